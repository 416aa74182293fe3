"""The kit of response stores."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ferrule.errors import RequestFailed
from ferrule.interfaces.response_store import ResponseStore, StoredResponse
from ferrule.plugin.kinds import KINDS
from ferrule.plugin.options import declared_options, read_options
from ferrule_testkit.kits.base import Kit, does_not_apply, promise, shown

_ODD = ("", "é🙂", "a/../b", "..", "x" * 300, "a b", "%", "_", "'; DROP TABLE responses; --", "A", "a")
_BYTES = bytes(range(256)) * 8  # a store does not look into texts


class ResponseStoreKit(Kit):
    """A store gives back what it was given, to its owner alone, within its bounds.

    Settings: `few`, options with which it keeps three responses at most; `short`, options with which it keeps them for
    less than half a second; `tiny`, options with which a response of 100 kB is too large.
    """

    kind = "response_store"
    few: Mapping[str, Any] = {}
    short: Mapping[str, Any] = {}
    tiny: Mapping[str, Any] = {}

    # ------------------------------------------------------------------------------------ promises

    def test_what_is_kept_comes_back(self) -> None:
        """Give back every field of a response, byte for byte, and None for one that was never kept."""
        store = self.make()
        kept = [response(name, owner, parent="p" * place or None) for place, (name, owner) in enumerate(_pairs())]
        for one in kept:
            promise(store.add(one), f"{shown(one)} is not taken")
        for one in kept:
            found = store.get(one.owner, one.id)
            promise(found == one, f"{shown(one)} comes back as {shown(found)}")
        promise(store.get("nobody", "nothing") is None, "a response comes from nowhere")
        store.close()

    def test_an_owner_sees_nothing_of_others(self) -> None:
        """Keep responses of one id apart by owner, in every method."""
        store = self.make()
        mine, other = response("one", "me", ended=False), response("one", "you", ended=False, response=b"other")
        promise(store.add(mine) and store.add(other), "two owners cannot have one id")
        store.append("me", "one", [b"mine"])
        promise(store.events("you", "one", 0) in ([], ()), "events of another owner are shown")
        promise(store.get("they", "one") is None, "another owner reads a response")
        promise(not store.delete("they", "one"), "another owner deletes a response")
        promise(store.delete("me", "one") and store.get("me", "one") is None, "a deleted response is there")
        promise(store.get("you", "one") == other, "a deletion takes another owner's response")
        promise(not store.append("they", "one", [b""]), "a stranger adds events")
        promise(not store.update(replace(mine, owner="they")), "a stranger changes a response")
        store.close()

    def test_an_id_is_taken_once(self) -> None:
        """Refuse a second response of an owner's id, and leave the first one as it was."""
        store = self.make()
        first = response("one")
        store.add(first)
        promise(not store.add(response("one", response=b"second")), "an id is taken twice")
        promise(store.get("", "one") == first, "the second response of an id replaces the first")
        store.close()

    def test_only_what_goes_on_is_changed(self) -> None:
        """Replace a response until it has ended, and nothing of it afterwards: of two ends the first one counts."""
        store = self.make()
        running = response("one", ended=False)
        store.add(running)
        promise(store.update(replace(running, response=b"more")), "a response that goes on cannot be replaced")
        ended = replace(running, response=b"end", ended=True)
        promise(store.update(ended), "a response cannot end")
        promise(not store.update(replace(running, response=b"late")), "a response that has ended is replaced")
        promise(not store.append("", "one", [b"late"]), "a response that has ended gets events")
        found = store.get("", "one")
        promise(found == ended, f"a response that has ended is {shown(found)}")
        promise(not store.update(replace(running, id="two")), "a response that is not there is replaced")
        promise(store.get("", "two") is None, "a replacement makes a response")
        store.close()

    def test_events_stay_in_order(self) -> None:
        """Give the events of a response from any number on, each once, until it is deleted."""
        store = self.make()
        store.add(response("one", ended=False))
        events = [b"%d" % number for number in range(2500)]
        for start in range(0, len(events), 500):
            promise(store.append("", "one", events[start : start + 500]), "events are not taken")
        store.append("", "one", [])
        for start in (0, 1, 999, 2499, 2500, 9999):
            found: list[bytes] = []
            while more := store.events("", "one", start + len(found)):
                found += more
            promise(found == events[start:], f"events from {start} on are {shown(found)}")
        store.delete("", "one")
        promise(len(store.events("", "one", 0)) == 0, "a deleted response has events")
        store.close()

    def test_the_number_is_bounded(self) -> None:
        """Keep the newest, and let go of the oldest, with their events."""
        store = self.make(self._given("few"))
        for number in range(20):
            promise(store.add(response(str(number), ended=False)), f"response {number} is not taken")
            store.append("", str(number), [b"event"])
        there = [number for number in range(20) if store.get("", str(number)) is not None]
        promise(1 <= len(there) <= 3, f"{len(there)} responses are kept")
        promise(there == list(range(20 - len(there), 20)), f"of twenty responses {there} are kept")
        promise(len(store.events("", "0", 0)) == 0, "events stay without their response")
        store.close()

    def test_the_age_is_bounded(self) -> None:
        """Forget a response after a time, also when nothing else happens."""
        store = self.make(self._given("short"))
        store.add(response("one"))
        time.sleep(0.5)
        promise(store.get("", "one") is None, "an old response is there")
        promise(store.add(response("one")), "the id of an old response is still taken")
        store.close()

    def test_what_is_too_large_is_refused(self) -> None:
        """Refuse a response or events beyond the whole store with RequestFailed, and keep what is there."""
        store = self.make(self._given("tiny"))
        kept = response("one", ended=False)
        store.add(kept)
        big = b"x" * 100_000
        calls: Sequence[Callable[[], bool]] = (
            lambda: store.add(response("two", response=big)),
            lambda: store.update(response("one", ended=False, response=big)),
            lambda: store.append("", "one", [big]),
        )
        for doing in calls:
            try:
                doing()
            except RequestFailed as error:
                promise(bool(error.message) and "/" not in error.message, f"the refusal is {error.message!r}")
            else:
                promise(False, "what is larger than the store is taken")
        promise(store.get("", "one") == kept, "a refusal changes what is there")
        promise(len(store.events("", "one", 0)) == 0, "refused events are kept")
        store.close()

    def test_instances_share_or_do_not(self) -> None:
        """Show the same responses in all processes of a server where `shared` says so."""
        if not self.plugin.shared:
            does_not_apply("its instances do not share responses")
        folder = self.folder()
        first, second = self.make(folder=folder), self.make(folder=folder)
        running = response("one", ended=False)
        first.add(running)
        first.append("", "one", [b"event"])
        promise(second.get("", "one") == running, "another process does not see a response")
        promise(list(second.events("", "one", 0)) == [b"event"], "another process does not see events")
        promise(second.update(replace(running, ended=True)), "another process cannot end a response")
        promise(not first.append("", "one", [b"late"]), "the end by another process does not count")
        first.close()
        promise(second.get("", "one") is not None, "a process that ends takes the responses along")
        second.close()

    # ------------------------------------------------------------------------------------ parts

    def make(self, options: Mapping[str, Any] | None = None, folder: Path | None = None) -> ResponseStore:
        declared = declared_options(self.plugin)
        values = {**self.plugin_options, **(options or {})}
        made = None if declared is None else read_options(declared, values)
        store: ResponseStore = KINDS[self.kind].make(self.plugin, made, folder or self.folder())
        return store

    def _given(self, name: str) -> Mapping[str, Any]:
        options: Mapping[str, Any] = getattr(self, name)
        if not options:
            does_not_apply(f"no `{name}` is given")
        return options


def response(name: str, owner: str = "", **fields: Any) -> StoredResponse:
    """Return a response that was made just now."""
    given = {"items": b"[]", "response": _BYTES, "created": time.time(), **fields}
    return StoredResponse(id=name, owner=owner, **given)


def _pairs() -> list[tuple[str, str]]:
    return [(name, owner) for name in _ODD for owner in ("", "me", "é")]

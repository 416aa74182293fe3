"""Stored responses as the routes use them: the store on a thread of its own, chains of responses, and references.

A chain is read from its end backwards, and no further than what a model's context can hold, so that its length does not
matter: a response holds its own items, and its parent's id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from ferrule.errors import ConfigError, NotFoundError, RequestError
from ferrule.interfaces.response_store import ResponseStore, StoredResponse
from ferrule.interfaces.router import RouterContext
from ferrule_plugins.router.responses.answers import ResponseEvent
from ferrule_plugins.router.responses.conversation import characters, response_of
from ferrule_plugins.router.responses.items import MAX_ITEMS

T = TypeVar("T")

_TAKEN = "request_id: there is a stored response of this id already."
_MOST_REFERRED = 32 << 20  # bytes of all items that a request refers to: as many as bodies have by default
_PARENT = "previous_response_id"
_LAST_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed"})
_ABANDONED = "The server was stopped, or its process ended, before the response was finished."


def store_factory(ctx: RouterContext) -> Callable[[], ResponseStore]:
    """Return a function that opens the chosen store. Raises PluginError, ConfigError."""
    frontend = ctx.config.frontend
    several = frontend.api_server_count > 1
    name = frontend.response_store
    if name == "auto" and "auto" not in ctx.plugins.names("response_store"):
        name = "sqlite" if several else "memory"
    if several and not ctx.plugins.load("response_store", name).shared:
        raise ConfigError(
            f"--response-store {name} keeps responses in one process: it does not go with --api-server-count "
            f"{frontend.api_server_count}.",
            "Take --response-store sqlite, or leave it out.",
        )
    make = ctx.plugins.factory("response_store", name)
    return lambda: make(ctx.folder)


@dataclass(frozen=True)
class Earlier:
    """The items of the responses that a request continues, oldest first. `whole`: none was left out."""

    items: Sequence[dict[str, Any]]
    whole: bool


class History:
    """The stored responses. The store is opened at the first use, and used on one thread."""

    def __init__(self, make: Callable[[], ResponseStore]) -> None:
        self._make = make
        self._store: ResponseStore | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")

    async def open(self) -> None:
        """Open the store now. Raises StartupError, PluginError."""
        await self._call(lambda store: None)

    async def close(self) -> None:
        """Close the store, if it is open. It may be opened again."""
        store, self._store = self._store, None
        if store is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, store.close)

    async def check_new(self, owner: str, response_id: str) -> None:
        """Raise RequestError for an id that is taken."""
        if await self._call(lambda store: store.get(owner, response_id)) is not None:
            raise RequestError(_TAKEN, "request_id")

    async def add(self, response: StoredResponse) -> None:
        """Keep a new response. Raises RequestError for an id that is taken, RequestFailed."""
        if not await self._call(lambda store: store.add(response)):
            raise RequestError(_TAKEN, "request_id")

    async def find(self, owner: str, response_id: str) -> StoredResponse:
        """Return a response. Raises NotFoundError. One whose process is gone becomes a failed one."""
        return await self._call(lambda store: _found(store, owner, response_id, None))

    async def update(self, response: StoredResponse) -> bool:
        return await self._call(lambda store: store.update(response))

    async def delete(self, owner: str, response_id: str) -> None:
        if not await self._call(lambda store: store.delete(owner, response_id)):
            raise _unknown(response_id, None)

    async def append(self, owner: str, response_id: str, events: Sequence[ResponseEvent]) -> bool:
        texts = [msgspec.json.encode(event) for event in events]
        return await self._call(lambda store: store.append(owner, response_id, texts))

    async def has_event(self, owner: str, response_id: str, number: int) -> bool:
        """Return whether the stream of a response has come as far as this event."""
        return await self._call(lambda store: bool(store.events(owner, response_id, number)))

    async def fail(self, response: StoredResponse, message: str) -> None:
        """End a response that nobody generates any more: as its stream tells, else as a failed one."""
        await self._call(lambda store: _settle(store, response, message))

    async def events(self, owner: str, response_id: str, start: int) -> list[ResponseEvent]:
        texts = await self._call(lambda store: store.events(owner, response_id, start))
        return [msgspec.json.decode(text) for text in texts]

    async def before(self, owner: str, parent: str, room: int) -> Earlier:
        """Return the items of a response and of all before it, as many as `room` characters hold, and one more.

        Raises NotFoundError, and RequestError for a response that has not ended well.
        """
        return await self._call(lambda store: _chain(store, owner, parent, room))

    async def referenced(self, owner: str, references: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
        """Return the items that references (place, id) name.

        Raises NotFoundError that names the place, and RequestError where the items are too large in all: references are
        short, and may name a large item again and again.
        """
        return await self._call(lambda store: _items(store, owner, references))

    async def _call(self, work: Callable[[ResponseStore], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._with_store, work)

    def _with_store(self, work: Callable[[ResponseStore], T]) -> T:
        if self._store is None:
            self._store = self._make()
        return work(self._store)


def _failed(response: StoredResponse, message: str) -> StoredResponse:
    """Return a response as one that failed."""
    told = msgspec.json.decode(response.response)
    told |= {"status": "failed", "error": {"code": "server_error", "message": message}}
    return replace(response, response=msgspec.json.encode(told), ended=True, abandoned=False)


def _unknown(response_id: str, param: str | None) -> NotFoundError:
    where = f"{param}: there" if param else "There"
    return NotFoundError(f"{where} is no response {response_id!r:.100} here: it may be deleted or too old.", param)


def _found(store: ResponseStore, owner: str, response_id: str, param: str | None) -> StoredResponse:
    response = store.get(owner, response_id)
    if response is None:
        raise _unknown(response_id, param)
    if response.abandoned:
        _settle(store, response, _ABANDONED)
        return _found(store, owner, response_id, param)
    return response


def _settle(store: ResponseStore, response: StoredResponse, message: str) -> None:
    """End a response whose generation stopped before its end was stored.

    A stream is stored before the response, so it may have ended already: then the response is what its last event says.
    """
    owner, name = response.owner, response.id
    ended = _failed(response, message)
    if number := _number_of_events(store, owner, name):
        last = msgspec.json.decode(store.events(owner, name, number - 1)[0])
        if last["type"] in _LAST_EVENTS:
            ended = replace(ended, response=msgspec.json.encode(last["response"]))
        else:
            event = {"type": "response.failed", "response": msgspec.Raw(ended.response), "sequence_number": number}
            store.append(owner, name, [msgspec.json.encode(event)])
    store.update(ended)


def _number_of_events(store: ResponseStore, owner: str, response_id: str) -> int:
    number = 0
    while found := len(store.events(owner, response_id, number)):
        number += found
    return number


def _chain(store: ResponseStore, owner: str, parent: str, room: int) -> Earlier:
    turns: list[list[dict[str, Any]]] = []
    count = size = 0
    name: str | None = parent
    child = ""
    while name is not None:
        if size > room or count > MAX_ITEMS:
            return Earlier(_joined(turns), whole=False)
        try:
            response = _found(store, owner, name, _PARENT)
        except NotFoundError as error:
            if not child:
                raise
            raise NotFoundError(
                f"{_PARENT}: the response {name!r:.100}, which {child} continues, is not here any more: it was deleted "
                "or is too old.",
                _PARENT,
            ) from error
        answered = msgspec.json.decode(response.response)
        if not response.ended or answered["status"] not in ("completed", "incomplete"):
            raise RequestError(f"{_PARENT}: the response {name} is {answered['status']}: it has no answer.", _PARENT)
        turn = [*msgspec.json.decode(response.items), *answered["output"]]
        turns.append(turn)
        count += 1 + len(turn)  # a turn may be empty
        size += sum(map(characters, turn))
        child, name = name, response.parent
    return Earlier(_joined(turns), whole=True)


def _joined(turns: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [item for turn in reversed(turns) for item in turn]


def _items(store: ResponseStore, owner: str, references: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    read: dict[str | None, dict[str, dict[str, Any]]] = {}  # the items of each response that was read, by their ids
    found: list[dict[str, Any]] = []
    size = 0
    for where, name in references:
        if (of := response_of(name)) not in read:
            read[of] = _items_of(store, owner, of)
        if (item := read[of].get(name)) is None:
            raise NotFoundError(
                f"{where}.id: there is no item {name!r:.100} here: its response may be deleted or too old, or was not "
                "stored.",
                f"{where}.id",
            )
        size += len(msgspec.json.encode(item))
        if size > _MOST_REFERRED:
            raise RequestError(f"{where}: the items that are referred to have more than {_MOST_REFERRED} bytes.", where)
        found.append(item)
    return found


def _items_of(store: ResponseStore, owner: str, response_id: str | None) -> dict[str, dict[str, Any]]:
    """Return the items of a response's input and output by their ids; none of a response that is not there."""
    response = None if response_id is None else store.get(owner, response_id)
    if response is None:
        return {}
    items = [*msgspec.json.decode(response.items), *msgspec.json.decode(response.response)["output"]]
    return {item["id"]: item for item in reversed(items)}  # of two with one id the first counts

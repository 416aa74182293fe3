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
_PARENT = "previous_response_id"
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

    async def events(self, owner: str, response_id: str, start: int) -> list[ResponseEvent]:
        texts = await self._call(lambda store: store.events(owner, response_id, start))
        return [msgspec.json.decode(text) for text in texts]

    async def before(self, owner: str, parent: str, room: int) -> Earlier:
        """Return the items of a response and of all before it, as many as `room` characters hold, and one more.

        Raises NotFoundError, and RequestError for a response that has not ended well.
        """
        return await self._call(lambda store: _chain(store, owner, parent, room))

    async def referenced(self, owner: str, references: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
        """Return the items that references (place, id) name. Raises NotFoundError that names the place."""
        return await self._call(lambda store: [_item(store, owner, where, name) for where, name in references])

    async def _call(self, work: Callable[[ResponseStore], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._with_store, work)

    def _with_store(self, work: Callable[[ResponseStore], T]) -> T:
        if self._store is None:
            self._store = self._make()
        return work(self._store)


def failed(response: StoredResponse, message: str) -> StoredResponse:
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
        ended = failed(response, _ABANDONED)
        event = {"type": "response.failed", "response": msgspec.Raw(ended.response)}
        number = _number_of_events(store, owner, response_id)
        if number:  # it has a stream, which ends
            store.append(owner, response_id, [msgspec.json.encode(event | {"sequence_number": number})])
        store.update(ended)
        return _found(store, owner, response_id, param)
    return response


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
        count += len(turn)
        size += sum(map(characters, turn))
        child, name = name, response.parent
    return Earlier(_joined(turns), whole=True)


def _joined(turns: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [item for turn in reversed(turns) for item in turn]


def _item(store: ResponseStore, owner: str, where: str, name: str) -> dict[str, Any]:
    response = None if (of := response_of(name)) is None else store.get(owner, of)
    if response is not None:
        items = [*msgspec.json.decode(response.items), *msgspec.json.decode(response.response)["output"]]
        for item in items:
            if item["id"] == name:
                return dict(item)
    raise NotFoundError(
        f"{where}.id: there is no item {name!r:.100} here: its response may be deleted or too old, or was not stored.",
        f"{where}.id",
    )

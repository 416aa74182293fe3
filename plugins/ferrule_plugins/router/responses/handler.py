"""The handlers of the Responses routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from msgspec.structs import replace

from ferrule import log
from ferrule.errors import FerruleError, RequestError
from ferrule.interfaces.response_store import StoredResponse
from ferrule.interfaces.router import JSON, EventStream, RequestInfo, RouterContext
from ferrule.interfaces.service import Admitted, Answer, ChatPrompt, Outputs
from ferrule.types import FinishReason
from ferrule_plugins.router.responses.answers import InputTokens, ItemList, Response, ResponseEvent
from ferrule_plugins.router.responses.background import Background, message_of
from ferrule_plugins.router.responses.conversation import Placed, message_item, normal, with_own_ids
from ferrule_plugins.router.responses.form import ResponseForm
from ferrule_plugins.router.responses.history import History, store_factory
from ferrule_plugins.router.responses.items import ReferenceItem
from ferrule_plugins.router.responses.request import Reading, generate, head
from ferrule_plugins.router.responses.schema import ENCRYPTED, LOGPROBS, ResponsesBody, TokensBody
from ferrule_protocol import Closing, extended

_logger = log.get("responses")

_LAST = frozenset({"response.completed", "response.incomplete"})
_CHARACTERS = 8  # for a token of the context: as many as the service reads


class Handler:
    """The handlers, with the stored responses and the runs in the background."""

    def __init__(self, ctx: RouterContext) -> None:
        self._ctx = ctx
        self._history = History(store_factory(ctx))
        self._background = Background(self._history)

    async def open(self) -> None:
        """Open the store. Raises StartupError, PluginError."""
        await self._history.open()

    async def close(self) -> None:
        await self._background.close()
        await self._history.close()

    # -------------------------------------------------------------------------------------------- generating

    async def count(self, body: TokensBody, info: RequestInfo) -> JSON:
        prompt, reading, _ = await self._read(body, info, info.id)
        read = await (await self._ctx.service.tokens(body.model)).read(prompt)
        found: InputTokens = {"object": "response.input_tokens", "input_tokens": len(read.ids)}
        if (extension := extended(reading.notes.extension, read.notes)) is not None:
            found["ferrule"] = extension
        return JSON(found, headers=reading.notes.headers)

    async def create(self, body: ResponsesBody, info: RequestInfo) -> JSON | EventStream:
        service = self._ctx.service
        name = body.request_id or info.id
        if body.store and body.request_id is not None:
            await self._history.check_new(info.key_name, f"resp_{name}")
        prompt, reading, items = await self._read(body, info, name)
        request = generate(body, prompt, reading, service)
        admitted = await service.admit(replace(request, answer_id=f"resp_{name}"))
        self._log_notes(body, name)
        extension = extended(reading.notes.extension, admitted.prompts[0].notes)
        fixed = head(body, request, f"resp_{name}", admitted.model, extension)
        include = body.include or ()
        form = ResponseForm(
            fixed,
            name,
            body.parallel_tool_calls is not False,
            encrypts=ENCRYPTED in include,
            logprobs=(admitted.tokens or service) if LOGPROBS in include else None,
        )
        record = _Kept(info.key_name, body.previous_response_id, items, self._history if body.store else None)
        headers = reading.notes.headers
        if body.background:
            return await self._in_background(form, admitted, record, body.stream, headers)
        if body.stream:
            outputs = admitted.outputs()
            return EventStream(Closing(_events(form, outputs, record), outputs), headers)
        answer = await admitted.answer()
        response = await _whole(form, answer)
        await record.add(response)
        return JSON(response, headers=headers)

    async def _in_background(
        self, form: ResponseForm, admitted: Admitted, kept: _Kept, streamed: bool, headers: dict[str, str]
    ) -> JSON | EventStream:
        outputs, queued = admitted.outputs(), form.response
        try:
            record = await kept.add(queued, ended=False)
        except BaseException:
            await outputs.aclose()
            raise
        self._background.begin(form, outputs, record, streamed)
        if streamed:
            return EventStream(self._background.follow(record, 0), headers)
        return JSON(queued, headers=headers)

    async def _read(
        self, body: TokensBody, info: RequestInfo, name: str
    ) -> tuple[ChatPrompt, Reading, list[dict[str, Any]]]:
        """Return the prompt of a body, with notes on its fields, and its own items. Raises RequestError."""
        service = self._ctx.service
        await service.resolve(body.model)  # of two mistakes, an unknown model is reported
        reading = Reading(body, info, self._ctx)
        own = await self._own_items(body, info.key_name, name)
        placed: list[Placed] = []
        if body.previous_response_id is not None:
            room = _CHARACTERS * (await service.tokens(body.model)).max_model_len
            earlier = await self._history.before(info.key_name, body.previous_response_id, room)
            if not earlier.whole and body.truncation != "auto":
                raise RequestError(
                    "previous_response_id: the conversation is longer than this model's context; with truncation auto "
                    "its oldest items are dropped.",
                    "previous_response_id",
                )
            placed = [("previous_response_id", item) for item in earlier.items]
        text = isinstance(body.input, str)
        placed += [("input" if text else f"input[{number}]", item) for number, item in enumerate(own)]
        prompt = await reading.fitting(placed) if body.truncation == "auto" else reading.prompt(placed)
        reading.settle(prompt)
        return prompt, reading, own

    async def _own_items(self, body: TokensBody, owner: str, name: str) -> list[dict[str, Any]]:
        """Return the items of a body in their normal form, with those that it refers to."""
        if body.input is None or isinstance(body.input, str):
            return [] if body.input is None else with_own_ids([message_item(body.input)], name)
        references = [
            (f"input[{number}]", item.id) for number, item in enumerate(body.input) if isinstance(item, ReferenceItem)
        ]
        found = iter(await self._history.referenced(owner, references) if references else ())
        return with_own_ids(
            [next(found) if isinstance(item, ReferenceItem) else normal(item) for item in body.input], name
        )

    def _log_notes(self, body: ResponsesBody, name: str) -> None:
        notes = {field: str(value) for field in ("user", "safety_identifier") if (value := getattr(body, field))}
        if notes and not self._ctx.config.frontend.disable_log_requests:
            _logger.info("request notes", id=f"resp_{name}", **notes)

    # -------------------------------------------------------------------------------------------- stored responses

    async def retrieve(
        self, response_id: str, info: RequestInfo, stream: bool, starting_after: int | None
    ) -> JSON | EventStream:
        record = await self._history.find(info.key_name, response_id)
        if not stream:
            if starting_after is not None:
                raise RequestError("starting_after needs stream to be true.", "starting_after")
            return JSON(msgspec.Raw(record.response))
        if not await self._background.has_stream(record):
            raise RequestError(
                "stream: only a response that was made with background and stream has a stream to follow.", "stream"
            )
        if starting_after is None:
            return EventStream(self._background.follow(record, 0))
        if not await self._history.has_event(info.key_name, response_id, starting_after):
            raise RequestError(f"starting_after: the stream has no event {starting_after} so far.", "starting_after")
        return EventStream(self._background.follow(record, starting_after + 1))

    async def input_items(
        self, response_id: str, info: RequestInfo, limit: int, newest_first: bool, after: str | None
    ) -> JSON:
        record = await self._history.find(info.key_name, response_id)
        items = msgspec.json.decode(record.items)
        if newest_first:
            items.reverse()
        if after is not None:
            place = next((number for number, item in enumerate(items) if item["id"] == after), None)
            if place is None:
                raise RequestError(f"after: the response has no input item {after!r:.100}.", "after")
            items = items[place + 1 :]
        shown = items[:limit]
        found: ItemList = {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(items) > limit,
        }
        return JSON(found)

    async def cancel(self, response_id: str, info: RequestInfo) -> JSON:
        record = await self._history.find(info.key_name, response_id)
        if not msgspec.json.decode(record.response)["background"]:
            raise RequestError("Only a response that was made with background can be cancelled.", "response_id")
        if not record.ended:
            record = await self._background.cancel(record)
        return JSON(msgspec.Raw(record.response))

    async def delete(self, response_id: str, info: RequestInfo) -> JSON:
        await self._history.delete(info.key_name, response_id)
        await self._background.forget(info.key_name, response_id)
        return JSON({"id": response_id, "object": "response", "deleted": True})


class _Kept:
    """The part of a response's record that is known before it is answered; `history` None: it is not stored."""

    def __init__(self, owner: str, parent: str | None, items: list[dict[str, Any]], history: History | None) -> None:
        self._owner, self._parent, self._items, self._history = owner, parent, items, history

    async def add(self, response: Response, ended: bool = True) -> StoredResponse:
        """Store the response, if it is to be stored. Raises RequestError, RequestFailed."""
        record = StoredResponse(
            id=response["id"],
            owner=self._owner,
            parent=self._parent,
            created=response["created_at"],
            ended=ended,
            items=msgspec.json.encode(self._items),
            response=msgspec.json.encode(response),
        )
        if self._history is not None:
            await self._history.add(record)
        return record


async def _whole(form: ResponseForm, answer: Answer) -> Response:
    if any(choice.logprobs for choice in answer.choices):  # there may be very many: other requests go on meanwhile
        return await asyncio.to_thread(form.whole, answer)
    return form.whole(answer)


async def _events(form: ResponseForm, outputs: Outputs, record: _Kept) -> AsyncIterator[ResponseEvent]:
    """Yield the events of a stream. A failure is told as `response.failed`, and then raised."""
    for event in form.begin():
        yield event
    try:
        async for output in outputs:
            if output.finish is FinishReason.ERROR:
                raise output.failure()
            for event in form.chunk(output):
                if event["type"] in _LAST:
                    await record.add(form.response)
                yield event
    except FerruleError as error:
        for event in form.fail(message_of(error), isinstance(error, RequestError)):
            yield event
        raise

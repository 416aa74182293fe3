"""``POST /acme/v2/say``: Acme's second protocol, in a dialect of its own.

    {"text": "…", "most": 64}

The answer is a stream of named events: ``begin``, ``word`` with a piece of the text, and ``end``; or ``trouble``, which
is also the body of every error. Keys come in ``X-Acme-Key``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter

from ferrule.interfaces.dialect import Dialect, Failure, encode
from ferrule.interfaces.router import Access, EventStream, Router, RouterContext, needs, streams
from ferrule.interfaces.service import Generate, Outputs, Prompt
from ferrule.sampling_params import SamplingParams
from ferrule.schema import Body, Count, SomeText
from ferrule_protocol import Closing

WORDS: Mapping[int, str] = {400: "not understood", 401: "not known", 404: "not here", 413: "too much", 503: "not now"}


class Spoken(Dialect):
    """Named events, and errors with a word in the place of a type."""

    paths = ("/acme/v2/",)
    key_headers = ("x-acme-key",)
    ping = b"event: hm\ndata: {}\n\n"
    last = b""
    error_schema = {
        "type": "object",
        "required": ["event", "word", "why"],
        "properties": {name: {"type": "string"} for name in ("event", "word", "why", "where")},
    }

    def error(self, failure: Failure) -> dict[str, str]:
        found = {"event": "trouble", "word": WORDS.get(failure.status, "failed"), "why": failure.message}
        return found if failure.param is None else found | {"where": failure.param}

    def event(self, content: dict[str, Any]) -> bytes:
        return b"event: " + content["event"].encode() + b"\ndata: " + encode(content) + b"\n\n"


class Say(Body):
    """The body."""

    text: SomeText
    most: Count = 64


class Dialogue(Router):
    conformance = "acme_protocol.conformance:DIALOGUE"

    def dialect(self, ctx: RouterContext) -> Dialect:
        return Spoken()

    def router(self, ctx: RouterContext) -> APIRouter:
        routes = APIRouter(tags=["acme"])

        @routes.post(
            "/acme/v2/say",
            summary="Say something.",
            dependencies=[needs(Access.KEY, room=True)],
            responses=streams(dict[str, Any]),
        )
        async def say(body: Say) -> EventStream:
            params = SamplingParams(temperature=0.0, max_tokens=body.most)
            prompts = (Prompt(text=body.text),)
            admitted = await ctx.service.admit(Generate(prompts=prompts, params=params, raw=True))
            outputs = admitted.outputs()
            return EventStream(Closing(_events(outputs), outputs))

        return routes


async def _events(outputs: Outputs) -> AsyncIterator[dict[str, Any]]:
    yield {"event": "begin"}
    async for output in outputs:
        if output.text:
            yield {"event": "word", "text": output.text}
        if output.error is not None:
            raise output.failure()
        if output.finish is not None:
            yield {"event": "end", "why": str(output.finish)}

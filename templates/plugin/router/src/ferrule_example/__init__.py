"""``POST /example``: a text in, its continuation out, at once or as lines of JSON."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from ferrule.interfaces.dialect import Dialect, Failure, encode
from ferrule.interfaces.parsers import Content
from ferrule.interfaces.router import JSON, Access, EventStream, Router, RouterContext, needs, streams
from ferrule.interfaces.service import Generate, Output, Prompt
from ferrule.sampling_params import SamplingParams
from ferrule.schema import Body, Count, SomeText
from ferrule_protocol import Closing


class Continue(Body):
    """A text to continue. A body that does not fit is answered 400 before the handler is called."""

    text: SomeText = Field(description="What to continue.")
    tokens: Count = Field(16, description="At most so many tokens.")
    stream: bool = Field(False, description="Answer in pieces, a line each.")


class Continued(BaseModel):
    text: str


class ExampleDialect(Dialect):
    """The form of streams and errors, and where keys are. Without a dialect all of that is as in OpenAI's API."""

    paths = ("/example/",)  # errors below it have the same form
    key_headers = ("x-example-key",)
    media_type = "application/x-ndjson"
    ping = last = b""
    error_schema = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}

    def error(self, failure: Failure) -> dict[str, str]:
        return {"error": failure.message}

    def event(self, content: Any) -> bytes:
        return encode(content) + b"\n"


class ExampleRouter(Router):
    def dialect(self, ctx: RouterContext) -> Dialect:
        return ExampleDialect()

    def router(self, ctx: RouterContext) -> APIRouter:
        routes = APIRouter()

        @routes.post(
            "/example",
            summary="Continue a text.",
            dependencies=[needs(Access.KEY, room=True)],
            response_model=Continued,
            responses=streams(Continued),
        )
        async def proceed(body: Continue) -> JSON | EventStream:
            params = SamplingParams(temperature=0.0, max_tokens=body.tokens)
            admitted = await ctx.service.admit(
                Generate(prompts=(Prompt(text=body.text),), params=params, raw=True, streamed=body.stream)
            )
            outputs = admitted.outputs()
            pieces = Closing(_pieces(outputs), outputs)  # leaving early cancels what still runs
            if body.stream:
                return EventStream(pieces)
            async with aclosing(pieces):
                return JSON({"text": "".join([piece["text"] async for piece in pieces])})

        return routes


async def _pieces(outputs: AsyncIterator[Output]) -> AsyncIterator[dict[str, str]]:
    async for output in outputs:
        text = "".join(event.text for event in output.events if isinstance(event, Content))
        if output.error is not None:
            raise output.failure()
        if text:
            yield {"text": text}

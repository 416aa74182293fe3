"""``POST /example``: a text in, its continuation out, at once or as lines of JSON."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from ferrule.interfaces.dialect import Dialect, Failure, encode
from ferrule.interfaces.router import JSON, Access, EventStream, Router, RouterContext, needs, streams
from ferrule.interfaces.service import Answer, Generate, Output, Prompt
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
            if not body.stream:
                return JSON(whole(await admitted.answer()))
            outputs = admitted.outputs()
            return EventStream(Closing(_chunks(outputs), outputs))  # leaving early cancels what still runs

        return routes


def chunk(output: Output) -> dict[str, str]:
    """Return what a line of a stream says."""
    return {"text": output.text}


def whole(answer: Answer) -> dict[str, str]:
    """Return the answer to a request that does not stream."""
    return {"text": answer.choices[0].text}


async def _chunks(outputs: AsyncIterator[Output]) -> AsyncIterator[dict[str, str]]:
    async for output in outputs:
        if output.error is not None:
            raise output.failure()
        if output.text:
            yield chunk(output)

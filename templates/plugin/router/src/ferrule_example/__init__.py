"""``POST /example``: a text in, its continuation out."""

from __future__ import annotations

from contextlib import aclosing

from fastapi import APIRouter
from pydantic import BaseModel, Field

from ferrule.errors import RequestFailed
from ferrule.interfaces.dialect import Dialect, Failure
from ferrule.interfaces.parsers import Content
from ferrule.interfaces.router import Router, RouterContext
from ferrule.interfaces.service import Generate, Prompt
from ferrule.sampling_params import SamplingParams
from ferrule.schema import Body, Count, SomeText


class Continue(Body):
    """What does not fit it is answered 400 before the handler is called."""

    text: SomeText = Field(description="What to continue.")
    tokens: Count = Field(16, description="At most so many tokens.")


class Continued(BaseModel):
    text: str


class ExampleDialect(Dialect):
    """How errors look, and where keys are. Without it, and `ExampleRouter.dialect`, they are as in OpenAI's API."""

    paths = ("/example/",)  # errors below it are worded in the same way
    key_headers = ("x-example-key",)
    error_schema = {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "string"}},
    }

    def error(self, failure: Failure) -> dict[str, str]:
        return {"error": failure.message}


class ExampleRouter(Router):
    def dialect(self, ctx: RouterContext) -> Dialect:
        return ExampleDialect()

    def router(self, ctx: RouterContext) -> APIRouter:
        routes = APIRouter()

        @routes.post("/example", summary="Continue a text.")
        async def proceed(body: Continue) -> Continued:
            params = SamplingParams(temperature=0.0, max_tokens=body.tokens)
            outputs = await ctx.service.generate(
                Generate(prompts=(Prompt(text=body.text),), params=params, raw=True, streamed=False)
            )
            text = ""
            async with aclosing(outputs):  # type: ignore[type-var]  # leaving early cancels what still runs
                async for output in outputs:
                    text += "".join(event.text for event in output.events if isinstance(event, Content))
                    if output.error is not None:
                        raise RequestFailed(output.error)
            return Continued(text=text)

        return routes

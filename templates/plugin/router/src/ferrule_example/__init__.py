"""``POST /example``: a text in, its continuation out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Annotated

from msgspec import Meta, Struct

from ferrule.errors import RequestFailed
from ferrule.interfaces.parsers import Content
from ferrule.interfaces.router import Call, Reply, Route, Router, RouterContext
from ferrule.interfaces.service import Generate, Prompt
from ferrule.sampling_params import SamplingParams


class Continue(Struct):
    """The body. What does not fit it is answered 400 before the handler is called."""

    text: Annotated[str, Meta(min_length=1)]
    tokens: Annotated[int, Meta(ge=1)] = 16


class ExampleRouter(Router):
    def routes(self, ctx: RouterContext) -> Sequence[Route]:
        async def proceed(call: Call) -> Reply:
            body: Continue = call.body
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
            return Reply({"text": text})

        return [Route(method="POST", path="/example", handler=proceed, body_type=Continue, summary="Continue a text.")]

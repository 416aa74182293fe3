"""``POST /acme/v1/ask``: a question in, an answer or a stream of events out.

    {"question": "…", "abilities": [{"name": "weather", "takes": {"city": "string"}}], "most": 64, "live": true}

A live answer is events {"say": …}, {"do": …, "with": {…}} and at last {"done": …}; a whole one is their fold.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Response
from pydantic import Field

from ferrule.interfaces.parsers import CallArguments, CallEnd, CallStart, Content
from ferrule.interfaces.router import JSON, EventStream, Router, RouterContext, streams
from ferrule.interfaces.service import Answer, ChatPrompt, Generate, Output, Prompt, Service
from ferrule.sampling_params import SamplingParams
from ferrule.schema import Body, Count, SomeText
from ferrule_protocol import Closing


class Ability(Body):
    """Something that the model may ask for."""

    name: SomeText = Field(max_length=64)
    takes: dict[str, str] = {}

    def tool(self) -> dict[str, Any]:
        properties = {name: {"type": kind} for name, kind in self.takes.items()}
        function = {"name": self.name, "parameters": {"type": "object", "properties": properties}}
        return {"type": "function", "function": function}


class Ask(Body):
    """The body."""

    question: SomeText
    abilities: list[Ability] = []
    most: Count = 64
    live: bool = False
    rehearse: str | None = None


class Acme(Router):
    conformance = "acme_protocol.conformance:ROUTER"

    def router(self, ctx: RouterContext) -> APIRouter:
        service = ctx.service
        routes = APIRouter(tags=["acme"])

        @routes.post("/acme/v1/ask", summary="Ask a question.", responses=streams(dict[str, Any]))
        async def ask(body: Ask) -> Response:
            admitted = await service.admit(await _request(body, service))
            if not body.live:
                return JSON(_whole(await admitted.answer()))
            outputs = admitted.outputs()
            return EventStream(Closing(_events(outputs), outputs))

        return routes


async def _request(body: Ask, service: Service) -> Generate:
    ids = None
    if body.rehearse is not None:
        ids = await service.tokenize(Prompt(text=body.rehearse, add_special_tokens=False))
    tools = tuple(ability.tool() for ability in body.abilities) or None
    return Generate(
        prompts=(ChatPrompt(messages=({"role": "user", "content": body.question},), tools=tools),),
        params=SamplingParams(temperature=0.0, max_tokens=len(ids) if ids else body.most),
        tools=tools,
        tool_choice="auto" if tools else None,
        logits_processors=({"qualname": "acme_rehearsal", "kwargs": {"ids": ids}},) if ids else (),
        streamed=body.live,
    )


def _whole(answer: Answer) -> dict[str, Any]:
    (choice,) = answer.choices
    actions = [{"do": call.name, "with": json.loads(call.arguments)} for call in choice.calls]
    return {"answer": choice.text, "actions": actions} | _end(choice)


def _end(output: Output) -> dict[str, Any]:
    return {"done": str(output.finish), "tokens": output.usage.completion_tokens}


async def _events(outputs: AsyncIterator[Output]) -> AsyncIterator[dict[str, Any]]:
    """Yield Acme's events of one choice."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    async for output in outputs:
        for event in output.events:
            match event:
                case Content(text):
                    yield {"say": text}
                case CallStart(index, _, name):
                    names[index], arguments[index] = name, ""
                case CallArguments(index, fragment):
                    arguments[index] += fragment
                case CallEnd(index):
                    yield {"do": names[index], "with": json.loads(arguments[index])}
        if output.error is not None:
            raise output.failure()
        if output.finish is not None:
            yield _end(output)

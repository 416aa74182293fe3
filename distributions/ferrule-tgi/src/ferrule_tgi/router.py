"""`tgi`: the routes of Text Generation Inference that continue a prompt, and its `/info`.

Tokens are drawn where a request says so (`do_sample`, or a temperature, top_k or top_p), by the model's defaults for
what it leaves open; otherwise the likeliest one is chosen, as TGI does. `/health` and `/metrics` are those of the
server, and so is `/tokenize`, whose form is another one. Refusals have the server's statuses: 400, where TGI has 422.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter

from ferrule import __version__
from ferrule.errors import RequestError
from ferrule.forms import GrammarSpec
from ferrule.interfaces.dialect import Dialect, Failure
from ferrule.interfaces.router import (
    JSON,
    Access,
    CurrentRequest,
    EventStream,
    RequestInfo,
    Router,
    RouterContext,
    needs,
    streams,
)
from ferrule.interfaces.service import Generate, Prompt
from ferrule.sampling_params import SamplingParams
from ferrule.schema import check_marks
from ferrule_protocol import Closing, Notes, extended
from ferrule_tgi.answers import Generated, Info, TokenEvent
from ferrule_tgi.form import Form, TokenForm, events
from ferrule_tgi.schema import EitherBody, GenerateBody, Parameters

_SAME = ("top_k", "top_p", "repetition_penalty", "frequency_penalty", "seed")
_NAMES = {
    **{name: f"parameters.{name}" for name in (*_SAME, "temperature", "stop")},
    "max_tokens": "parameters.max_new_tokens",
    "model": "parameters.adapter_id",
    "n": "parameters.best_of",
    "truncate_prompt_tokens": "parameters.truncate",
    "logprobs": "parameters.top_n_tokens",
    "structured_outputs": "parameters.grammar",
    "prompt": "inputs",
}


class TgiDialect(Dialect):
    """The dialect of TGI: errors are a text and a type, and streams end without a mark."""

    last = b""
    error_schema = {
        "description": "Every error, whatever its status, has this form.",
        "type": "object",
        "required": ["error", "error_type"],
        "properties": {
            "error": {"type": "string", "description": "What is wrong, and what would be right."},
            "error_type": {"enum": ["validation", "overloaded", "generation"]},
        },
    }

    def error(self, failure: Failure) -> dict[str, str]:
        kind = "generation" if failure.status >= 500 else "validation"
        if failure.status in (429, 503):
            kind = "overloaded"
        return {"error": failure.message, "error_type": kind}


class Tgi(Router):
    def dialect(self, ctx: RouterContext) -> Dialect:
        return TgiDialect()

    def absent(self, ctx: RouterContext) -> Mapping[str, str]:
        return {"/chat_tokenize": "POST /tokenize with messages gives the tokens of a conversation."}

    def router(self, ctx: RouterContext) -> APIRouter:
        routes = APIRouter(tags=["tgi"])
        handler = _Handler(ctx)
        queued = [needs(Access.KEY, room=True)]

        @routes.post("/generate", dependencies=queued, response_model=Generated, summary="Continue a prompt.")
        async def generate(body: GenerateBody, info: CurrentRequest) -> JSON | EventStream:
            return await handler.answer(body, info, stream=False)

        @routes.post(
            "/generate_stream",
            dependencies=queued,
            response_model=TokenEvent,
            responses=streams(TokenEvent),
            summary="Continue a prompt, token by token.",
        )
        async def generate_stream(body: GenerateBody, info: CurrentRequest) -> JSON | EventStream:
            return await handler.answer(body, info, stream=True)

        @routes.post(
            "/",
            dependencies=queued,
            response_model=list[Generated],
            responses=streams(TokenEvent),
            summary="Either of the two: the route of Hugging Face's clients.",
        )
        async def either(body: EitherBody, info: CurrentRequest) -> JSON | EventStream:
            return await handler.answer(body, info, stream=body.stream, listed=True)

        @routes.get("/info", summary="The model and the limits.")
        async def about() -> Info:
            return handler.info()

        return routes


class _Handler:
    """The handlers of the routes."""

    def __init__(self, ctx: RouterContext) -> None:
        self._service = ctx.service
        self._config = ctx.config

    def info(self) -> Info:
        model = self._service.model
        return {
            "model_id": self._service.names[0],
            "model_sha": None,
            "model_dtype": model.dtype,
            "model_device_type": model.device,
            "model_pipeline_tag": "text-generation",
            "max_best_of": int(self._config.options["max_n"]),
            "max_input_tokens": model.max_model_len - 1,
            "max_total_tokens": model.max_model_len,
            "router": "ferrule",
            "version": __version__,
        }

    async def answer(
        self, body: GenerateBody, info: RequestInfo, *, stream: bool, listed: bool = False
    ) -> JSON | EventStream:
        """Answer a request, as a stream or as a whole; `listed`: the whole answer is in a list."""
        asked = body.parameters or Parameters()
        _check(asked, stream)
        notes = self._notes(body, asked, info)
        admitted = await self._service.admit(self._request(body, asked, stream))
        prompt = admitted.prompts[0]
        tokens = TokenForm.of(admitted.tokens or self._service)
        form = Form(asked, body.inputs, prompt, tokens, extended(notes.extension, prompt.notes))
        if stream:
            outputs = admitted.outputs()
            return EventStream(Closing(events(form, outputs), outputs), notes.headers)
        answer = await admitted.answer()
        whole: Any = await asyncio.to_thread(form.whole, answer) if asked.details else form.whole(answer)
        return JSON([whole] if listed else whole, headers=notes.headers)

    def _notes(self, body: GenerateBody, asked: Parameters, info: RequestInfo) -> Notes:
        notes = Notes.of(info.unknown_fields, type(body))
        notes.known += [(f"parameters.{name}", why) for name, why in check_marks(asked)]
        if asked.decoder_input_details and not asked.details:
            notes.known.append(("parameters.decoder_input_details", "has an effect with details only."))
        notes.settle(self._config.frontend.strict_requests)
        return notes

    def _request(self, body: GenerateBody, asked: Parameters, stream: bool) -> Generate:
        given = {name: getattr(asked, name) for name in _SAME}
        own: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if not _draws(asked):
            own["temperature"] = 0.0
        elif asked.temperature is not None:
            own["temperature"] = asked.temperature
        tokens = stream or asked.details or asked.best_of > 1
        own |= {
            "n": asked.best_of,
            "max_tokens": asked.max_new_tokens,
            "stop": asked.stop,
            "include_stop_str_in_output": True,
            "truncate_prompt_tokens": asked.truncate,
            "logprobs": (asked.top_n_tokens or 0) if tokens else None,
            "prompt_logprobs": 0 if asked.decoder_input_details and asked.details else None,
        }
        return Generate(
            prompts=(Prompt(text=body.inputs),),
            params=SamplingParams(**{**self._service.sampling_defaults(), **own}),
            grammar=None if asked.grammar is None else GrammarSpec(form=asked.grammar.form()),
            model=asked.adapter_id,
            raw=True,
            streamed=stream,
            names=_NAMES,
        )


def _draws(asked: Parameters) -> bool:
    """Return whether tokens are drawn: a parameter that only drawing has says so, too."""
    told = (asked.temperature not in (None, 0, 1), asked.top_k, asked.top_p not in (None, 1))
    return asked.temperature != 0 and (asked.do_sample or any(told))


def _check(asked: Parameters, stream: bool) -> None:
    """Raise RequestError for parameters that do not go together."""
    if asked.best_of > 1 and stream:
        raise RequestError("parameters.best_of cannot be streamed.", "parameters.best_of")
    if asked.best_of > 1 and not _draws(asked):
        raise RequestError("parameters.best_of above 1 needs do_sample: all texts would be the same.", "do_sample")
    if asked.decoder_input_details and stream:
        raise RequestError("parameters.decoder_input_details cannot be streamed.", "parameters.decoder_input_details")

"""`tokenize`: from text or a conversation to token ids, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from ferrule.errors import RequestError
from ferrule.interfaces.router import Call, Reply, Route, Router, RouterContext
from ferrule.interfaces.service import ChatPrompt, Prompt
from ferrule_plugins.router.openai_schema import Int


class TokenizeBody(Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Struct, kw_only=True):
    model: str | None = None
    tokens: list[Int]


class Tokenize(Router):
    def routes(self, ctx: RouterContext) -> Sequence[Route]:
        service = ctx.service

        async def tokenize(call: Call) -> Reply:
            body: TokenizeBody = call.body
            service.resolve(body.model)
            ids = await service.tokenize(_prompt_of(body))
            texts = [service.token_text(token_id) for token_id in ids] if body.return_token_strs else None
            length = service.model.max_model_len
            return Reply({"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": texts})

        async def detokenize(call: Call) -> Reply:
            body: DetokenizeBody = call.body
            service.resolve(body.model)
            return Reply({"prompt": await service.detokenize(body.tokens)})

        return [
            Route(
                method="POST",
                path="/tokenize",
                handler=tokenize,
                body_type=TokenizeBody,
                summary="Token ids of a prompt or a conversation.",
                tags=("tokens",),
            ),
            Route(
                method="POST",
                path="/detokenize",
                handler=detokenize,
                body_type=DetokenizeBody,
                summary="Text of token ids.",
                tags=("tokens",),
            ),
        ]


def _prompt_of(body: TokenizeBody) -> Prompt | ChatPrompt:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give either prompt or messages.", "prompt")
    if body.prompt is not None:
        return Prompt(text=body.prompt, add_special_tokens=body.add_special_tokens is not False)
    return ChatPrompt(
        messages=tuple(body.messages or ()),
        tools=None if body.tools is None else tuple(body.tools),
        documents=None if body.documents is None else tuple(body.documents),
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
    )

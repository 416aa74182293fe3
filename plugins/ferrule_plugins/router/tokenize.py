"""`tokenize`: from text or a conversation to token ids, and back; and a description of the tokenizer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from ferrule.errors import RequestError
from ferrule.interfaces.router import JSON, CurrentRequest, Router, RouterContext
from ferrule.interfaces.service import ChatPrompt, Prompt
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.schema import Body, Text, TokenIds
from ferrule_protocol import (
    Conversation,
    Extension,
    Notes,
    TemplateFields,
    chat_prompt,
    choose_templates,
    extended,
    unread_by_template,
)

_MODEL = "One of the served names. Default: the first."


_EXTENSION = Field(None, exclude_if=lambda extension: extension is None)


class TokenizeBody(TemplateFields, Body):
    """A body with either `prompt` or `messages`."""

    model: Text | None = Field(None, description=_MODEL)
    prompt: Text | None = Field(None, description="A text.")
    messages: Conversation | None = Field(None, description="A conversation, for the chat template.")
    add_special_tokens: bool | None = Field(
        None, description="The tokenizer adds its own tokens. Default: true for a prompt, false for messages."
    )
    return_token_strs: bool = Field(False, description="Add `token_strs`. Default: false.")


class DetokenizeBody(Body):
    model: Text | None = Field(None, description=_MODEL)
    tokens: TokenIds = Field(description="Token ids.")


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    ferrule: Extension | None = _EXTENSION


class Detokenized(BaseModel):
    prompt: str
    ferrule: Extension | None = _EXTENSION


class Tokenize(Router):
    def router(self, ctx: RouterContext) -> APIRouter:
        service = ctx.service
        routes = APIRouter(tags=["tokens"])

        @routes.post("/tokenize", summary="Token ids of a prompt or a conversation.", response_model=Tokens)
        async def tokenize(body: TokenizeBody, info: CurrentRequest) -> Response:
            spoken = await service.tokens(body.model)
            prompt, notes = _prompt_of(body), Notes.of(info.unknown_fields, TokenizeBody)
            if body.messages is not None:
                notes.known += unread_by_template(body.messages, body, service)
            notes.settle(ctx.config.frontend.strict_requests)
            read = await spoken.read(prompt)
            found = Tokens(
                count=len(read.ids),
                max_model_len=spoken.max_model_len,
                tokens=list(read.ids),
                token_strs=[spoken.token_text(token_id) for token_id in read.ids] if body.return_token_strs else None,
                ferrule=extended(notes.extension, read.notes),
            )
            return JSON(found, headers=notes.headers)

        @routes.post("/detokenize", summary="Text of token ids.", response_model=Detokenized)
        async def detokenize(body: DetokenizeBody, info: CurrentRequest) -> Response:
            text = await (await service.tokens(body.model)).detokenize(body.tokens)
            return JSON(Detokenized(prompt=text, ferrule=Notes.of(info.unknown_fields, DetokenizeBody).extension))

        async def tokenizer_info() -> dict[str, Any]:
            if service.tokenizer is None:
                raise RequestError("This server runs without a tokenizer: it takes and gives token ids only.")
            return describe(service.tokenizer, ctx.config.frontend.chat_template)

        if ctx.config.frontend.enable_tokenizer_info_endpoint:
            summary = "The tokenizer's configuration, chat template included."
            routes.add_api_route("/tokenizer_info", tokenizer_info, summary=summary)
        return routes


def describe(tokenizer: Tokenizer, chat_template: str | None) -> dict[str, Any]:
    """Return ``tokenizer_config.json``, with special tokens as plain strings and the template that this server applies.

    `chat_template` is the value of ``--chat-template``. Names of files and folders are left out.
    """
    told = {name: value for name, value in tokenizer.settings.items() if not name.endswith(("_file", "_path"))}
    templates = choose_templates(chat_template, tokenizer.chat_template)
    named = [{"name": name, "template": text} for name, text in templates.items()]
    told |= {"tokenizer_class": told.get("tokenizer_class", "PreTrainedTokenizerFast"), **tokenizer.special_tokens}
    if named:
        told["chat_template"] = templates["default"] if list(templates) == ["default"] else named
    return told


def _prompt_of(body: TokenizeBody) -> Prompt | ChatPrompt:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give either prompt or messages.", "prompt")
    if body.prompt is not None:
        return Prompt(text=body.prompt, add_special_tokens=body.add_special_tokens is not False)
    return chat_prompt(body.messages or (), body)

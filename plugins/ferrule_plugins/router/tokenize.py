"""`tokenize`: from text or a conversation to token ids, and back; what the tokenizer is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import UNSET, Struct, UnsetType

from ferrule.errors import RequestError
from ferrule.frontend.text.render import choose_templates
from ferrule.interfaces.router import Call, Reply, Route, Router, RouterContext
from ferrule.interfaces.service import ChatPrompt, Prompt
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule_plugins.router.openai_answers import Extension
from ferrule_plugins.router.openai_fields import Notes
from ferrule_plugins.router.openai_schema import Int, says


class TokenizeBody(Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    model: Annotated[str | None, says("One of the served names. Default: the first.")] = None
    prompt: Annotated[str | None, says("A text.")] = None
    messages: Annotated[list[dict[str, Any]] | None, says("A conversation, for the chat template.")] = None
    add_special_tokens: Annotated[
        bool | None, says("The tokenizer adds its own tokens. Default: true for a prompt, false for messages.")
    ] = None
    return_token_strs: Annotated[bool | None, says("Add `token_strs`. Default: false.")] = None
    add_generation_prompt: Annotated[
        bool | None, says("Begin a new message. Default: true, unless the final one is continued.")
    ] = None
    continue_final_message: Annotated[bool | None, says("Leave the last message open. Default: false.")] = None
    tools: Annotated[list[dict[str, Any]] | None, says("For the template.")] = None
    documents: Annotated[list[dict[str, Any]] | None, says("For the template.")] = None
    chat_template: Annotated[str | None, says("Another template. Needs `--trust-request-chat-template`.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, says("Variables for the template.")] = None


class DetokenizeBody(Struct, kw_only=True):
    model: Annotated[str | None, says("One of the served names. Default: the first.")] = None
    tokens: Annotated[list[Int], says("Token ids.")]


class Tokens(Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    ferrule: Extension | UnsetType = UNSET


class Text(Struct, kw_only=True):
    prompt: str
    ferrule: Extension | UnsetType = UNSET


class Tokenize(Router):
    def routes(self, ctx: RouterContext) -> Sequence[Route]:
        service = ctx.service

        async def tokenize(call: Call) -> Reply:
            body: TokenizeBody = call.body
            service.resolve(body.model)
            ids = await service.tokenize(_prompt_of(body))
            texts = [service.token_text(token_id) for token_id in ids] if body.return_token_strs else None
            length = service.model.max_model_len
            extension = Notes.of(call).extension
            return Reply(Tokens(count=len(ids), max_model_len=length, tokens=ids, token_strs=texts, ferrule=extension))

        async def detokenize(call: Call) -> Reply:
            body: DetokenizeBody = call.body
            service.resolve(body.model)
            text = await service.detokenize(body.tokens)
            return Reply(Text(prompt=text, ferrule=Notes.of(call).extension))

        async def info(call: Call) -> Reply:
            if service.tokenizer is None:
                raise RequestError("This server runs without a tokenizer: it takes and gives token ids only.")
            return Reply(describe(service.tokenizer, ctx.config.frontend.chat_template))

        told = Route(
            method="GET",
            path="/tokenizer_info",
            handler=info,
            answer=dict[str, Any],
            summary="The tokenizer's configuration, chat template included.",
            tags=("tokens",),
        )
        return [
            *([told] if ctx.config.frontend.enable_tokenizer_info_endpoint else ()),
            Route(
                method="POST",
                path="/tokenize",
                handler=tokenize,
                body_type=TokenizeBody,
                answer=Tokens,
                summary="Token ids of a prompt or a conversation.",
                tags=("tokens",),
            ),
            Route(
                method="POST",
                path="/detokenize",
                handler=detokenize,
                body_type=DetokenizeBody,
                answer=Text,
                summary="Text of token ids.",
                tags=("tokens",),
            ),
        ]


def describe(tokenizer: Tokenizer, chat_template: str | None) -> dict[str, Any]:
    """``tokenizer_config.json``, special tokens as plain texts, and the template that this server applies.

    `chat_template` is what ``--chat-template`` says. Names of files and folders are left out.
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
    return ChatPrompt(
        messages=tuple(body.messages or ()),
        tools=None if body.tools is None else tuple(body.tools),
        documents=None if body.documents is None else tuple(body.documents),
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=not body.continue_final_message
        if body.add_generation_prompt is None
        else body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
    )

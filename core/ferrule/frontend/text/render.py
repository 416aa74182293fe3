"""`Renderer`: the one place where a conversation becomes text, for every protocol and offline use."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import msgspec

from ferrule.config import FrontendConfig, LimitsConfig
from ferrule.errors import ConfigError, ForbiddenError, RequestError, nearest
from ferrule.frontend.children.pool import ChildPool
from ferrule.frontend.text.builtin import builtin_templates, find_builtin
from ferrule.frontend.text.messages import RESERVED, read_documents, read_messages, read_tools
from ferrule.frontend.text.tokenize import Encoder
from ferrule.interfaces.service import ChatPrompt
from ferrule.interfaces.tokenizer import ChatTokenizer

_TASK = "ferrule.frontend.text.template:work"
_MEMORY_BYTES = 512 << 20  # that a child may write
_CHARACTERS_IN = 16  # per token of the context: conversation (L16)
_CHARACTERS_OUT = 8  # per token of the context: rendered text (L10)
_MAX_NOTES = 16
_MAX_TEMPLATE = 256 << 10  # characters of a template in a request

Templates = dict[str, str]
"""Name → template text; "default" is the usual one, "tool_use" the one for requests with tools."""


def choose_templates(option: str | None, own: str | dict[str, str] | None) -> Templates:
    """Return the templates that ``--chat-template`` means: a name among the tokenizer's `own`, a file, a built-in
    template, or a text.

    Without the option these are the tokenizer's own; there may be none. Raises ConfigError.
    """
    named = {"default": own} if isinstance(own, str) else dict(own or {})
    if option is None:
        return named
    if option in named:
        return {"default": named[option]}
    inline = any(mark in option for mark in ("{{", "{%", "{#"))
    file = None if inline else Path(option) if _is_file(option) else builtin_file(option)
    if file is not None:
        try:
            return {"default": file.read_text("utf-8")}
        except (OSError, UnicodeDecodeError):
            raise ConfigError(f"--chat-template: {option} cannot be read as UTF-8 text.") from None
    if inline:  # on one line, a line break is written \n
        return {"default": option.replace("\\n", "\n")}
    names = [*named, *builtin_templates()]
    raise ConfigError(
        f"--chat-template: {option!r} is neither a file nor a known template.{nearest(option, names)}",
        f"Known names: {', '.join(names)}. A template's text must hold {{{{ or {{%.",
    )


def builtin_file(option: str) -> Path | None:
    """Return the file of the built-in template that ``--chat-template`` names; None where it names something else."""
    found = None if _is_file(option) else find_builtin(option)
    return None if found is None else found.file


def _is_file(option: str) -> bool:
    try:
        return Path(option).is_file()
    except OSError:  # too long for a file name
        return False


def _check_end(chat: ChatPrompt) -> None:
    if chat.continue_final_message and chat.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other: set one of them to false.",
            "continue_final_message",
        )


def _as_json(job: dict[str, Any], param: str) -> str:
    """Encode as JSON, which can hold anything that a client's JSON text may hold: integers of any size and lone
    surrogates.
    """
    try:
        return json.dumps(job)
    except (TypeError, ValueError, RecursionError):
        raise RequestError("The request holds a value that cannot be processed.", param) from None


class Rendered(msgspec.Struct, frozen=True):
    """The text of a conversation, and notes on what of it the text does not show."""

    text: str
    notes: tuple[str, ...] = ()


class Renderer:
    """A renderer in children: the server's templates in one pool, templates of requests in another that may be blocked.

    A request that is trusted may name one of the server's instead.
    """

    def __init__(
        self,
        frontend: FrontendConfig,
        limits: LimitsConfig,
        templates: Templates,
        special_tokens: dict[str, str],
        max_model_len: int,
    ) -> None:
        self.templates = templates
        self._format = frontend.chat_template_content_format
        self._strict = frontend.strict_requests
        self._limits = limits
        self._special_tokens = special_tokens
        self._max_in = _CHARACTERS_IN * max_model_len
        self._max_out = _CHARACTERS_OUT * max_model_len
        self._server_pool = ChildPool(_TASK, size=2, memory_bytes=_MEMORY_BYTES)
        self._request_pool = ChildPool(_TASK, size=2, memory_bytes=_MEMORY_BYTES, niceness=10)

    @property
    def pids(self) -> frozenset[int]:
        """Child processes that can still run."""
        return self._server_pool.pids | self._request_pool.pids

    async def encode(self, chat: ChatPrompt, encoder: Encoder) -> list[int] | None:
        """Return the ids of a conversation that the tokenizer itself writes; None where a template does. Raises
        RequestError.
        """
        tokenizer = encoder.tokenizer
        if not isinstance(tokenizer, ChatTokenizer) or self.templates or chat.chat_template is not None:
            return None
        _check_end(chat)
        messages = read_messages(chat.messages, self._max_in)
        given = {**(chat.chat_template_kwargs or {}), "tools": read_tools(chat.tools)}
        variables = {name: value for name, value in given.items() if name in tokenizer.reads}
        continued = chat.continue_final_message
        return await encoder.offload(lambda: tokenizer.encode_chat(messages, variables, continued=continued))

    async def render(self, chat: ChatPrompt) -> str:
        """Return the text of a conversation. Raises RequestError, ForbiddenError for a template of the request's
        own.
        """
        return (await self.write(chat)).text

    async def write(self, chat: ChatPrompt) -> Rendered:
        """Render like `render`, and note what the text does not show; a strict server refuses that."""
        template = self._template(chat)
        _check_end(chat)
        messages = read_messages(chat.messages, self._max_in)
        job = {
            "template": template,
            "messages": messages,
            "variables": {
                **self._special_tokens,
                "tools": read_tools(chat.tools),
                "documents": read_documents(chat.documents),
                "add_generation_prompt": chat.add_generation_prompt,
            },
            "extra": self._extra(chat.chat_template_kwargs),
            "content_format": chat.content_format or self._format,
            "max_characters": self._max_out,
            "marker": secrets.token_hex(16) if chat.continue_final_message else "",
        }
        pool = self._server_pool if chat.chat_template is None else self._request_pool
        param = "messages" if chat.chat_template is None else "chat_template"
        asked = {"job": _as_json(job, param)}
        found = msgspec.convert(await pool.run(asked, self._limits.template_timeout, "The chat template", param), dict)
        notes = tuple(
            f"{name}: the chat template does not show it to the model." for name in found["lost"][:_MAX_NOTES]
        )
        if notes and self._strict:
            raise RequestError(f"{notes[0]} This server refuses what has no effect.", found["lost"][0])
        return Rendered(found["text"], notes)

    async def inspect(self) -> dict[str, Any]:
        """Start a child and describe the default template: see `template.work`.

        `content` is the option's, where it is not auto. A template of its own for tools counts as reading them.
        """
        template = self.templates.get("default")
        if template is None:
            return {}
        job = {"inspect": template, "special_tokens": self._special_tokens}
        report = msgspec.convert(await self._server_pool.run(job, 10.0, "The chat template", "chat_template"), dict)
        report["content"] = report["content"] if self._format == "auto" else self._format
        report["reads"] = [*report["reads"], *(["tools"] if "tool_use" in self.templates else [])]
        return report

    async def close(self) -> None:
        await self._server_pool.close()
        await self._request_pool.close()

    def _template(self, chat: ChatPrompt) -> str:
        if chat.chat_template is not None:
            if not self._limits.trust_request_chat_template:
                raise ForbiddenError(
                    "This server does not accept chat_template in requests (--trust-request-chat-template).",
                    "chat_template",
                )
            if not isinstance(chat.chat_template, str) or len(chat.chat_template) > _MAX_TEMPLATE:
                raise RequestError(
                    f"chat_template must be a text of up to {_MAX_TEMPLATE} characters.", "chat_template"
                )
            return self.templates.get(chat.chat_template, chat.chat_template)
        name = "tool_use" if chat.tools and "tool_use" in self.templates else "default"
        if name in self.templates:
            return self.templates[name]
        if self.templates:
            raise RequestError(
                f"This model has chat templates named {', '.join(sorted(self.templates))}, and none is the default: "
                "the server must be started with --chat-template NAME.",
                "messages",
            )
        raise RequestError(
            "This model has no chat template, so it takes completions only. The server can be given one with "
            "--chat-template.",
            "messages",
        )

    def _extra(self, extra: dict[str, Any] | None) -> dict[str, Any]:
        for name in extra or ():
            if name in RESERVED or name in self._special_tokens or name.endswith("_token"):
                raise RequestError(f"chat_template_kwargs: {name!r:.80} is set by the server.", "chat_template_kwargs")
        return dict(extra or {})

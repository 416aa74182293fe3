"""`Renderer`: the one place where a conversation becomes text, for every protocol and offline use. `Encoder`: texts to
ids.
"""

from __future__ import annotations

import asyncio
import copy
import json
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from ferrule.config import FrontendConfig, LimitsConfig
from ferrule.errors import ForbiddenError, RequestError
from ferrule.frontend.children.pool import ChildPool
from ferrule.frontend.text.builtin import Templates
from ferrule.frontend.text.detokenize import decode
from ferrule.frontend.text.messages import RESERVED, read_documents, read_messages, read_tools
from ferrule.interfaces.service import ChatPrompt
from ferrule.interfaces.tokenizer import ChatTokenizer, Tokenizer

T = TypeVar("T")

_TASK = "ferrule.frontend.text.template:work"
_MEMORY_BYTES = 512 << 20  # that a child may write
_CHARACTERS_IN = 16  # per token of the context: conversation (L16)
_CHARACTERS_OUT = 8  # per token of the context: rendered text (L10)
_MAX_NOTES = 16
_MAX_TEMPLATE = 256 << 10  # characters of a template in a request
_INLINE = 512  # characters that are encoded sooner than a thread would wake up: about 0.1 ms
_THREADS = 2


class Encoder:
    """A tokenizer that encodes long texts on a few threads, so that they do not hold up the event loop.

    The gate bounds how many texts wait: it counts requests before they come here.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")

    def of(self, tokenizer: Tokenizer) -> Encoder:
        """Return an encoder by another tokenizer on the same threads. It is closed with this one."""
        other = copy.copy(self)
        other.tokenizer = tokenizer
        return other

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) <= _INLINE:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await self.offload(lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the id sequences of each word, at the start of a text and after a space."""
        return await self.offload(lambda: self._bad_words(words))

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        forms = (form for word in words for form in (word.lstrip() or word, " " + word.lstrip()))
        found = (tuple(self.tokenizer.encode(form, add_special_tokens=False)) for form in forms)
        return tuple(dict.fromkeys(ids for ids in found if ids))

    async def offload(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Rendered(msgspec.Struct, frozen=True):
    """The text of a conversation, notes on what of it the text does not show, and its ids where the tokenizer wrote
    them itself.
    """

    text: str
    notes: tuple[str, ...] = ()
    ids: tuple[int, ...] | None = None


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

    async def render(self, chat: ChatPrompt) -> str:
        """Return the text of a conversation. Raises RequestError, ForbiddenError for a template of the request's
        own.
        """
        return (await self.write(chat)).text

    async def write(self, chat: ChatPrompt, encoder: Encoder | None = None) -> Rendered:
        """Render like `render`, and note what the text does not show; a strict server refuses that.

        A tokenizer that writes conversations itself does so, unless there is a template. Raises RequestError.
        """
        tokenizer = None if encoder is None or self.templates or chat.chat_template is not None else encoder.tokenizer
        if encoder is not None and isinstance(tokenizer, ChatTokenizer):
            return await self._encoded(chat, encoder, tokenizer)
        template = self._template(chat)
        messages = self._messages(chat)
        extra = chat.chat_template_kwargs or {}
        for name in extra:
            if name in RESERVED or name in self._special_tokens or name.endswith("_token"):
                raise RequestError(f"chat_template_kwargs: {name!r:.80} is set by the server.", "chat_template_kwargs")
        job = {
            "template": template,
            "messages": messages,
            "variables": {
                **self._special_tokens,
                "tools": read_tools(chat.tools) if chat.tools else None,
                "documents": read_documents(chat.documents) if chat.documents else None,
                "add_generation_prompt": chat.add_generation_prompt,
            },
            "extra": extra,
            "content_format": chat.content_format or self._format,
            "max_characters": self._max_out,
            "marker": secrets.token_hex(16) if chat.continue_final_message else "",
        }
        pool = self._server_pool if chat.chat_template is None else self._request_pool
        param = "messages" if chat.chat_template is None else "chat_template"
        try:
            asked = {"job": json.dumps(job)}  # as JSON, which has integers of any size and lone surrogates, too
        except (TypeError, ValueError, RecursionError):
            raise RequestError("The request holds a value that cannot be processed.", param) from None
        found = msgspec.convert(await pool.run(asked, self._limits.template_timeout, "The chat template", param), dict)
        notes = tuple(
            f"{name}: the chat template does not show it to the model." for name in found["lost"][:_MAX_NOTES]
        )
        if notes and self._strict:
            raise RequestError(f"{notes[0]} This server refuses what has no effect.", found["lost"][0])
        return Rendered(found["text"], notes)

    async def _encoded(self, chat: ChatPrompt, encoder: Encoder, tokenizer: ChatTokenizer) -> Rendered:
        messages = self._messages(chat)
        given = {**(chat.chat_template_kwargs or {}), "tools": read_tools(chat.tools) if chat.tools else None}
        variables = {name: value for name, value in given.items() if name in tokenizer.reads}
        continued = chat.continue_final_message
        ids = await encoder.offload(lambda: tokenizer.encode_chat(messages, variables, continued=continued))
        return Rendered(decode(encoder.tokenizer, ids, skip_special_tokens=False), ids=tuple(ids))

    def _messages(self, chat: ChatPrompt) -> list[dict[str, Any]]:
        if chat.continue_final_message and chat.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: set one of them to false.",
                "continue_final_message",
            )
        return read_messages(chat.messages, self._max_in)

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

"""`POST /invocations`, as SageMaker calls a container: chat or completions, by the shape of the body."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import ConfigDict, Discriminator, Tag

from ferrule import log
from ferrule.errors import RequestError
from ferrule.interfaces.router import JSON, EventStream, RequestInfo, RouterContext
from ferrule.schema import printable
from ferrule_plugins.router.openai_chat import Chat
from ferrule_plugins.router.openai_completions import Completions
from ferrule_plugins.router.openai_schema import ChatBody, CompletionBody
from ferrule_protocol import NOTES_HEADER

_logger = log.get("openai")
_NEEDS = "Give messages, as for /v1/chat/completions, or prompt (or prompt_embeds), as for /v1/completions"


class ChatInvocation(ChatBody):
    """The body of /v1/chat/completions."""

    model_config = ConfigDict(extra="allow")  # the fields of the other kind are told


class CompletionInvocation(CompletionBody):
    """The body of /v1/completions."""

    model_config = ConfigDict(extra="allow")


def _kind(body: Any) -> str:
    if not isinstance(body, dict):
        return ""
    prompted = body.get("prompt") is not None or body.get("prompt_embeds") is not None
    if prompted == (body.get("messages") is not None):
        raise RequestError(f"{_NEEDS}{', not both' if prompted else ''}.", "messages")
    return "<prompt>" if prompted else "<messages>"


Invocation = Annotated[
    Annotated[ChatInvocation, Tag("<messages>")] | Annotated[CompletionInvocation, Tag("<prompt>")],
    Discriminator(_kind),
]


class Invocations:
    """The handler of this route."""

    def __init__(self, ctx: RouterContext) -> None:
        self._chat, self._completions = Chat(ctx), Completions(ctx)
        self._strict = ctx.config.frontend.strict_requests

    async def __call__(self, body: ChatInvocation | CompletionInvocation, info: RequestInfo) -> JSON | EventStream:
        others = [name for name in map(printable, body.model_extra or ()) if name not in info.unknown_fields]
        if others and self._strict:
            beside = "messages" if isinstance(body, ChatBody) else "a prompt"
            raise RequestError(f"{others[0]}: unknown beside {beside}.", others[0])
        if others:
            _logger.warning("ignored unknown fields", fields=",".join(others))
            info = replace(info, unknown_fields=(*info.unknown_fields, *others))
        answer = await (self._chat(body, info) if isinstance(body, ChatBody) else self._completions(body, info))
        if others:
            answer.headers[NOTES_HEADER] = ", ".join(filter(None, [answer.headers.get(NOTES_HEADER), *others]))
        return answer

"""`POST /invocations`, as SageMaker calls a container: chat or completions, by the shape of the body."""

from __future__ import annotations

from dataclasses import replace

from msgspec import Struct

from ferrule import log
from ferrule.errors import RequestError
from ferrule.interfaces.router import Call, EventStream, Reply, RouterContext
from ferrule_plugins.router.openai_chat import Chat
from ferrule_plugins.router.openai_completions import Completions
from ferrule_plugins.router.openai_fields import HEADER
from ferrule_plugins.router.openai_schema import AnyBody, ChatBody, CompletionBody

_logger = log.get("openai")
_NEEDS = "Give messages, as for /v1/chat/completions, or prompt (or prompt_embeds), as for /v1/completions"


class Invocations:
    """The handler."""

    def __init__(self, ctx: RouterContext) -> None:
        self._chat, self._completions = Chat(ctx), Completions(ctx)
        self._strict = ctx.config.frontend.strict_requests

    async def __call__(self, call: Call) -> Reply | EventStream:
        body: AnyBody = call.body
        prompted = body.prompt is not None or body.prompt_embeds is not None
        if prompted == (body.messages is not None):
            raise RequestError(f"{_NEEDS}{', not both' if prompted else ''}.", "messages")
        kind: type[ChatBody | CompletionBody] = CompletionBody if prompted else ChatBody
        if body.logprobs is not None and prompted == isinstance(body.logprobs, bool):
            wanted = "an integer, as the body has a prompt" if prompted else "true or false, as the body has messages"
            raise RequestError(f"logprobs must be {wanted}.", "logprobs")
        others = self._others(body, kind)
        typed = kind(**{name: getattr(body, name) for name in kind.__struct_fields__})
        call = replace(call, body=typed, unknown_fields=(*call.unknown_fields, *others))
        reply = await (self._completions if prompted else self._chat)(call)
        named = ", ".join(filter(None, [reply.headers.get(HEADER), *others]))
        return replace(reply, headers={**reply.headers, HEADER: named}) if others else reply

    def _others(self, body: AnyBody, kind: type[Struct]) -> list[str]:
        """Fields of the other kind: nothing knows them on this kind's own route either."""
        names = [name for name in body.__struct_fields__ if name not in kind.__struct_fields__]
        others = [name for name in names if getattr(body, name) is not None]
        if others and self._strict:
            beside = "messages" if kind is ChatBody else "a prompt"
            raise RequestError(f"{others[0]}: unknown beside {beside}.", others[0])
        if others:
            _logger.warning("ignored unknown fields", fields=",".join(others))
        return others

"""`POST /invocations`, as SageMaker calls a container: chat or completions, by the shape of the body."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Tag

from ferrule.errors import RequestError
from ferrule_plugins.router.openai.schema import ChatBody, CompletionBody

_NEEDS = "Give messages, as for /v1/chat/completions, or prompt (or prompt_embeds), as for /v1/completions"


def _kind(body: Any) -> str:
    if not isinstance(body, dict):
        return ""
    prompted = body.get("prompt") is not None or body.get("prompt_embeds") is not None
    if prompted == (body.get("messages") is not None):
        raise RequestError(f"{_NEEDS}{', not both' if prompted else ''}.", "messages")
    return "<prompt>" if prompted else "<messages>"


Invocation = Annotated[
    Annotated[ChatBody, Tag("<messages>")] | Annotated[CompletionBody, Tag("<prompt>")],
    Discriminator(_kind),
]

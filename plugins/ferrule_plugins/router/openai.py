"""`openai`: models, completions and chat completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ferrule.interfaces.router import Call, Reply, Route, Router, RouterContext
from ferrule_plugins.router.openai_chat import Chat
from ferrule_plugins.router.openai_completions import Completions
from ferrule_plugins.router.openai_schema import ChatBody, CompletionBody


class OpenAI(Router):
    def routes(self, ctx: RouterContext) -> Sequence[Route]:
        models = _Models(ctx)
        tags = ("openai",)
        return [
            Route(method="GET", path="/v1/models", handler=models.all, summary="The served models.", tags=tags),
            Route(method="GET", path="/v1/models/{model:path}", handler=models.one, summary="One model.", tags=tags),
            Route(
                method="POST",
                path="/v1/completions",
                handler=Completions(ctx),
                body_type=CompletionBody,
                summary="Continue one or more prompts.",
                tags=tags,
            ),
            Route(
                method="POST",
                path="/v1/chat/completions",
                handler=Chat(ctx),
                body_type=ChatBody,
                summary="Answer a conversation.",
                tags=tags,
            ),
        ]


class _Models:
    def __init__(self, ctx: RouterContext) -> None:
        self._service = ctx.service
        self._created = int(time.time())

    async def all(self, call: Call) -> Reply:
        return Reply({"object": "list", "data": [self._card(name) for name in self._service.names]})

    async def one(self, call: Call) -> Reply:
        return Reply(self._card(self._service.resolve(call.path_params["model"])))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "ferrule",
            "root": self._service.names[0],
            "parent": None,
            "max_model_len": self._service.model.max_model_len,
        }

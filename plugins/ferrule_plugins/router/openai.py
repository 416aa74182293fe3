"""`openai`: models, completions and chat completions."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ferrule.interfaces.router import Call, Reply, Route, Router, RouterContext
from ferrule_plugins.router.invocations import Invocations
from ferrule_plugins.router.openai_answers import ChatCompletion, Completion, ModelCard, ModelList, ModelPermission
from ferrule_plugins.router.openai_chat import Chat
from ferrule_plugins.router.openai_completions import Completions
from ferrule_plugins.router.openai_schema import AnyBody, ChatBody, CompletionBody


class OpenAI(Router):
    def routes(self, ctx: RouterContext) -> Sequence[Route]:
        models = _Models(ctx)
        tags = ("openai",)
        return [
            Route(
                method="GET",
                path="/v1/models",
                handler=models.all,
                answer=ModelList,
                summary="The served models.",
                tags=tags,
            ),
            Route(
                method="GET",
                path="/v1/models/{model:path}",
                handler=models.one,
                answer=ModelCard,
                summary="One model.",
                tags=tags,
            ),
            Route(
                method="POST",
                path="/v1/completions",
                handler=Completions(ctx),
                body_type=CompletionBody,
                answer=Completion,
                event=Completion,
                summary="Continue one or more prompts.",
                tags=tags,
            ),
            Route(
                method="POST",
                path="/v1/chat/completions",
                handler=Chat(ctx),
                body_type=ChatBody,
                answer=ChatCompletion,
                event=ChatCompletion,
                summary="Answer a conversation.",
                tags=tags,
            ),
            Route(
                method="POST",
                path="/invocations",
                handler=Invocations(ctx),
                body_type=AnyBody,
                answer=Completion | ChatCompletion,
                event=Completion | ChatCompletion,
                summary="Either of the two, by the body's shape: for SageMaker.",
                tags=tags,
            ),
        ]


class _Models:
    def __init__(self, ctx: RouterContext) -> None:
        self._service = ctx.service
        self._created = int(time.time())

    async def all(self, call: Call) -> Reply:
        return Reply(ModelList(data=[self._card(name) for name in self._service.names]))

    async def one(self, call: Call) -> Reply:
        return Reply(self._card(self._service.resolve(call.path_params["model"])))

    def _card(self, name: str) -> ModelCard:
        return ModelCard(
            id=name,
            created=self._created,
            root=self._service.names[0],
            max_model_len=self._service.model.max_model_len,
            permission=[ModelPermission(id=f"modelperm-{name}", created=self._created)],
        )

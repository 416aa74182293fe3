"""`openai`: models, completions and chat completions."""

from __future__ import annotations

import time

from fastapi import APIRouter

from ferrule.interfaces.router import JSON, Access, CurrentRequest, EventStream, Router, RouterContext, needs, streams
from ferrule.interfaces.service import ServedAdapter, Service
from ferrule_plugins.router.openai.answers import ChatCompletion, Completion, ModelCard, ModelList, ModelPermission
from ferrule_plugins.router.openai.chat import Chat
from ferrule_plugins.router.openai.completions import Completions
from ferrule_plugins.router.openai.invocations import Invocation
from ferrule_plugins.router.openai.schema import ChatBody


class OpenAI(Router):
    def router(self, ctx: RouterContext) -> APIRouter:
        routes = APIRouter(tags=["openai"])
        cards = _Cards(ctx.service)
        queued = [needs(Access.KEY, room=True)]
        completions, chats = Completions(ctx), Chat(ctx)

        routes.post(
            "/v1/chat/completions",
            dependencies=queued,
            response_model=ChatCompletion,
            responses=streams(ChatCompletion),
            summary="Answer a conversation.",
        )(chats.chat)
        routes.post(
            "/v1/completions",
            dependencies=queued,
            response_model=Completion,
            responses=streams(Completion),
            summary="Continue one or more prompts.",
        )(completions.complete)

        @routes.post(
            "/invocations",
            dependencies=queued,
            response_model=Completion | ChatCompletion,
            responses=streams(Completion | ChatCompletion),
            summary="Either of the two, by the body's shape: for SageMaker.",
        )
        async def invoke(body: Invocation, info: CurrentRequest) -> JSON | EventStream:
            return await (chats.chat(body, info) if isinstance(body, ChatBody) else completions.complete(body, info))

        @routes.get("/v1/models", summary="The served models.")
        async def models() -> ModelList:
            return ModelList(data=cards.all())

        @routes.get("/v1/models/{model:path}", summary="One model.")
        async def model(model: str) -> ModelCard:
            return cards.of(await ctx.service.resolve(model))

        return routes


class _Cards:
    """The served models as OpenAI lists them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    def all(self) -> list[ModelCard]:
        """Describe the model under each of its names, and then its adapters."""
        adapters = [self._card(adapter.name, adapter) for adapter in self._service.adapters()]
        return [self._card(name, None) for name in self._service.names] + adapters

    def of(self, name: str) -> ModelCard:
        return self._card(name, next((one for one in self._service.adapters() if one.name == name), None))

    def _card(self, name: str, adapter: ServedAdapter | None) -> ModelCard:
        return ModelCard(
            id=name,
            created=self._created,
            root=self._service.names[0] if adapter is None else adapter.path,
            parent=None if adapter is None else adapter.parent,
            max_model_len=(adapter and adapter.max_model_len) or self._service.max_model_len,
            permission=[ModelPermission(id=f"modelperm-{name}", created=self._created)],
        )

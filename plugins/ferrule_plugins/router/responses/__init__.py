"""`responses`: OpenAI's Responses, stored or not, streamed or not, in the background or not.

What is stored, and when: a response of which the client was told the end (completed or incomplete), just before it is
told; and one in the background from its beginning. A response whose stream failed, or whose client left, is not stored.
`store` is true by default, as OpenAI documents it; vLLM stores only with VLLM_ENABLE_RESPONSES_API_STORE, because its
memory would grow without bounds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query

from ferrule.interfaces.dialect import Dialect, encode
from ferrule.interfaces.router import (
    JSON,
    Access,
    CurrentRequest,
    EventStream,
    Router,
    RouterContext,
    needs,
    streams,
)
from ferrule_plugins.router.responses.answers import (
    DeletedResponse,
    InputTokens,
    ItemList,
    Response,
    ResponseEvent,
)
from ferrule_plugins.router.responses.handler import Handler
from ferrule_plugins.router.responses.schema import Include, ResponsesBody, TokensBody

_MOST_ITEMS = 100  # of a list
_Included = Annotated[list[Include] | None, Query(alias="include[]", description="Accepted: nothing is left out.")]


class Named(Dialect):
    """The dialect of Responses: named events, and no line behind the last one. Errors are those of OpenAI's API; an
    event that is one has its fields beside `error`, too, where OpenAI's types have them.
    """

    paths = ("/v1/responses/",)
    last = b""

    def event(self, content: dict[str, Any]) -> bytes:
        if (error := content.get("error")) is not None and "type" not in content:
            told = {"type": "error", "code": error["type"], "message": error["message"], "param": error["param"]}
            content = told | content
        return b"event: %b\ndata: %b\n\n" % (content["type"].encode(), encode(content))


class Responses(Router):
    def dialect(self, ctx: RouterContext) -> Dialect:
        return Named()

    def router(self, ctx: RouterContext) -> APIRouter:
        handler = Handler(ctx)

        @asynccontextmanager
        async def lifespan(app: Any) -> AsyncIterator[None]:
            await handler.open()
            try:
                yield
            finally:
                await handler.close()

        routes = APIRouter(tags=["responses"], lifespan=lifespan)

        @routes.post(
            "/v1/responses",
            dependencies=[needs(Access.KEY, room=True)],
            response_model=Response,
            responses=streams(ResponseEvent),
            summary="Answer a conversation, as OpenAI's Responses API does.",
        )
        async def create(body: ResponsesBody, info: CurrentRequest) -> JSON | EventStream:
            return await handler.create(body, info)

        @routes.post(
            "/v1/responses/input_tokens",
            response_model=InputTokens,
            summary="The number of tokens that a conversation has as a prompt.",
        )
        async def input_tokens(body: TokensBody, info: CurrentRequest) -> JSON:
            return await handler.count(body, info)

        _stored(routes, handler)
        return routes


def _stored(routes: APIRouter, handler: Handler) -> None:
    """Add the routes of stored responses."""

    @routes.get(
        "/v1/responses/{response_id}",
        response_model=Response,
        responses=streams(ResponseEvent),
        summary="A stored response, or the rest of its stream.",
    )
    async def retrieve(
        response_id: str,
        info: CurrentRequest,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0, le=1 << 62)] = None,
        include: _Included = None,
        include_obfuscation: Annotated[bool, Query(description="Accepted: no padding is sent.")] = False,
    ) -> JSON | EventStream:
        return await handler.retrieve(response_id, info, stream, starting_after)

    @routes.get(
        "/v1/responses/{response_id}/input_items",
        response_model=ItemList,
        summary="The items of a stored response's own input.",
    )
    async def input_items(
        response_id: str,
        info: CurrentRequest,
        limit: Annotated[int, Query(ge=1, le=_MOST_ITEMS)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
        include: _Included = None,
    ) -> JSON:
        return await handler.input_items(response_id, info, limit, order == "desc", after)

    @routes.post(
        "/v1/responses/{response_id}/cancel",
        response_model=Response,
        summary="Stop generating a response in the background.",
    )
    async def cancel(response_id: str, info: CurrentRequest) -> JSON:
        return await handler.cancel(response_id, info)

    @routes.delete(
        "/v1/responses/{response_id}",
        response_model=DeletedResponse,
        summary="Forget a stored response; one that is being generated is stopped.",
    )
    async def delete(response_id: str, info: CurrentRequest) -> JSON:
        return await handler.delete(response_id, info)

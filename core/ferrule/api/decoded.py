"""Hands the body that `BodyReader` has decoded to FastAPI, so that it is not decoded again."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute, APIRouter, iter_route_contexts
from starlette.requests import Request
from starlette.responses import Response

from ferrule.interfaces.router import SCOPE_KEY, Frame
from ferrule.schema.undeclared import telling

DECODED = "ferrule.decoded"  # key of the ASGI scope: the value of the request's JSON body

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class _Decoded(Request):
    """A request whose body is not decoded a second time."""

    async def json(self) -> Any:
        return self.scope[DECODED] if DECODED in self.scope else await super().json()


class _Handing:
    """A replacement for `APIRoute.get_route_handler` whose handlers receive requests with decoded bodies."""

    def __init__(self, make: Callable[[], Handler]) -> None:
        self._make = make

    def __call__(self) -> Handler:
        handler = self._make()

        async def handle(request: Request) -> Response:
            frame: Frame = request.scope[SCOPE_KEY]
            with telling(frame.info.undeclared):
                return await handler(_Decoded(request.scope, request.receive))

        return handle


def hand_decoded(router: APIRouter) -> None:
    """Have all routes of a router find their bodies already decoded.

    A router that several applications include is changed once.
    """
    for context in iter_route_contexts(router.routes):
        route = context.original_route
        if isinstance(route, APIRoute) and not isinstance(route.get_route_handler, _Handing):
            route.get_route_handler = _Handing(route.get_route_handler)  # type: ignore[method-assign]

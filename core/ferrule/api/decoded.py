"""The body that a layer has decoded, handed to FastAPI in the place of its own decoding."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from ferrule.interfaces.router import SCOPE_KEY, Frame
from ferrule.schema import telling

DECODED = "ferrule.decoded"  # key of the ASGI scope: the value of the request's JSON body

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class _Decoded(Request):
    """A request whose body is not decoded a second time."""

    async def json(self) -> Any:
        return self.scope[DECODED] if DECODED in self.scope else await super().json()


class _Handing:
    """Makes a route's handler, as `APIRoute.get_route_handler` does, for requests that are decoded."""

    def __init__(self, make: Callable[[], Handler]) -> None:
        self._make = make

    def __call__(self) -> Handler:
        handler = self._make()

        async def handle(request: Request) -> Response:
            frame: Frame = request.scope[SCOPE_KEY]
            with telling(frame.info.undeclared):
                return await handler(_Decoded(request.scope, request.receive))

        return handle


def hand_decoded(route: APIRoute) -> None:
    """Have the route find its body decoded. A router may be included in several applications: it is done once."""
    if not isinstance(route.get_route_handler, _Handing):
        route.get_route_handler = _Handing(route.get_route_handler)  # type: ignore[method-assign]

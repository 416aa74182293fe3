"""Calling the handler of a route, with what the frame has read and decoded and without FastAPI's application around it.

What that application does for each request, the frame has done: errors, limits, the search for the route. Most handlers
take their body, `CurrentRequest` and the request, and return a response. These are called here, as FastAPI would
call them. For all others FastAPI solves what they take and encodes what they return.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, cast, get_args

from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.params import Form
from fastapi.routing import APIRoute, request_response
from pydantic import Discriminator, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ferrule.interfaces.router import SCOPE_KEY, Frame, Needs, request_info
from ferrule.schema import refusal_of

# As ASGI, and a coroutine function: the frame runs it as a task.
Endpoint = Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]

GIVEN = "ferrule.given"  # key of the ASGI scope: the request's body, `Given`


@dataclass(frozen=True, slots=True)
class Given:
    """A body that was read, and the JSON value that it holds."""

    body: bytes
    value: Any


class _Decoded(Request):
    """A request whose body is not read and decoded a second time."""

    async def body(self) -> bytes:
        given: Given = self.scope[GIVEN]
        return given.body

    async def json(self) -> Any:
        given: Given = self.scope[GIVEN]
        return given.value


def body_type(route: APIRoute) -> TypeAdapter[Any] | None:
    """What validates the route's JSON body; None when it has none."""
    field = route.body_field
    if field is None or isinstance(field.field_info, Form):
        return None
    found = field.field_info
    annotation: Any = found.annotation
    if isinstance(annotation, type) and not found.metadata:
        return _adapter(annotation)
    if found.metadata and all(isinstance(one, Discriminator) for one in found.metadata):
        return _adapter(Annotated[(annotation, *found.metadata)])
    return TypeAdapter(cast(Any, Annotated[annotation, found]))


@lru_cache(maxsize=128)
def _adapter(body: Any) -> TypeAdapter[Any]:
    """A type may be the body of several routes, and of several applications in one process."""
    return TypeAdapter(body)


def endpoint_of(route: APIRoute, body: TypeAdapter[Any] | None) -> Endpoint:
    """The route as an application that finds its decoded body, where it has one, in the scope as `Given`."""
    if _is_direct(route):
        return _Direct.of(route, body)
    if body is None or route.max_body_size is not None:  # FastAPI counts the bytes of a body while it reads them
        return AsyncExitStackMiddleware(route.app)
    handler = route.get_route_handler()

    async def respond(request: Request) -> Response:
        return await handler(_Decoded(request.scope, request.receive))

    return AsyncExitStackMiddleware(request_response(respond))


def reads_body(endpoint: Endpoint) -> bool:
    """Whether the handler may read the bytes of its JSON body: it takes the request."""
    return not (isinstance(endpoint, _Direct) and endpoint.request is None)


def _is_direct(route: APIRoute) -> bool:
    """Whether FastAPI would do no more for the route than `_Direct` does."""
    needed = route.dependant  # what FastAPI has read from the handler's signature
    others = (
        *(*needed.path_params, *needed.query_params, *needed.header_params, *needed.cookie_params),
        *(needed.response_param_name, needed.background_tasks_param_name),
        *(needed.http_connection_param_name, needed.security_scopes_param_name),
        *(route.dependency_overrides_provider, route.max_body_size),
        *(each for each in needed.dependencies if each.call is not request_info and not isinstance(each.call, Needs)),
    )
    return (
        not any(other is not None for other in others)
        and needed.body_params == ([route.body_field] if route.body_field else [])  # several are embedded in one
        and not (route.body_field and isinstance(route.body_field.field_info, Form))
        and type(route).get_route_handler is APIRoute.get_route_handler
        and inspect.iscoroutinefunction(route.endpoint)
        and _returns_response(route.endpoint)
    )


def _returns_response(handler: Callable[..., Any]) -> bool:
    try:
        kind = inspect.signature(handler, eval_str=True).return_annotation
    except NameError:  # an annotation that is not there at run time
        return False
    return all(inspect.isclass(member) and issubclass(member, Response) for member in get_args(kind) or (kind,))


@dataclass(frozen=True, slots=True)
class _Direct:
    """Calls a handler with what it names: its body, as `body_type` makes it, `CurrentRequest`, and the request."""

    handler: Callable[..., Awaitable[Response]]
    body: tuple[str, TypeAdapter[Any]] | None
    infos: tuple[str, ...]
    request: str | None

    @classmethod
    def of(cls, route: APIRoute, body: TypeAdapter[Any] | None) -> _Direct:
        needed = route.dependant
        infos = tuple(each.name for each in needed.dependencies if each.call is request_info and each.name)
        named = (route.body_field.name, body) if route.body_field and body else None
        return cls(route.endpoint, named, infos, needed.request_param_name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        frame: Frame = scope[SCOPE_KEY]
        values: dict[str, Any] = dict.fromkeys(self.infos, frame.info)
        if self.body is not None:
            name, adapter = self.body
            value = scope[GIVEN].value
            try:
                values[name] = adapter.validate_python(value)
            except ValidationError as error:
                raise refusal_of(error, given=value) from None
        if self.request is not None:
            values[self.request] = _Decoded(scope, receive) if GIVEN in scope else Request(scope, receive)
        response = await self.handler(**values)
        await response(scope, receive, send)

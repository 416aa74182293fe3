"""`router`: HTTP routes, written as FastAPI writes them. Layers around them do what must not depend on a route.

A plugin returns an `APIRouter`::

    class Ask(Body):
        question: str = Field(min_length=1, description="What to ask.")

    class Answer(BaseModel):
        text: str

    class Asking(Router):
        def router(self, ctx: RouterContext) -> APIRouter:
            routes = APIRouter(tags=["ask"])

            @routes.post("/ask", summary="Ask a question.")
            async def ask(body: Ask, info: CurrentRequest) -> Answer:
                return Answer(text=await answer(ctx.service, body, info.id))

            return routes

Before FastAPI is called, layers around it have compared the raw path byte for byte, checked the key that the route
needs (`needs`; a route without it needs `--api-key`), asked whether the server takes work, read the body under the
limits of size, time and depth, and decoded it once as strict JSON: no NaN, no lone surrogates, integers of 64 bits.
So bodies are declared as pydantic models: `ferrule.schema.Body` has the settings that fit, and beside it are types such
as `Int`. Fields that a model does not declare follow its `extra`: those that a `Body` or `Strict` ignores, as is the
default, are told to the client, or refused with ``--strict-requests``. A handler that reads a raw body, a form or an
upload is under the limits too, and checks what it reads itself.

Then FastAPI does what its users know: dependencies (those with `yield`, too), response models, background tasks, forms
and uploads (with `python-multipart`), route classes, and lifespans of routers, which run in each API process; the
engine may not be ready yet when they begin. Handlers of exceptions belong to the application, so a router has none: it
raises the exceptions of `ferrule.errors`, or HTTPException, or wraps its handlers in a route class.

A handler returns a model or a dict, which FastAPI checks against the declared answer and encodes; `JSON`, which is
encoded as it is; an `EventStream`; or any other `Response`. Every error reaches the client as
``{"error": {"message", "type", "param", "code"}}``: what pydantic finds is a 400 that names the field, HTTPException
has the status that it says, and anything unexpected is a 500 without its text. A router of another protocol returns its
`Dialect`, which says how errors and streams look there, and which headers carry the key.

`ferrule_protocol` has what protocols share: fields of conversations, usage, notes on fields without effect, streams
that let go of what they read.

Only path operations are taken: no mounts, websockets or plain Starlette routes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Request, Response, params
from fastapi.routing import APIRoute, RouteContext
from pydantic import TypeAdapter

from ferrule.interfaces.dialect import OPENAI, Dialect, encode
from ferrule.schema import Undeclared

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from ferrule.config import RouterSettings
    from ferrule.interfaces.plugins import Plugins
    from ferrule.interfaces.service import Service

SCOPE_KEY = "ferrule"  # of the ASGI scope: the server's side of a request, a `Frame`
ON_BEHALF = "ferrule.on_behalf"  # of the scope of a call of `RouterContext.app`: the name of the API key to call as


class Access(Enum):
    """The callers that a route accepts. PUBLIC is for the short list of probes only."""

    PUBLIC = "public"
    KEY = "key"  # `--api-key`, when one is set
    ADMIN = "admin"  # absent unless admin routes are on; needs the admin key
    OPERATOR = "operator"  # needs the admin key, too; whether there is such a route, its router says

    @property
    def administers(self) -> bool:
        """Whether the admin key is needed, where there is one."""
        return self in (Access.ADMIN, Access.OPERATOR)


@dataclass(frozen=True)
class Needs:
    """The dependency that `needs` returns. It is read when the application is built; calling it does nothing."""

    access: Access
    room: bool = False
    max_body_bytes: int | None = None

    async def __call__(self) -> None:
        return None


def needs(access: Access, room: bool = False, max_body_bytes: int | None = None) -> params.Depends:
    """Return a dependency for ``dependencies=[…]`` of a route or of an APIRouter; a route's own wins.

    Without one, a route has `Access.KEY`. `room` marks a route that generates: while the queue is full, a call is
    answered 429 before its body is looked at. `max_body_bytes` replaces `--max-body-bytes` for a handler that reads
    an upload piece by piece, and so does not keep it in memory.
    """
    needed: params.Depends = Depends(Needs(access, room, max_body_bytes))
    return needed


def needs_of(route: APIRoute | RouteContext) -> Needs:
    """Return a route's needs. The last mark counts, as FastAPI puts those of the router before those of the route."""
    marks = [needed.dependency for needed in route.dependencies]
    return next((mark for mark in reversed(marks) if isinstance(mark, Needs)), Needs(Access.KEY))


def access_of(route: APIRoute) -> Access:
    """Return the access of a route."""
    return needs_of(route).access


@dataclass(frozen=True)
class RequestInfo:
    """Facts about a request beyond what FastAPI gives to handlers. See `CurrentRequest`."""

    id: str  # ours, random; the client's own is in `headers`
    headers: Mapping[str, str]  # lower-case names
    disconnected: Callable[[], Awaitable[None]]  # resolves when the client has left
    key_name: str = ""  # of the API key that it came with; empty where none was needed
    undeclared: Undeclared = field(default_factory=Undeclared)  # what the models of the body say of its fields

    @property
    def unknown_fields(self) -> tuple[str, ...]:
        """Body fields that no model declares, such as ``a.b[2].c``; printable. Only the handler sees all of them."""
        return self.undeclared.places


class Frame(Protocol):
    """The object that the server puts into the ASGI scope under `SCOPE_KEY`."""

    info: RequestInfo

    async def stream(self, reply: EventStream) -> None:
        """Send the whole stream."""


async def request_info(request: Request) -> RequestInfo:
    """Return the request's info: the dependency behind `CurrentRequest`."""
    frame: Frame = request.scope[SCOPE_KEY]
    return frame.info


CurrentRequest = Annotated[RequestInfo, Depends(request_info)]  # a handler's parameter: `info: CurrentRequest`


class JSON(Response):
    """An answer that is encoded as it is: nothing is checked against the declared model, which is for the document."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


class EventStream(Response):
    """Events as the router's `Dialect` writes them, and its last line; by default server-sent events of JSON, and
    `[DONE]`.

    An exception from the iterator becomes one error event, and the connection closes without the last line. When the
    client leaves, the iterator is cancelled. It is closed in every case (`aclose`, if it has that).
    """

    def __init__(self, events: AsyncIterator[Any], headers: Mapping[str, str] | None = None) -> None:
        self.events = events
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        frame: Frame = scope[SCOPE_KEY]
        await frame.stream(self)
        if self.background is not None:
            await self.background()


def streams(event: Any) -> dict[int | str, dict[str, Any]]:
    """Return a value for ``responses=`` that says a 200 may also be an `EventStream` with events of this type."""
    return {200: {"content": {"text/event-stream": {"x-event": _Described(event)}}}}


class _Described:
    """The schema of an event. It is made when FastAPI copies it into the description of all routes: a start that
    describes nothing has nothing of it to pay.
    """

    def __init__(self, event: Any) -> None:
        self._event = event

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        try:
            hash(self._event)
        except TypeError:  # some annotations cannot be keys
            return _event_schema(self._event)
        return deepcopy(_event_schema_once(self._event))


def _event_schema(event: Any) -> dict[str, Any]:
    described = TypeAdapter(list[event]).json_schema(mode="serialization", ref_template="#/components/schemas/{model}")
    return dict(described["items"] | {"$defs": described.get("$defs", {})})  # in a list a model is a reference


_event_schema_once = lru_cache(maxsize=32)(_event_schema)  # for several routes, and several applications in one process


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotImplementedError("This context belongs to no server.")


@dataclass(frozen=True)
class RouterContext:
    """The means of a router. `service` is the only way to the engine, and includes the admission gate.

    It is for handlers, not for `Router.router`: until the engine is ready every use of `service` raises
    UnavailableError.
    """

    config: RouterSettings
    plugins: Plugins
    service: Service
    load: Callable[[], int] = int  # requests with a body that are being served, in all API processes
    folder: Path | None = None  # that all API processes share, and that goes with the server; None where there is one
    app: ASGIApp = _nothing
    """The whole server as an ASGI application, for a router that sends requests to other routes in the background, such
    as the lines of a batch. They pass the same limits and checks as those of clients. The scope of such a call has
    `ON_BEHALF`: the call is authorised if a key of that name exists, or if the name is empty. It comes after requests
    of clients: it may use half of the queue, has a lower priority, and is not counted in `load`."""


class Router(ABC):
    @abstractmethod
    def router(self, ctx: RouterContext) -> APIRouter:
        """Return the routes to serve. Two routers that claim one method and path stop start-up."""

    def dialect(self, ctx: RouterContext) -> Dialect:
        """Return the dialect of these routes: how errors and streams look, and which headers carry the key."""
        return OPENAI

    def absent(self, ctx: RouterContext) -> Mapping[str, str]:
        """Return paths that clients may try and nobody serves, each with a sentence that says what would be right.

        A path that ends in ``/`` stands for itself without the slash, and for all paths below it.
        """
        return {}

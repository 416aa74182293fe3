"""`router` of contract 1: a table of routes, bodies as Structs. Read by an adapter; see `ferrule.interfaces.http`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ferrule.interfaces.http import Access as Access

if TYPE_CHECKING:
    from ferrule.config import Config
    from ferrule.interfaces.plugins import Plugins
    from ferrule.interfaces.service import Service


@dataclass(frozen=True)
class Call:
    """One HTTP call after the gate. `body` is an instance of the route's `body_type`, or None."""

    body: Any
    path_params: Mapping[str, str]
    query: Mapping[str, str]  # values of a repeated name are joined by commas
    headers: Mapping[str, str]  # lower-case names
    request_id: str  # ours, random; the client's own is in `headers`
    disconnected: Callable[[], Awaitable[None]]  # resolves when the client has left
    unknown_fields: tuple[str, ...] = ()  # body fields that `body_type` does not know, such as ``a.b[2].c``; printable


@dataclass(frozen=True)
class Reply:
    """A whole answer: `content` is encoded as JSON, or sent as it is when it is str or bytes."""

    content: Any
    status: int = 200
    media_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EventStream:
    """Server-sent events. Each item is encoded as JSON and sent as one `data:` event; then `[DONE]`.

    An exception from the iterator becomes one error event, and the connection closes without `[DONE]`.
    """

    events: AsyncIterator[Any]
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[Call], Awaitable[Reply | EventStream]]


@dataclass(frozen=True, kw_only=True)
class Route:
    """`path` is a template such as ``/v1/models/{model}``. `body_type` is a msgspec Struct; None: no body is read.

    `answer`, `event` and `query` describe: the type of a 200's JSON body, that of a streamed event (both may be unions
    of Structs), and what each query parameter means. A route that streams when asked to has both types.
    """

    method: str
    path: str
    handler: Handler
    body_type: type | None = None
    access: Access = Access.KEY
    summary: str = ""
    tags: tuple[str, ...] = ()
    answer: Any = None
    event: Any = None
    query: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RouterContext:
    """What a router may use. `service` is the only way to the engine, and it holds the admission gate.

    Routes are asked for before the engine is ready: until then every use of `service` raises UnavailableError, so it
    is to be used by handlers, not by `Router.routes`. `all_routes` answers once every router was asked.
    """

    config: Config
    plugins: Plugins
    service: Service
    all_routes: Callable[[], Sequence[Route]] = tuple
    load: Callable[[], int] = int  # requests with a body that are being served, in all API processes


class Router(ABC):
    @abstractmethod
    def routes(self, ctx: RouterContext) -> Sequence[Route]:
        """The routes to serve. Two routers that claim one method and path stop start-up."""

    def absent(self, ctx: RouterContext) -> Mapping[str, str]:
        """Paths that clients may try and nobody serves, each with a sentence that says what would be right.

        A path that ends in ``/`` stands for itself without it, and for all below.
        """
        return {}

"""The kit of routers: the real frame over a scripted service, called without a socket."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter

from ferrule.api.app import build_app
from ferrule.api.auth import PUBLIC
from ferrule.api.lifecycle import Lifecycle
from ferrule.api.paths import Entry
from ferrule.api.routes import application, entries_of
from ferrule.config import Config, FrontendConfig
from ferrule.env import Environment
from ferrule.errors import EngineDead, OverloadedError, RequestError, RequestFailed, UnavailableError
from ferrule.interfaces.router import Access, RouterContext
from ferrule.interfaces.service import Generate, Output
from ferrule.plugin import Plugins
from ferrule_testkit.kits.base import Kit, does_not_apply, installed_plugins, promise, shown
from ferrule_testkit.service import ScriptedService

_NAME = "under-test"
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE"})
_PATIENCE = 20.0  # seconds for one call
_LEAKS = ("Traceback", "secret-detail", "/site-packages/", "0x7f")

BAD_BODIES: Mapping[str, bytes] = {
    "no body": b"",
    "no JSON": b"{",
    "no UTF-8": b'{"\xff": 1}',
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "deep": b"[" * 5000,
    "a long number": b'{"a": ' + b"9" * 400 + b"}",
}
USUAL: Mapping[str, Any] = {
    "prompt": "hello",
    "messages": [{"role": "user", "content": "hello"}],
    "input": "hello",
    "text": "hello",
    "tokens": [72, 105],
}
WRONG_VALUES: Sequence[Any] = (-1, 0, 2**63, 1.5, True, "x", "", [], [[]], {}, {"a": None}, [None], None)


@dataclass
class Answer:
    """What was sent for one call. `problems` are breaches of ASGI: an answer that starts or ends twice, or never."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    problems: list[str] = field(default_factory=list)


class RouterKit(Kit):
    """A router's routes are well formed and guarded; every call is answered once, in the error shape when it fails.

    Settings: `calls`, valid calls as (method, path, body), which must succeed. Without them bodies are guessed.
    """

    kind = "router"
    calls: Sequence[tuple[str, str, Any]] = ()
    frontend: Mapping[str, Any] = {}

    # ------------------------------------------------------------------------------------ promises

    def test_routes_are_well_formed(self) -> None:
        """Every route has a method, a path and a summary, and waits for nothing in a thread; none is there twice."""
        routes = self.site().routes
        for entry in routes:
            name = _name(entry)
            promise(entry.method in _METHODS and entry.path.startswith("/"), f"{name} is not a route")
            promise(_is_async(entry.route.endpoint), f"the handler of {name} is not async")
            summary = entry.route.summary or ""
            promise(bool(summary) and "\n" not in summary, f"{name} has no summary of one line")
        names = [(entry.method, entry.path) for entry in routes]
        promise(len(set(names)) == len(names), f"a route is there twice: {shown(sorted(names))}")

    def test_routes_are_described(self) -> None:
        """The OpenAPI document has every route, with who may call it, and with the errors that this server answers."""
        document = application(Config(), self.site().routes).openapi()
        for entry in self.site().routes:
            if not entry.route.include_in_schema:
                continue
            operation = document["paths"][entry.route.path_format][entry.method.lower()]
            promise("security" in operation, f"{_name(entry)} does not tell what key it needs")
            promise("422" not in operation["responses"], f"{_name(entry)} documents a 422, which is never answered")
            promise("400" in operation["responses"], f"{_name(entry)} documents no error")

    def test_asking_for_routes_needs_no_engine(self) -> None:
        """`router` may be asked for before the engine is ready, twice, with the same result."""
        first, second = self.site(ready=False).routes, self.site(ready=False).routes
        names = [[(entry.method, entry.path, entry.access) for entry in routes] for routes in (first, second)]
        promise(names[0] == names[1], "a second router has other routes")

    def test_only_probes_are_public(self) -> None:
        """Routes that need no key are on the short list of probes; a route that takes a body needs one."""
        for route in self.site().routes:
            if route.access is Access.PUBLIC:
                known = (route.method, route.path) in PUBLIC and route.body is None
                promise(known, f"{route.method} {route.path} is open to everybody")

    def test_no_route_of_another_router_is_taken(self) -> None:
        """Beside the built-in routers nothing is claimed twice."""
        installed = installed_plugins()
        mine = {(route.method, route.path) for route in self.site().routes}
        for name in installed.names("router"):
            cls = installed.load("router", name)
            if installed.origin("router", name).split(" ")[0] == "ferrule" and cls is not self.plugin:
                context = RouterContext(Config(), installed, ScriptedService())
                taken = mine & {(entry.method, entry.path) for entry in entries_of(cls().router(context))}
                promise(not taken, f"{shown(sorted(taken))} belongs to the router {name}")

    def test_a_key_is_asked_for(self) -> None:
        """With --api-key, every route but the probes answers 401 without the key, and something else with it."""
        site = self.site(api_key=("k",))
        for route in site.routes:
            answer = site.call(route.method, _path(route), _body(route))
            public = route.access is Access.PUBLIC
            promise(public or answer.status == 401, f"{_name(route)} answers {answer.status} without a key")
            answer = site.call(route.method, _path(route), _body(route), {"authorization": "Bearer k"})
            promise(answer.status != 401, f"{_name(route)} refuses the right key")

    def test_valid_calls_succeed(self) -> None:
        """Each of `calls` gives an answer below 400."""
        if not self.calls:
            does_not_apply("no `calls` are given")
        for method, path, body in self.calls:
            answer = self.site().call(method, path, _encode(body))
            self._fine(answer, f"{method} {path}")
            promise(answer.status < 400, f"{method} {path} answers {answer.status}: {shown(answer.body)}")

    def test_bad_bodies_are_a_4xx(self) -> None:
        """What is no JSON, or not of the right form, is refused with 4xx and the error shape, once."""
        for route in self._routes(body=True):
            site = self.site()
            for what, body in BAD_BODIES.items():
                answer = site.call(route.method, _path(route), body)
                self._fine(answer, f"{_name(route)} with {what}")
                promise(400 <= answer.status < 500, f"{_name(route)} answers {answer.status} to {what}")

    def test_no_value_of_a_field_is_the_servers_fault(self) -> None:
        """Any JSON value of any field is taken, or refused with 4xx: never a 5xx, and never no answer."""
        for route in self._routes(body=True):
            site = self.site()
            given = {**self._valid(route)}
            for name in route.body.declared if route.body else ():
                for value in WRONG_VALUES:
                    answer = site.call(route.method, _path(route), _encode({**given, name: value}))
                    self._fine(answer, f"{_name(route)} with {name} = {shown(value)}")
                    promise(answer.status < 500, f"{_name(route)} answers {answer.status} to {name} = {shown(value)}")
            promise(site.service.open == 0, f"{_name(route)} leaves {site.service.open} requests running")

    def test_null_means_the_default(self) -> None:
        """A field of a valid call that is not required may be null, which means the same as leaving it out."""
        for route in self._routes(body=True):
            given, site = self._valid(route) or json.loads(next(_guesses(route))), self.site()
            usual, steady = self._meaning(site, route, given), self._meaning(site, route, given)
            if usual is None:
                continue
            for name in route.body.declared if route.body else ():
                if name in given:
                    continue
                meaning = self._meaning(site, route, {**given, name: None})
                promise(meaning is not None, f"{_name(route)} refuses {name} = null")
                same = meaning == usual or usual != steady
                promise(same, f"{_name(route)} takes {name} = null for {shown(meaning)}, not for {shown(usual)}")

    def test_what_the_service_raises_is_answered(self) -> None:
        """Refusals, overload, draining, a dead engine and faults of ours are each answered once, in the error shape."""
        for error, status in (
            (RequestError("Wrong.", "prompt"), 400),
            (OverloadedError("Full."), 429),
            (UnavailableError("Draining."), 503),
            (EngineDead("secret-detail"), 503),
            (RequestFailed("Failed."), 500),
            (RuntimeError("secret-detail"), 500),
        ):
            site = self.site()
            site.service.refusal = error  # type: ignore[assignment]
            for method, path, body in self._calls():
                site.service.asked = 0
                answer = site.call(method, path, body)
                self._fine(answer, f"{method} {path} while the service raises {type(error).__name__}")
                known = answer.status == status or not site.service.asked
                promise(known, f"{method} {path} answers {answer.status} to {type(error).__name__}, not {status}")

    def test_a_failure_in_the_middle_is_told(self) -> None:
        """When generation fails after it began, the answer is an error, or a stream without its end mark."""
        for error in (EngineDead("secret-detail"), RequestFailed("Failed."), RuntimeError("secret-detail")):
            site = self.site()
            site.service.failure = error
            for method, path, body in self._calls():
                site.service.requests.clear()
                answer = site.call(method, path, body)
                self._fine(answer, f"{method} {path} while generation fails")
                streamed = answer.headers.get("content-type", "").startswith("text/event-stream")
                failed = streamed and site.service.requests
                promise(not failed or b"[DONE]" not in answer.body, f"{method} {path} ends a failed stream as if whole")
                promise(site.service.open == 0, f"{method} {path} leaves a request running")

    def test_before_the_engine_is_ready(self) -> None:
        """While the model is loaded, routes answer at once: 503 with the error shape, or what needs no engine."""
        for route in self._routes():
            answer = self.site(ready=False).call(route.method, _path(route), _body(route))
            self._fine(answer, f"{_name(route)} before the start")

    def test_a_client_that_leaves_is_noticed(self) -> None:
        """When the client leaves, what was generated for it is cancelled, and nothing is left running."""
        for method, path, body in self._calls():
            site = self.site()
            site.service.pace = lambda: asyncio.sleep(0.001)
            site.call(method, path, body, leave=True)
            promise(site.service.open == 0, f"{method} {path} goes on though the client has left")

    def test_parameters_of_paths(self) -> None:
        """Odd values in a path are a success or a 4xx, and no page repeats them raw."""
        for route in self._routes():
            if "{" not in route.path:
                continue
            for value in ("x" * 300, "..%2f..%2fetc%2fpasswd", "%00", "%ff", "%E2%82%AC", "<script>"):
                answer = self.site().call(route.method, _path(route, value), _body(route))
                self._fine(answer, f"{_name(route)} with {shown(value)}")
                promise(answer.status < 500, f"{_name(route)} answers {answer.status} to {shown(value)}")
                html = "html" in answer.headers.get("content-type", "")
                promise(not html or b"<script>" not in answer.body, f"{_name(route)} repeats markup")

    # ------------------------------------------------------------------------------------ parts

    def site(self, ready: bool = True, **frontend: Any) -> Site:
        return Site(self.plugin, ready, {**self.frontend, **frontend})

    def _routes(self, body: bool = False) -> Sequence[Entry]:
        routes = self.site().routes
        chosen = [route for route in routes if not body or route.body is not None]
        if not chosen:
            does_not_apply("no route takes a body" if body else "there is no route")
        return chosen

    def _calls(self) -> Sequence[tuple[str, str, bytes]]:
        if self.calls:
            return [(method, path, _encode(body)) for method, path, body in self.calls]
        return [(route.method, _path(route), body) for route in self._routes() for body in _guesses(route)]

    def _valid(self, route: Entry) -> Mapping[str, Any]:
        found = [body for method, path, body in self.calls if (method, path) == (route.method, route.path)]
        return found[0] if found and isinstance(found[0], Mapping) else {}

    def _meaning(self, site: Site, route: Entry, body: Mapping[str, Any]) -> Any:
        """What a call asks of the service, or the answer when it asks for no generation; None when it is refused."""
        before = len(site.service.requests)
        answer = site.call(route.method, _path(route), _encode(body))
        if answer.status >= 400:
            return None
        return site.service.requests[before:] or answer.body

    def _fine(self, answer: Answer, what: str) -> None:
        """One answer, and of the error shape when it is an error."""
        promise(not answer.problems, f"{what}: {'; '.join(answer.problems)}")
        for leak in _LEAKS:
            promise(leak.encode() not in answer.body, f"{what}: the answer tells {leak!r}: {shown(answer.body)}")
        if answer.status >= 400:
            try:
                error = json.loads(answer.body)["error"]
                shape = set(error) == {"message", "type", "param", "code"} and error["code"] == answer.status
            except (ValueError, KeyError, TypeError):
                shape = False
            promise(shape, f"{what}: {answer.status} without the error shape: {shown(answer.body)}")


class Asked(ScriptedService):
    """Knows how often it was asked to generate."""

    asked = 0

    async def generate(self, request: Generate) -> AsyncIterator[Output]:
        self.asked += 1
        return await super().generate(request)


class Site:
    """One application with the router under test, in admin mode so that all of its routes are there."""

    def __init__(self, router: Any, ready: bool, frontend: Mapping[str, Any]) -> None:
        self.service = Asked()
        self._lifecycle = Lifecycle()
        self._ready = ready
        self.routes: Sequence[Entry] = ()
        config = Config(
            frontend=FrontendConfig(**{"routers": (_NAME,), "disable_uvicorn_access_log": True, **frontend}),
            env=Environment(server_dev_mode=True),
        )
        self._app = build_app(config, _Plugins(router, self), self._lifecycle)

    def call(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        leave: bool = False,
    ) -> Answer:
        """With `leave` the client goes as soon as the first piece of the answer has come."""
        return asyncio.run(self._call(method, path, body, headers or {}, leave))

    async def _call(self, method: str, path: str, body: bytes, headers: Mapping[str, str], leave: bool) -> Answer:
        if self._ready:
            self._lifecycle.ready(self.service)
        answer, gone = Answer(), asyncio.Event()
        sent = [False, False]  # the request's body, and the answer's end

        async def receive() -> dict[str, Any]:
            if not sent[0]:
                sent[0] = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Mapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                if answer.status:
                    answer.problems.append("the answer starts twice")
                answer.status = message["status"]
                answer.headers = {key.decode(): value.decode("latin-1") for key, value in message["headers"]}
            elif message["type"] == "http.response.body":
                if not answer.status or sent[1]:
                    answer.problems.append("a body comes before the start, or after the end")
                answer.body += message.get("body", b"")
                sent[1] = not message.get("more_body", False)
                if leave:
                    gone.set()

        given = {"content-type": "application/json", "content-length": str(len(body)), "host": "kit", **headers}
        raw = path.encode("latin-1", "replace")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": raw,
            "query_string": b"",
            "root_path": "",
            "headers": [(key.encode(), value.encode()) for key, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._app(scope, receive, send)
        except TimeoutError:
            answer.problems.append(f"no answer within {_PATIENCE:.0f} s")
        if not leave and (not answer.status or not sent[1]):
            answer.problems.append("the answer has no end")
        return answer


class _Plugins(Plugins):
    """The installed plugins, and the router under test, which tells the site its routes."""

    def __init__(self, router: Any, site: Site) -> None:
        super().__init__()
        self._installed = installed_plugins()
        self._router, self._site = router, site

    def names(self, kind: str) -> tuple[str, ...]:
        return self._installed.names(kind)

    def load(self, kind: str, name: str) -> Any:
        if (kind, name) != ("router", _NAME):
            return self._installed.load(kind, name)
        router, site = self._router, self._site

        class Told(router):  # type: ignore[misc, valid-type]
            def router(self, ctx: RouterContext) -> APIRouter:
                made = super().router(ctx)
                site.routes = tuple(entries_of(made))
                return made  # type: ignore[no-any-return]

        return Told

    def origin(self, kind: str, name: str) -> str:
        return self._installed.origin(kind, name)


def _name(route: Entry) -> str:
    return f"{route.method} {route.path}"


def _is_async(handler: Any) -> bool:
    """Also of an object that can be called."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def _path(route: Entry, value: str = "x") -> str:
    return "/".join(value if part.startswith("{") else part for part in route.path.split("/"))


def _body(route: Entry) -> bytes:
    return b"" if route.body is None else b"{}"


def _guesses(route: Entry) -> Iterator[bytes]:
    """Bodies that are likely to be taken: one of the usual fields each, streamed and not."""
    names = set(route.body.declared if route.body else ())
    for name in sorted(names & USUAL.keys()):
        yield _encode({name: USUAL[name]})
        if "stream" in names:
            yield _encode({name: USUAL[name], "stream": True})
    if not names & USUAL.keys():
        yield _body(route)


def _encode(body: Any) -> bytes:
    if body is None or isinstance(body, bytes):
        return body or b""
    return json.dumps(body).encode()

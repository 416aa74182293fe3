"""The kit of routers: the real frame over a scripted service, called without a socket."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from ferrule.api.caller import PUBLIC
from ferrule.api.errors import failure_of
from ferrule.api.paths import Entry
from ferrule.api.routes import application, entries_of
from ferrule.config import Config, LimitsConfig, RouterSettings
from ferrule.errors import EngineDead, OverloadedError, RequestError, RequestFailed, UnavailableError
from ferrule.interfaces.dialect import Failure, encode
from ferrule.interfaces.router import Access, RouterContext
from ferrule_testkit.installed import installed_plugins
from ferrule_testkit.kits.base import Kit, does_not_apply, promise, shown
from ferrule_testkit.kits.router_site import SentResponse, Site
from ferrule_testkit.service import ScriptedService

_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE"})
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


class RouterKit(Kit):
    """A router's routes are well formed and guarded; every call is answered once, and in the form of its dialect when
    it fails.

    Settings: `calls`, valid calls as (method, path, body), which must succeed. Without them bodies are guessed.
    """

    kind = "router"
    calls: Sequence[tuple[str, str, Any]] = ()
    frontend: Mapping[str, Any] = {}

    # ------------------------------------------------------------------------------------ promises

    def test_routes_are_well_formed(self) -> None:
        """Give every route a method, a path and a summary, an async handler, and no duplicate."""
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
        """Describe every route in the OpenAPI document, with who may call it and the errors that this server
        answers.
        """
        site = self.site()
        document = application(Config(), (), site.routes).openapi()
        for entry in site.routes:
            if not entry.route.include_in_schema:
                continue
            operation = document["paths"][entry.route.path_format][entry.method.lower()]
            promise("security" in operation, f"{_name(entry)} does not tell what key it needs")
            promise("422" not in operation["responses"], f"{_name(entry)} documents a 422, which is never answered")
            promise("400" in operation["responses"], f"{_name(entry)} documents no error")

    def test_asking_for_routes_needs_no_engine(self) -> None:
        """Return the same routes from `router` before the engine is ready, and when it is called twice."""
        first, second = self.site(ready=False).routes, self.site(ready=False).routes
        names = [[(entry.method, entry.path, entry.access) for entry in routes] for routes in (first, second)]
        promise(names[0] == names[1], "a second router has other routes")

    def test_only_probes_are_public(self) -> None:
        """Require a key for every route that is not on the short list of probes, or that accepts a body."""
        for route in self.site().routes:
            if route.access is Access.PUBLIC:
                known = (route.method, route.path) in PUBLIC and route.body is None
                promise(known, f"{route.method} {route.path} is open to everybody")

    def test_no_route_of_another_router_is_taken(self) -> None:
        """Claim no route of a built-in router."""
        installed = installed_plugins()
        mine = {(route.method, route.path) for route in self.site().routes}
        for name in installed.names("router"):
            cls = installed.load("router", name)
            if installed.origin("router", name).split(" ")[0] == "ferrule" and cls is not self.plugin:
                context = RouterContext(RouterSettings.of(Config(), installed), installed, ScriptedService())
                taken = mine & {(entry.method, entry.path) for entry in entries_of(cls().router(context))}
                promise(not taken, f"{shown(sorted(taken))} belongs to the router {name}")

    def test_a_key_is_asked_for(self) -> None:
        """Answer 401 without the key from every route but the probes, with --api-key, and something else with the key,
        in any of the dialect's headers.
        """
        site = self.site(api_key=("k",))
        for route in site.routes:
            answer = site.call(route.method, _path(route), _body(route))
            self._fine(answer, f"{_name(route)} without a key")
            public = route.access is Access.PUBLIC
            promise(public or answer.status == 401, f"{_name(route)} answers {answer.status} without a key")
            for name, value in (("authorization", "Bearer k"), *((name, "k") for name in site.dialect.key_headers)):
                answer = site.call(route.method, _path(route), _body(route), {name: value})
                promise(answer.status != 401, f"{_name(route)} refuses the right key in {name}")

    def test_errors_have_the_form_of_its_dialect(self) -> None:
        """Write errors of every status in the form of the dialect, also for wrong paths, methods and sizes."""
        site, small = self.site(), self.site(max_body_bytes=1)
        for status in (400, 401, 403, 404, 405, 408, 413, 429, 500, 503):
            for failure in _failures(status):
                said = encode(site.dialect.error(failure))
                promise(failure.message.encode() in said, f"an error {status} loses its message: {shown(said)}")
        for path in site.dialect.paths:
            promise(path.startswith("/"), f"the dialect's path {shown(path)} does not begin with /")
            below = f"{path}no-such-route" if path.endswith("/") else path
            self._fine(site.call("PATCH", below), f"PATCH {below}")
        for route in site.routes:
            self._fine(site.call("PATCH", _path(route)), f"PATCH {route.path}")
            if route.body is not None:
                answer = small.call(route.method, _path(route), b'{"a": 1}')
                self._fine(answer, f"{_name(route)} with a large body")
                promise(answer.status == 413, f"{_name(route)} answers {answer.status} to a body over the limit")

    def test_valid_calls_succeed(self) -> None:
        """Answer each of `calls` with a status below 400."""
        if not self.calls:
            does_not_apply("no `calls` are given")
        site = self.site()
        for method, path, body in self.calls:
            answer = site.call(method, path, _encode(body))
            self._fine(answer, f"{method} {path}")
            promise(answer.status < 400, f"{method} {path} answers {answer.status}: {shown(answer.body)}")

    def test_bad_bodies_are_a_4xx(self) -> None:
        """Refuse a body that is not JSON, or not of the right form, with 4xx and the error shape, once."""
        for route in self._routes(body=True):
            site = self.site()
            for what, body in BAD_BODIES.items():
                answer = site.call(route.method, _path(route), body)
                self._fine(answer, f"{_name(route)} with {what}")
                promise(400 <= answer.status < 500, f"{_name(route)} answers {answer.status} to {what}")

    def test_no_value_of_a_field_is_the_servers_fault(self) -> None:
        """Accept any JSON value of any field, or refuse it with 4xx: never with a 5xx, and never without an answer."""
        for route in self._routes(body=True):
            site = self.site()
            given = {**self._valid(route)}
            for name in _fields(route):
                for value in WRONG_VALUES:
                    answer = site.call(route.method, _path(route), _encode({**given, name: value}))
                    self._fine(answer, f"{_name(route)} with {name} = {shown(value)}")
                    promise(answer.status < 500, f"{_name(route)} answers {answer.status} to {name} = {shown(value)}")
            promise(site.service.open == 0, f"{_name(route)} leaves {site.service.open} requests running")

    def test_null_means_the_default(self) -> None:
        """Accept null for a field of a valid call that is not required, with the meaning of leaving it out."""
        for route in self._routes(body=True):
            given, site = self._valid(route) or json.loads(next(_guesses(route))), self.site()
            usual, steady = self._meaning(site, route, given), self._meaning(site, route, given)
            if usual is None:
                continue
            for name in _fields(route):
                if name in given:
                    continue
                meaning = self._meaning(site, route, {**given, name: None})
                promise(meaning is not None, f"{_name(route)} refuses {name} = null")
                same = meaning == usual or usual != steady
                promise(same, f"{_name(route)} takes {name} = null for {shown(meaning)}, not for {shown(usual)}")

    def test_what_the_service_raises_is_answered(self) -> None:
        """Answer a refusal, overload, draining, a dead engine and an internal fault each once, in the error shape."""
        site = self.site()
        for error, status in (
            (RequestError("Wrong.", "prompt"), 400),
            (OverloadedError("Full."), 429),
            (UnavailableError("Draining."), 503),
            (EngineDead("secret-detail"), 503),
            (RequestFailed("Failed."), 500),
            (RuntimeError("secret-detail"), 500),
        ):
            site.service.refusal = error  # type: ignore[assignment]
            for method, path, body in self._calls():
                site.service.asked = 0
                answer = site.call(method, path, body)
                self._fine(answer, f"{method} {path} while the service raises {type(error).__name__}")
                known = answer.status == status or not site.service.asked
                promise(known, f"{method} {path} answers {answer.status} to {type(error).__name__}, not {status}")

    def test_a_failure_in_the_middle_is_told(self) -> None:
        """Answer with an error, or with a stream that ends with one, when generation fails after it began."""
        for error in (EngineDead("secret-detail"), RequestFailed("Failed."), RuntimeError("secret-detail")):
            site = self.site()
            site.service.failure = error
            for method, path, body in self._calls():
                site.service.requests.clear()
                answer = site.call(method, path, body)
                self._fine(answer, f"{method} {path} while generation fails")
                failed = answer.headers.get("content-type", "") == site.dialect.media_type and site.service.requests
                told = failure_of(error, lambda doing: None)
                told = replace(told, request_id=answer.headers.get(site.dialect.id_header, ""))
                last = site.dialect.event(site.dialect.error(told))
                promise(not failed or answer.body.endswith(last), f"{method} {path} ends a failed stream as if whole")
                promise(site.service.open == 0, f"{method} {path} leaves a request running")

    def test_before_the_engine_is_ready(self) -> None:
        """Answer at once while the model is loaded: 503 with the error shape, or a result that needs no engine."""
        site = self.site(ready=False)
        for route in self._routes():
            answer = site.call(route.method, _path(route), _body(route))
            self._fine(answer, f"{_name(route)} before the start")

    def test_a_client_that_leaves_is_noticed(self) -> None:
        """Cancel generation when the client leaves, and leave nothing running: in the middle of an answer, and when not
        one event of a stream was asked for.
        """
        for leave in ("start", "body"):
            site = self.site()
            site.service.pace = lambda: asyncio.sleep(0.001)
            for method, path, body in self._calls():
                site.call(method, path, body, leave=leave)
                promise(site.service.open == 0, f"{method} {path} goes on though the client left at its {leave}")

    def test_parameters_of_paths(self) -> None:
        """Answer odd values in a path with success or a 4xx, and never repeat them raw in a page."""
        site = self.site()
        for route in self._routes():
            if "{" not in route.path:
                continue
            for value in ("x" * 300, "..%2f..%2fetc%2fpasswd", "%00", "%ff", "%E2%82%AC", "<script>"):
                answer = site.call(route.method, _path(route, value), _body(route))
                self._fine(answer, f"{_name(route)} with {shown(value)}")
                promise(answer.status < 500, f"{_name(route)} answers {answer.status} to {shown(value)}")
                html = "html" in answer.headers.get("content-type", "")
                promise(not html or b"<script>" not in answer.body, f"{_name(route)} repeats markup")

    # ------------------------------------------------------------------------------------ parts

    def site(self, ready: bool = True, max_body_bytes: int | None = None, **frontend: Any) -> Site:
        limits = LimitsConfig() if max_body_bytes is None else LimitsConfig(max_body_bytes=max_body_bytes)
        return Site(self.plugin, ready, {**self.frontend, **frontend}, limits, self.plugin_options)

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
        """Return the requests that a call makes to the service, or the answer if it makes none; None when the call is
        refused.
        """
        before = len(site.service.requests)
        answer = site.call(route.method, _path(route), _encode(body))
        if answer.status >= 400:
            return None
        return site.service.requests[before:] or answer.body

    def _fine(self, answer: SentResponse, what: str) -> None:
        """Check that there is one answer, in the shape of the dialect's errors if it is an error."""
        promise(not answer.problems, f"{what}: {'; '.join(answer.problems)}")
        for leak in _LEAKS:
            promise(leak.encode() not in answer.body, f"{what}: the answer tells {leak!r}: {shown(answer.body)}")
        if answer.status >= 400:
            shapes = [_shape(encode(answer.dialect.error(failure))) for failure in _failures(answer.status)]
            shaped = _shape(answer.body) in shapes
            promise(shaped, f"{what}: {answer.status} without the error shape: {shown(answer.body)}")


def _failures(status: int) -> Sequence[Failure]:
    """Return failures of one status: with and without a field at fault."""
    return [Failure(status=status, kind="SomeError", message="What is wrong.", param=param) for param in ("a", None)]


def _shape(body: bytes) -> Any:
    """Return the keys and the numbers of a JSON text, in their places; not its other values."""

    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shape(part) for key, part in value.items()}
        if isinstance(value, list):
            return [shape(part) for part in value]
        return value if isinstance(value, int) else ""

    try:
        return shape(json.loads(body))
    except ValueError:
        return b"no JSON"


def _name(route: Entry) -> str:
    return f"{route.method} {route.path}"


def _is_async(handler: Any) -> bool:
    """Return whether a handler, which may also be an object that can be called, is async."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def _path(route: Entry, value: str = "x") -> str:
    return "/".join(value if part.startswith("{") else part for part in route.path.split("/"))


def _body(route: Entry) -> bytes:
    return b"" if route.body is None else b"{}"


def _fields(route: Entry) -> Sequence[str]:
    """Return the names of the fields that a JSON body may have, by any of its models."""
    if route.body is None:
        return ()
    schema = TypeAdapter(route.body).json_schema()
    found, parts = dict[str, None](), [schema]
    for part in parts:
        if "$ref" in part:
            parts.append(schema["$defs"][part["$ref"].rpartition("/")[2]])
        parts += [*part.get("anyOf", ()), *part.get("oneOf", ())]
        found |= dict.fromkeys(part.get("properties", ()))
    return tuple(found)


def _guesses(route: Entry) -> Iterator[bytes]:
    """Yield bodies that are likely to be accepted: each has one of the usual fields, streamed and not."""
    names = set(_fields(route))
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

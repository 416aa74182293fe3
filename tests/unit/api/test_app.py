"""The frame: routing, auth, body limits, error shape, states. No engine: the service is scripted."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import random
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Request

from ferrule.api.app import build_app
from ferrule.api.json_body import JsonScan
from ferrule.api.lifecycle import Lifecycle
from ferrule.config import Config, FrontendConfig, LimitsConfig
from ferrule.config.parse import parse
from ferrule.config.resolve import resolve
from ferrule.env import Environment
from ferrule.errors import ConfigError, EngineDead, OverloadedError, PluginError, RequestError, StartupError
from ferrule.hooks import HookRunner
from ferrule.interfaces.hooks import AccessRequest, Hooks
from ferrule.interfaces.router import Access, CurrentRequest, EventStream, Router, RouterContext, needs
from ferrule.plugin import Plugins, discover
from ferrule.schema import Body
from ferrule_testkit.service import ScriptedService

PLUGINS = discover()
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


class Prompt(Body):
    prompt: str


class Site:
    """An application with its life cycle and service, and a client for it."""

    def __init__(self, plugins: Any = PLUGINS, ready: bool = True, **frontend: Any) -> None:
        limits = LimitsConfig(**frontend.pop("limits", {}))
        self.config = Config(frontend=FrontendConfig(**frontend), limits=limits)
        self.lifecycle = Lifecycle()
        self.service = ScriptedService()
        self.app = build_app(self.config, plugins, self.lifecycle)
        if ready:
            self.lifecycle.ready(self.service)
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=True)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.fixture(scope="module")
def plain() -> Site:
    """Make one site for many cases that leave nothing behind: making it is most of a case's time."""
    return Site()


def check_error(response: httpx.Response, status: int, param: str | None = None) -> str:
    """Check that an error has OpenAI's shape and tells nothing about the server's internals."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["param"] == param, error
    for secret in ("Traceback", "0x", "/ferrule", "msgspec"):
        assert secret not in response.text
    return str(error["message"])


def check_anthropic(response: httpx.Response, status: int) -> None:
    """Check that an error has Anthropic's shape."""
    assert response.status_code == status, response.text
    found = response.json()
    assert (set(found), set(found["error"])) == ({"type", "error", "request_id"}, {"type", "message"})


def check_ollama(response: httpx.Response, status: int) -> None:
    """Check that an error has Ollama's shape."""
    assert response.status_code == status, response.text
    found = response.json()
    assert (set(found), type(found["error"])) == ({"error"}, str)


# ------------------------------------------------------------------------------------------------ routing


@pytest.mark.advisory("CVE-2026-48746")
@pytest.mark.parametrize(
    "path",
    [
        *("//v1/models", "/v1//models", "/./v1/models", "/v1/../v1/models", "/v1/models;x", "/v1/models/"),
        *("/%76%31/models", "/v1%2fmodels", "/V1/models", "/v1/model", "/v1/models%00", "/health/", "/health%20"),
    ],
)
async def test_only_the_exact_path_is_a_route(path: str, plain: Site) -> None:
    messages = await call_raw(plain.app, raw_path=path.encode())
    assert messages[0]["status"] == 404
    assert json.loads(messages[1]["body"])["error"]["code"] == 404


async def call_raw(app: Any, raw_path: bytes, method: str = "GET", headers: Any = ()) -> list[dict[str, Any]]:
    """Call ASGI with exactly these bytes as the path."""
    sent: list[dict[str, Any]] = []
    scope = {
        "type": "http",
        "method": method,
        "path": raw_path.decode("latin-1"),
        "raw_path": raw_path,
        "query_string": b"",
        "headers": list(headers),
        "client": ("127.0.0.1", 1),
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


async def test_unknown_route_names_the_nearest() -> None:
    site = Site()
    assert "'/v1/chat/completions'" in check_error(await site.http.post("/v1/chat/completion", json=CHAT), 404)


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/v1/embeddings", "POST /api/embed gives the vectors of texts; it needs task embed."),
        ("/v1/score", "/v1/score needs task score, which is not in this build."),
        ("/v1/files", "ferrule run-batch"),
        ("/v1/files/", "ferrule run-batch"),
        ("/v1/files/file-1/content", "ferrule run-batch"),
        ("/v1/models/", "'/v1/models'"),
        ("//v1///models", "'/v1/models'"),
        ("/v1", "base URL"),
        ("/api/pull", "not fetched by requests"),
        ("/api/blobs/sha256:00", "stores no files"),
        ("/api/nothing", "there are chat, generate"),
        ("/v1/chat/completion", "'/v1/chat/completions'"),
        ("/reset_prefix_cache", "FERRULE_SERVER_DEV_MODE=1"),
        ("/sleep/", "FERRULE_SERVER_DEV_MODE=1"),
    ],
)
async def test_unknown_routes_say_what_would_be_right(path: str, what: str, plain: Site) -> None:
    messages = await call_raw(plain.app, path.encode())
    assert messages[0]["status"] == 404
    error = json.loads(messages[1]["body"])["error"]
    assert what in (error if path.startswith("/api/") else error["message"])


async def test_admin_routes_are_not_suggested() -> None:
    lifecycle = Lifecycle()
    env = Environment(server_dev_mode=True, admin_key="a")
    app = build_app(Config(env=env), PLUGINS, lifecycle)
    lifecycle.ready(ScriptedService())
    for path in (b"/reset_prefix_cach", b"/reset_prefix_cache/", b"//reset_prefix_cache"):
        body = json.loads((await call_raw(app, path))[1]["body"])
        assert body["error"]["message"] == f"There is no route {path.decode()}."


async def test_routers_that_are_left_out_are_named() -> None:
    site = Site(routers=("openai", "health"))
    assert "router tokenize" in check_error(await site.http.post("/tokenize", json={"prompt": "a"}), 404)
    assert "router docs" in check_error(await site.http.get("/docs"), 404)
    check_error(await Site(routers=("openai",)).http.get("/health"), 404)


async def test_a_router_may_say_what_is_elsewhere() -> None:
    class Moved(Router):
        def router(self, ctx: RouterContext) -> APIRouter:
            return APIRouter()

        def absent(self, ctx: RouterContext) -> dict[str, str]:
            return {"/old/": "It moved to /new."}

    site = Site(plugins=FakePlugins(moved=Moved))
    for path in ("/old", "/old/", "/old/a/b"):
        assert "It moved to /new." in check_error(await site.http.get(path), 404)
    assert "moved" not in check_error(await site.http.get("/older"), 404)


async def test_wrong_method_says_what_is_allowed() -> None:
    site = Site()
    response = await site.http.get("/v1/chat/completions")
    assert "POST" in check_error(response, 405)
    assert response.headers["allow"] == "POST"
    response = await site.http.delete("/v1/models")
    check_error(response, 405)
    assert response.headers["allow"] == "GET, HEAD"


async def test_head_is_get_without_a_body() -> None:
    site = Site()
    response = await site.http.head("/v1/models")
    assert (response.status_code, response.content) == (200, b"")


async def test_options_without_origin_lists_methods(plain: Site) -> None:
    response = await plain.http.options("/ping")
    check_error(response, 405)
    assert response.headers["allow"] == "GET, HEAD, POST"


async def test_root_path_is_taken_with_and_without_the_prefix() -> None:
    site = Site(root_path="/llm")
    for path in ("/llm/v1/models", "/v1/models"):
        assert (await site.http.get(path)).status_code == 200
    check_error(await site.http.get("/llmx/v1/models"), 404)


async def test_model_names_may_hold_slashes() -> None:
    site = Site()
    site.service.names = ("org/name", "b")
    site.lifecycle.service.names = site.service.names
    for path in ("/v1/models/org/name", "/v1/models/org%2Fname"):
        assert (await site.http.get(path)).json()["id"] == "org/name"
    check_error(await site.http.get("/v1/models/other"), 404, "model")
    check_error(await site.http.get("/v1/models/%ff"), 404)


async def test_two_routers_may_not_claim_one_route() -> None:
    class Twice(Router):
        def router(self, ctx: RouterContext) -> APIRouter:
            routes = APIRouter()

            @routes.get("/version")
            async def handler() -> None: ...

            return routes

    with pytest.raises(StartupError, match="/version"):
        Site(plugins=FakePlugins(twice=Twice))


async def test_a_router_cannot_make_itself_public() -> None:
    class Open(Router):
        def router(self, ctx: RouterContext) -> APIRouter:
            routes = APIRouter()

            @routes.get("/open", dependencies=[needs(Access.PUBLIC)])
            async def handler() -> None: ...

            return routes

    with pytest.raises(StartupError, match="public"):
        Site(plugins=FakePlugins(open=Open))


async def test_a_router_that_fails_stops_the_start_and_is_named() -> None:
    class Broken(Router):
        def router(self, ctx: RouterContext) -> APIRouter:
            return APIRouter(prefix=f"/{ctx.service.model.architecture}")

    with pytest.raises(PluginError, match="Plugin router:broken of ferrule 1.* failed: UnavailableError"):
        Site(plugins=FakePlugins(broken=Broken))


class FakePlugins(Plugins):
    """The real set, with more routers."""

    def __init__(self, **more: type) -> None:
        super().__init__()
        self.more = more

    def names(self, kind: str) -> tuple[str, ...]:
        return PLUGINS.names(kind) + tuple(self.more)

    def load(self, kind: str, name: str) -> Any:
        return self.more.get(name) or PLUGINS.load(kind, name)

    def is_builtin(self, kind: str, name: str) -> bool:
        return True

    def origin(self, kind: str, name: str) -> str:
        return "ferrule 1" if name in self.more else PLUGINS.origin(kind, name)


# --------------------------------------------------------------------------------------------------- auth

PROBES = {("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/version")}
PUBLIC = PROBES | {("GET", "/ui"), ("GET", "/ui/{file}")}


@pytest.mark.advisory("vllm-routes-without-key")
async def test_every_route_but_the_public_list_needs_the_key() -> None:
    site = Site(api_key=("secret", "other"))
    spec = (await site.http.get("/openapi.json", headers={"authorization": "Bearer secret"})).json()
    routes = {(method.upper(), path) for path, methods in spec["paths"].items() for method in methods}
    assert len(routes) > 10
    for method, path in sorted(routes | {("GET", "/nowhere"), ("PUT", "/v1/models"), ("POST", "/health")}):
        target = path.replace("{model}", "fake").replace("/ui/{file}", "/ui/style.css")
        free = await site.http.request(method, target)
        if (method, path) in PUBLIC:
            assert free.status_code == 200
            continue
        anthropic = path.startswith("/v1/messages")
        ollama = path == "/" or path.startswith("/api/")
        check = check_anthropic if anthropic else check_ollama if ollama else check_error
        check(free, 401)
        assert free.headers["www-authenticate"] == "Bearer"
        for header in ("Bearer wrong", "Bearer ", "secret", "Basic secret", "Bearer secre", "Bearer secret2"):
            check(await site.http.request(method, target, headers={"authorization": header}), 401)
        check(await site.http.request(method, target, params={"api_key": "secret"}), 401)
        by_header = await site.http.request(method, target, headers={"x-api-key": "secret"})
        assert (by_header.status_code == 401) is not anthropic
        for key in ("secret", "other"):
            known = await site.http.request(method, target, headers={"authorization": f"bearer {key}"})
            assert known.status_code != 401


@pytest.mark.parametrize("verdict", [True, False, None])
async def test_a_hook_decides_before_the_key(verdict: bool | None) -> None:
    asked: list[AccessRequest] = []

    class Door(Hooks):
        def authorise(self, access: AccessRequest) -> bool | None:
            asked.append(access)
            return verdict

    lifecycle = Lifecycle()
    app = build_app(Config(frontend=FrontendConfig(api_key=("k",))), PLUGINS, lifecycle, HookRunner([("door", Door())]))
    lifecycle.ready(ScriptedService())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
        assert (await http.get("/version")).status_code == 200
        assert not asked
        without = (await http.get("/v1/models", headers={"x-door": "back"})).status_code
        known = (await http.get("/v1/models", headers={"authorization": "Bearer k"})).status_code
    assert (without, known) == {True: (200, 200), False: (401, 401), None: (401, 200)}[verdict]
    assert (asked[0].method, asked[0].path, asked[0].headers["x-door"]) == ("GET", "/v1/models", "back")


async def test_two_authorization_headers_are_refused() -> None:
    site = Site(api_key=("secret",))
    headers = [(b"authorization", b"Bearer secret"), (b"authorization", b"Bearer secret")]
    assert (await call_raw(site.app, b"/v1/models", headers=headers))[0]["status"] == 401


async def test_a_key_from_the_environment_is_the_option() -> None:
    lifecycle = Lifecycle()
    config = resolve(parse([], env=Environment(api_key="env")).config)
    app = build_app(config, PLUGINS, lifecycle)
    lifecycle.ready(ScriptedService())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/v1/models", headers={"authorization": "Bearer env"})).status_code == 200


async def test_auth_comes_before_the_body_is_read() -> None:
    site = Site(api_key=("secret",), limits={"max_body_bytes": 10})
    check_error(await site.http.post("/v1/chat/completions", content=b"x" * 100), 401)


# ------------------------------------------------------------------------------------------------- bodies


async def post(site: Site, content: bytes | AsyncIterator[bytes], **headers: str) -> httpx.Response:
    return await site.http.post(
        "/v1/completions", content=content, headers={"content-type": "application/json"} | headers
    )


@pytest.mark.advisory("CVE-2026-54235")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"3", None),
        (b'"x"', None),
        (b"null", None),
        (b'{"prompt": NaN}', None),
        (b'{"temperature": NaN, "prompt": "a"}', None),
        (b'{"temperature": -Infinity, "prompt": "a"}', None),
        (b'{"temperature": 1e309, "prompt": "a"}', "temperature"),
        (b'{"prompt": "a"} x', None),
        (b'{"prompt": "a",}', None),
        (b"{'prompt': 'a'}", None),
        (b'\xef\xbb\xbf{"prompt": "a"}', None),
        (b'{"prompt": "\xff\xfe"}', None),
        (b'{"prompt": "a", "unheard_of": "\xff\xfe"}', None),
        (b'{"prompt": "\\ud800"}', None),
        (b'{"prompt": "\\udc00x"}', None),
        (b'{"prompt": "a\x00"}', None),
        (b"[" * 100_000, None),
        (b'{"x": ' + b"[" * 100_000, None),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
        (b'{"x":' * 100_000 + b"1" + b"}" * 100_000, None),
        (b'{"prompt": "a", "x": ' + b"[" * 64 + b"]" * 64 + b"}", None),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 1_000_000 + b"}", "max_tokens"),
        (b'{"prompt": "a", "x": ' + b"9" * 1_000_000 + b"}", "x"),
        (b'{"prompt": "a", "x": [1, {"y": -9223372036854775809}]}', "x[1].y"),
        (b'{"prompt": [1, 9223372036854775808]}', "prompt[1]"),
    ],
)
async def test_hostile_json_is_a_400(body: bytes, param: str | None, plain: Site) -> None:
    check_error(await post(plain, body), 400, param)


async def test_nesting_at_the_limit_is_fine() -> None:
    site = Site()
    assert (await post(site, b'{"prompt": "a", "x": ' + b"[" * 63 + b"]" * 63 + b"}")).status_code == 200
    brackets = json.dumps({"prompt": "[[[{{{" * 40}).encode()
    assert (await post(site, brackets)).status_code == 200


async def test_duplicate_keys_last_wins() -> None:
    site = Site()
    assert (await post(site, b'{"prompt": "a", "prompt": "bc"}')).json()["choices"][0]["text"] == "bc"


@pytest.mark.advisory("PYSEC-2026-2305", "CVE-2025-23310")
async def test_body_over_the_limit_is_a_413() -> None:
    site = Site(limits={"max_body_bytes": 1000})
    check_error(await post(site, json.dumps({"prompt": "a" * 1000}).encode()), 413)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    check_error(await post(site, pieces()), 413)
    assert (await post(site, b'{"prompt":"a"}'.ljust(1000))).status_code == 200


@pytest.mark.advisory("CVE-2025-23310")
async def test_body_in_pieces_of_every_size() -> None:
    """See the same nesting and numbers in the scan, whatever the cut."""
    site = Site()
    good = b'{"prompt": "a\\"[\\\\", "max_tokens": 5, "x": [["]"], 1234567890123456789]}'
    bad = b'{"prompt": "a\\"[\\\\", "x": [["]"], 12345678901234567890]}'
    for size in (1, 2, 3, 7, 20):

        async def pieces(body: bytes, size: int = size) -> AsyncIterator[bytes]:
            for start in range(0, len(body), size):
                yield body[start : start + size]

        assert (await post(site, pieces(good))).json()["choices"][0]["text"] == 'a"[\\'
        check_error(await post(site, pieces(bad)), 400, "x[1]")


@pytest.mark.advisory("CVE-2026-73559")
async def test_a_body_with_too_many_values_is_refused() -> None:
    site = Site()
    check_error(await post(site, b'{"prompt": [' + b"[]," * 2_000_000 + b"[]]}"), 400)
    check_error(await post(site, b'{"prompt": [' + b'"",' * 2_000_000 + b'""]}'), 400)


async def test_a_silent_body_is_a_408() -> None:
    site = Site(limits={"body_timeout": 0.05})

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        raise AssertionError("not reached")

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-length", b"5")],
    }
    site.config = replace(site.config)
    await asyncio.wait_for(site.app(scope, receive, send), 120)
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    assert sent[-1]["more_body"] is False


@pytest.mark.advisory("PYSEC-2026-2305", "CVE-2025-43859")
@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"content-type": "text/plain"}, "Content-Type"),
        ({"content-type": "application/x-www-form-urlencoded"}, "Content-Type"),
        ({"content-type": "application/json; charset=latin-1"}, "Content-Type"),
        ({"content-encoding": "gzip"}, "Content-Encoding"),
    ],
)
async def test_wrong_content_headers(headers: dict[str, str], param: str, plain: Site) -> None:
    check_error(await post(plain, b'{"prompt": "a"}', **headers), 400, param)


async def test_a_dialect_takes_bodies_of_other_types(plain: Site) -> None:
    """Read what curl sends without a header as JSON, on the paths of a protocol whose clients do that, and nowhere
    else; a page of another origin cannot use it.
    """
    form = {"content-type": "application/x-www-form-urlencoded"}
    body = b'{"model": "fake"}'
    shown = await plain.http.post("/api/show", content=body, headers=form)
    assert (shown.status_code, "details" in shown.json()) == (200, True)
    assert (await plain.http.post("/api/show", content=b"model=fake", headers=form)).status_code == 400
    assert (await plain.http.post("/api/show", content=body, headers={"content-type": "text/plain"})).status_code == 400
    elsewhere = await plain.http.post("/api/show", content=body, headers=form | {"origin": "https://evil.example"})
    check_ollama(elsewhere, 403)


async def test_right_content_headers(plain: Site) -> None:
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.x+json"):
        assert (await post(plain, b'{"prompt": "a"}', **{"content-type": kind})).status_code == 200


async def test_strict_requests_refuse_unknown_fields() -> None:
    site = Site(strict_requests=True)
    message = check_error(await post(site, b'{"prompt": "a", "temprature": 1, "zzzzz": 1}'), 400, "temprature")
    assert message.startswith("temprature is unknown, and so is zzzzz. Did you mean 'temperature'?")
    assert "--strict-requests" in message
    body = b'{"prompt": "a", "stream": true, "stream_options": {"include_usge": true}}'
    message = check_error(await post(site, body), 400, "stream_options.include_usge")
    assert "'include_usage'" in message
    assert (await post(site, b'{"prompt": "a"}')).status_code == 200


async def test_unknown_fields_are_named_in_a_header() -> None:
    site = Site()
    body = json.dumps({"prompt": "a", "temprature": 1, "x\r\ny": 2}).encode()
    response = await post(site, body)
    assert response.status_code == 200
    assert response.headers["x-ferrule-ignored-fields"] == "temprature, x??y"
    assert "x-ferrule-ignored-fields" not in (await post(site, b'{"prompt": "a"}')).headers


# ------------------------------------------------------------------------------------- states and failures


async def test_states() -> None:
    site = Site(ready=False)
    response = await site.http.get("/health")
    assert "starting" in check_error(response, 503)
    assert response.headers["retry-after"] == "5"
    check_error(await site.http.post("/v1/chat/completions", json=CHAT), 503)
    check_error(await site.http.get("/v1/models"), 503)
    assert (await site.http.get("/version")).status_code == 200

    site.lifecycle.ready(site.service)
    assert (await site.http.get("/health")).status_code == 200
    site.service.state = "stalled"
    assert "stalled" in check_error(await site.http.get("/health"), 503)
    site.service.state = "ready"

    site.lifecycle.drain()
    assert "draining" in check_error(await site.http.get("/health"), 503)
    response = await site.http.post("/v1/chat/completions", json=CHAT)
    check_error(response, 503)
    assert response.headers["retry-after"] == "5"
    assert (await site.http.get("/metrics")).status_code == 200

    site.lifecycle.die("The engine has stopped.")
    assert "dead" in check_error(await site.http.get("/health"), 503)
    check_error(await site.http.post("/v1/chat/completions", json=CHAT), 503)


async def test_refusals_of_the_service_keep_their_status() -> None:
    site = Site()
    site.service.refusal = OverloadedError("The queue is full.", retry_after=7)
    response = await site.http.post("/v1/chat/completions", json=CHAT)
    check_error(response, 429)
    assert response.headers["retry-after"] == "7"
    site.service.refusal = EngineDead("worker 3 at 0xdeadbeef")
    check_error(await site.http.post("/v1/chat/completions", json=CHAT), 503)


@pytest.mark.advisory("CVE-2026-22778")
async def test_a_bug_is_a_500_that_tells_nothing() -> None:
    site = Site()
    site.service.failure = ValueError("/ferrule/secret 0x7f00 Traceback")
    message = check_error(await site.http.post("/v1/chat/completions", json=CHAT), 500)
    assert "secret" not in message
    assert site.service.open == 0


@pytest.mark.advisory("CVE-2026-116176")
async def test_request_id_header_is_echoed_only_when_valid() -> None:
    site = Site(enable_request_id_headers=True)
    assert (await site.http.get("/version", headers={"x-request-id": "abc.1"})).headers["x-request-id"] == "abc.1"
    for bad in ("a b", "a" * 129, "é", ""):
        given = (await site.http.get("/version", headers={"x-request-id": bad.encode()})).headers["x-request-id"]
        assert given != bad
        assert len(given) == 32
    assert "x-request-id" not in (await Site().http.get("/version", headers={"x-request-id": "a"})).headers


async def test_cors() -> None:
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    site = Site(api_key=("secret",))
    response = await site.http.options("/v1/chat/completions", headers=preflight)
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, "*")
    response = await site.http.get("/v1/models", headers={"origin": "https://a.example"})
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (401, "*")
    site = Site(allowed_origins=("https://b.example",), allow_credentials=True)
    assert (await site.http.options("/v1/models", headers=preflight)).status_code == 400
    response = await site.http.get("/version", headers={"origin": "https://b.example"})
    assert response.headers["access-control-allow-credentials"] == "true"
    response = await Site(allowed_origins=()).http.get("/version", headers={"origin": "https://a.example"})
    assert "access-control-allow-origin" not in response.headers


async def test_a_refused_preflight_has_the_error_shape() -> None:
    site = Site(allowed_origins=("https://b.example",), allowed_methods=("GET",))
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    message = check_error(await site.http.options("/v1/models", headers=headers), 400)
    assert message.startswith("Disallowed CORS origin, method: see --allowed-origins")


async def test_load_counts_requests_with_a_body() -> None:
    site = Site(enable_server_load_tracking=True)
    release = asyncio.Event()
    site.service.pace = release.wait
    calls = [asyncio.create_task(site.http.post("/v1/completions", json={"prompt": "a"})) for _ in range(3)]
    while site.service.open < 3:
        await asyncio.sleep(0)
    assert (await site.http.get("/load")).json() == {"server_load": 3}
    release.set()
    await asyncio.gather(*calls)
    assert (await site.http.get("/load")).json() == {"server_load": 0}


def test_middleware_that_cannot_be_used_stops_the_start() -> None:
    for name, what in (
        ("json.loads", "json.loads is a function, no ASGI class"),
        ("json.decoder.JSONDecoder", "cannot be loaded: TypeError"),
        ("collections.Counter", "cannot be loaded: TypeError"),
        ("no_such_module.x", "cannot be loaded: ModuleNotFoundError"),
        ("x", "cannot be loaded: ValueError"),
    ):
        with pytest.raises(ConfigError, match=what):
            Site(middleware=(name,))


@pytest.mark.advisory("PYSEC-2026-4325")
async def test_metrics_grow_with_routes_and_never_with_requests() -> None:
    site = Site()
    await site.http.post("/v1/completions", json={"prompt": "a"})
    await site.http.get("/metrics")
    for number in range(20):
        await site.http.request(f"M{number}", f"/nowhere/{number}")
        await site.http.get("/metrics")
    before = {(call.route, call.method) for call in site.service.calls}
    for number in range(200):
        await site.http.request(f"X{number}", f"/nowhere/{number}", headers={"host": f"h{number}"})
        await site.http.post("/v1/completions", json={"prompt": "a", "model": f"m{number}"})
    after = {(call.route, call.method) for call in site.service.calls}
    assert after == before == {("/v1/completions", "POST"), ("/metrics", "GET"), ("none", "OTHER")}
    assert sum(call.route == "none" and call.status == 404 for call in site.service.calls) == 220
    assert "vllm:num_requests_running" in (await site.http.get("/metrics")).text


async def test_docs_describe_every_route_and_can_be_switched_off() -> None:
    site = Site(root_path="llm/", strict_requests=True)
    spec = (await site.http.get("/openapi.json")).json()
    assert spec["servers"] == [{"url": "/llm"}]
    assert "max_tokens" in json.dumps(spec["components"]["schemas"]["ChatBody"])
    assert spec["paths"]["/v1/models/{model}"]["get"]["parameters"][0]["name"] == "model"
    chat = spec["paths"]["/v1/chat/completions"]["post"]
    assert set(chat["responses"]) >= {"200", "400", "401", "404", "413", "429", "503", "default"}
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "ChatCompletion" in json.dumps(chat["responses"]["200"]["content"]["text/event-stream"]["schema"])
    assert "--strict-requests" in chat["description"]
    assert chat["security"] == [{"key": []}]
    assert spec["paths"]["/health"]["get"]["security"] == []
    names = [operation["operationId"] for methods in spec["paths"].values() for operation in methods.values()]
    assert len(set(names)) == len(names)
    off = Site(disable_fastapi_docs=True)
    for path in ("/docs", "/redoc", "/openapi.json"):
        check_error(await off.http.get(path), 404)


@pytest.mark.parametrize(("path", "assets"), [("/docs", 2), ("/redoc", 1)])
async def test_pages_need_nothing_from_elsewhere(path: str, assets: int, plain: Site) -> None:
    site = plain
    response = await site.http.get(path)
    assert response.headers["content-type"].startswith("text/html")
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert "'unsafe-inline'" not in policy["script-src"]
    page = response.text
    assert "://" not in page
    for script in re.findall(r"<script>(.*?)</script>", page, re.DOTALL):
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy["script-src"]
    assert "'openapi.json'" in page or '"openapi.json"' in page
    links = [link for link in re.findall(r"(?:src|href)=\"([^\"]+)", page) if not link.startswith("data:")]
    assert len(links) == assets
    for link in links:
        asset = await site.http.get(f"/{link}")
        assert asset.status_code == 200
        assert asset.headers["content-type"].startswith(("text/javascript", "text/css"))
    check_error(await site.http.get("/docs/LICENSES.txt"), 404)
    check_error(await site.http.get("/docs/..%2fdocs.py"), 404)


async def test_query_parameters_are_the_handlers() -> None:
    class Echo(Router):
        def router(self, ctx: RouterContext) -> APIRouter:
            routes = APIRouter()

            @routes.get("/echo")
            async def handler(request: Request) -> list[tuple[str, str]]:
                return request.query_params.multi_items()

            return routes

    site = Site(plugins=FakePlugins(echo=Echo))
    assert (await site.http.get("/echo?tag=a&x=1&tag=b")).json() == [["tag", "a"], ["x", "1"], ["tag", "b"]]


# ------------------------------------------------------------------------------------------------ streams


class Wire:
    """A raw ASGI exchange: what was sent so far, and a client that can leave."""

    def __init__(self, app: Any, path: str, body: Any) -> None:
        self.sent: list[dict[str, Any]] = []
        self.left = asyncio.Event()
        self.arrived = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(b"content-length", b"9")],
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        self.arrived.set()

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


STREAM = {"prompt": "hello", "stream": True}


async def test_stream_headers_and_end() -> None:
    wire = Wire(Site().app, "/v1/completions", STREAM)
    await asyncio.wait_for(wire.task, 120)
    headers = dict(wire.sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"x-accel-buffering"] == b"no"
    assert wire.text.endswith("data: [DONE]\n\n")
    assert wire.sent[-1]["more_body"] is False


@pytest.mark.parametrize("body", [STREAM, {"prompt": "hello"}])
async def test_leaving_closes_the_request_though_nothing_comes(body: dict[str, Any]) -> None:
    site = Site()
    asked = asyncio.Event()

    async def never() -> None:
        asked.set()
        await asyncio.Event().wait()

    site.service.pace = never
    wire = Wire(site.app, "/v1/completions", body)
    await asyncio.wait_for(asked.wait(), 120)
    assert site.service.open == 1
    wire.left.set()
    await asyncio.wait_for(wire.task, 120)
    assert site.service.open == 0
    assert site.lifecycle.num_open == 0
    assert "[DONE]" not in wire.text


async def test_leaving_between_admission_and_stream_closes_the_request() -> None:
    """Let the client leave in the very step in which the handler returns."""
    site = Site()
    wire = Wire(site.app, "/v1/completions", STREAM)
    admit = site.service.admit

    async def leave(request: Any) -> Any:
        admitted = await admit(request)
        wire.left.set()
        return admitted

    site.service.admit = leave  # type: ignore[method-assign]
    await asyncio.wait_for(wire.task, 120)
    assert site.service.open == 0


@pytest.mark.advisory("CVE-2026-22778")
async def test_failure_in_a_stream_is_an_event_without_done() -> None:
    site = Site()
    site.service.failure = EngineDead("gone")
    wire = Wire(site.app, "/v1/completions", STREAM)
    await asyncio.wait_for(wire.task, 120)
    events = [line for line in wire.text.split("\n\n") if line]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == 503
    assert "[DONE]" not in wire.text
    assert wire.sent[-1]["more_body"] is False


@pytest.mark.parametrize("stream", [True, False])
async def test_death_ends_every_open_request(stream: bool) -> None:
    site = Site()
    asked = asyncio.Event()

    async def never() -> None:
        asked.set()
        await asyncio.Event().wait()

    site.service.pace = never
    wire = Wire(site.app, "/v1/completions", STREAM | {"stream": stream})
    await asyncio.wait_for(asked.wait(), 120)
    site.lifecycle.die("The engine has stopped.")
    await asyncio.wait_for(wire.task, 120)
    assert wire.sent[0]["status"] == (200 if stream else 503)
    assert '"code":503' in wire.text
    assert "[DONE]" not in wire.text
    assert site.service.open == 0


async def test_silent_stream_is_kept_alive_by_comments() -> None:
    site = Site(sse_keepalive=0.02)
    release = asyncio.Event()
    site.service.pace = release.wait
    wire = Wire(site.app, "/v1/completions", STREAM)
    while wire.text.count(": ping\n\n") < 3:
        wire.arrived.clear()
        await asyncio.wait_for(wire.arrived.wait(), 120)
    release.set()
    await asyncio.wait_for(wire.task, 120)
    assert wire.text.endswith("data: [DONE]\n\n")


async def test_events_of_a_plugin_are_encoded_and_closed() -> None:
    closed = asyncio.Event()

    class Plain(Router):
        def router(self, ctx: RouterContext) -> APIRouter:
            routes = APIRouter()

            async def events() -> AsyncIterator[Any]:
                try:
                    yield {"a": 1}
                    yield ["\n"]
                finally:
                    closed.set()

            @routes.get("/plain")
            async def handler() -> EventStream:
                return EventStream(events(), headers={"x-more": "1"})

            return routes

    site = Site(plugins=FakePlugins(plain=Plain))
    response = await site.http.get("/plain")
    assert response.text == 'data: {"a":1}\n\ndata: ["\\n"]\n\ndata: [DONE]\n\n'
    assert response.headers["x-more"] == "1"
    assert closed.is_set()


async def test_admin_routes_are_absent_unless_switched_on() -> None:
    check_error(await Site().http.post("/reset_prefix_cache"), 404)
    lifecycle = Lifecycle()
    config = Config(env=Environment(server_dev_mode=True), frontend=FrontendConfig(api_key=("k",)))
    app = build_app(resolve(config), PLUGINS, lifecycle)
    lifecycle.ready(ScriptedService())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
        check_error(await http.post("/reset_prefix_cache"), 401)
        answer = await http.post("/reset_prefix_cache", headers={"authorization": "Bearer k"})
        assert answer.json() == {"reset": True}


# --------------------------------------------------------------------------------------------- access log


async def test_one_escaped_line_per_call(caplog: pytest.LogCaptureFixture) -> None:
    site = Site()
    with caplog.at_level(logging.INFO, "ferrule.access"):
        await call_raw(site.app, b"/health\r\nINFO forged\x1b[0m\xff" + b"a" * 9000)
        await site.http.get("/health")
        await Site(disable_uvicorn_access_log=True).http.get("/version")
    lines = [record.getMessage() for record in caplog.records if record.name == "ferrule.access"]
    assert len(lines) == 2
    assert lines[0].isprintable()
    assert len(lines[0]) < 700
    assert '"GET /health HTTP/1.1" 200' in lines[1]


# ------------------------------------------------------------------------------------------------- the scan

TEXTS = ['a"[{\\', '"]}"[{"', '""' * 9, "", "\\\\", '\\"', "[[[", "é\u2028", "1234567890123456789012"]
PLAIN = ["{[", "]}", "", ",", "é\u2028", "1234567890123456789012"]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_scan_is_the_same_for_every_cut(seed: int, plain: bool) -> None:
    """Find depth and long integers as a parser would, wherever the body is cut."""
    rng = random.Random(seed)
    texts = PLAIN if plain else TEXTS  # pieces without escapes are scanned in another way

    def value(depth: int) -> Any:
        kind = rng.randrange(6 if depth else 3)
        if kind < 3:
            return [rng.choice(texts), rng.choice([0, -5, 1.5, None, True]), 10**20 if rng.random() < 0.02 else 3][kind]
        if kind == 3:
            return {rng.choice(texts): value(depth - 1) for _ in range(rng.randrange(4))}
        return [value(depth - 1) for _ in range(rng.randrange(4))]

    def deepest(item: Any) -> int:
        parts = item.values() if isinstance(item, dict) else item if isinstance(item, list) else None
        return 0 if parts is None else 1 + max(map(deepest, parts), default=0)

    def holds_long(item: Any) -> bool:
        if isinstance(item, (dict, list)):
            return any(map(holds_long, item.values() if isinstance(item, dict) else item))
        return isinstance(item, int) and item >= 1 << 63

    tree = [value(6) for _ in range(5)]
    body = json.dumps(tree, ensure_ascii=not plain and rng.random() < 0.5).encode()
    for size in (1, 2, 3, 5, 8, 13, len(body)):
        for limit in (deepest(tree), deepest(tree) - 1):
            scan = JsonScan(limit)
            try:
                for start in range(0, len(body), size):
                    scan.feed(body[start : start + size])
            except RequestError:
                assert limit < deepest(tree)
            else:
                assert limit == deepest(tree)
                assert scan.has_long_int == holds_long(tree)


# ------------------------------------------------------------------------------------------------ the rest


async def test_query_strings_are_bounded() -> None:
    site = Site()
    assert (await site.http.get("/v1/models", params={"a": "b"})).status_code == 200
    check_error(await site.http.get("/v1/models?" + "a=b&" * 100), 400)


@pytest.mark.advisory("CVE-2026-48746")
async def test_websockets_are_refused() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await Site().app({"type": "websocket", "path": "/v1/models", "headers": []}, None, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_a_handler_can_wait_for_the_client_to_leave() -> None:
    waiting, left = asyncio.Event(), asyncio.Event()

    class Waits(Router):
        def router(self, ctx: RouterContext) -> APIRouter:
            routes = APIRouter()

            @routes.post("/wait")
            async def handler(body: Prompt, info: CurrentRequest) -> None:
                async def watch() -> None:
                    await info.disconnected()
                    left.set()

                task = asyncio.create_task(watch())
                waiting.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.wait_for(task, 120)

            return routes

    wire = Wire(Site(plugins=FakePlugins(waits=Waits)).app, "/wait", {"prompt": "a"})
    await asyncio.wait_for(waiting.wait(), 120)
    wire.left.set()
    await asyncio.wait_for(wire.task, 120)
    assert left.is_set()
    assert not wire.sent


async def test_an_event_that_cannot_be_encoded_ends_the_stream_with_an_error() -> None:
    class Odd(Router):
        def router(self, ctx: RouterContext) -> APIRouter:
            routes = APIRouter()

            async def events() -> AsyncIterator[Any]:
                yield {"a": 1}
                yield object()

            @routes.get("/odd")
            async def handler() -> EventStream:
                return EventStream(events())

            return routes

    text = (await Site(plugins=FakePlugins(odd=Odd)).http.get("/odd")).text
    assert text.startswith('data: {"a":1}\n\n')
    assert '"code":500' in text
    assert "[DONE]" not in text

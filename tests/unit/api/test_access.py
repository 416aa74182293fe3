"""Who may call what: a frozen list of all built-in routes, and every route with every way to bring a key."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import httpx
import pytest

from ferrule.api.app import build_app
from ferrule.api.lifecycle import Lifecycle
from ferrule.api.paths import Entry
from ferrule.api.routes import entries_of
from ferrule.config import Config, FrontendConfig, LoRAConfig, RouterSettings
from ferrule.config.plugins import configured
from ferrule.config.resolve import resolve
from ferrule.config.sections import PluginConfig
from ferrule.env import Environment
from ferrule.interfaces.router import Access, RouterContext
from ferrule.plugin import discover
from ferrule_testkit.service import ScriptedService
from tools import ROOT

STORE = tempfile.TemporaryDirectory()
STORED = PluginConfig(plugin_config={"router:batches": {"folder": STORE.name}})  # without it those routes are off
PLUGINS = configured(discover(), STORED, Environment())
GOLDEN = ROOT / "tests" / "contracts" / "routes.txt"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


def built_in() -> list[Entry]:
    frontend = FrontendConfig(enable_tokenizer_info_endpoint=True)
    switched_on = Environment(server_dev_mode=True, allow_runtime_lora_updating=True)
    config = Config(env=switched_on, frontend=frontend, lora=LoRAConfig(enable_lora=True))
    context = RouterContext(RouterSettings.of(config, PLUGINS), PLUGINS, Lifecycle().service)
    names = [name for name in PLUGINS.names("router") if PLUGINS.origin("router", name).startswith("ferrule ")]
    return [route for name in names for route in entries_of(PLUGINS.make("router", name).router(context))]


@pytest.mark.advisory("CVE-2026-105754")
def test_the_list_of_routes_is_frozen() -> None:
    """Compare with the list: a new route, or another access, is a decision that this file has to state, too."""
    lines = sorted(f"{route.method} {route.path} {route.access.value}" for route in built_in())
    assert lines == GOLDEN.read_text().splitlines()


def sent(key: str, path: str) -> dict[str, dict[str, str]]:
    """Return ways to send a key that are not the right one for a path."""
    other = "x-acme-key" if path.startswith("/v1/messages") else "x-api-key"
    return {
        "another scheme": {"authorization": f"Basic {key}"},
        "no scheme": {"authorization": key},
        "another header": {other: key},
        "azure": {"api-key": key},
        "a cookie": {"cookie": f"authorization=Bearer {key}; api_key={key}"},
        "two in one": {"authorization": f"Bearer {key} {key}"},
        "another case": {"authorization": f"Bearer {key.upper()}"},
        "half of it": {"authorization": f"Bearer {key[:-1]}"},
        "proxy": {"proxy-authorization": f"Bearer {key}"},
    }


def cases() -> Iterator[tuple[str, str, Access]]:
    """Yield every path with every method, and the access that it needs to be answered anything but 401."""
    routes: dict[str, dict[str, Access]] = {}
    for route in built_in():
        routes.setdefault(route.path, {})[route.method] = route.access
    for path, served in routes.items():
        strictest = Access.OPERATOR if any(access.administers for access in served.values()) else Access.KEY
        for method in METHODS:
            yield (
                method,
                path.replace("{model:path}", "fake").replace("/ui/{file}", "/ui/app.js"),
                served.get("GET" if method == "HEAD" else method, strictest),
            )


@pytest.mark.advisory("vllm-routes-without-key", "CVE-2024-37032")
@pytest.mark.parametrize("admin", ["the-admin-key", None])
async def test_every_route_with_every_way_to_bring_a_key(admin: str | None) -> None:
    lifecycle = Lifecycle()
    front = FrontendConfig(api_key=("the-user-key", "a-second-key"), admin_key=admin, disable_uvicorn_access_log=True)
    switched_on = Environment(server_dev_mode=True, allow_runtime_lora_updating=True)
    app = build_app(Config(frontend=front, env=switched_on, lora=LoRAConfig(enable_lora=True)), PLUGINS, lifecycle)
    lifecycle.ready(ScriptedService())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
        for method, path, access in cases():
            what = (method, path, access)
            if admin is None and not access.administers:
                continue  # as with an admin key
            if access is Access.PUBLIC:
                assert (await http.request(method, path)).status_code == 200, what
                continue
            right = admin if admin and access.administers else "the-user-key"
            wrong = "the-user-key" if right == admin else admin or "nobody's"
            tries = [{}, {"authorization": f"Bearer {wrong}"}, *sent(right, path).values()]
            for headers in tries:
                answer = await http.request(method, path, headers=headers)
                assert answer.status_code == 401, (what, headers, answer.text)
                assert answer.headers["www-authenticate"] == "Bearer"
                header = "x-api-key: KEY" if path.startswith("/v1/messages") else "Authorization: Bearer KEY"
                assert method == "HEAD" or header in str(answer.json()["error"])
            for query in ({"api_key": right}, {"key": right}, {"authorization": f"Bearer {right}"}):
                assert (await http.request(method, path, params=query)).status_code == 401, (what, query)
            for key in {right, "a-second-key"} if right == "the-user-key" else {right}:
                answer = await http.request(method, path, headers={"authorization": f"Bearer {key}"})
                assert answer.status_code != 401, (what, answer.text)


@pytest.mark.advisory("CVE-2025-10164")
async def test_without_dev_mode_admin_routes_are_404_with_any_key() -> None:
    lifecycle = Lifecycle()
    front = FrontendConfig(api_key=("user",), admin_key="admin", disable_uvicorn_access_log=True)
    app = build_app(Config(frontend=front), PLUGINS, lifecycle)
    lifecycle.ready(ScriptedService())
    admin = {(route.method, route.path) for route in built_in() if route.access is Access.ADMIN}
    assert admin
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
        for method, path in admin:
            assert (await http.request(method, path)).status_code == 401
            answer = await http.request(method, path, headers={"authorization": "Bearer user"})
            assert answer.status_code == 404
            assert "FERRULE_SERVER_DEV_MODE=1" in answer.json()["error"]["message"]


async def test_an_admin_key_alone_guards_admin_routes_alone() -> None:
    lifecycle = Lifecycle()
    config = Config(env=Environment(server_dev_mode=True), frontend=FrontendConfig(admin_key="admin"))
    app = build_app(resolve(config), PLUGINS, lifecycle)
    lifecycle.ready(ScriptedService())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
        assert (await http.get("/v1/models")).status_code == 200
        assert (await http.post("/reset_prefix_cache")).status_code == 401
        answer = await http.post("/reset_prefix_cache", headers={"authorization": "Bearer admin"})
        assert answer.status_code == 200


@pytest.mark.parametrize(("public", "status"), [(False, 401), (True, 200)])
async def test_metrics_may_be_scraped_without_a_key_when_the_option_says_so(public: bool, status: int) -> None:
    lifecycle = Lifecycle()
    frontend = FrontendConfig(api_key=("secret",), public_metrics=public)
    app = build_app(resolve(Config(frontend=frontend)), PLUGINS, lifecycle)
    lifecycle.ready(ScriptedService())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
        assert (await http.get("/metrics")).status_code == status
        assert (await http.get("/v1/models")).status_code == 401

"""The routes behind the page at /ui. The page itself is tested in a browser: tests/e2e/http/test_ui.py."""

from __future__ import annotations

import asyncio
import re
from importlib.resources import files
from typing import Any

import pytest

from ferrule.interfaces.service import Service
from ferrule_plugins.router import ui
from ferrule_testkit.service import ScriptedService
from tests.fakes.http import Site, error_of

FOLDER = files("ferrule_plugins.router") / "static" / "ui"


async def test_one_picture_a_second_serves_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    asked: list[str] = []

    class Engine(ScriptedService):
        async def call(self, name: str, *args: Any) -> Any:
            asked.append(name)
            await asyncio.sleep(0)
            return {"number": len(asked)}

    monkeypatch.setattr(ui.time, "monotonic", lambda: now)
    service: Service = Engine()
    picture = ui._Picture(service)
    found = await asyncio.gather(*(picture.get() for _ in range(20)))
    assert found == [{"number": 1}] * 20
    now += 0.9
    assert await picture.get() == {"number": 1}
    now += 0.2
    assert await picture.get() == {"number": 2}
    assert asked == ["live", "live"]


async def test_the_page_names_all_its_files_and_none_that_is_not_there() -> None:
    site = Site()
    page = (await site.http.get("/ui")).text
    named = set(re.findall(r'(?:src|href)="ui/([^"]+)"', page))
    assert named == {entry.name for entry in FOLDER.iterdir()} - {"index.html"}
    for name in named:
        answer = await site.http.get(f"/ui/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in answer.headers["content-security-policy"]


def test_the_source_parses_no_html_and_names_no_other_host() -> None:
    for entry in FOLDER.iterdir():
        text = entry.read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|style=", text
        ), entry.name
        hosts = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}  # a name space, not an address
        assert not hosts, entry.name


async def test_the_page_can_be_switched_off() -> None:
    site = Site(disable_ui=True)
    for path in ("/ui", "/ui/app.js", "/ui/api/live"):
        answer = await site.http.get(path)
        assert "--disable-ui" in error_of(answer, 404)["message"]

"""Dialects of routers in the frame: which one an answer has, and what stops the start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from fastapi import APIRouter, Request, Response

from ferrule.errors import PluginError, StartupError
from ferrule.interfaces.dialect import Dialect, Failure
from ferrule.interfaces.router import EventStream, Router, RouterContext
from tests.unit.api.test_app import FakePlugins, Site, check_error


class Short(Dialect):
    """A dialect whose errors are their status, and whose stream says all there is of an error."""

    paths = ("/short/",)
    media_type = "text/short"
    last = b"end"

    def error(self, failure: Failure) -> Any:
        return {"short": failure.status}

    def event(self, content: Any) -> bytes:
        return f"<{content}>".encode()


class Deeper(Short):
    paths = ("/short/deep/", "/alone")

    def error(self, failure: Failure) -> Any:
        return {"deep": failure.status}


class Speaking(Router):
    words: Dialect = Short()
    route = "/short/count"

    def dialect(self, ctx: RouterContext) -> Dialect:
        return self.words

    def router(self, ctx: RouterContext) -> APIRouter:
        routes = APIRouter()

        async def numbers(most: int) -> AsyncIterator[int]:
            for number in range(most):
                yield number

        @routes.post(self.route)
        async def count(most: int = 2) -> EventStream:
            return EventStream(numbers(most))

        return routes


class SpeakingDeeper(Speaking):
    words = Deeper()
    route = "/elsewhere"


class Wordless(Speaking):
    class words(Short):  # type: ignore[assignment]  # made for each router
        def error(self, failure: Failure) -> Any:
            raise KeyError(failure.status)

    def dialect(self, ctx: RouterContext) -> Dialect:
        return self.words()


async def failing(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Fail, as an operator's middleware."""
    raise RuntimeError("a secret")


@pytest.mark.parametrize(
    ("method", "path", "told"),
    [
        ("GET", "/short", {"short": 404}),
        ("GET", "/short/", {"short": 404}),
        ("GET", "/short/x/y", {"short": 404}),
        ("GET", "//short//x", {"short": 404}),
        ("GET", "/short/count", {"short": 405}),
        ("GET", "/short/deep", {"deep": 404}),
        ("GET", "/short/deep/x", {"deep": 404}),
        ("GET", "/elsewhere", {"deep": 405}),  # a route of that router, not below its paths
        ("GET", "/alone", {"deep": 404}),
        ("POST", "/short/count?most=x", {"short": 400}),
    ],
)
async def test_an_error_has_the_dialect_of_the_nearest_place(method: str, path: str, told: dict[str, int]) -> None:
    site = Site(plugins=FakePlugins(one=Speaking, two=SpeakingDeeper))
    answer = await site.http.request(method, f"http://test{path}")
    assert (answer.json(), answer.status_code) == (told, *told.values())


@pytest.mark.parametrize("path", ["/shorter", "/alone/x", "/elsewhere/x", "/v1/short", "/%2Fshort/x"])
async def test_other_paths_keep_to_openai(path: str) -> None:
    check_error(await Site(plugins=FakePlugins(one=Speaking, two=SpeakingDeeper)).http.get(path), 404)


async def test_its_stream_is_framed_by_it() -> None:
    answer = await Site(plugins=FakePlugins(one=Speaking)).http.post("/short/count")
    assert (answer.text, answer.headers["content-type"]) == ("<0><1>end", "text/short")


async def test_the_failure_of_a_middleware_has_it_too() -> None:
    site = Site(plugins=FakePlugins(one=Speaking), middleware=(f"{__name__}.failing",))
    for path, told in (("/short/count", b'{"short":500}'), ("/v1/models", b'"code":500}}')):
        messages: list[Any] = []
        with pytest.raises(RuntimeError, match="a secret"):  # the answer was sent, and the server logs it
            await site.app(_scope(path), _nothing, _into(messages))
        assert messages[-1]["body"].endswith(told)
        assert b"secret" not in messages[-1]["body"]


def _scope(path: str) -> dict[str, Any]:
    return {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
    }


async def _nothing() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


def _into(messages: list[Any]) -> Callable[[Any], Awaitable[None]]:
    async def send(message: Any) -> None:
        messages.append(message)

    return send


async def test_a_dialect_that_fails_stops_the_start_and_is_named() -> None:
    with pytest.raises(PluginError, match="Plugin router:wordless of ferrule 1.* failed: KeyError"):
        Site(plugins=FakePlugins(wordless=Wordless))


async def test_two_dialects_for_one_path_stop_the_start() -> None:
    class Rival(SpeakingDeeper):
        class words(Short):  # type: ignore[assignment]
            paths = ("/short/",)

        def dialect(self, ctx: RouterContext) -> Dialect:
            return self.words()

    with pytest.raises(StartupError, match="Two routers have a dialect for /short/"):
        Site(plugins=FakePlugins(one=Speaking, rival=Rival))

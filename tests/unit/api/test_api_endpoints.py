"""How routes are called: by FastAPI, as its users know it, or without it, where it would add nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, HTTPException, Query, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field

from ferrule.api.app import build_app
from ferrule.api.lifecycle import Lifecycle
from ferrule.config import Config, FrontendConfig, LimitsConfig
from ferrule.interfaces.router import JSON, Access, CurrentRequest, Router, RouterContext, needs
from ferrule.plugin import Plugins, discover
from ferrule.schema import Body, Count
from ferrule_testkit.service import ScriptedService

PLUGINS = discover()
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}


class Line(Body):
    text: str
    times: Count = 1


class Ask(Body):
    question: Annotated[str, Field(min_length=2)]
    lines: list[Line] = []
    either: list[int] | int | None = None


class Said(BaseModel):
    text: str
    number: int = 3


def client(declare: Callable[[APIRouter], object]) -> httpx.AsyncClient:
    """Return a client of an application with the routes that `declare` adds, and those of the plugins."""

    class Added(Router):
        def router(self, ctx: RouterContext) -> APIRouter:
            routes = APIRouter()
            declare(routes)
            return routes

    class Together(Plugins):
        """The real set, with one more router."""

        def names(self, kind: str) -> tuple[str, ...]:
            return (*PLUGINS.names(kind), "added")

        def load(self, kind: str, name: str) -> Any:
            return Added if name == "added" else PLUGINS.load(kind, name)

        def is_builtin(self, kind: str, name: str) -> bool:
            return True

        def origin(self, kind: str, name: str) -> str:
            return "the test" if name == "added" else PLUGINS.origin(kind, name)

    lifecycle = Lifecycle()
    limits = LimitsConfig(body_timeout=0.2)  # what must come is here
    app = build_app(Config(frontend=FrontendConfig(), limits=limits), Together(), lifecycle)
    lifecycle.ready(ScriptedService())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")


async def nothing() -> None: ...


def twice(routes: APIRouter) -> None:
    """Add one handler with two routes; FastAPI is needed for the dependency of the second."""

    async def answer(body: Ask, info: CurrentRequest, request: Request) -> JSON:
        given = await request.json()
        assert json.loads(await request.body()) == given
        if body.question == "teapot":
            raise HTTPException(418, "No coffee here.")
        return JSON({"asked": body.model_dump(), "given": given, "unknown": info.unknown_fields}, 201)

    routes.post("/direct", dependencies=[needs(Access.KEY)])(answer)
    routes.post("/solved", dependencies=[Depends(nothing)])(answer)


BODIES: list[Any] = [
    {"question": "why?"},
    {"question": "why?", "lines": [{"text": "a", "times": 2.0}, {"text": "b"}], "either": None},
    {"question": "why?", "other": 1, "lines": [{"text": "a"}, {"text": "b", "tmies": 2}], "__class__": {}},
    {"question": "teapot"},
    *({}, [], "why?", 5, None, [{"question": "why?"}]),
    *({"question": 5}, {"question": "?"}, {"question": None}, {"question": "why?", "lines": [{"text": "a"}, 3]}),
    {"question": "why?", "lines": [{"text": "a", "times": "3"}]},
    {"question": "why?", "lines": [{"text": "a", "times": 0}] * 5},
    *({"question": "why?", "either": "x"}, {"question": "why?", "either": [1, "x"]}),
]


@pytest.mark.parametrize("body", BODIES, ids=str)
async def test_a_handler_is_called_as_fastapi_would_call_it(body: Any) -> None:
    http = client(twice)
    found = [await http.post(path, json=body) for path in ("/direct", "/solved")]
    assert found[0].status_code == found[1].status_code
    assert found[0].headers == found[1].headers
    assert found[0].json() == found[1].json()
    assert found[0].status_code in (201, 400, 418)


async def test_fastapi_is_called_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    solved = []

    async def solve(**needed: Any) -> Any:
        solved.append(needed["request"].url.path)
        raise RuntimeError

    monkeypatch.setattr("fastapi.routing.solve_dependencies", solve)
    http = client(twice)
    assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert (await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})).status_code == 200
    assert (await http.post("/direct", json=BODIES[0])).status_code == 201
    assert (await http.post("/solved", json=BODIES[0])).status_code == 500
    assert solved == ["/solved"]


async def test_a_body_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(text: Any) -> Any:
        raise AssertionError("a second time")

    def declare(routes: APIRouter) -> None:
        async def answer(body: Ask, request: Request) -> JSON:
            return JSON(await request.json())

        routes.post("/direct")(answer)
        routes.post("/solved", dependencies=[Depends(nothing)])(answer)

    monkeypatch.setattr("starlette.requests.json.loads", decode)
    http = client(declare)
    answers = [await http.post(path, json=BODIES[0]) for path in ("/direct", "/solved")]
    monkeypatch.undo()
    assert [answer.json() for answer in answers] == [BODIES[0]] * 2


# ------------------------------------------------------------------------------------------------ FastAPI as usual


async def test_parameters_models_and_status() -> None:
    def declare(routes: APIRouter) -> None:
        @routes.get("/said/{text}", status_code=203)
        async def said(text: str, number: Annotated[int, Query(ge=1)], response: Response) -> Said:
            response.headers["x-number"] = str(number)
            return Said(text=text, number=number)

        @routes.get("/thread", response_model=Said)
        def thread() -> dict[str, Any]:
            return {"text": "from a thread"}

        @routes.get("/where")
        async def where(request: Request) -> JSON:
            return JSON([request.url_for("said", text="a").path, request.app.title])

    http = client(declare)
    answer = await http.get("/said/hello", params={"number": 7})
    assert (answer.status_code, answer.headers["x-number"]) == (203, "7")
    assert answer.json() == {"text": "hello", "number": 7}
    refused = await http.get("/said/hello", params={"number": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "number")
    assert (await http.get("/thread")).json() == {"text": "from a thread", "number": 3}
    assert (await http.get("/where")).json() == ["/said/a", "Ferrule"]


async def test_dependencies_and_work_after_the_answer() -> None:
    """Close what a dependency opened after the answer was sent, and run tasks in between."""
    order: list[str] = []

    async def opened() -> AsyncIterator[None]:
        order.append("opened")
        yield
        order.append("closed")

    def declare(routes: APIRouter) -> None:
        @routes.post("/work", dependencies=[Depends(opened)])
        async def work(body: Ask, tasks: BackgroundTasks) -> JSON:
            order.append("called")
            tasks.add_task(order.append, "task")
            return JSON(body.question)

    answer = await client(declare).post("/work", json={"question": "why?"})
    assert answer.json() == "why?"
    assert order == ["opened", "called", "task", "closed"]


async def test_a_route_class_of_its_own() -> None:
    class Stamped(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def stamped(request: Request) -> Response:
                answer = await handler(request)
                answer.headers["x-stamp"] = (await request.body()).decode()
                return answer

            return stamped

    def declare(routes: APIRouter) -> None:
        routes.route_class = Stamped

        @routes.post("/stamped")
        async def ask(body: Ask) -> JSON:
            return JSON(body.question)

    body = {"question": "why?"}
    answer = await client(declare).post(
        "/stamped", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert (answer.json(), json.loads(answer.headers["x-stamp"])) == ("why?", body)


@pytest.mark.parametrize("content", [b"", b"raw"])
async def test_a_handler_reads_the_body_itself(content: bytes) -> None:
    """Also an empty one, for which nothing comes."""

    def declare(routes: APIRouter) -> None:
        @routes.post("/raw", dependencies=[needs(Access.KEY)])
        async def raw(request: Request) -> Response:
            return Response(b"got " + await request.body())

    answer = await client(declare).post("/raw", content=content)
    assert (answer.status_code, answer.content) == (200, b"got " + content)


async def test_a_stream_may_outlast_the_time_for_the_body() -> None:
    """Starlette asks for the client's end while it streams, which is no part of the body."""

    def declare(routes: APIRouter) -> None:
        @routes.post("/later", dependencies=[needs(Access.KEY)])
        async def later(request: Request) -> Response:
            body = await request.body()
            ends = asyncio.create_task(request.receive())
            await asyncio.wait([ends], timeout=0.3)  # longer than --body-timeout
            assert not ends.done()
            ends.cancel()
            return Response(body)

    answer = await client(declare).post("/later", content=b"raw")
    assert (answer.status_code, answer.content) == (200, b"raw")


async def test_a_limit_of_the_route() -> None:
    def declare(routes: APIRouter) -> None:
        @routes.post("/small", max_body_size=64)
        async def small(body: Ask) -> JSON:
            return JSON(body.question)

    http = client(declare)
    assert (await http.post("/small", json={"question": "why?"})).json() == "why?"
    refused = await http.post("/small", json={"question": "why?" * 30})
    assert refused.status_code == 413


async def test_a_dependency_is_closed_when_the_handler_fails() -> None:
    closed = []

    async def opened() -> AsyncIterator[None]:
        try:
            yield
        finally:
            closed.append(True)

    def declare(routes: APIRouter) -> None:
        @routes.get("/fails", dependencies=[Depends(opened)])
        async def fails() -> Said:
            raise ValueError("a secret")

    answer = await client(declare).get("/fails")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert closed == [True]

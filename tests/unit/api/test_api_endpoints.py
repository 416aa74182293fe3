"""FastAPI as its users know it, within the layers: what the author of a router may expect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, Form, HTTPException, Query, Request, Response, UploadFile
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field
from starlette.types import ASGIApp

from ferrule.api.app import build_app
from ferrule.api.lifecycle import Lifecycle
from ferrule.config import Config, FrontendConfig, LimitsConfig
from ferrule.interfaces.router import JSON, Access, CurrentRequest, Router, RouterContext, needs
from ferrule.schema import Body, Count
from ferrule_testkit.service import ScriptedService
from tests.unit.api.test_app import FakePlugins, check_error

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


def application(declare: Callable[[APIRouter], object], made: APIRouter | None = None, **frontend: Any) -> ASGIApp:
    """Return an application with the routes that `declare` adds, and that of health; its service is ready."""

    class Added(Router):
        def router(self, ctx: RouterContext) -> APIRouter:
            routes = made or APIRouter()
            declare(routes)
            return routes

    lifecycle = Lifecycle()
    limits = LimitsConfig(body_timeout=0.2, max_body_bytes=10_000)  # what must come is here
    front = FrontendConfig(**{"routers": ("added", "health")} | frontend)
    app = build_app(Config(frontend=front, limits=limits), FakePlugins(added=Added), lifecycle)
    lifecycle.ready(ScriptedService())
    return app


def client(declare: Callable[[APIRouter], object], **frontend: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=application(declare, **frontend))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def nothing() -> None: ...


def asking(routes: APIRouter) -> None:
    """Add a route whose handler takes a body in every way."""

    @routes.post("/ask", dependencies=[needs(Access.KEY), Depends(nothing)])
    async def answer(body: Ask, info: CurrentRequest, request: Request) -> JSON:
        given = await request.json()
        assert json.loads(await request.body()) == given
        if body.question == "teapot":
            raise HTTPException(418, "No coffee here.")
        return JSON({"asked": body.model_dump(), "given": given, "unknown": info.unknown_fields}, 201)


@pytest.mark.parametrize(
    "body",
    [
        {"question": "why?"},
        {"question": "why?", "lines": [{"text": "a", "times": 2.0}, {"text": "b"}], "either": None},
        {"question": "why?", "other": 1, "lines": [{"text": "a"}, {"text": "b", "tmies": 2}], "__class__": {}},
    ],
    ids=str,
)
async def test_a_handler_gets_the_model_and_what_it_was_made_of(body: Any) -> None:
    answer = await client(asking).post("/ask", json=body)
    told = answer.json()
    assert (answer.status_code, told["given"]) == (201, body)
    assert told["asked"]["question"] == body["question"]
    unknown = ["other", "lines[1].tmies", "__class__"] if "other" in body else []
    assert sorted(told["unknown"]) == sorted(unknown)
    assert answer.headers.get("x-ferrule-ignored-fields", "") == ", ".join(told["unknown"])


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        *((wrong, 400, None) for wrong in ([], "why?", 5, [{"question": "why?"}])),
        *((wrong, 400, "question") for wrong in ({}, {"question": 5}, {"question": "?"}, {"question": None})),
        ({"question": "why?", "lines": [{"text": "a"}, 3]}, 400, "lines[1]"),
        ({"question": "why?", "lines": [{"text": "a", "times": "3"}]}, 400, "lines[0].times"),
        ({"question": "why?", "lines": [{"text": "a", "times": 0}] * 5}, 400, "lines[0].times"),
        ({"question": "why?", "either": "x"}, 400, "either"),
        ({"question": "why?", "either": [1, "x"]}, 400, "either[1]"),
        ({"question": "teapot"}, 418, None),
    ],
    ids=str,
)
async def test_refusals_have_the_error_shape(body: Any, status: int, param: str | None) -> None:
    check_error(await client(asking).post("/ask", json=body), status, param)


async def test_a_strict_server_refuses_before_the_handler_is_called() -> None:
    def declare(routes: APIRouter) -> None:
        @routes.post("/ask")
        async def ask(body: Ask) -> JSON:
            raise AssertionError("called")

    message = check_error(
        await client(declare, strict_requests=True).post(
            "/ask", json={"question": "why?", "lines": [{"text": "a", "tmies": 2}]}
        ),
        400,
        "lines[0].tmies",
    )
    assert "'times'" in message


async def test_a_body_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(text: Any) -> Any:
        raise AssertionError("a second time")

    def declare(routes: APIRouter) -> None:
        @routes.post("/ask", dependencies=[Depends(nothing)])
        async def answer(body: Ask, request: Request) -> JSON:
            return JSON(await request.json())

    monkeypatch.setattr("starlette.requests.json.loads", decode)
    http = client(declare, routers=("added", "openai"))
    answer = await http.post("/ask", json={"question": "why?"})
    chat = await http.post("/v1/chat/completions", json=CHAT)
    monkeypatch.undo()
    assert (answer.json(), chat.status_code) == ({"question": "why?"}, 200)


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


async def test_a_route_class_may_handle_exceptions() -> None:
    class Odd(Exception):
        pass

    class Handling(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def handled(request: Request) -> Response:
                try:
                    return await handler(request)
                except Odd as error:
                    return JSON({"odd": str(error)}, 409)

            return handled

    def declare(routes: APIRouter) -> None:
        routes.route_class = Handling

        @routes.get("/odd")
        async def odd() -> Said:
            raise Odd("told")

    answer = await client(declare).get("/odd")
    assert (answer.status_code, answer.json()) == (409, {"odd": "told"})


async def test_a_dependency_sees_what_the_handler_raises() -> None:
    """Let a dependency answer a handler's exception otherwise."""

    async def changing() -> AsyncIterator[None]:
        try:
            yield
        except LookupError:
            raise HTTPException(410, "Gone.") from None

    def declare(routes: APIRouter) -> None:
        @routes.get("/found", dependencies=[Depends(changing)])
        async def found() -> Said:
            raise LookupError("a secret")

    assert check_error(await client(declare).get("/found"), 410) == "Gone."


async def test_an_answer_that_does_not_fit_its_model_is_a_fault() -> None:
    def declare(routes: APIRouter) -> None:
        @routes.get("/said", response_model=Said)
        async def said() -> dict[str, Any]:
            return {"text": 5}

    check_error(await client(declare).get("/said"), 500)


async def test_response_models_choose_what_is_told() -> None:
    class Secretive(Said):
        secret: str = "hidden"

    def declare(routes: APIRouter) -> None:
        @routes.post("/said", response_model=Said, response_model_exclude_defaults=True)
        async def said(body: Ask) -> Secretive:
            return Secretive(text=body.question)

    assert (await client(declare).post("/said", json={"question": "why?"})).json() == {"text": "why?"}


async def test_routers_within_routers() -> None:
    """Include routers with their prefixes, dependencies and tags; the last mark of access counts."""
    called: list[str] = []

    async def outer() -> None:
        called.append("outer")

    def declare(routes: APIRouter) -> None:
        inner = APIRouter(prefix="/inner", dependencies=[needs(Access.ADMIN)])

        @inner.post("/ask/{name}")
        async def ask(name: str, body: Ask) -> JSON:
            return JSON([name, body.question])

        @inner.get("/open", dependencies=[needs(Access.KEY)])
        async def open_() -> JSON:
            return JSON("open")

        routes.include_router(inner, prefix="/outer", dependencies=[Depends(outer)], tags=["nested"])

    http = client(declare, routers=("added", "docs"))
    assert (await http.get("/outer/inner/open")).json() == "open"
    assert called == ["outer"]
    message = check_error(await http.post("/outer/inner/ask/me", json={"question": "why?"}), 404)
    assert "FERRULE_SERVER_DEV_MODE" not in message  # a template is not told
    document = (await http.get("/openapi.json")).json()
    assert document["paths"]["/outer/inner/open"]["get"]["tags"] == ["nested"]
    assert "/outer/inner/ask/{name}" not in document["paths"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/files/a", 200),
        ("/files/%61", 200),
        ("/files/a%2Fsecret", 404),
        ("/files/secret", 200),
        ("/files/%73ecret", 404),
        ("/files/", 404),
        ("/files/a%0A", 404),
        ("/%66iles/a", 404),
        ("/rest/a/b", 200),
        ("/rest/a%2Fb", 200),
        ("/rest/%2E%2E/a", 200),
        ("/number/5", 200),
        ("/number/x", 404),
    ],
)
async def test_an_escape_leads_nowhere_else(path: str, status: int) -> None:
    def declare(routes: APIRouter) -> None:
        async def file(request: Request) -> JSON:
            return JSON(request.path_params)

        for template in (
            "files/secret",
            "files/{name}/secret",
            "files/{name}",
            "rest/{name:path}",
            "number/{name:int}",
        ):
            routes.get(f"/{template}")(file)

    assert (await client(declare).get(f"http://test{path}")).status_code == status


# ------------------------------------------------------------------------------------------------ forms


@pytest.fixture
def uploads() -> Callable[[APIRouter], None]:
    pytest.importorskip("python_multipart")

    def declare(routes: APIRouter) -> None:
        @routes.post("/upload")
        async def upload(file: UploadFile, note: Annotated[str, Form()] = "") -> JSON:
            return JSON([file.filename, (await file.read()).decode(), note])

    return declare


async def test_uploads(uploads: Callable[[APIRouter], None]) -> None:
    http = client(uploads)
    answer = await http.post("/upload", files={"file": ("a.txt", b"hello")}, data={"note": "n"})
    assert (answer.status_code, answer.json()) == (200, ["a.txt", "hello", "n"])
    check_error(await http.post("/upload", data={"note": "n"}), 400, "file")
    check_error(await http.post("/upload", json={"file": "a"}), 400, "file")


async def test_uploads_are_under_the_limits(uploads: Callable[[APIRouter], None]) -> None:
    answer = await client(uploads).post("/upload", files={"file": ("a.txt", b"x" * 20_000)})
    check_error(answer, 413)
    assert answer.headers["connection"] == "close"
    check_error(await client(uploads, api_key=("k",)).post("/upload", files={"file": ("a", b"")}), 401)


# ------------------------------------------------------------------------------------------------ lifespans


async def test_the_lifespan_of_a_router_is_run() -> None:
    order: list[str] = []

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[dict[str, Any]]:
        order.append("begin")
        yield {"greeting": "hello"}
        order.append("end")

    def declare(routes: APIRouter) -> None:
        @routes.get("/state")
        async def state(request: Request) -> JSON:
            order.append("call")
            return JSON(request.state.greeting)

    app = application(declare, APIRouter(lifespan=lifespan))
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    state: dict[str, Any] = {}
    running = asyncio.create_task(app({"type": "lifespan", "state": state}, messages.get, sent.put))
    messages.put_nowait({"type": "lifespan.startup"})
    assert (await sent.get())["type"] == "lifespan.startup.complete"

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "state": dict(state)}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=with_state), base_url="http://test") as http:
        assert (await http.get("/state")).json() == "hello"
    messages.put_nowait({"type": "lifespan.shutdown"})
    assert (await sent.get())["type"] == "lifespan.shutdown.complete"
    await running
    assert order == ["begin", "call", "end"]


@pytest.mark.parametrize("content", [b"", b"raw"])
async def test_a_handler_reads_the_body_itself(content: bytes) -> None:
    """Read any body, also an empty one, for which nothing comes."""

    def declare(routes: APIRouter) -> None:
        @routes.post("/raw", dependencies=[needs(Access.KEY)])
        async def raw(request: Request) -> Response:
            return Response(b"got " + await request.body())

    answer = await client(declare).post("/raw", content=content)
    assert (answer.status_code, answer.content) == (200, b"got " + content)


async def test_a_stream_may_outlast_the_time_for_the_body() -> None:
    """Let Starlette ask for the client's end while it streams, which is not a part of the body."""

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

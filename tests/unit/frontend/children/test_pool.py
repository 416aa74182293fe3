"""Children that work over client data: deadlines, memory, death, cancelling, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from ferrule.config import FrontendConfig, LimitsConfig
from ferrule.errors import ForbiddenError, OverloadedError, PluginError, RequestError, UnavailableError
from ferrule.frontend.children.child import HEADER, HELLO
from ferrule.frontend.children.pool import ChildPool
from ferrule.frontend.guided.work import Setup
from ferrule.frontend.text.render import Renderer
from ferrule.interfaces.guided_decoding import Vocabulary
from ferrule.interfaces.service import ChatPrompt
from ferrule.plugin import discover

TASK = "ferrule.frontend.text.template:work"
HI = ({"role": "user", "content": "hi"},)
SIMPLE = "{% for m in messages %}{{ m.content }}{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def job(template: str, **values: Any) -> dict[str, Any]:
    fixed = {"messages": list(HI), "variables": {}, "extra": {}, "content_format": "auto", "max_characters": 1 << 20}
    return {"template": template, **fixed, **values}


def exists(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@pytest.fixture
async def pool() -> AsyncIterator[ChildPool]:
    pool = ChildPool(TASK, size=2, memory_bytes=512 << 20)
    yield pool
    pids = pool.pids
    await pool.close()
    assert not any(exists(pid) for pid in pids)


async def ask(pool: ChildPool, template: str, seconds: float = 120.0, **values: Any) -> Any:
    asked = {"job": json.dumps(job(template, **values))}
    found = await pool.run(asked, seconds, "The chat template", "messages")
    return found["text"]


async def test_a_child_answers_and_is_used_again(pool: ChildPool) -> None:
    assert await ask(pool, SIMPLE) == "hi"
    pids = pool.pids
    assert await ask(pool, SIMPLE, messages=[{"role": "user", "content": "x\0é🙂" * 30_000}]) == "x\0é🙂" * 30_000
    assert pool.pids == pids
    assert len(pids) == 1


async def test_refusals_come_back_and_the_child_lives(pool: ChildPool) -> None:
    with pytest.raises(RequestError, match="no: why") as caught:
        await ask(pool, "{{ raise_exception('no: why') }}")
    assert caught.value.param == "messages"
    with pytest.raises(RequestError, match="syntax error"):
        await ask(pool, "{% for %}")
    assert len(pool.pids) == 1


async def begun(pool: ChildPool) -> asyncio.Task[Any]:
    """Work without end, which the pool's one child has been given."""
    assert await ask(pool, SIMPLE) == "hi"
    assert len(pool.pids) == 1
    task = asyncio.create_task(ask(pool, ENDLESS))
    await asyncio.sleep(0)  # one turn takes it as far as its answer
    return task


@pytest.mark.advisory("CVE-2026-55574")
async def test_others_go_on_beside_work_without_end(pool: ChildPool) -> None:
    slow = await begun(pool)
    assert await ask(pool, SIMPLE) == "hi"
    assert len(pool.pids) == 2
    assert not slow.done()
    slow.cancel()


@pytest.mark.advisory("CVE-2026-55574")
async def test_a_deadline_ends_the_child(pool: ChildPool) -> None:
    assert await ask(pool, SIMPLE) == "hi"
    (first,) = pool.pids
    with pytest.raises(RequestError, match=r"took longer than 0\.5 s"):
        await ask(pool, ENDLESS, seconds=0.5)
    assert await ask(pool, SIMPLE) == "hi"
    while first in pool.pids:
        await asyncio.sleep(0.01)


@pytest.mark.advisory("CVE-2025-61620")
@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**9 }}",
        "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}",
        "{{ range(99999) | list | tojson(indent=100000) }}",
    ],
)
async def test_memory_has_a_limit(pool: ChildPool, template: str) -> None:
    with pytest.raises(RequestError, match="512 MiB|longer than|took longer"):
        await ask(pool, template, seconds=10.0)
    assert await ask(pool, SIMPLE) == "hi"


@pytest.mark.advisory("CVE-2025-61620")
@pytest.mark.parametrize(
    "template",
    [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
        "{% if 1 %}" * 10_000 + "{% endif %}" * 10_000,
        "{{ 1" + " + 1" * 25_000 + " }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ '%999999999d' % 1 }}",
    ],
    ids=["recursion", "brackets", "blocks", "sum", "power", "format"],
)
async def test_bombs_are_refusals(pool: ChildPool, template: str) -> None:
    with pytest.raises(RequestError) as caught:
        await ask(pool, template, seconds=3.0)
    assert "0x" not in caught.value.message
    assert "Traceback" not in caught.value.message
    assert await ask(pool, SIMPLE) == "hi"


@pytest.mark.advisory("CVE-2025-57809")
async def test_a_killed_child_fails_its_request_only(pool: ChildPool) -> None:
    slow = await begun(pool)
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(RequestError, match="cannot be processed"):
        await slow
    assert await ask(pool, SIMPLE) == "hi"


async def test_an_idle_child_that_died_is_replaced(pool: ChildPool) -> None:
    assert await ask(pool, SIMPLE) == "hi"
    (pid,) = pool.pids
    os.kill(pid, signal.SIGKILL)
    while pool.pids:
        await asyncio.sleep(0.01)
    assert await ask(pool, SIMPLE) == "hi"


@pytest.mark.advisory("CVE-2026-115911")
async def test_cancelling_kills_the_work(pool: ChildPool) -> None:
    slow = await begun(pool)
    (pid,) = pool.pids
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    while exists(pid) and pid in pool.pids:
        await asyncio.sleep(0.01)
    assert await ask(pool, SIMPLE) == "hi"


async def test_waiting_has_a_limit(pool: ChildPool) -> None:
    slow = [asyncio.create_task(ask(pool, ENDLESS)) for _ in range(2)]
    await asyncio.sleep(0)  # one turn, and the places are theirs
    with pytest.raises(OverloadedError):
        await ask(pool, SIMPLE, seconds=0.1)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_patient_work_waits_longer_than_its_deadline_for_a_child() -> None:
    pool = ChildPool(TASK, size=1, memory_bytes=512 << 20, patient=True)
    first = asyncio.create_task(ask(pool, ENDLESS))
    await asyncio.sleep(0)
    second = asyncio.create_task(ask(pool, ENDLESS, seconds=0.2))
    await asyncio.wait({second}, timeout=0.6)
    assert not second.done()
    first.cancel()
    with pytest.raises(RequestError, match=r"took longer than 0\.2 s"):
        await second
    await pool.close()


async def test_a_setup_that_a_plugin_refuses_starts_one_child_only(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    start = asyncio.create_subprocess_exec

    async def counted(*arguments: Any, **options: Any) -> Any:
        started.append(arguments)
        return await start(*arguments, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", counted)

    async def setup() -> bytes:
        return msgspec.msgpack.encode(Setup(discover(), "missing", Vocabulary((b"a",), 1, (0,))))

    pool = ChildPool("ferrule.frontend.guided.work:CompileTask", size=1, memory_bytes=1 << 30, setup=setup)
    works = (pool.run({}, 60.0, "The constraint", "x") for _ in range(3))
    errors = await asyncio.gather(*works, return_exceptions=True)
    assert [type(error) for error in errors] == [PluginError] * 3
    assert len({str(error) for error in errors}) == 1
    assert len(started) == 1
    await pool.close()


async def test_a_child_that_starts_too_slowly_is_refused_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse for now: the machine is too busy, which no request is to be answered 5xx for."""
    monkeypatch.setattr("ferrule.frontend.children.pool._START_SECONDS", 0.05)

    async def setup() -> bytes:
        await asyncio.sleep(3600)
        return b""

    pool = ChildPool(TASK, size=1, memory_bytes=512 << 20, setup=setup)
    with pytest.raises(OverloadedError, match="The chat template cannot be processed now"):
        await ask(pool, SIMPLE)
    await pool.close()
    assert pool.pids == frozenset()


@pytest.mark.parametrize("value", ["\ud800", 1 << 70, object()])
async def test_values_that_cannot_travel_are_the_client_s_fault(pool: ChildPool, value: Any) -> None:
    with pytest.raises(RequestError):
        await pool.run({"job": value}, 120.0, "The chat template", "messages")
    assert pool.pids == frozenset()


async def test_a_task_that_cannot_be_imported_is_ours() -> None:
    pool = ChildPool("ferrule.frontend.text.template:missing", size=1, memory_bytes=512 << 20)
    with pytest.raises(UnavailableError):
        await ask(pool, SIMPLE)
    await pool.close()
    with pytest.raises(UnavailableError):
        await ask(pool, SIMPLE)


CHILD = [sys.executable, "-m", "ferrule.frontend.children.child", TASK, str(512 << 20), "0"]


def start_child() -> subprocess.Popen[bytes]:
    child = subprocess.Popen(CHILD, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    if child.stdout is None:
        raise RuntimeError("no pipe")
    length, _ = HEADER.unpack(child.stdout.read(HEADER.size))
    assert HELLO.encode() in child.stdout.read(length)
    return child


def test_a_child_ends_with_its_parent() -> None:
    child = start_child()
    child.communicate()  # closes the pipe
    assert child.returncode == 0


def test_a_child_whose_parent_is_gone_before_it_is_ready_says_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    child = subprocess.run(CHILD, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (child.returncode, child.stderr) == (1, b"")


def test_a_child_at_work_ends_itself_when_nobody_else_does() -> None:
    import msgspec

    child = start_child()
    body = msgspec.msgpack.encode({"job": json.dumps(job(ENDLESS))})
    child.communicate(HEADER.pack(len(body), 0.1) + body)  # and close the pipe, which it does not look at now
    assert child.returncode == -signal.SIGALRM


# ------------------------------------------------------------------------------------------------ renderer


def renderer(templates: dict[str, str], **limits: Any) -> Renderer:
    patient = LimitsConfig(**{"template_timeout": 120.0, **limits})
    return Renderer(FrontendConfig(), patient, templates, {"bos_token": "<s>"}, 1000)


def chat(**values: Any) -> ChatPrompt:
    return ChatPrompt(**{"messages": HI, **values})


@pytest.mark.advisory("CVE-2025-62426")
async def test_renderer_refuses_before_it_renders() -> None:
    quiet = renderer({"default": SIMPLE})
    with pytest.raises(ForbiddenError) as caught:
        await quiet.render(chat(chat_template="{{ 1 }}"))
    assert caught.value.param == "chat_template"
    passed = ("tokenize", "chat_template", "messages", "tools", "bos_token", "eos_token", "add_generation_prompt")
    called = ("raise_exception", "strftime_now", "namespace", "range")  # functions of templates
    for name in (*passed, *called):
        with pytest.raises(RequestError, match=name) as refused:
            await quiet.render(chat(chat_template_kwargs={name: True}))
        assert refused.value.param == "chat_template_kwargs"
    with pytest.raises(RequestError, match="exclude each other"):
        await quiet.render(chat(continue_final_message=True))
    with pytest.raises(RequestError, match="characters"):
        await quiet.render(chat(messages=({"role": "user", "content": "x" * 16_001},)))
    with pytest.raises(RequestError, match="no chat template"):
        await renderer({}).render(chat())
    with pytest.raises(RequestError, match="named rag, tool_use"):
        await renderer({"rag": SIMPLE, "tool_use": SIMPLE}).render(chat())
    assert quiet.pids == frozenset()


async def test_renderer_renders() -> None:
    rendering = renderer({"default": "{{ bos_token }}" + SIMPLE, "tool_use": "T{{ tools | length }}{{ documents }}"})
    assert (await rendering.inspect())["content"] == "string"
    assert await rendering.render(chat()) == "<s>hi"
    tool = {"type": "function", "function": {"name": "f"}}
    assert await rendering.render(chat(tools=(tool,), documents=({"title": "a"},))) == "T1[{'title': 'a'}]"
    for field, value in (("tools", ({"type": "function"},)), ("documents", ("a",))):
        with pytest.raises(RequestError, match=rf"{field}\[0\]"):
            await rendering.render(chat(**{field: value}))
    messages = (*HI, {"role": "assistant", "content": "so "})
    assert (
        await rendering.render(chat(messages=messages, add_generation_prompt=False, continue_final_message=True))
        == "<s>hiso "
    )
    with pytest.raises(RequestError, match="longer than 8000 characters"):
        await rendering.render(chat(messages=({"role": "user", "content": "x" * 9000},)))
    with pytest.raises(RequestError, match="surrogate") as caught:
        await rendering.render(chat(messages=({"role": "user", "content": "\ud800"},)))
    assert caught.value.param == "messages"
    await rendering.close()


async def test_a_template_that_writes_half_of_a_character() -> None:
    broken = renderer({"default": "{{ '\\ud83d' }}" + SIMPLE})
    with pytest.raises(RequestError, match="The chat template gives half of a surrogate pair"):
        await broken.render(chat())
    await broken.close()


@pytest.mark.advisory("CVE-2026-115911")
async def test_endless_request_templates_do_not_hold_up_the_server_s_own() -> None:
    rendering = renderer({"default": SIMPLE}, trust_request_chat_template=True)
    hostile = [asyncio.create_task(rendering.render(chat(chat_template=ENDLESS))) for _ in range(8)]
    while len(rendering.pids) < 2:
        await asyncio.sleep(0.01)
    assert await rendering.render(chat()) == "hi"
    assert not any(task.done() for task in hostile)
    for task in hostile:
        task.cancel()
    await asyncio.gather(*hostile, return_exceptions=True)
    await rendering.close()


@pytest.mark.advisory("CVE-2026-115911")
async def test_endless_request_templates_are_refused_in_time() -> None:
    """End those that have a child; the others find no free one meanwhile."""
    rendering = renderer({"default": SIMPLE}, trust_request_chat_template=True, template_timeout=0.5)
    hostile = [asyncio.create_task(rendering.render(chat(chat_template=ENDLESS))) for _ in range(8)]
    results = await asyncio.gather(*hostile, return_exceptions=True)
    assert {type(result) for result in results} == {RequestError, OverloadedError}
    pids = rendering.pids
    await rendering.close()
    assert not any(exists(pid) for pid in pids)

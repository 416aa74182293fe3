"""The picture of an engine at work: what it shows, that it is bounded, and that nobody pays for it unasked."""

from __future__ import annotations

import json
from typing import Any

from ferrule import live
from ferrule.interfaces.scheduler import Scheduler
from ferrule.live import Live
from ferrule.types import Adapter, Chunk, Guesses
from ferrule.wire.messages import Call, CallReply
from tests.unit.engine.test_loop import A, LoopHarness, Preparing


def harness(**more: Any) -> tuple[Any, Live]:
    made = LoopHarness(**more)
    return made, Live(made.loop, made.clock)


def test_a_client_is_shown_who_runs_and_who_waits() -> None:
    engine, _ = harness()
    for number in range(6):
        engine.submit(A, f"r{number}", range(12), 9)
        engine.steps(1)
    engine.inbox.append((A, Call(7, "live")))
    engine.steps(1)
    (reply,) = [message for message in engine.sent[A] if isinstance(message, CallReply)]
    picture = reply.result
    assert json.loads(json.dumps(picture))["figures"]["running"] == 4
    rows = picture["running"]
    assert [row["id"] for row in rows] == ["r0", "r1", "r2", "r3"]
    assert [row["id"] for row in picture["waiting"]] == ["r4", "r5"]
    first, last = rows[0], rows[-1]
    assert (first["prompt"], first["phase"]) == (12, "decode")
    assert first["generated"] > last["generated"]
    assert first["computed"] == 12 + first["generated"] - 1  # the newest token is not in the cache yet
    assert (first["cached"], last["cached"]) == (0, 8)
    blocks = picture["blocks"]
    assert (blocks["total"], blocks["stride"], blocks["per_cell"]) == (63, 1, 1)
    assert sum(blocks["shared"]) == 2  # the two blocks of the common beginning
    assert sum(blocks["shared"]) + sum(blocks["used"]) == picture["figures"]["blocks_used"]
    assert "token_ids" not in json.dumps(picture)


def test_steps_are_noted_while_somebody_looks() -> None:
    engine, view = harness(depth=2)
    engine.submit(A, "one", range(10), 30)
    engine.steps(3)
    assert engine.loop.on_step is None
    assert view.picture()["steps"] == []
    engine.clock.advance(1.0)
    engine.steps(2)
    steps = view.picture()["steps"]
    assert [tuple(step[2:]) for step in steps] == [(1, 1, 0), (1, 1, 0)]
    assert all(0 <= seconds <= 1.0 for _, seconds, *_ in steps)
    engine.clock.advance(live.WATCHED_SECONDS + 1)
    engine.steps(1)
    assert engine.loop.on_step is None


def test_a_picture_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(live, "MAX_ROWS", 3)
    monkeypatch.setattr(live, "MAX_BLOCKS", 20)
    monkeypatch.setattr(live, "MAX_CELLS", 6)
    monkeypatch.setattr(live, "MAX_STEPS", 5)
    engine, view = harness()
    view.picture()
    for number in range(9):
        engine.submit(A, f"r{number}", range(12), 9)
    engine.steps(7)
    picture = view.picture()
    assert (len(picture["running"]), len(picture["waiting"]), len(picture["steps"])) == (3, 3, 5)
    blocks = picture["blocks"]
    assert (blocks["stride"], blocks["looked_at"], blocks["per_cell"]) == (4, 16, 3)
    assert len(blocks["used"]) == 6
    assert picture["figures"]["running"] + picture["figures"]["waiting"] == 9


def test_another_scheduler_shows_its_figures() -> None:
    engine, view = harness()
    inner = engine.scheduler

    class Other(Scheduler):
        add = cancel = schedule = commit = check = None  # type: ignore[assignment]

        def has_work(self) -> bool:
            return inner.has_work()

        def stats(self) -> Any:
            return inner.stats()

    Other.__abstractmethods__ = frozenset()
    engine.loop.scheduler = Other(inner.limits, inner.policy)
    picture = view.picture()
    assert picture["figures"]["blocks_total"] == 63
    assert not {"running", "waiting", "blocks"} & picture.keys()


def test_adapters_and_guesses_are_shown() -> None:
    engine = Preparing(adapter_slots=1)
    view = Live(engine.loop, engine.clock)
    assert view.picture()["adapters"] == []
    for id, name in (("a", "x"), ("b", "x"), ("c", "y"), ("d", None)):
        engine.submit(A, id, max_tokens=9, adapter=None if name is None else Adapter(name=f"{name}@1", served=name))
    engine.steps(1)
    assert [(one["name"], one["loaded"], one["waiting"]) for one in view.picture()["adapters"]] == [
        ("x", False, 2),
        ("y", False, 1),
    ]
    engine.executor.device.load(engine.needs[0])
    engine.loading[0].set_result(None)
    engine.steps(2)
    picture = view.picture()
    assert picture["adapters"] == [
        {"name": "x", "loaded": True, "running": 2, "waiting": 0},
        {"name": "y", "loaded": False, "running": 0, "waiting": 1},
    ]
    assert picture["limits"]["adapter_slots"] == 1
    assert {row["id"]: row["adapter"] for row in picture["running"]} == {"a": "x", "b": "x", "d": None}
    assert all(row["guesses"] is None for row in picture["running"])
    request = engine.scheduler.running["d"]
    request.guessed = Guesses(2, 6, (2, 1))
    assert {row["id"]: row["guesses"] for row in view.picture()["running"]}["d"] == {
        "drafts": 2,
        "draft_tokens": 6,
        "accepted_by_place": (2, 1),
    }
    assert "adapters" not in harness()[1].picture()


def test_guesses_are_tokens_of_a_step_apart() -> None:
    rows = [
        (5, 0, "sample"),
        (4, 3, "sample"),
        (7, 0, ""),
    ]  # the end of a prompt, a row with guesses, a piece of a prompt
    chunks = [
        Chunk(slot=0, id="", epoch=1, start=0, count=count, drafts=drafts, ends=ends) for count, drafts, ends in rows
    ]
    assert live._counts(chunks) == (16, 1, 3)

"""A burst has its turns, and the event loop is watched; nothing here depends on how fast the machine is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import pytest

from ferrule.api import loop_guard
from ferrule.api.loop_guard import LoopGuard
from ferrule.api.turns import Turns

AT_ONCE = 16


def test_a_burst_begins_in_its_order_and_lets_others_run() -> None:
    async def burst() -> list[int]:
        turns, begun, seen = Turns(lambda: AT_ONCE), [], []

        def start(number: int) -> Callable[[], None]:
            return lambda: begun.append(number)

        for number in range(5 * AT_ONCE + 3):
            turns.begin(start(number))
        while len(begun) < 5 * AT_ONCE + 3:
            seen.append(len(begun))
            await asyncio.sleep(0)
        assert begun == list(range(5 * AT_ONCE + 3))
        await asyncio.sleep(0)
        turns.begin(start(-1))  # at rest again: it begins at once
        assert begun[-1] == -1
        return seen

    seen = asyncio.run(burst())
    assert seen[0] == AT_ONCE
    assert all(later - earlier <= AT_ONCE for earlier, later in zip(seen, seen[1:], strict=False))


def test_a_request_that_begins_may_bring_others() -> None:
    async def nested() -> list[str]:
        turns, begun = Turns(lambda: AT_ONCE), []
        for _ in range(AT_ONCE):
            turns.begin(lambda: begun.append("first"))
        turns.begin(lambda: turns.begin(lambda: begun.append("inner")))
        while "inner" not in begun:
            await asyncio.sleep(0)
        return begun

    assert asyncio.run(nested()) == ["first"] * AT_ONCE + ["inner"]


def test_who_waits_for_a_turn_may_leave() -> None:
    async def tasks() -> list[int]:
        turns, came = Turns(lambda: AT_ONCE), list[int]()

        async def come(number: int) -> None:
            await turns.turn()
            came.append(number)

        waiting = [asyncio.create_task(come(number)) for number in range(3 * AT_ONCE)]
        await asyncio.sleep(0)
        assert len(came) == AT_ONCE
        waiting[AT_ONCE].cancel()
        waiting[-1].cancel()
        await asyncio.wait(waiting)
        return came

    came = asyncio.run(tasks())
    assert came == [number for number in range(3 * AT_ONCE - 1) if number != AT_ONCE]


def test_a_stall_is_counted_and_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Find this stall among others, which a busy machine may make before and after."""
    monkeypatch.setattr(loop_guard, "_LONG", 0.05)
    monkeypatch.setattr(loop_guard, "_QUIET", 0.0)
    stalls: list[float] = []

    def told() -> bool:
        said = [record.getMessage() for record in caplog.records]
        return any("has not turned for" in each and "stall (test_turns.py:" in each for each in said)

    async def stall() -> None:
        guard = LoopGuard(stalls.append)
        await asyncio.sleep(0.05)
        began, before = time.monotonic(), sum(stalls)
        while not told() and time.monotonic() < began + 60:
            time.sleep(0.01)  # holds the loop until the guard has said so
        while sum(stalls) == before:
            await asyncio.sleep(0)
        guard.close()

    with caplog.at_level(logging.WARNING, logger="ferrule.api"):
        asyncio.run(stall())
    assert told()
    assert max(stalls) >= 0.03  # it held the loop for 50 ms, of which a tick may have waited for 20

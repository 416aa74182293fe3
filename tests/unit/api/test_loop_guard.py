"""The event loop is watched; nothing here depends on how fast the machine is."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from ferrule.api import loop_guard
from ferrule.api.loop_guard import LoopGuard


def test_a_stall_is_counted_and_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Find this stall among others, which a busy machine may make before and after."""
    monkeypatch.setattr(loop_guard, "_LONG", 0.05)
    monkeypatch.setattr(loop_guard, "_QUIET", 0.0)
    stalls: list[float] = []

    def told() -> bool:
        said = [record.getMessage() for record in caplog.records]
        return any("has not turned for" in each and "stall (test_loop_guard.py:" in each for each in said)

    async def stall() -> None:
        guard = LoopGuard(stalls.append, lambda: True)
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


def test_it_looks_seldom_until_work_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an idle loop sleep; a stall of the first request is counted all the same."""
    waits: list[float] = []
    stalls: list[float] = []
    busy = False

    async def idle_and_then_busy() -> None:
        nonlocal busy
        loop = asyncio.get_running_loop()
        later = loop.call_later
        guard = LoopGuard(stalls.append, lambda: busy)

        def call_later(seconds: float, *call: Any) -> asyncio.TimerHandle:
            waits.append(seconds)
            return later(seconds, *call)

        monkeypatch.setattr(loop, "call_later", call_later)
        while not waits:
            await asyncio.sleep(0)
        stalls.clear()
        busy = True
        guard.stir()
        guard.stir()
        time.sleep(0.06)
        while not stalls:
            await asyncio.sleep(0)
        busy = False
        while waits[-1] < 0.5:
            await asyncio.sleep(0)
        guard.close()
        ticks = len(waits)
        guard.stir()
        assert len(waits) == ticks

    asyncio.run(idle_and_then_busy())
    assert waits[0] >= 0.5
    assert set(waits[1:-1]) == {0.02}
    assert max(stalls) >= 0.03

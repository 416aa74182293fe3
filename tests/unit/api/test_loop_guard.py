"""The event loop is watched; nothing here depends on how fast the machine is."""

from __future__ import annotations

import asyncio
import logging
import time

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

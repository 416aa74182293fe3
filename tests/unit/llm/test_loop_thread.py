"""An event loop on a thread of its own."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ferrule.errors import EngineDead
from ferrule.llm.loop_thread import LoopThread


def test_of_two_that_close_one_waits_for_the_other() -> None:
    loop, begun, go_on, closed = LoopThread("loop"), threading.Event(), asyncio.Event(), []

    async def wait() -> None:
        begun.set()
        await go_on.wait()
        closed.append("part")

    def close() -> None:
        loop.close()
        closed.append("all")

    loop.opened.push_async_callback(wait)
    threads = [threading.Thread(target=close) for _ in range(2)]
    for thread in threads:
        thread.start()
    begun.wait()
    loop.post(go_on.set)
    for thread in threads:
        thread.join(30)
    assert closed == ["part", "all", "all"]
    with pytest.raises(EngineDead):
        loop.wait(asyncio.sleep(0))

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


def test_who_waits_while_another_thread_closes_is_told_so() -> None:
    loop, begun, told = LoopThread("loop"), threading.Event(), []

    async def for_ever() -> None:
        begun.set()
        await asyncio.Event().wait()

    def wait() -> None:
        try:
            loop.wait(for_ever())
        except EngineDead as error:
            told.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    loop.close()
    thread.join(30)
    assert told == ["This LLM was closed. Make another one to go on."]

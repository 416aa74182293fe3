"""Room for bodies: who waits, who is refused, and what decoding in turns makes of a large body."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ferrule.api import budget as budgets
from ferrule.api import json_turns
from ferrule.api.budget import Budget
from ferrule.api.json_body import JsonScan, decode_large
from ferrule.errors import FerruleError, OverloadedError, RequestError, TooLargeError, UnavailableError
from ferrule.shared_memory.board import Board
from ferrule.shared_memory.buffers import Buffers


def ignore(error: FerruleError) -> None:
    pass


def make(limit: int = 1000, **more: Any) -> Budget:
    return Budget(Buffers(Board(), limit), **more)


async def test_a_claim_is_given_back_whatever_happens() -> None:
    budget = make()

    async def fail() -> None:
        with budget.claim(ignore) as claim:
            await budget.grow(claim, 600)
            raise ZeroDivisionError(budget.buffers.used)

    with pytest.raises(ZeroDivisionError, match="600"):
        await fail()
    assert budget.buffers.used == 0


async def test_who_finds_no_room_waits_for_it_and_is_refused_in_the_end() -> None:
    budget = make(patience=30.0)
    with budget.claim(ignore) as first:
        await budget.grow(first, 900)
        with budget.claim(ignore) as second:
            waiting = asyncio.create_task(budget.grow(second, 200))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            budget.resize(first, 700)
            await waiting
            assert budget.buffers.used == 900
    budget = make(patience=0.01)
    with budget.claim(ignore) as first, budget.claim(ignore) as second:
        await budget.grow(first, 900)
        with pytest.raises(UnavailableError) as caught:
            await budget.grow(second, 200)
        assert caught.value.retry_after
        assert caught.value.__context__ is None
        with pytest.raises(TooLargeError):
            await budget.grow(second, 1001)


async def test_one_of_several_keys_gets_half() -> None:
    budget = make(keys=(1, 2), patience=0.01)
    with budget.claim(ignore) as first, budget.claim(ignore) as same, budget.claim(ignore) as other:
        first.key = same.key = "alice"
        await budget.grow(first, 400)
        with pytest.raises(OverloadedError):
            await budget.grow(same, 200)
        await budget.grow(other, 200)
        with pytest.raises(TooLargeError):
            await budget.grow(other, 400)


async def test_large_bodies_leave_a_quarter_to_what_they_hold() -> None:
    budget = make(patience=0.01)
    with budget.claim(ignore) as first, budget.claim(ignore) as second:
        await budget.grow(first, 700, turn=True)
        with pytest.raises(UnavailableError):
            await budget.grow(second, 100, turn=True)
        await budget.grow(first, 300)


async def test_only_bodies_that_others_wait_for_and_that_hardly_move_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(budgets, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(budgets, "_POLL", 0.001)
    budget, ended = make(300_000), list[str]()
    ends: dict[str, Callable[[FerruleError], None]] = {
        name: lambda error, name=name: ended.append(name)
        for name in ("slow", "fast", "silent", "waits")  # type: ignore[misc]
    }
    with (
        budget.claim(ends["slow"]) as slow,
        budget.claim(ends["fast"]) as fast,
        budget.claim(ends["silent"]) as silent,
        budget.claim(ends["waits"]) as waits,
    ):
        for claim in (slow, fast, silent):
            await budget.grow(claim, 100_000)
        slow.reading = fast.reading = True
        waiting = asyncio.create_task(budget.grow(waits, 1000))
        for _ in range(3):
            await asyncio.sleep(0.05)
            now[0] += 2.5
            fast.received += 70_000
            slow.received += 10
        assert set(ended) == {"slow"}
        waiting.cancel()


# ------------------------------------------------------------------------------------------ decoding in turns


def in_turns(text: bytes | bytearray) -> Any:
    turns = json_turns.decode_in_turns(text)
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return end.value


def draw(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8)
    if kind == 0:
        parts = ["a", "\\", '"', "é", "中", "😀", "\n", "abcdefghijklmnop", "\\" * 50]
        return "".join(rng.choice(parts) for _ in range(rng.randrange(30)))
    if kind == 1:
        return [rng.choice([1, 2.5, None, True, 12345]) for _ in range(rng.randrange(60))]
    if kind == 2 or depth > 4:
        return rng.randrange(10**6)
    if kind < 5:
        return [draw(rng, depth + 1) for _ in range(rng.randrange(6))]
    return {f"k{number}é": draw(rng, depth + 1) for number in range(rng.randrange(6))}


def outcome(decode: Callable[[Any], Any], text: bytes | bytearray) -> Any:
    try:
        return decode(text)
    except (UnicodeDecodeError, msgspec.DecodeError):
        return "refused"


def test_what_is_decoded_in_turns_is_what_is_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_turns, "PIECE", 40)
    rng, refused = random.Random(1), 0
    for _ in range(1500):
        text = bytearray(json.dumps(draw(rng), ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1])).encode())
        for _ in range(rng.choice((0, 0, 1, 2))):
            place = rng.randrange(len(text))
            text[place : place + rng.randrange(2)] = rng.choice([b",", b'"', b"\\", b"[", b"]", b" ", b"\xff", b""])
        expected = outcome(msgspec.json.decode, text)
        assert outcome(in_turns, text) == outcome(in_turns, bytes(text)) == expected
        refused += expected == "refused"
    assert 200 < refused < 1200


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":[' + b"12345," * 100_000 + b"1]}",
        b'{"a":"' + b"hello wor" * 100_000 + b'"}',
        b'{"a":"' + b"\\u4e2d" * 100_000 + b'"}',
        b'{"a":"' + b"\\ud83d\\ude00" * 50_000 + b'"}',
        b'{"a":"' + b"\\\\" * 300_000 + b'"}',
        b'{"a":[' + b'"word",' * 50_000 + b'""]}',
        b"{" + b",".join(b'"%d":1' % number for number in range(50_000)) + b"}",
    ],
)
async def test_a_large_body_gives_turns(text: bytes) -> None:
    scan, turns = JsonScan(64), 0
    scan.feed(text)
    work = asyncio.create_task(decode_large(text, scan))
    while not work.done():
        await asyncio.sleep(0)
        turns += 1
    assert work.result() == json.loads(text)
    assert turns >= 4
    assert 0.5 * len(text) < scan.num_bytes < 50 * len(text)


async def test_a_large_body_with_a_number_that_is_too_long_is_refused() -> None:
    text = b'{"a":"' + b"x" * 300_000 + b'","b":%d}' % 10**30
    scan = JsonScan(64)
    scan.feed(text)
    with pytest.raises(RequestError, match="64 bits"):
        await decode_large(text, scan)

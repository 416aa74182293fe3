"""A picture of an engine at work, for the page at `/ui`: numbers and request ids, never a prompt or an output.

An engine makes one between two steps, when a client calls ``live``. Steps are noted down for a few seconds after such a
call, so an engine that nobody watches does no extra work. Its size is bounded, and so is the time that it takes: 256
requests, 8,192 blocks of the cache, 120 steps. What is beyond is counted and not shown.

This reads the default scheduler's own state, which is why it is not in the plugin contract: a scheduler that does not
derive from that one shows its figures alone.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

from ferrule.engine.blocks import BlockPool
from ferrule.engine.loop import EngineLoop
from ferrule.engine.preparing import Preparing
from ferrule.engine.request import Request
from ferrule.engine.scheduler import DefaultScheduler
from ferrule.types import Chunk, StepPlan

MAX_ROWS = 256  # of the requests that run, and of those that wait
MAX_STEPS = 120
MAX_BLOCKS = 8_192  # that are looked at: of a larger cache, every second, third … one
MAX_CELLS = 1_024  # of the map of the cache
WATCHED_SECONDS = 5.0  # after a call for which steps are noted down


class Live:
    """The pictures of one engine. The engine's thread calls its methods."""

    def __init__(self, loop: EngineLoop, clock: Callable[[], float]) -> None:
        """Answer the loop's calls ``live``."""
        self._loop = loop
        self._clock = clock
        self._noted: deque[tuple[float, float, tuple[Chunk, ...]]] = deque(maxlen=MAX_STEPS)
        self._steps: deque[tuple[float, float, int, int, int]] = deque(
            maxlen=MAX_STEPS
        )  # ended, seconds, tokens, decoding, guesses
        self._asked = 0.0
        self._ended = 0.0  # when the last noted step ended
        loop.calls["live"] = self.picture

    def note(self, plan: StepPlan, begun: float, ended: float) -> None:
        """Note down a step. With several in flight, a step counts from the end of the one before it.

        Its rows are counted when a picture is taken, if it is still among the newest steps then.
        """
        self._noted.append((ended, ended - max(begun, self._ended), plan.chunks))
        self._ended = ended
        if ended - self._asked > WATCHED_SECONDS:
            self._loop.on_step = None
            self._noted.clear()
            self._steps.clear()

    def picture(self) -> dict[str, Any]:
        """Return what the engine does now, as values of JSON; times in seconds.

        Keys: `now`; `figures`, as in `EngineStats`; `limits`; `steps`, oldest first, each [seconds since it ended,
        seconds that it took, tokens, rows that decode, guesses]; of the default scheduler also `running` and `waiting`,
        in the order in which the scheduler has them, `blocks`, and with adapters `adapters`, those that are loaded or
        wanted, each with its numbers of requests.
        """
        now = self._asked = self._clock()
        self._loop.on_step = self.note
        self._steps.extend((ended, seconds, *_counts(chunks)) for ended, seconds, chunks in self._noted)
        self._noted.clear()
        scheduler, limits = self._loop.scheduler, self._loop.scheduler.limits
        found = {
            "now": now,
            "figures": msgspec.to_builtins(scheduler.stats()),
            "limits": {
                "max_num_seqs": limits.max_num_seqs,
                "max_num_batched_tokens": limits.max_num_batched_tokens,
                "max_model_len": limits.max_model_len,
                "block_size": next((group.block_size for group in limits.groups if group.paged), 0),
            },
            "steps": [(now - ended, *counts) for ended, *counts in self._steps],
        }
        if isinstance(scheduler, DefaultScheduler):
            running = islice(scheduler.running.values(), MAX_ROWS)
            if limits.adapter_slots:
                found["limits"]["adapter_slots"] = limits.adapter_slots
                found["adapters"] = _adapters(scheduler, self._loop.preparing)
            found["running"] = [_running(request, scheduler.cache.held(request.id), now) for request in running]
            found["waiting"] = list(islice(_waiting(scheduler, now), MAX_ROWS))
            found["blocks"] = _blocks(scheduler.cache.pool)
        return found


def _counts(chunks: Iterable[Chunk]) -> tuple[int, int, int]:
    """Return how many tokens a step computes, how many of its rows decode, and how many of the tokens are guesses."""
    tokens = decoding = guesses = 0
    for chunk in chunks:
        count = chunk.count
        tokens += count
        decoding += count - chunk.drafts == 1 and chunk.ends == "sample"
        guesses += chunk.drafts
    return tokens, decoding, guesses


def _running(request: Request, blocks: int, now: float) -> dict[str, Any]:
    first = request.first_token
    return _common(request, now) | {
        "phase": "prefill" if request.prefilling else "decode",
        "computed": request.sent,
        "cached": max(0, request.cached),
        "blocks": blocks,
        "queued": request.scheduled - request.spec.arrival,
        "first_token": first - request.spec.arrival if first else None,
        "inter_token": _inter_token(request, now),
    }


def _inter_token(request: Request, now: float) -> float | None:
    """Return the mean time between the tokens of a request so far, or None before the second one."""
    generated = len(request.ids) - request.num_prompt
    return (now - request.first_token) / (generated - 1) if generated > 1 and request.first_token else None


def _waiting(scheduler: DefaultScheduler, now: float) -> Iterator[dict[str, Any]]:
    for request in scheduler.waiting:
        yield _common(request, now) | {"paused": False}
    for request in scheduler.waiting.paused.values():
        yield _common(request, now) | {"paused": True}


def _common(request: Request, now: float) -> dict[str, Any]:
    return {
        "id": request.id,
        "prompt": request.num_prompt,
        "generated": len(request.ids) - request.num_prompt,
        "age": now - request.spec.arrival,
        "preemptions": request.num_preemptions,
        "adapter": next(_named([request]), None),
        "guesses": None if request.guessed is None else msgspec.to_builtins(request.guessed),
    }


def _adapters(scheduler: DefaultScheduler, preparing: Preparing) -> list[dict[str, Any]]:
    """Return the adapters that are in a slot, or that requests use or wait for, in the order of their names."""
    running = Counter(_named(scheduler.running.values()))
    waiting = Counter(_named((*scheduler.waiting, *scheduler.waiting.paused.values()))) + Counter(preparing.adapters())
    loaded = set(preparing.loaded())
    names = sorted(loaded | set(running) | set(waiting))
    return [
        {"name": name, "loaded": name in loaded, "running": running[name], "waiting": waiting[name]}
        for name in names[:MAX_ROWS]
    ]


def _named(requests: Iterable[Request]) -> Iterator[str]:
    """Yield the titles of the adapters of those requests that have one."""
    return (request.spec.adapter.title for request in requests if request.spec.adapter is not None)


def _blocks(pool: BlockPool) -> dict[str, Any]:
    """Return the map of the cache: cells of consecutive blocks, each with how many of those that were looked at are
    cached, used and shared.
    """
    stride = math.ceil((pool.num_blocks - 1) / MAX_BLOCKS)
    states = pool.states(stride)
    each = math.ceil(len(states) / MAX_CELLS)
    starts = range(0, len(states), each)
    names = {"cached": 1, "used": 2, "shared": 3}
    counts = {name: [states.count(state, start, start + each) for start in starts] for name, state in names.items()}
    return {"total": pool.num_blocks - 1, "stride": stride, "per_cell": each, "looked_at": len(states), **counts}

"""Tracks of steps and requests in a profile: they are added to the file that torch's profiler has written.

The file has the JSON of Chrome's traces, which Perfetto opens:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Its times are microseconds since
`baseTimeNanoseconds`, which is since 1970. A step lasts from its submission to its result, so two steps in flight
overlap: each of two tracks has every other one.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ferrule.interfaces.executor import Step
from ferrule.types import StepPlan, StepResult

_TRACKS = ("steps", "steps, every other one")  # their threads are 1 and 2, which no thread of this process is


@dataclass
class StepTracks:
    """The steps since a profile was begun. Times are nanoseconds since 1970, of a clock that does not go back."""

    _events: list[dict[str, Any]] = field(default_factory=list)  # `ts` and `dur` in nanoseconds
    _running: dict[int, str] = field(default_factory=dict)  # by slot: the request
    _offset: int = field(default_factory=lambda: time.time_ns() - time.monotonic_ns())

    def follow(self, plan: StepPlan, step: Step) -> Step:
        """Return a step that notes its end here when its result is asked for."""
        now = self._now()
        for slot in plan.releases:
            if (ended := self._running.pop(slot, None)) is not None:
                self._request("e", ended, now)
        for admit in plan.admits:
            self._running[admit.slot] = admit.id
            self._request("b", admit.id, now)
        return _Followed(self, plan, step, now)

    def ended(self, plan: StepPlan, began: int) -> None:
        prompts = [chunk for chunk in plan.chunks if chunk.count > 1]  # a prompt's last token alone looks decoded
        counts = {"decoded": len(plan.chunks) - len(prompts), "of prompts": sum(chunk.count for chunk in prompts)}
        args = {"rows": len(plan.chunks), "tokens": plan.num_tokens, "admitted": len(plan.admits), **counts}
        name, tid = f"step {plan.step}", 1 + plan.step % len(_TRACKS)
        self._add("X", name, "step", began, tid=tid, dur=self._now() - began, args=args)
        self._add("C", "tokens", "step", began, args=counts)

    def write(self, file: Path) -> None:
        """Add the tracks to a trace, which is replaced at once."""
        with gzip.open(file, "rt", encoding="utf-8") as read:
            trace = json.load(read)
        trace["traceEvents"] += self._told(trace.get("baseTimeNanoseconds", 0))
        part = file.with_suffix(".part")
        with gzip.open(part, "wt", encoding="utf-8", compresslevel=6) as written:
            json.dump(trace, written)
        part.replace(file)

    def _told(self, base: int) -> Iterator[dict[str, Any]]:
        for number, name in enumerate(_TRACKS, 1):
            yield {"ph": "M", "name": "thread_name", "pid": os.getpid(), "tid": number, "args": {"name": name}}
        for id in self._running.values():
            self._request("e", id, self._now())
        for event in self._events:
            times = {"ts": (event["ts"] - base) / 1000} | ({"dur": event["dur"] / 1000} if "dur" in event else {})
            yield event | times

    def _request(self, phase: str, id: str, now: int) -> None:
        self._add(phase, "request", "request", now, id=id)

    def _add(self, phase: str, name: str, category: str, now: int, tid: int = 1, **more: Any) -> None:
        event = {"ph": phase, "name": name, "cat": category, "ts": now, "pid": os.getpid(), "tid": tid}
        self._events.append(event | more)

    def _now(self) -> int:
        return self._offset + time.monotonic_ns()


@dataclass
class _Followed(Step):
    tracks: StepTracks
    plan: StepPlan
    step: Step
    began: int
    _told: bool = False

    def done(self) -> bool:
        return self.step.done()

    def result(self) -> StepResult:
        result = self.step.result()
        if not self._told:
            self._told = True
            self.tracks.ended(self.plan, self.began)
        return result

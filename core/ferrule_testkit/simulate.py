"""Deterministic simulation of a scheduler: random work on a fake device, everything checked after every step.

    python -m ferrule_testkit.simulate --seed 7 --steps 10000

A run is a series of episodes of a few hundred steps, each with other limits, groups, policy and depth. The same
arguments give the same run; a failure prints the line that replays it.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from ferrule.engine.cache import footprint
from ferrule.engine.encodings import Encodings
from ferrule.engine.preparing import Preparing
from ferrule.engine.scheduler import DefaultScheduler
from ferrule.interfaces.scheduler import Scheduler, SchedulerLimits, SchedulingPolicy
from ferrule.plugin.kinds import load_object
from ferrule.types import (
    Admit,
    EngineRequest,
    FinishReason,
    Pooling,
    RequestDelta,
    StepPlan,
    StepResult,
    TokenSampling,
)
from ferrule_testkit.fakes import BullyPolicy, FakeDevice, FakeModel, VirtualClock, longest, scope, solo
from ferrule_testkit.simulate_ledger import Ledger, Violation
from ferrule_testkit.simulate_loads import Loads
from ferrule_testkit.simulate_media import Chance
from ferrule_testkit.simulate_setup import Setup, draw_setup

SchedulerFactory = Callable[[SchedulerLimits, SchedulingPolicy], Scheduler]
EPISODE_STEPS = 300


@cache
def load(kind: str, name: str) -> Any:
    """Load a scheduler or policy class by the name that users type; "bully" is the simulator's own policy."""
    if (kind, name) == ("policy", "bully"):
        return BullyPolicy
    found = list(entry_points(group=f"ferrule.v1.{kind}", name=name))
    if not found:
        raise LookupError(f"there is no {kind} named {name!r}")
    return found[0].load()


# ------------------------------------------------------------------------------------------- the world


class World:
    """A scheduler, a fake device and a ledger. Each public method is a rule that may be applied at any time."""

    def __init__(
        self,
        setup: Setup,
        make: SchedulerFactory,
        rng: random.Random,
        device_cls: type[FakeDevice] = FakeDevice,
        preparing_cls: type[Preparing] = Preparing,
    ) -> None:
        self.setup = setup
        self.limits = setup.limits
        self.rng = rng
        self.clock = VirtualClock()
        self.scheduler = make(setup.limits, load("policy", setup.policy)())
        self.model = FakeModel(setup.limits.groups, setup.vocab_size)
        self.ledger = Ledger(setup.limits, "" if self.scheduler.own_order else setup.policy)
        self.requests: dict[str, EngineRequest] = {}  # all that came
        limits, room = setup.limits, Encodings(setup.limits).room
        self.device = device_cls(self.model, limits.num_blocks, self._scope, limits.num_snapshots, self.guess, room)
        self.chance = Chance(repr(setup) + "luck", setup.storm, setup.vocab_size)
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.submitted = 0
        self.pauses = random.Random(repr(setup))  # another generator, so that nothing else changes
        self.tasks = random.Random(repr(("tasks", setup)))
        self.pausing = self.pauses.choice((0.0, 0.0, 0.1, 0.4))  # chance in a step
        self.loads = Loads(self.device, random.Random(repr(("adapters", setup))), preparing_cls)

    # ------------------------------------------------------------------------------------ rules

    def draw_request(self) -> EngineRequest:
        rng = self.rng
        base = rng.choice(self.setup.bases)
        storm = self.setup.storm
        prompt = list(base[: rng.randint(0, 2 if storm else len(base) // rng.choice((1, 2, 3)))])
        prompt += [rng.randrange(self.setup.vocab_size) for _ in range(rng.randint(0, 3))]
        prompt_ids, media = self.chance.prompt(prompt or [0])
        self.submitted += 1
        few = rng.random() < 0.3
        most = 120 if storm else 30
        scope = (None, None, None, "a", "") if rng.random() < 0.3 else (None,)
        sampling = TokenSampling(
            seed=rng.randrange(4),
            max_tokens=rng.randint(1, 4) if few else rng.randint(1, most),
            min_tokens=rng.choice((0, 0, rng.randint(0, 5))),
            stop_token_ids=tuple(
                rng.randrange(self.setup.vocab_size) for _ in range(0 if storm else rng.choice((0, 0, 1, 2)))
            ),
            logprobs=rng.choice((None, 1)),
            prompt_logprobs=rng.choice((None, None, None, 1)),
        )
        return EngineRequest(
            id=f"r{self.submitted}",
            prompt_ids=prompt_ids,
            work=Pooling(normalize=sampling.seed > 1) if self.tasks.random() < self.setup.pooling else sampling,
            arrival=self.clock.now - rng.choice((0.0, 0.0, rng.random())),
            priority=rng.choice((0, 0, 0, -1, 1, 3)),
            adapter=None if rng.choice(scope) is None or storm else self.loads.draw(),
            media=media,
            cache_salt=(rng.choice(scope), rng.choice(scope))[1],  # two draws, so that nothing else changes
            key_name=("", "a", "b")[self.submitted % 3],
        )

    def guess(self, id: str, ids: Sequence[int]) -> tuple[int, ...]:
        """Return the guesses of the runner's speculator for a request."""
        if id not in self.ledger.live:
            return ()
        track = self.ledger.live[id]
        text = [*track.request.prompt_ids, *track.solo.token_ids, 0, 0, 0]
        return self.chance.guesses(text[len(ids) :])

    def add(self, request: EngineRequest) -> bool:
        """Add a request that can run, as the gate does; one whose id is here must be refused. False when it was not."""
        if not self._can_run(request) or request.id in self.loads.wanting:
            return False
        if request.adapter is not None and request.id not in self.ledger.live:
            self.loads.add(request)
            return True
        return self.queue(request)

    def queue(self, request: EngineRequest) -> bool:
        """Give a request to the scheduler, once its adapter is there."""
        known = request.id in self.ledger.live
        self.requests[request.id] = request
        try:
            self.scheduler.add(request, self.clock.now)
        except ValueError as error:
            if not known:
                raise Violation(f"I10: {request.id} was refused: {error}") from error
            return False
        if known:
            raise Violation(f"I10: {request.id} was admitted twice")
        alone = solo(self.model, request, self.limits.max_model_len)
        self.ledger.add(request, alone)
        self.chance.keep(request, alone.token_ids)
        return True

    def _can_run(self, request: EngineRequest) -> bool:
        """Return whether a request fits into the cache, and into a step where prompts go whole, as the gate before the
        scheduler demands.
        """
        limit = longest(request, self.limits.max_model_len)
        whole = self.limits.chunked_prefill or limit - 1 <= self.limits.max_num_batched_tokens
        fits = footprint(self.limits, limit - 1) <= self.limits.num_blocks - 1
        sizes = [item.count for item in request.media]
        fits = fits and (max if self.limits.chunked_prefill else sum)([0, *sizes]) <= Encodings(self.limits).room
        return whole and fits and len(request.prompt_ids) < limit

    def queue_prepared(self) -> None:
        """Load what was begun, or some of it, and queue the requests for which all is there."""
        for request in self.loads.turn():
            self.queue(request)

    def cancel(self, ids: list[str], reason: FinishReason) -> None:
        self.loads.cancel(ids)
        deltas = self.scheduler.cancel(ids, reason, self.clock.now)
        self.ledger.cancelled(ids, reason, deltas)
        self._note_ends(deltas)

    def pause(self, id: str, paused: bool) -> None:
        """Let the client stop or resume reading a request's output. A scheduler that keeps the default `pause` changes
        nothing.
        """
        self.scheduler.pause(id, paused, self.clock.now)
        if self._overrides("pause"):
            self.ledger.pause(id, paused)

    def fail(self, id: str) -> None:
        """Return error rows for this request from now on."""
        self.device.failing.add(id)

    def reset_cache(self) -> None:
        self.scheduler.reset_cache()

    def plan(self) -> bool:
        """Plan a step and begin it, if one more may be in flight; False when there was nothing to begin."""
        if len(self.in_flight) >= self.limits.depth:
            return False
        plan = self.scheduler.schedule(self.clock.now)
        self.ledger.now = self.clock.now
        self.ledger.planned(plan)
        if plan is None:
            if not (self.in_flight or all(track.paused for track in self.ledger.live.values())):
                raise Violation("I10: work waits, nothing is in flight, and nothing can be planned")
            return False
        self.in_flight.append((plan, self.device.run(plan)))
        return True

    def end_step(self) -> None:
        """Commit the oldest step in flight, if there is one."""
        if self.in_flight:
            plan, result = self.in_flight.popleft()
            deltas = self.scheduler.commit(plan, result, self.clock.now)
            self.ledger.credited(deltas, self.device.failing)
            self._note_ends(deltas)

    def check(self) -> None:
        self.scheduler.check()
        self.ledger.figures(self.scheduler.stats(), self.scheduler.has_work())
        self.ledger.progress()

    # ------------------------------------------------------------------------------------ driver

    def step(self) -> None:
        """Disturb, plan and commit; disturbances and commits come by chance."""
        rng = self.rng
        self.clock.advance(rng.choice((0.001, 0.01, 0.5, 100.0)) * rng.random())
        if rng.random() < self.setup.load and len(self.ledger.live) + len(self.loads.wanting) < 12:
            self.add(self.draw_request())
        if rng.random() < 0.08 and self.ledger.live:
            self.disturb()
        self.queue_prepared()
        if self.ledger.live and self.pauses.random() < self.pausing:
            live = list(self.ledger.live)
            self.pause(self.pauses.choice(live), self.pauses.random() < 0.5)
        begun = self.plan()
        if not begun or len(self.in_flight) >= self.limits.depth or rng.random() < 0.3:
            self.end_step()
        self.check()

    def disturb(self) -> None:
        rng = self.rng
        live = list(self.ledger.live)
        kind = rng.randrange(8)
        if kind < 5:
            ids = rng.sample(live, rng.randint(1, min(2, len(live)))) + ["nobody"]
            self.cancel(ids, rng.choice((FinishReason.ABORT, FinishReason.STOP)))
        elif kind == 5:
            self.fail(rng.choice(live))
        elif kind == 6:
            self.reset_cache()
        else:
            self.add(self.ledger.live[rng.choice(live)].request)

    def drain(self) -> None:
        """Let everything end. Nothing may be left."""
        for id in list(self.ledger.live):
            self.pause(id, False)
        self.loads.late = 0.0
        while self.loads.wanting or self.ledger.live or self.in_flight:
            self.clock.advance(0.01)
            self.queue_prepared()
            self.loads.check_drained(bool(self.ledger.live or self.in_flight))
            if not self.plan() or len(self.in_flight) >= self.limits.depth:
                self.end_step()
            self.check()
        if self.scheduler.schedule(self.clock.now) is not None:
            raise Violation("I4: a plan without a request")
        forgotten = self.scheduler.reset_cache()
        if not self._overrides("reset_cache"):
            return
        if not forgotten and self.limits.prefix_caching:
            raise Violation("I4: prefixes are held without a request")
        stats = self.scheduler.stats()
        if stats.blocks_cached or stats.snapshots:
            raise Violation("I4: prefixes are left after a reset")

    def _scope(self, admit: Admit, adapter: str | None) -> int:
        """Return what a request's cells depend on: its salt, and whatever adapter is in its slot."""
        request = self.requests[admit.id]
        return scope(adapter, request.cache_salt)

    def _note_ends(self, deltas: Sequence[RequestDelta]) -> None:
        for delta in deltas:
            if delta.finish is not None:
                self.loads.preparing.ended(delta.id)

    def _overrides(self, method: str) -> bool:
        """Return whether the scheduler overrides a method that has a default, which is safe and promises less."""
        return getattr(type(self.scheduler), method) is not getattr(Scheduler, method)


@dataclass
class Report:
    steps: int = 0
    requests: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    restored: int = 0  # lives that began with saved states
    preemptions: int = 0
    vectors: int = 0
    right_guesses: int = 0
    wrong_guesses: int = 0
    adapted: int = 0  # requests with an adapter
    encoded: int = 0  # items


def simulate(
    seed: int,
    steps: int,
    scheduler_cls: SchedulerFactory = DefaultScheduler,
    policy: str | None = None,
    depth: int | None = None,
    device_cls: type[FakeDevice] = FakeDevice,
    preparing_cls: type[Preparing] = Preparing,
) -> Report:
    """Run `steps` steps. Raises Violation, or what the scheduler raised, with a line that replays the run."""
    report = Report()
    episode = 0
    try:
        while report.steps < steps:
            rng = random.Random(f"{seed}:{episode}")
            world = World(draw_setup(rng, policy, depth), scheduler_cls, rng, device_cls, preparing_cls)
            for _ in range(min(EPISODE_STEPS, steps - report.steps)):
                world.step()
                report.steps += 1
            world.drain()
            report.requests += world.ledger.finished
            report.tokens += world.ledger.tokens
            report.cached_tokens += world.ledger.hits
            report.restored += world.ledger.restored
            report.preemptions += world.ledger.preemptions
            report.vectors += world.ledger.vectors
            report.encoded += world.ledger.media.encoded
            report.right_guesses += world.device.right_guesses
            report.wrong_guesses += world.device.wrong_guesses
            report.adapted += world.loads.num_prepared
            episode += 1
    except Exception as error:
        line = f"python -m ferrule_testkit.simulate --seed {seed} --steps {steps}"
        line += f" --policy {policy}" if policy else ""
        line += f" --depth {depth}" if depth else ""
        error.add_note(f"episode {episode}, step {report.steps + 1}; replay: {line}")
        raise
    return report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ferrule_testkit.simulate", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds to run, from --seed on")
    parser.add_argument("--policy", help="policy plugin; default: all of the built-in ones")
    parser.add_argument("--depth", type=int, help="steps in flight; default: 1 to 3")
    parser.add_argument("--scheduler", default="default", help="scheduler plugin, or module:Class")
    args = parser.parse_args(argv)
    scheduler = load_object(args.scheduler) if ":" in args.scheduler else load("scheduler", args.scheduler)
    for seed in range(args.seed, args.seed + args.seeds):
        try:
            print(f"seed {seed}: {simulate(seed, args.steps, scheduler, args.policy, args.depth)}")
        except Exception as error:
            print(f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

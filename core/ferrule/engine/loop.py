"""`EngineLoop`: messages in, plans to the executor, results to the scheduler, deltas out. One loop for any depth."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from ferrule import log
from ferrule.errors import FerruleError
from ferrule.interfaces.executor import Executor, StepHandle
from ferrule.interfaces.scheduler import Scheduler
from ferrule.types import (
    Call,
    CallReply,
    Cancel,
    Deltas,
    EngineRequest,
    FinishReason,
    FromEngine,
    RequestDelta,
    RequestTimes,
    StepPlan,
    Submit,
    ToEngine,
)

Receive = Callable[[float], list[tuple[bytes, ToEngine]]]
Send = Callable[[bytes, FromEngine], None]

IDLE_SECONDS = 0.25  # longest wait for a message; bounds how late a stop is noticed
STALL_POLL_SECONDS = 0.01
STATS_SECONDS = 0.1
_logger = log.get("engine")


class EngineLoop:
    """Everything it touches is passed in. One thread calls its methods; `stalled_for` may be called from any.

    `receive(timeout_s)` returns what has arrived, waiting at most that long for the first message. Each request's
    deltas go to the client that submitted it. `stall_seconds` bounds how long work may wait while nothing runs and
    nothing can be planned; then one request is failed. `executor_calls` are the names that a `Call` may pass on.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        receive: Receive,
        send: Send,
        clock: Callable[[], float],
        stall_seconds: float = 5.0,
        executor_calls: frozenset[str] = frozenset(),
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.last_progress = clock()  # when a step last ended or there was nothing to do
        self._receive = receive
        self._send = send
        self._clock = clock
        self._depth = scheduler.limits.depth
        self._stall_seconds = stall_seconds
        self._executor_calls = executor_calls
        self._in_flight: deque[tuple[StepPlan, StepHandle]] = deque()
        self._owners: dict[str, bytes] = {}  # request id -> client, oldest first
        self._outbox: dict[bytes, list[RequestDelta]] = {}  # a key for each client that was heard
        self._stuck = False  # work waits, nothing runs, nothing could be planned
        self._stats_due = False
        self._stats_sent = clock()

    def run(self, stop: Callable[[], bool]) -> None:
        """Step until `stop()`. Raises what a step of the executor raised: a device fault, fatal."""
        while not stop():
            self.step()

    def step(self) -> None:
        """Take in messages, plan and begin one step, and end the oldest one if no more may be in flight."""
        self._take_messages()
        plan = self.scheduler.schedule(self._clock())
        if plan is not None:
            self._in_flight.append((plan, self.executor.submit(plan)))
        if self._in_flight and (plan is None or len(self._in_flight) >= self._depth):
            self._end_oldest_step()
        self._mark_progress(plan)
        self._flush()

    def stalled_for(self, now: float) -> float:
        """Seconds since a step last ended, or since there was last nothing to do."""
        return max(0.0, now - self.last_progress)

    # ------------------------------------------------------------------------------------ steps

    def _end_oldest_step(self) -> None:
        plan, handle = self._in_flight.popleft()
        result = handle.result()
        now = self._clock()
        self.last_progress = now
        self._deliver(self.scheduler.commit(plan, result, now))

    def _mark_progress(self, plan: StepPlan | None) -> None:
        self._stuck = plan is None and not self._in_flight and self.scheduler.has_work()
        now = self._clock()
        if not self._owners:
            self.last_progress = now
        elif self._stuck and self.stalled_for(now) > self._stall_seconds:
            self._fail_oldest(now)
            self.last_progress = now

    def _fail_oldest(self, now: float) -> None:
        """Something must give when nothing can run: one request ends, rather than all of them waiting for ever."""
        id = next(iter(self._owners))
        _logger.error("nothing can be scheduled for %.1f s: request %s ends", self._stall_seconds, id)
        deltas = self.scheduler.cancel([id], FinishReason.ERROR, now)
        error = "The request could not be scheduled."
        self._deliver([msgspec.structs.replace(delta, error=error) for delta in deltas])
        self._owners.pop(id, None)

    # ------------------------------------------------------------------------------------ messages

    def _take_messages(self) -> None:
        if self._stuck:
            patience = STALL_POLL_SECONDS
        else:
            patience = 0.0 if self._owners or self._in_flight else IDLE_SECONDS
        for client, message in self._receive(patience):
            self._outbox.setdefault(client, [])
            if isinstance(message, Submit):
                self._submit(client, message.request)
            elif isinstance(message, Cancel):
                ids = [id for id in message.ids if self._owners.get(id) == client]
                self._deliver(self.scheduler.cancel(ids, message.reason, self._clock()))
            else:
                self._send(client, self._answer(message))

    def _submit(self, client: bytes, request: EngineRequest) -> None:
        """Queue a request. Whatever goes wrong ends this request and no other."""
        if request.id in self._owners:
            _logger.error("request id %s was submitted twice: the second one is dropped", request.id)
            return
        now = self._clock()
        try:
            self.scheduler.add(request, now)
        except Exception as error:
            if not isinstance(error, ValueError):
                _logger.exception("request %s could not be queued", request.id)
            text = str(error) if isinstance(error, ValueError) else "The request could not be queued."
            times = RequestTimes(arrival=request.arrival, finished=now)
            delta = RequestDelta(request.id, finish=FinishReason.ERROR, error=text, times=times)
            self._outbox[client].append(delta)
        else:
            self._owners[request.id] = client

    def _deliver(self, deltas: list[RequestDelta]) -> None:
        for delta in deltas:
            client = self._owners.pop(delta.id) if delta.finish is not None else self._owners[delta.id]
            self._outbox[client].append(delta)
            self._stats_due = self._stats_due or not self._owners

    def _flush(self) -> None:
        """Send at most one message to each client: its deltas, and the figures when due or when all work is done."""
        now = self._clock()
        stats = None
        if self._stats_due or (self._owners and now - self._stats_sent >= STATS_SECONDS):
            waited = self.stalled_for(now) if self._owners else 0.0
            stats = msgspec.structs.replace(self.scheduler.stats(), stalled_seconds=waited)
            self._stats_due = False
            self._stats_sent = now
        for client, deltas in self._outbox.items():
            if deltas or stats is not None:
                self._send(client, Deltas(tuple(deltas), stats))
                self._outbox[client] = []

    # ------------------------------------------------------------------------------------ calls

    def _answer(self, call: Call) -> CallReply:
        try:
            return CallReply(call.number, self._call(call.name, call.args))
        except (FerruleError, AssertionError) as error:
            return CallReply(call.number, error=str(error))
        except Exception:
            _logger.exception("call %s failed", call.name)
            return CallReply(call.number, error=f"{call.name} failed; the log says why")

    def _call(self, name: str, args: tuple[Any, ...]) -> Any:
        if name == "reset_prefix_cache":
            return self.scheduler.reset_cache()
        if name == "stats":
            return msgspec.to_builtins(self.scheduler.stats())
        if name == "check":
            self.scheduler.check()
            return True
        if name not in self._executor_calls:
            raise FerruleError(f"there is no call {name!r}")
        while self._in_flight:  # a call runs between steps
            self._end_oldest_step()
        return self.executor.call(name, args)

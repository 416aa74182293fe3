"""`EngineLoop`: messages in, plans to the executor, results to the scheduler, deltas out. One loop for any depth."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec

from ferrule import log
from ferrule.engine.late_calls import LateCalls
from ferrule.engine.preparing import Preparing
from ferrule.engine.sleep import Sleep
from ferrule.errors import AsleepError, RequestError
from ferrule.interfaces.executor import Executor, Step
from ferrule.interfaces.scheduler import Scheduler
from ferrule.types import (
    Adapter,
    AdapterLoad,
    EngineRequest,
    EngineStats,
    FinishReason,
    RequestDelta,
    RequestTimes,
    StepPlan,
)
from ferrule.wire.messages import Cancel, Channel, Deltas, Pause, Submit

IDLE_SECONDS = 0.25  # longest wait for a message; bounds how late a stop is noticed
STALL_POLL_SECONDS = 0.01
LOADING_POLL_SECONDS = 0.002
STATS_SECONDS = 0.1
_PASSED_ON = ("start_profile", "stop_profile", "collective_rpc", "describe_adapter")  # calls that the executor answers
_logger = log.get("engine")


def _log_failure(doing: str) -> None:
    _logger.exception("%s failed", doing)


class EngineLoop:
    """Everything it touches is passed in. One thread calls its methods; any may call `stalled_for` and `fail`.

    Each request's deltas go to the client that submitted it. `stall_seconds` bounds how long work may wait while
    nothing runs and nothing can be planned; then one request is failed. With `sleep_mode` the engine may sleep;
    requests that come then wait. With `debug` the scheduler checks its invariants each time that all work is done.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        channel: Channel,
        clock: Callable[[], float],
        stall_seconds: float = 5.0,
        sleep_mode: bool = False,
        debug: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.log_failure: Callable[[str], None] = _log_failure  # of the exception that is being handled
        self.on_step: Callable[[StepPlan, float, float], None] | None = None  # plan, times at which it began and ended
        self.last_progress = clock()  # when a step last ended or there was nothing to do
        self.ended = False  # `run` is over
        self._channel = channel
        self._clock = clock
        self._depth = scheduler.limits.depth
        self._stall_seconds = stall_seconds
        self._sleep = Sleep(scheduler, executor, clock, sleep_mode)
        self._debug = debug
        self._unchecked = False  # requests came since the last check
        self._calling = False  # an executor's call may take long: that does not count as a stall
        # With when the step began, and the seconds of planning.
        self._in_flight: deque[tuple[StepPlan, Step, float, float]] = deque()
        self._owners: dict[str, bytes] = {}  # request id -> client, oldest first
        self._paused: set[str] = set()  # their clients do not read
        self.preparing = Preparing(lambda need: self.executor.prepare(need), scheduler.limits.adapter_slots)
        self.calls = self._administration()  # the functions that clients may call, by name
        self._late = LateCalls(channel)
        self._outbox: dict[bytes, list[RequestDelta]] = {}  # a key for each client that was heard
        self._fault: Exception | None = None  # what the executor's check of its health raised
        self._stuck = False  # work waits, nothing runs, nothing could be planned
        self._stats_due = False
        self._stats_sent = clock()

    def run(self, stop: Callable[[], bool]) -> None:
        """Step until `stop()`. Raises what a step of the executor raised, or `fail` was given: a device fault, fatal.

        With `debug`, also AssertionError for an invariant that does not hold: the scheduler is broken, as fatal.
        """
        try:
            while not stop():
                self.step()
        finally:
            self.ended = True

    def step(self) -> None:
        """Take in messages, plan and begin one step, and end the oldest one if no more may be in flight."""
        if self._fault is not None:
            while self._in_flight:
                self._end_oldest_step()  # a step that failed says more
            raise self._fault
        self._take_messages()
        self._late.answer(self.log_failure)
        if not self._sleep.level:  # an adapter may need the model's weights
            self._queue_prepared()
        begun = self._clock()
        plan = None if self._sleep.level else self.scheduler.schedule(begun)
        if plan is not None:
            planning = self._clock() - begun
            self._in_flight.append((plan, self.executor.submit(plan), begun, planning))
        if self._in_flight and (plan is None or len(self._in_flight) >= self._depth):
            self._end_oldest_step()
        self._mark_progress(plan)
        self._flush()
        self._check_when_idle()

    def fail(self, error: Exception) -> None:
        """End the loop at its next turn: its executor cannot go on."""
        self._fault = error

    def stalled_for(self, now: float) -> float:
        """Return the seconds since a step ended, or there was nothing to do; 0 in an administrative call."""
        return 0.0 if self._calling else max(0.0, now - self.last_progress)

    # ------------------------------------------------------------------------------------ steps

    def _end_oldest_step(self) -> None:
        plan, step, begun, planning = self._in_flight.popleft()
        result = step.result()
        if (took := result.seconds) is not None:
            result = msgspec.structs.replace(result, seconds=msgspec.structs.replace(took, scheduler=planning))
        now = self._clock()
        if self.on_step is not None:
            self.on_step(plan, begun, now)
        self.last_progress = now
        self._deliver(self.scheduler.commit(plan, result, now))

    def _mark_progress(self, plan: StepPlan | None) -> None:
        self._stuck = plan is None and not self._in_flight and self.scheduler.has_work() and not self._sleep.level
        now = self._clock()
        if not self.scheduler.has_work() or self._sleep.level:
            self.last_progress = now
        elif self._stuck and self.stalled_for(now) > self._stall_seconds:
            self._fail_oldest(now)
            self.last_progress = now

    def _fail_oldest(self, now: float) -> None:
        """End one request when nothing can run, so that the others do not wait for ever."""
        id = next(id for id in self._owners if id not in self.preparing and id not in self._paused)
        _logger.error("nothing can be scheduled for %.1f s: request %s ends", self._stall_seconds, id)
        deltas = self.scheduler.cancel([id], FinishReason.ERROR, now)
        error = "The request could not be scheduled."
        self._deliver([msgspec.structs.replace(delta, error=error) for delta in deltas])
        self._owners.pop(id, None)

    def _check_when_idle(self) -> None:
        if self._debug and self._unchecked and not (self._owners or self._in_flight):
            self._unchecked = False
            self.scheduler.check()

    # ------------------------------------------------------------------------------------ messages

    def _take_messages(self) -> None:
        if self._stuck:
            patience = STALL_POLL_SECONDS
        else:
            busy = self._in_flight or (self.scheduler.has_work() and not self._sleep.level)
            loading = self._late or (self.preparing and not self._sleep.level)
            patience = 0.0 if busy else LOADING_POLL_SECONDS if loading else IDLE_SECONDS
        for client, message in self._channel.receive(patience):
            self._outbox.setdefault(client, [])
            if isinstance(message, Submit):
                self._submit(client, message.request)
            elif isinstance(message, Cancel):
                self._cancel([id for id in message.ids if self._owners.get(id) == client], message.reason)
            elif isinstance(message, Pause):
                self._pause(client, message)
            else:
                self._late.run(client, message, self.calls, self.log_failure)

    def _submit(self, client: bytes, request: EngineRequest) -> None:
        """Queue a request. Whatever goes wrong ends this request and no other."""
        if request.id in self._owners:
            _logger.error("request id %s was submitted twice: the second one is dropped", request.id)
            return
        self._owners[request.id] = client
        if request.grammar is None and request.adapter is None:
            self._queue(request)
        else:
            self.preparing.add(request)

    def _queue_prepared(self) -> None:
        for request, error in self.preparing.take():
            if error is None:
                self._queue(request)
            elif isinstance(error, AsleepError):  # it slept meanwhile
                self.preparing.add(request)
            elif isinstance(error, RequestError):  # an executor without constraints refuses them: no fault to log
                self._end(request, FinishReason.ERROR, error.message, invalid=True)
            else:
                self._end_unprepared(request, error)

    def _end_unprepared(self, request: EngineRequest, error: BaseException) -> None:
        what, where = ("adapter", "") if request.grammar is None else ("constraint", " on the output")
        try:
            raise error
        except (Exception, SystemExit):
            self.log_failure(f"loading the {what} of request {request.id}")
        self._end(request, FinishReason.ERROR, f"The {what}{where} could not be loaded.")

    def _queue(self, request: EngineRequest) -> None:
        try:
            self.scheduler.add(request, self._clock())
            self._unchecked = True
        except Exception as error:
            if not isinstance(error, ValueError):
                self.log_failure(f"adding request {request.id}")
            text = str(error) if isinstance(error, ValueError) else "The request could not be queued."
            self._end(request, FinishReason.ERROR, text)

    def _cancel(self, ids: list[str], reason: FinishReason) -> None:
        for request in self.preparing.cancel(ids):
            self._end(request, reason)
        self._deliver(self.scheduler.cancel(ids, reason, self._clock()))

    def _pause(self, client: bytes, message: Pause) -> None:
        if self._owners.get(message.id) == client:
            (self._paused.add if message.paused else self._paused.discard)(message.id)
            self.scheduler.pause(message.id, message.paused, self._clock())

    def _end(
        self, request: EngineRequest, finish: FinishReason, error: str | None = None, invalid: bool = False
    ) -> None:
        """Send the last delta of a request that the scheduler does not know."""
        times = RequestTimes(arrival=request.arrival, finished=self._clock())
        self._deliver([RequestDelta(id=request.id, finish=finish, error=error, times=times, invalid=invalid)])

    def _deliver(self, deltas: list[RequestDelta]) -> None:
        for delta in deltas:
            client = self._owners[delta.id]
            self._outbox[client].append(delta)
            if delta.finish is not None:
                del self._owners[delta.id]
                self.preparing.ended(delta.id)
                self._paused.discard(delta.id)
            self._stats_due = self._stats_due or not self._owners

    def _flush(self) -> None:
        """Send at most one message to each client: its deltas, and the figures when due or when all work is done."""
        now = self._clock()
        stats = None
        if self._stats_due or (self._owners and now - self._stats_sent >= STATS_SECONDS):
            stats = self._stats(now)
            self._stats_due = False
            self._stats_sent = now
        for client, deltas in self._outbox.items():
            if deltas or stats is not None:
                self._channel.send(client, Deltas(tuple(deltas), stats))
                self._outbox[client] = []

    def _stats(self, now: float) -> EngineStats:
        waited = self.stalled_for(now) if self._owners else 0.0
        stats = self.scheduler.stats()
        waiting = tuple(dict.fromkeys((*stats.waiting_adapters, *self.preparing.adapters())))
        state = {"stalled_seconds": waited, "sleep_level": self._sleep.level, "waiting_adapters": waiting}
        return msgspec.structs.replace(stats, **state)

    # ------------------------------------------------------------------------------------ calls

    def _administration(self) -> dict[str, Callable[..., Any]]:
        """Return the functions that a `Call` may name. Those that concern the executor run between steps."""
        own: dict[str, Callable[..., Any]] = {
            "reset_prefix_cache": self.scheduler.reset_cache,
            "stats": lambda: msgspec.to_builtins(self._stats(self._clock())),
            "check": lambda: self.scheduler.check() is None,
            "expect": self.executor.expect,
            "read_adapter": self._read_adapter,
            "pin_adapter": lambda name, path, served: self.preparing.pin(Adapter(name=name, path=path, served=served)),
            "unpin_adapter": self.preparing.unpin,
            "is_sleeping": lambda: self._sleep.level > 0,
            "sleep": partial(self._between_steps, self._sleep.begin),
            "wake_up": partial(self._between_steps, self._sleep.end),
        }
        return own | {name: partial(self._between_steps, self._pass_on, name) for name in _PASSED_ON}

    def _read_adapter(self, name: str, path: str, served: str) -> Future[None]:
        """Begin to read and check an adapter, before requests may use it."""
        if not self.scheduler.limits.adapter_slots:
            raise RequestError("This server has no adapters.")
        return self.executor.prepare(AdapterLoad(adapter=Adapter(name=name, path=path, served=served), slot=0))

    def _pass_on(self, name: str, *args: Any) -> Any:
        return self.executor.call(name, args)

    def _between_steps(self, function: Callable[..., Any], *args: Any) -> Any:
        while self._in_flight:
            self._end_oldest_step()
        self._calling = True
        try:
            return function(*args)
        finally:
            self.last_progress = self._clock()
            self._calling = False
            self._stats_due = True

"""EngineLoop on a fake device: routing, depth, calls, stalls, faults."""

import sys
from collections import deque
from concurrent.futures import CancelledError, Future

import pytest

from ferrule.engine.loop import STATS_SECONDS, EngineLoop
from ferrule.engine.scheduler import DefaultScheduler
from ferrule.errors import AsleepError, CheckpointError, EngineDead, RequestError, RequestFailed
from ferrule.interfaces.scheduler import Scheduler, SchedulerLimits
from ferrule.types import Adapter, AdapterLoad, CacheGroup, CompiledGrammar, EngineRequest, FinishReason, TokenSampling
from ferrule.wire.messages import Call, CallReply, Cancel, Deltas, Pause, Submit
from ferrule_plugins.policy.fcfs import FcfsPolicy
from ferrule_testkit.fakes import VirtualClock, solo
from tests.fakes.executor import FakeExecutor

GROUPS = (CacheGroup("full", 4),)
A, B = b"client-a", b"client-b"


class LoopHarness:
    """A loop with two clients that are lists."""

    def __init__(self, depth=1, scheduler_cls=DefaultScheduler, break_at=0, adapter_slots=0, **more):
        self.clock = VirtualClock()
        self.executor = FakeExecutor(GROUPS, break_at=break_at)
        self.executor.init_cache(64)
        limits = SchedulerLimits(
            groups=GROUPS,
            num_blocks=64,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=64,
            depth=depth,
            adapter_slots=adapter_slots,
        )
        self.scheduler = scheduler_cls(limits, FcfsPolicy())
        self.inbox = deque()
        self.sent = {A: [], B: []}
        self.waits = []
        self.loop = EngineLoop(
            self.scheduler, self.executor, self, self.clock, **{"stall_seconds": 2.0, "debug": True} | more
        )

    def receive(self, timeout):
        self.waits.append(timeout)
        messages = list(self.inbox)
        self.inbox.clear()
        if not messages:
            self.clock.advance(timeout)
        return messages

    def send(self, client, message):
        self.sent[client].append(message)

    def submit(self, client, id, prompt=(1, 2, 3), max_tokens=4, **more):
        sampling = TokenSampling(seed=1, max_tokens=max_tokens)
        request = EngineRequest(id=id, prompt_ids=tuple(prompt), work=sampling, **more)
        self.inbox.append((client, Submit(request)))
        return request

    def steps(self, count):
        for _ in range(count):
            self.loop.step()

    def drain(self):
        self.steps(1)
        while self.scheduler.has_work():
            self.steps(1)

    def deltas(self, client):
        return [delta for m in self.sent[client] if isinstance(m, Deltas) for delta in m.deltas]

    def said(self, client, id):
        return [token for delta in self.deltas(client) if delta.id == id for token in delta.token_ids]

    def stats(self, client):
        return [m.stats for m in self.sent[client] if isinstance(m, Deltas) and m.stats is not None]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_each_client_gets_its_own_deltas_at_any_depth(depth):
    harness = LoopHarness(depth)
    one = harness.submit(A, "one", range(20), 8)
    two = harness.submit(B, "two", range(5), 6)
    harness.drain()
    for client, request in ((A, one), (B, two)):
        expected = solo(harness.executor.model, request, 64)
        assert harness.said(client, request.id) == expected.token_ids
        assert {delta.id for delta in harness.deltas(client)} == {request.id}
        assert [delta.finish for delta in harness.deltas(client)][-1] is FinishReason.LENGTH
    harness.scheduler.check()


def test_depth_is_the_number_of_steps_in_flight():
    for depth in (1, 2, 3):
        harness = LoopHarness(depth)
        harness.submit(A, "one", max_tokens=9)
        harness.steps(depth)
        assert len(harness.executor.plans) == depth
        assert len(harness.said(A, "one")) == 1


def test_one_message_a_step_for_a_client():
    harness = LoopHarness()
    harness.submit(A, "one")
    harness.submit(A, "two")
    harness.steps(1)
    (message,) = harness.sent[A]
    assert [delta.id for delta in message.deltas] == ["one", "two"]
    assert harness.sent[B] == []


def test_idle_loop_waits_and_counts_as_progress():
    harness = LoopHarness()
    harness.steps(3)
    assert harness.waits == [0.25] * 3
    assert harness.loop.stalled_for(harness.clock.now) == 0.0
    assert harness.executor.plans == []
    harness.submit(A, "one")
    harness.steps(2)
    assert harness.waits[-1] == 0.0


def test_run_ends_when_it_is_told_to():
    harness = LoopHarness()
    harness.submit(A, "one")
    harness.loop.run(lambda: bool(harness.deltas(A)) and harness.deltas(A)[-1].finish is not None)
    assert len(harness.said(A, "one")) == 4


def test_a_loop_says_when_it_is_over():
    """Its watchdog must not end a process that goes on with something else."""
    harness = LoopHarness()
    harness.submit(A, "one", max_tokens=50)
    assert not harness.loop.ended
    harness.loop.run(lambda: bool(harness.deltas(A)))
    assert harness.loop.ended
    harness.submit(A, "two")
    harness.executor.submit = None
    with pytest.raises(TypeError):
        harness.loop.run(lambda: False)
    assert harness.loop.ended


def test_cancel_ends_a_request_at_once_and_only_for_its_owner():
    harness = LoopHarness(depth=2)
    harness.submit(A, "one", max_tokens=50)
    harness.steps(3)
    harness.inbox.append((B, Cancel(("one",))))
    harness.steps(1)
    assert harness.deltas(A)[-1].finish is None
    harness.inbox.append((A, Cancel(("one", "nobody"), FinishReason.STOP)))
    harness.steps(1)
    assert harness.deltas(A)[-1].finish is FinishReason.STOP
    harness.steps(3)
    assert [delta.finish for delta in harness.deltas(A)].count(FinishReason.STOP) == 1
    assert harness.deltas(A)[-1].finish is FinishReason.STOP
    assert harness.deltas(B) == []


def test_a_request_that_cannot_run_ends_alone():
    harness = LoopHarness()
    harness.submit(A, "long", range(100))
    harness.submit(A, "fine")
    harness.drain()
    first = harness.deltas(A)[0]
    assert (first.id, first.finish) == ("long", FinishReason.ERROR)
    assert "100 tokens" in first.error
    assert len(harness.said(A, "fine")) == 4


@pytest.mark.advisory("CVE-2026-105756")
def test_an_exception_while_a_request_is_added_ends_alone_and_says_nothing_of_its_text():
    class Bad(DefaultScheduler):
        def add(self, request, now):
            if request.id == "bad":
                raise KeyError("/secret/path")
            super().add(request, now)

    harness = LoopHarness(scheduler_cls=Bad)
    harness.submit(A, "bad")
    harness.submit(A, "fine")
    harness.drain()
    assert harness.deltas(A)[0].error == "The request could not be queued."
    assert len(harness.said(A, "fine")) == 4


@pytest.mark.advisory("CVE-2026-105755")
def test_a_second_request_of_the_same_id_does_not_touch_the_first():
    harness = LoopHarness()
    harness.submit(A, "one")
    harness.submit(B, "one", max_tokens=30)
    harness.drain()
    assert len(harness.said(A, "one")) == 4
    assert harness.deltas(B) == []


def test_stats_come_now_and_then_and_when_all_is_done():
    harness = LoopHarness()
    harness.submit(A, "one", max_tokens=30)
    harness.submit(B, "two", max_tokens=2)
    for _ in range(20):
        harness.steps(1)
        harness.clock.advance(STATS_SECONDS / 4)
    assert 3 <= len(harness.stats(A)) <= 6
    harness.drain()
    last = harness.stats(A)[-1]
    assert harness.stats(B)[-1] == last
    assert (last.running, last.waiting, last.blocks_used, last.generation_tokens) == (0, 0, 0, 32)


def ask(harness, *calls):
    """Return the replies to calls (name, *args), taken in by one step."""
    seen = len(harness.sent[B])
    for number, (name, *args) in enumerate(calls):
        harness.inbox.append((B, Call(number, name, tuple(args))))
    harness.steps(1)
    replies = [m for m in harness.sent[B][seen:] if isinstance(m, CallReply)]
    assert [reply.number for reply in replies] == list(range(len(calls)))
    return replies


def test_calls_are_answered_by_their_number():
    harness = LoopHarness()
    harness.submit(A, "one", max_tokens=20)
    harness.steps(2)
    calls = [("stats",), ("check",), ("reset_prefix_cache",), ("collective_rpc", "x", [], {}), ("shutdown",)]
    replies = ask(harness, *calls)
    assert (replies[0].result["running"], replies[0].result.get("sleep_level", 0)) == (1, 0)
    assert replies[1].result is True
    assert replies[2].result is False  # the first block of the request is full, and held
    assert replies[3].result == 1
    assert harness.executor.calls == [("collective_rpc", ("x", [], {}))]
    assert (replies[4].error, replies[4].status) == ("there is no call 'shutdown'", 500)
    assert harness.executor.alive


@pytest.mark.advisory("CVE-2025-10164")
@pytest.mark.parametrize("name", ["submit", "release", "restore", "call", "step", "__init__", "_between_steps"])
def test_the_set_of_calls_is_closed(name):
    harness = LoopHarness(sleep_mode=True)
    assert ask(harness, (name,))[0].error == f"there is no call {name!r}"
    assert harness.executor.calls == []


def test_calls_on_the_executor_run_between_steps():
    harness = LoopHarness(depth=3)
    harness.submit(A, "one", max_tokens=20)
    harness.steps(2)
    assert harness.said(A, "one") == []
    seen = []
    harness.executor.call = lambda name, args: seen.append(len(harness.loop._in_flight))
    harness.inbox.append((A, Call(1, "start_profile")))
    harness.steps(1)
    assert seen == [0]
    assert len(harness.said(A, "one")) >= 2


@pytest.mark.parametrize(
    ("error", "text", "status"),
    [
        (RequestFailed("cannot do that"), "cannot do that", 500),
        (RequestError("no such method"), "no such method", 400),
        (OSError("/secret"), "stop_profile failed; the log says why", 500),
    ],
)
def test_a_call_that_fails_is_answered_and_the_loop_lives(error, text, status):
    harness = LoopHarness()

    def call(name, args):
        raise error

    harness.executor.call = call
    harness.submit(A, "one")
    (reply,) = ask(harness, ("stop_profile",))
    assert (reply.error, reply.status) == (text, status)
    harness.drain()
    assert len(harness.said(A, "one")) == 4


def test_a_long_call_is_no_stall():
    harness = LoopHarness()
    harness.submit(A, "one", max_tokens=30)
    harness.steps(2)
    waited = []

    def call(name, args):
        harness.clock.advance(1000.0)
        waited.append(harness.loop.stalled_for(harness.clock.now))

    harness.executor.call = call
    ask(harness, ("collective_rpc", "x", [], {}))
    assert waited == [0.0]
    assert harness.loop.stalled_for(harness.clock.now) == 0.0


# ------------------------------------------------------------------------------------------------ sleep


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_requests_that_slept_say_what_they_would_have_said(depth):
    harness = LoopHarness(depth, sleep_mode=True)
    requests = [harness.submit(A, id, range(5, 5 + n), 20) for id, n in (("one", 3), ("two", 11), ("three", 30))]
    harness.steps(4)
    assert ask(harness, ("sleep",), ("is_sleeping",))[1].result is True
    requests.append(harness.submit(A, "late", (7, 8), 5))
    plans = len(harness.executor.plans)
    harness.steps(20)
    assert len(harness.executor.plans) == plans
    assert harness.waits[-1] == 0.25  # asleep, it waits for messages
    assert harness.stats(A)[-1].sleep_level == 1
    assert (harness.stats(A)[-1].running, harness.stats(A)[-1].waiting, harness.stats(A)[-1].blocks_used) == (0, 4, 0)
    assert [reply.result for reply in ask(harness, ("wake_up",), ("is_sleeping",))] == [None, False]
    harness.drain()
    for request in requests:
        expected = solo(harness.executor.model, request, 64)
        assert harness.said(A, request.id) == expected.token_ids
    assert harness.executor.calls == [
        ("release", (("weights", "kv_cache"), 1)),
        ("restore", ("weights",)),
        ("restore", ("kv_cache",)),
    ]
    assert harness.stats(A)[-1].preemptions == 0
    harness.scheduler.check()


def test_prefixes_are_forgotten_in_sleep():
    harness = LoopHarness(sleep_mode=True)
    harness.submit(A, "one", range(20))
    harness.drain()
    ask(harness, ("sleep", 2), ("wake_up", None))
    harness.submit(A, "two", range(20))
    harness.drain()
    assert harness.deltas(A)[-1].cached == 0
    assert len(harness.said(A, "two")) == 4


def test_parts_wake_one_by_one():
    harness = LoopHarness(sleep_mode=True)
    ask(harness, ("sleep", 1), ("sleep", 2))
    harness.submit(A, "one")
    harness.steps(2)
    ask(harness, ("wake_up", ["weights"]), ("wake_up", ["weights"]))
    harness.steps(3)
    assert harness.said(A, "one") == []
    assert ask(harness, ("is_sleeping",), ("stats",))[1].result["sleep_level"] == 2
    ask(harness, ("wake_up", ["kv_cache"]))
    harness.drain()
    assert len(harness.said(A, "one")) == 4
    assert [args for name, args in harness.executor.calls if name == "restore"] == [("weights",), ("kv_cache",)]


def test_a_request_is_cancelled_in_its_sleep():
    harness = LoopHarness(sleep_mode=True)
    harness.submit(A, "one", max_tokens=30)
    harness.steps(3)
    ask(harness, ("sleep",))
    harness.inbox.append((A, Cancel(("one",))))
    harness.steps(1)
    assert harness.deltas(A)[-1].finish is FinishReason.ABORT
    assert not harness.scheduler.has_work()


def test_sleep_is_no_stall():
    harness = LoopHarness(sleep_mode=True)
    harness.submit(A, "one")
    harness.steps(1)
    ask(harness, ("sleep",))
    for _ in range(10):
        harness.steps(1)
        harness.clock.advance(100.0)
    harness.steps(1)
    assert harness.loop.stalled_for(harness.clock.now) == 0.0
    assert harness.deltas(A)[-1].finish is None
    assert harness.stats(A)[-1].stalled_seconds < 1.0


@pytest.mark.parametrize(
    ("call", "status", "word"),
    [(("sleep", 3), 400, "level"), (("sleep", "1"), 400, "level"), (("wake_up", ["lora"]), 400, "kv_cache")],
)
def test_calls_about_sleep_are_checked(call, status, word):
    harness = LoopHarness(sleep_mode=True)
    (reply,) = ask(harness, call)
    assert reply.status == status
    assert word in reply.error
    assert harness.executor.calls == []


@pytest.mark.parametrize("name", ["sleep", "wake_up"])
def test_without_sleep_mode_it_stays_awake(name):
    harness = LoopHarness()
    (reply,) = ask(harness, (name,))
    assert (reply.status, reply.error) == (403, "This server cannot sleep: start it with --enable-sleep-mode.")


def test_a_scheduler_that_cannot_evacuate_sleeps_when_it_is_idle():
    class Plain(DefaultScheduler):
        evacuate = Scheduler.evacuate

    harness = LoopHarness(scheduler_cls=Plain, sleep_mode=True)
    harness.submit(A, "one", max_tokens=10)
    harness.steps(2)
    assert "Requests run" in ask(harness, ("sleep",))[0].error
    harness.drain()
    assert ask(harness, ("sleep",))[0].error is None


def test_a_wake_up_that_fails_can_be_repeated():
    harness = LoopHarness(sleep_mode=True)
    ask(harness, ("sleep",))
    call = harness.executor.call

    def missing(name, args):
        raise CheckpointError("The weights are gone.")

    harness.executor.call = missing
    assert ask(harness, ("wake_up",), ("is_sleeping",))[0].error == "The weights are gone."
    harness.executor.call = call
    assert [reply.result for reply in ask(harness, ("wake_up",), ("is_sleeping",))] == [None, False]


def test_a_broken_invariant_is_reported_by_the_check_call():
    harness = LoopHarness()
    harness.scheduler._slots.free.pop()
    harness.inbox.append((A, Call(1, "check")))
    harness.steps(1)
    assert harness.sent[A][0].error.startswith("I9")


class Loses(DefaultScheduler):
    """A scheduler that forgets the slots of requests that have ended."""

    def _vacate(self, request):
        super()._vacate(request)
        self._slots.free.pop()


@pytest.mark.parametrize("debug", [True, False])
def test_with_debug_an_idle_engine_checks_itself(debug):
    harness = LoopHarness(scheduler_cls=Loses, debug=debug)
    harness.submit(A, "one", max_tokens=2)
    harness.steps(1)
    if debug:
        with pytest.raises(AssertionError, match="I9: slots are lost"):
            harness.drain()
    else:
        harness.drain()
        harness.steps(3)
    assert len(harness.said(A, "one")) == 2


def test_an_engine_that_stays_idle_checks_itself_once():
    harness = LoopHarness()
    checks = []
    harness.scheduler.check = lambda: checks.append(len(harness.deltas(A)))
    harness.submit(A, "one", max_tokens=2)
    harness.submit(A, "two", max_tokens=3)
    harness.drain()
    harness.steps(3)
    assert checks == [5]


class Lazy(DefaultScheduler):
    """A scheduler that never runs a request whose id begins with x, nor anything behind it."""

    def schedule(self, now):
        return None if any(id.startswith("x") for id in self._requests) else super().schedule(now)


def test_work_that_cannot_be_planned_fails_one_request_after_a_while():
    harness = LoopHarness(scheduler_cls=Lazy)
    harness.submit(A, "x")
    harness.submit(B, "fine")
    harness.steps(50)
    assert harness.deltas(A) == []
    assert harness.loop.stalled_for(harness.clock.now) > 0.3
    assert harness.stats(A)[-1].stalled_seconds > 0.1
    assert harness.waits[-1] > 0  # no busy loop
    while not harness.deltas(A):
        harness.steps(1)
        assert harness.loop.stalled_for(harness.clock.now) <= 2.1
    (delta,) = harness.deltas(A)
    assert (delta.finish, delta.error) == (FinishReason.ERROR, "The request could not be scheduled.")
    harness.drain()
    assert len(harness.said(B, "fine")) == 4


def test_a_device_fault_is_fatal():
    harness = LoopHarness(depth=2, break_at=3)
    harness.submit(A, "one", max_tokens=30)
    with pytest.raises(EngineDead):
        harness.steps(10)


def test_a_hanging_step_shows_in_stalled_for():
    harness = LoopHarness()
    harness.submit(A, "one", max_tokens=30)
    harness.steps(2)
    harness.clock.advance(42.0)
    assert harness.loop.stalled_for(harness.clock.now) == 42.0
    harness.steps(1)
    assert harness.loop.stalled_for(harness.clock.now) == 0.0


# --------------------------------------------------------------------------------------- constraints

GRAMMAR = CompiledGrammar(backend="b", digest=b"d", data=b"")


class Preparing(LoopHarness):
    """The futures of constraints and adapters are the test's."""

    def __init__(self, **more):
        super().__init__(**more)
        self.loading, self.needs = [], []
        self.executor.prepare = self.prepare

    def prepare(self, need):
        self.needs.append(need)
        self.loading.append(Future())
        return self.loading[-1]

    def log_failures(self):
        """Return a list of what is logged from now on: what was being done, and the exception that was being
        handled.
        """
        logged = []
        self.loop.log_failure = lambda doing: logged.append((doing, sys.exception()))
        return logged


def test_a_request_waits_for_its_own_constraint_only():
    harness = Preparing()
    constrained = harness.submit(A, "constrained", grammar=GRAMMAR)
    harness.submit(A, "free")
    harness.steps(12)
    assert len(harness.said(A, "free")) == 4
    assert harness.said(A, "constrained") == []
    harness.loading[0].set_result(None)
    harness.drain()
    assert harness.said(A, "constrained") == solo(harness.executor.model, constrained, 64).token_ids


UNLOADED = "The constraint on the output could not be loaded."


@pytest.mark.advisory("CVE-2026-105757")
@pytest.mark.parametrize("fault", [RuntimeError("planted"), SystemExit(1), None], ids=["raised", "exited", "cancelled"])
def test_a_constraint_that_cannot_be_loaded_ends_its_request(fault):
    harness = Preparing()
    logged = harness.log_failures()
    harness.submit(A, "constrained", grammar=GRAMMAR)
    harness.submit(B, "free")
    harness.steps(1)
    if fault is None:
        assert harness.loading[0].cancel()
    else:
        harness.loading[0].set_exception(fault)
    harness.steps(8)
    (last,) = harness.deltas(A)
    assert (last.finish, last.error) == (FinishReason.ERROR, UNLOADED)
    assert len(harness.said(B, "free")) == 4
    ((doing, error),) = logged
    assert doing == "loading the constraint of request constrained"
    assert type(error) is (CancelledError if fault is None else type(fault))


def test_an_executor_that_refuses_constraints_says_why_and_logs_no_fault():
    harness = Preparing()
    logged = harness.log_failures()
    harness.submit(A, "constrained", grammar=GRAMMAR)
    harness.steps(1)
    harness.loading[0].set_exception(RequestError("no constraints here"))
    harness.steps(2)
    (last,) = harness.deltas(A)
    assert (last.finish, last.error) == (FinishReason.ERROR, "no constraints here")
    assert logged == []


def test_a_fault_of_prepare_ends_its_request():
    harness = Preparing()
    logged = harness.log_failures()
    fault = RuntimeError("planted")

    def prepare(grammar):
        raise fault

    harness.executor.prepare = prepare
    harness.submit(A, "constrained", grammar=GRAMMAR)
    harness.submit(B, "free")
    harness.steps(8)
    (last,) = harness.deltas(A)
    assert (last.finish, last.error) == (FinishReason.ERROR, UNLOADED)
    assert len(harness.said(B, "free")) == 4
    assert logged == [("loading the constraint of request constrained", fault)]
    fault = EngineDead("planted")
    harness.submit(A, "another", grammar=GRAMMAR)
    with pytest.raises(EngineDead):
        harness.steps(1)


def test_a_backend_that_is_expected_is_opened_and_a_fault_of_it_ends_nothing(monkeypatch):
    fault = RuntimeError("planted")
    opened = []

    def expect(executor, backend):
        opened.append(backend)
        raise fault

    monkeypatch.setattr(FakeExecutor, "expect", expect)
    harness = Preparing()
    logged = harness.log_failures()
    harness.inbox.append((A, Call(0, "expect", ("b",))))
    harness.submit(B, "free")
    harness.steps(8)
    assert opened == ["b"]
    assert len(harness.said(B, "free")) == 4
    assert logged == [("the call expect", fault)]


def test_a_request_is_cancelled_while_its_constraint_loads():
    harness = Preparing()
    harness.submit(A, "constrained", grammar=GRAMMAR)
    harness.steps(1)
    harness.inbox.append((A, Cancel(("constrained",), FinishReason.ABORT)))
    harness.steps(1)
    harness.loading[0].set_result(None)
    harness.steps(3)
    assert [delta.finish for delta in harness.deltas(A)] == [FinishReason.ABORT]
    assert not harness.scheduler.has_work()


def test_loading_is_no_stall_and_does_not_spin():
    harness = Preparing()
    harness.submit(A, "constrained", grammar=GRAMMAR)
    harness.steps(1)
    harness.waits.clear()
    harness.clock.advance(60.0)
    harness.steps(4)
    assert harness.deltas(A) == []
    assert harness.loop.stalled_for(harness.clock()) < 1.0
    assert all(wait > 0 for wait in harness.waits)


def test_an_executor_without_guided_decoding_says_so():
    harness = LoopHarness()
    harness.submit(A, "constrained", grammar=GRAMMAR)
    harness.steps(2)
    assert [delta.finish for delta in harness.deltas(A)] == [FinishReason.ERROR]


# ------------------------------------------------------------------------------------------- pauses


def test_a_paused_request_is_no_work_and_says_the_same_afterwards():
    harness = LoopHarness(depth=2)
    request = harness.submit(A, "a", max_tokens=20)
    harness.steps(4)
    harness.inbox.append((A, Pause("a", True)))
    harness.steps(1)
    said = len(harness.deltas(A))
    harness.clock.advance(100.0)
    harness.steps(20)
    assert len(harness.deltas(A)) == said
    assert harness.loop.stalled_for(harness.clock.now) < 1.0  # neither the watchdog nor the stall rule minds
    assert harness.scheduler.stats().paused == 1
    harness.inbox.append((A, Pause("a", False)))
    harness.steps(40)
    tokens = [token for delta in harness.deltas(A) for token in delta.token_ids]
    assert tokens == solo(harness.executor.model, request, 64).token_ids


def test_only_the_client_whose_request_it_is_can_pause_it():
    harness = LoopHarness()
    harness.submit(A, "a")
    harness.steps(1)
    harness.inbox.append((B, Pause("a", True)))
    harness.inbox.append((A, Pause("nobody", True)))
    harness.steps(10)
    assert harness.deltas(A)[-1].finish is FinishReason.LENGTH


def test_a_paused_request_is_cancelled_at_once():
    harness = LoopHarness()
    harness.submit(A, "a", max_tokens=20)
    harness.steps(3)
    harness.inbox += [(A, Pause("a", True)), (A, Cancel(("a",)))]
    harness.steps(1)
    assert harness.deltas(A)[-1].finish is FinishReason.ABORT
    assert not harness.scheduler.has_work()
    assert harness.scheduler.stats().waiting == 0


def test_an_unhealthy_executor_ends_the_loop():
    harness = LoopHarness()
    harness.submit(A, "one")
    harness.steps(2)
    harness.loop.fail(EngineDead("a worker is gone"))
    with pytest.raises(EngineDead, match="a worker is gone"):
        harness.loop.run(lambda: False)


def test_a_step_that_failed_says_more_than_the_check():
    harness = LoopHarness(depth=2, break_at=2)
    harness.submit(A, "one", max_tokens=8)
    harness.steps(1)
    assert harness.loop._in_flight
    harness.executor._break_at = 1
    harness.steps(1)
    harness.loop.fail(EngineDead("unhealthy"))
    with pytest.raises(EngineDead, match="the fake device broke"):
        harness.steps(3)


# --------------------------------------------------------------------------------------- adapters


def adapted(harness, id, name, **more):
    harness.submit(A, id, adapter=Adapter(name=name), **more)


def test_a_request_waits_for_its_own_adapter_only_and_is_computed_with_it():
    harness = Preparing(adapter_slots=2)
    adapted(harness, "late", "x")
    adapted(harness, "again", "x")
    harness.submit(A, "free")
    harness.steps(12)
    assert len(harness.said(A, "free")) == 4
    assert harness.said(A, "late") == []
    assert harness.needs == [AdapterLoad(adapter=Adapter(name="x"), slot=1)]  # once for both
    harness.executor.device.load(harness.needs[0])
    harness.loading[0].set_result(None)
    harness.drain()
    said = harness.said(A, "late")
    assert (len(said), said) == (4, harness.said(A, "again"))
    assert said != harness.said(A, "free")
    adapted(harness, "later", "x")
    harness.drain()
    assert harness.said(A, "later") == said
    assert len(harness.needs) == 1  # it is still there


def test_adapters_without_a_free_slot_wait_in_their_order_and_one_that_is_cancelled_makes_room():
    harness = Preparing(adapter_slots=1)
    for id, name in (("a", "x"), ("b", "y"), ("c", "z"), ("d", "x")):
        adapted(harness, id, name, grammar=GRAMMAR if id == "d" else None)
    harness.steps(1)
    assert [getattr(need, "slot", None) for need in harness.needs] == [None, 1]
    harness.inbox.append((A, Cancel(("a", "d"), FinishReason.ABORT)))
    harness.steps(2)
    assert harness.needs[2:] == [AdapterLoad(adapter=Adapter(name="y"), slot=1)]
    for need, future in zip(harness.needs[2:], harness.loading[2:], strict=True):
        harness.executor.device.load(need)
        future.set_result(None)
    harness.steps(8)
    assert len(harness.said(A, "b")) == 4
    assert harness.needs[3:] == [AdapterLoad(adapter=Adapter(name="z"), slot=1)]


def test_an_adapter_that_cannot_be_loaded_ends_its_requests_and_the_next_one_tries_again():
    harness = Preparing(adapter_slots=1)
    logged = harness.log_failures()
    adapted(harness, "a", "x")
    adapted(harness, "b", "x")
    harness.steps(1)
    harness.loading[0].set_exception(RuntimeError("planted"))
    harness.steps(1)
    assert [delta.error for delta in harness.deltas(A)] == ["The adapter could not be loaded."] * 2
    assert [doing for doing, _ in logged] == [f"loading the adapter of request {id}" for id in "ab"]
    adapted(harness, "c", "x")
    harness.steps(1)
    assert len(harness.needs) == 2


def test_a_server_without_slots_refuses_adapters():
    harness = Preparing()
    adapted(harness, "a", "x")
    harness.steps(2)
    (last,) = harness.deltas(A)
    assert (last.finish, last.error, last.invalid) == (FinishReason.ERROR, "This server has no adapters.", True)
    assert harness.needs == []


def test_younger_requests_do_not_take_the_slot_that_an_older_one_waits_for():
    """Keep one adapter in use by ever new requests: one for another adapter gets the slot all the same."""
    harness = Preparing(adapter_slots=1)
    adapted(harness, "x0", "x", max_tokens=6)
    harness.steps(1)
    harness.executor.device.load(harness.needs[0])
    harness.loading[0].set_result(None)
    harness.steps(2)
    adapted(harness, "y", "y")
    for number in range(1, 8):
        adapted(harness, f"x{number}", "x", max_tokens=6)
        harness.steps(1)
        stats = harness.loop._stats(0.0)
        assert (stats.running_adapters, stats.waiting_adapters) in [(("x",), ("y", "x")), ((), ("y", "x"))]
    harness.steps(8)
    assert [need.adapter.name for need in harness.needs] == ["x", "y"]
    harness.executor.device.load(harness.needs[1])
    harness.loading[1].set_result(None)
    harness.steps(12)
    assert len(harness.said(A, "y")) == 4
    assert [need.adapter.name for need in harness.needs] == ["x", "y", "x"]


def test_an_adapter_is_read_ahead_while_steps_run():
    harness = Preparing(adapter_slots=1)
    harness.inbox.append((A, Call(7, "read_adapter", ("x@1", "/x", "x"))))
    harness.submit(B, "free")
    harness.steps(12)
    assert len(harness.said(B, "free")) == 4
    assert harness.needs == [AdapterLoad(adapter=Adapter(name="x@1", path="/x", served="x"), slot=0)]
    assert not [message for message in harness.sent[A] if isinstance(message, CallReply)]
    harness.loading[0].set_exception(RequestError("of rank 99"))
    harness.inbox.append((A, Call(8, "read_adapter", ("y", "/y", "y"))))
    harness.steps(2)
    harness.loading[1].set_result(None)
    harness.steps(1)
    replies = [message for message in harness.sent[A] if isinstance(message, CallReply)]
    assert replies == [CallReply(7, error="of rank 99", status=400), CallReply(8)]


def test_an_adapter_that_needed_the_weights_of_a_sleeping_model_is_loaded_again():
    harness = Preparing(adapter_slots=1, sleep_mode=True)
    adapted(harness, "a", "x")
    harness.steps(1)
    ask(harness, ("sleep",))
    harness.loading[0].set_exception(AsleepError("planted"))
    harness.inbox.append((B, Call(9, "read_adapter", ("y", "/y", "y"))))
    harness.steps(2)
    harness.loading[1].set_exception(AsleepError("asleep"))
    harness.steps(2)
    assert CallReply(9, error="asleep", status=503) in harness.sent[B]
    ask(harness, ("wake_up", None))
    harness.steps(2)
    assert harness.needs[2:] == [AdapterLoad(adapter=Adapter(name="x"), slot=1)]
    harness.executor.device.load(harness.needs[2])
    harness.loading[2].set_result(None)
    harness.drain()
    assert len(harness.said(A, "a")) == 4


def test_adapters_are_loaded_when_the_model_is_awake():
    """Load none in its sleep: it may need the model's weights."""
    harness = Preparing(adapter_slots=1, sleep_mode=True)
    ask(harness, ("sleep",))
    adapted(harness, "a", "x")
    harness.steps(3)
    assert harness.needs == []
    assert harness.waits[-1] == 0.25
    ask(harness, ("wake_up", None))
    harness.steps(1)
    assert harness.needs == [AdapterLoad(adapter=Adapter(name="x"), slot=1)]
    harness.executor.device.load(harness.needs[0])
    harness.loading[0].set_result(None)
    harness.drain()
    assert len(harness.said(A, "a")) == 4

"""EngineLoop on a fake device: routing, depth, calls, stalls, faults."""

from collections import deque
from concurrent.futures import Future

import pytest

from ferrule.engine.loop import STATS_SECONDS, EngineLoop
from ferrule.engine.scheduler import DefaultScheduler
from ferrule.errors import CheckpointError, EngineDead, RequestError, RequestFailed
from ferrule.interfaces.scheduler import Scheduler, SchedulerLimits
from ferrule.types import CacheGroup, CompiledGrammar, EngineRequest, FinishReason, TokenSampling
from ferrule.wire.messages import Call, CallReply, Cancel, Deltas, Submit
from ferrule_plugins.policy.fcfs import FcfsPolicy
from ferrule_testkit.fakes import FakeExecutor, VirtualClock, solo

GROUPS = (CacheGroup("full", 4),)
A, B = b"client-a", b"client-b"


class House:
    """A loop with two clients that are lists."""

    def __init__(self, depth=1, scheduler_cls=DefaultScheduler, break_at=0, **more):
        self.clock = VirtualClock()
        self.executor = FakeExecutor(GROUPS, break_at=break_at)
        self.executor.init_cache(64)
        limits = SchedulerLimits(
            groups=GROUPS, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, depth=depth
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
        request = EngineRequest(id=id, prompt_ids=tuple(prompt), sampling=sampling, **more)
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
    house = House(depth)
    one = house.submit(A, "one", range(20), 8)
    two = house.submit(B, "two", range(5), 6)
    house.drain()
    for client, request in ((A, one), (B, two)):
        expected = solo(house.executor.model, request, 64)
        assert house.said(client, request.id) == expected.token_ids
        assert {delta.id for delta in house.deltas(client)} == {request.id}
        assert [delta.finish for delta in house.deltas(client)][-1] is FinishReason.LENGTH
    house.scheduler.check()


def test_depth_is_the_number_of_steps_in_flight():
    for depth in (1, 2, 3):
        house = House(depth)
        house.submit(A, "one", max_tokens=9)
        house.steps(depth)
        assert len(house.executor.plans) == depth
        assert len(house.said(A, "one")) == 1


def test_one_message_a_step_for_a_client():
    house = House()
    house.submit(A, "one")
    house.submit(A, "two")
    house.steps(1)
    (message,) = house.sent[A]
    assert [delta.id for delta in message.deltas] == ["one", "two"]
    assert house.sent[B] == []


def test_idle_loop_waits_and_counts_as_progress():
    house = House()
    house.steps(3)
    assert house.waits == [0.25] * 3
    assert house.loop.stalled_for(house.clock.now) == 0.0
    assert house.executor.plans == []
    house.submit(A, "one")
    house.steps(2)
    assert house.waits[-1] == 0.0


def test_run_ends_when_it_is_told_to():
    house = House()
    house.submit(A, "one")
    house.loop.run(lambda: bool(house.deltas(A)) and house.deltas(A)[-1].finish is not None)
    assert len(house.said(A, "one")) == 4


def test_cancel_ends_a_request_at_once_and_only_for_its_owner():
    house = House(depth=2)
    house.submit(A, "one", max_tokens=50)
    house.steps(3)
    house.inbox.append((B, Cancel(("one",))))
    house.steps(1)
    assert house.deltas(A)[-1].finish is None
    house.inbox.append((A, Cancel(("one", "nobody"), FinishReason.STOP)))
    house.steps(1)
    assert house.deltas(A)[-1].finish is FinishReason.STOP
    house.steps(3)
    assert [delta.finish for delta in house.deltas(A)].count(FinishReason.STOP) == 1
    assert house.deltas(A)[-1].finish is FinishReason.STOP
    assert house.deltas(B) == []


def test_a_request_that_cannot_run_ends_alone():
    house = House()
    house.submit(A, "long", range(100))
    house.submit(A, "fine")
    house.drain()
    first = house.deltas(A)[0]
    assert (first.id, first.finish) == ("long", FinishReason.ERROR)
    assert "100 tokens" in first.error
    assert len(house.said(A, "fine")) == 4


def test_an_exception_while_a_request_is_added_ends_alone_and_says_nothing_of_its_text():
    class Bad(DefaultScheduler):
        def add(self, request, now):
            if request.id == "bad":
                raise KeyError("/secret/path")
            super().add(request, now)

    house = House(scheduler_cls=Bad)
    house.submit(A, "bad")
    house.submit(A, "fine")
    house.drain()
    assert house.deltas(A)[0].error == "The request could not be queued."
    assert len(house.said(A, "fine")) == 4


def test_a_second_request_of_the_same_id_does_not_touch_the_first():
    house = House()
    house.submit(A, "one")
    house.submit(B, "one", max_tokens=30)
    house.drain()
    assert len(house.said(A, "one")) == 4
    assert house.deltas(B) == []


def test_stats_come_now_and_then_and_when_all_is_done():
    house = House()
    house.submit(A, "one", max_tokens=30)
    house.submit(B, "two", max_tokens=2)
    for _ in range(20):
        house.steps(1)
        house.clock.advance(STATS_SECONDS / 4)
    assert 3 <= len(house.stats(A)) <= 6
    house.drain()
    last = house.stats(A)[-1]
    assert house.stats(B)[-1] == last
    assert (last.running, last.waiting, last.blocks_used, last.generation_tokens) == (0, 0, 0, 32)


def ask(house, *calls):
    """The replies to calls (name, *args), taken in by one step."""
    seen = len(house.sent[B])
    for number, (name, *args) in enumerate(calls):
        house.inbox.append((B, Call(number, name, tuple(args))))
    house.steps(1)
    replies = [m for m in house.sent[B][seen:] if isinstance(m, CallReply)]
    assert [reply.number for reply in replies] == list(range(len(calls)))
    return replies


def test_calls_are_answered_by_their_number():
    house = House()
    house.submit(A, "one", max_tokens=20)
    house.steps(2)
    calls = [("stats",), ("check",), ("reset_prefix_cache",), ("collective_rpc", "x", [], {}), ("shutdown",)]
    replies = ask(house, *calls)
    assert (replies[0].result["running"], replies[0].result.get("sleep_level", 0)) == (1, 0)
    assert replies[1].result is True
    assert replies[2].result is False  # the first block of the request is full, and held
    assert replies[3].result == 1
    assert house.executor.calls == [("collective_rpc", ("x", [], {}))]
    assert (replies[4].error, replies[4].status) == ("there is no call 'shutdown'", 500)
    assert house.executor.alive


@pytest.mark.parametrize("name", ["submit", "release", "restore", "call", "step", "__init__", "_between_steps"])
def test_the_set_of_calls_is_closed(name):
    house = House(sleep_mode=True)
    assert ask(house, (name,))[0].error == f"there is no call {name!r}"
    assert house.executor.calls == []


def test_calls_on_the_executor_run_between_steps():
    house = House(depth=3)
    house.submit(A, "one", max_tokens=20)
    house.steps(2)
    assert house.said(A, "one") == []
    seen = []
    house.executor.call = lambda name, args: seen.append(len(house.loop._in_flight))
    house.inbox.append((A, Call(1, "start_profile")))
    house.steps(1)
    assert seen == [0]
    assert len(house.said(A, "one")) >= 2


@pytest.mark.parametrize(
    ("error", "text", "status"),
    [
        (RequestFailed("cannot do that"), "cannot do that", 500),
        (RequestError("no such method"), "no such method", 400),
        (OSError("/secret"), "stop_profile failed; the log says why", 500),
    ],
)
def test_a_call_that_fails_is_answered_and_the_loop_lives(error, text, status):
    house = House()

    def call(name, args):
        raise error

    house.executor.call = call
    house.submit(A, "one")
    (reply,) = ask(house, ("stop_profile",))
    assert (reply.error, reply.status) == (text, status)
    house.drain()
    assert len(house.said(A, "one")) == 4


def test_a_long_call_is_no_stall():
    house = House()
    house.submit(A, "one", max_tokens=30)
    house.steps(2)
    waited = []

    def call(name, args):
        house.clock.advance(1000.0)
        waited.append(house.loop.stalled_for(house.clock.now))

    house.executor.call = call
    ask(house, ("collective_rpc", "x", [], {}))
    assert waited == [0.0]
    assert house.loop.stalled_for(house.clock.now) == 0.0


# ------------------------------------------------------------------------------------------------ sleep


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_requests_that_slept_say_what_they_would_have_said(depth):
    house = House(depth, sleep_mode=True)
    requests = [house.submit(A, id, range(5, 5 + n), 20) for id, n in (("one", 3), ("two", 11), ("three", 30))]
    house.steps(4)
    assert ask(house, ("sleep",), ("is_sleeping",))[1].result is True
    requests.append(house.submit(A, "late", (7, 8), 5))
    plans = len(house.executor.plans)
    house.steps(20)
    assert len(house.executor.plans) == plans
    assert house.waits[-1] == 0.25  # asleep, it waits for messages
    assert house.stats(A)[-1].sleep_level == 1
    assert (house.stats(A)[-1].running, house.stats(A)[-1].waiting, house.stats(A)[-1].blocks_used) == (0, 4, 0)
    assert [reply.result for reply in ask(house, ("wake_up",), ("is_sleeping",))] == [None, False]
    house.drain()
    for request in requests:
        expected = solo(house.executor.model, request, 64)
        assert house.said(A, request.id) == expected.token_ids
    assert house.executor.calls == [
        ("release", (("weights", "kv_cache"), 1)),
        ("restore", ("weights",)),
        ("restore", ("kv_cache",)),
    ]
    assert house.stats(A)[-1].preemptions == 0
    house.scheduler.check()


def test_prefixes_are_forgotten_in_sleep():
    house = House(sleep_mode=True)
    house.submit(A, "one", range(20))
    house.drain()
    ask(house, ("sleep", 2), ("wake_up", None))
    house.submit(A, "two", range(20))
    house.drain()
    assert house.deltas(A)[-1].cached == 0
    assert len(house.said(A, "two")) == 4


def test_parts_wake_one_by_one():
    house = House(sleep_mode=True)
    ask(house, ("sleep", 1), ("sleep", 2))
    house.submit(A, "one")
    house.steps(2)
    ask(house, ("wake_up", ["weights"]), ("wake_up", ["weights"]))
    house.steps(3)
    assert house.said(A, "one") == []
    assert ask(house, ("is_sleeping",), ("stats",))[1].result["sleep_level"] == 2
    ask(house, ("wake_up", ["kv_cache"]))
    house.drain()
    assert len(house.said(A, "one")) == 4
    assert [args for name, args in house.executor.calls if name == "restore"] == [("weights",), ("kv_cache",)]


def test_a_request_is_cancelled_in_its_sleep():
    house = House(sleep_mode=True)
    house.submit(A, "one", max_tokens=30)
    house.steps(3)
    ask(house, ("sleep",))
    house.inbox.append((A, Cancel(("one",))))
    house.steps(1)
    assert house.deltas(A)[-1].finish is FinishReason.ABORT
    assert not house.scheduler.has_work()


def test_sleep_is_no_stall():
    house = House(sleep_mode=True)
    house.submit(A, "one")
    house.steps(1)
    ask(house, ("sleep",))
    for _ in range(10):
        house.steps(1)
        house.clock.advance(100.0)
    house.steps(1)
    assert house.loop.stalled_for(house.clock.now) == 0.0
    assert house.deltas(A)[-1].finish is None
    assert house.stats(A)[-1].stalled_seconds < 1.0


@pytest.mark.parametrize(
    ("call", "status", "word"),
    [(("sleep", 3), 400, "level"), (("sleep", "1"), 400, "level"), (("wake_up", ["lora"]), 400, "kv_cache")],
)
def test_calls_about_sleep_are_checked(call, status, word):
    house = House(sleep_mode=True)
    (reply,) = ask(house, call)
    assert reply.status == status
    assert word in reply.error
    assert house.executor.calls == []


@pytest.mark.parametrize("name", ["sleep", "wake_up"])
def test_without_sleep_mode_it_stays_awake(name):
    house = House()
    (reply,) = ask(house, (name,))
    assert (reply.status, reply.error) == (403, "This server cannot sleep: start it with --enable-sleep-mode.")


def test_a_scheduler_that_cannot_evacuate_sleeps_when_it_is_idle():
    class Plain(DefaultScheduler):
        evacuate = Scheduler.evacuate

    house = House(scheduler_cls=Plain, sleep_mode=True)
    house.submit(A, "one", max_tokens=10)
    house.steps(2)
    assert "Requests run" in ask(house, ("sleep",))[0].error
    house.drain()
    assert ask(house, ("sleep",))[0].error is None


def test_a_wake_up_that_fails_can_be_repeated():
    house = House(sleep_mode=True)
    ask(house, ("sleep",))
    call = house.executor.call

    def missing(name, args):
        raise CheckpointError("The weights are gone.")

    house.executor.call = missing
    assert ask(house, ("wake_up",), ("is_sleeping",))[0].error == "The weights are gone."
    house.executor.call = call
    assert [reply.result for reply in ask(house, ("wake_up",), ("is_sleeping",))] == [None, False]


def test_a_broken_invariant_is_reported_by_the_check_call():
    house = House()
    house.scheduler._slots.pop()
    house.inbox.append((A, Call(1, "check")))
    house.steps(1)
    assert house.sent[A][0].error.startswith("I9")


class Loses(DefaultScheduler):
    """Forgets the slots of requests that have ended."""

    def _vacate(self, request):
        super()._vacate(request)
        self._slots.pop()


@pytest.mark.parametrize("debug", [True, False])
def test_with_debug_an_idle_engine_checks_itself(debug):
    house = House(scheduler_cls=Loses, debug=debug)
    house.submit(A, "one", max_tokens=2)
    house.steps(1)
    if debug:
        with pytest.raises(AssertionError, match="I9: slots are lost"):
            house.drain()
    else:
        house.drain()
        house.steps(3)
    assert len(house.said(A, "one")) == 2


def test_an_engine_that_stays_idle_checks_itself_once():
    house = House()
    checks = []
    house.scheduler.check = lambda: checks.append(len(house.deltas(A)))
    house.submit(A, "one", max_tokens=2)
    house.submit(A, "two", max_tokens=3)
    house.drain()
    house.steps(3)
    assert checks == [5]


class Lazy(DefaultScheduler):
    """Never runs a request whose id begins with x, nor anything behind it."""

    def schedule(self, now):
        return None if any(id.startswith("x") for id in self._requests) else super().schedule(now)


def test_work_that_cannot_be_planned_fails_one_request_after_a_while():
    house = House(scheduler_cls=Lazy)
    house.submit(A, "x")
    house.submit(B, "fine")
    house.steps(50)
    assert house.deltas(A) == []
    assert house.loop.stalled_for(house.clock.now) > 0.3
    assert house.stats(A)[-1].stalled_seconds > 0.1
    assert house.waits[-1] > 0  # no busy loop
    while not house.deltas(A):
        house.steps(1)
        assert house.loop.stalled_for(house.clock.now) <= 2.1
    (delta,) = house.deltas(A)
    assert (delta.finish, delta.error) == (FinishReason.ERROR, "The request could not be scheduled.")
    house.drain()
    assert len(house.said(B, "fine")) == 4


def test_a_device_fault_is_fatal():
    house = House(depth=2, break_at=3)
    house.submit(A, "one", max_tokens=30)
    with pytest.raises(EngineDead):
        house.steps(10)


def test_a_hanging_step_shows_in_stalled_for():
    house = House()
    house.submit(A, "one", max_tokens=30)
    house.steps(2)
    house.clock.advance(42.0)
    assert house.loop.stalled_for(house.clock.now) == 42.0
    house.steps(1)
    assert house.loop.stalled_for(house.clock.now) == 0.0


# --------------------------------------------------------------------------------------- constraints

GRAMMAR = CompiledGrammar(backend="b", digest=b"d", data=b"")


class Preparing(House):
    """The futures of constraints are the test's."""

    def __init__(self, **more):
        super().__init__(**more)
        self.loading = []
        self.executor.prepare = self.prepare

    def prepare(self, grammar):
        self.loading.append(Future())
        return self.loading[-1]


def test_a_request_waits_for_its_own_constraint_only():
    house = Preparing()
    constrained = house.submit(A, "constrained", grammar=GRAMMAR)
    house.submit(A, "free")
    house.steps(12)
    assert len(house.said(A, "free")) == 4
    assert house.said(A, "constrained") == []
    house.loading[0].set_result(None)
    house.drain()
    assert house.said(A, "constrained") == solo(house.executor.model, constrained, 64).token_ids


def test_a_constraint_that_cannot_be_loaded_ends_its_request():
    house = Preparing()
    house.submit(A, "constrained", grammar=GRAMMAR)
    house.submit(B, "free")
    house.steps(1)
    house.loading[0].set_exception(RuntimeError("planted"))
    house.steps(8)
    (last,) = house.deltas(A)
    assert (last.finish, last.error) == (FinishReason.ERROR, "The constraint on the output could not be loaded.")
    assert len(house.said(B, "free")) == 4


def test_a_request_is_cancelled_while_its_constraint_loads():
    house = Preparing()
    house.submit(A, "constrained", grammar=GRAMMAR)
    house.steps(1)
    house.inbox.append((A, Cancel(("constrained",), FinishReason.ABORT)))
    house.steps(1)
    house.loading[0].set_result(None)
    house.steps(3)
    assert [delta.finish for delta in house.deltas(A)] == [FinishReason.ABORT]
    assert not house.scheduler.has_work()


def test_loading_is_no_stall_and_does_not_spin():
    house = Preparing()
    house.submit(A, "constrained", grammar=GRAMMAR)
    house.steps(1)
    house.waits.clear()
    house.clock.advance(60.0)
    house.steps(4)
    assert house.deltas(A) == []
    assert house.loop.stalled_for(house.clock()) < 1.0
    assert all(wait > 0 for wait in house.waits)


def test_an_executor_without_guided_decoding_says_so():
    house = House()
    house.submit(A, "constrained", grammar=GRAMMAR)
    house.steps(2)
    assert [delta.finish for delta in house.deltas(A)] == [FinishReason.ERROR]

"""EngineLoop on a fake device: routing, depth, calls, stalls, faults."""

from collections import deque

import pytest

from ferrule.engine.loop import STATS_SECONDS, EngineLoop
from ferrule.engine.scheduler import DefaultScheduler
from ferrule.errors import EngineDead, RequestFailed
from ferrule.interfaces.scheduler import SchedulerLimits
from ferrule.types import (
    CacheGroup,
    Call,
    CallReply,
    Cancel,
    Deltas,
    EngineRequest,
    FinishReason,
    Submit,
    TokenSampling,
)
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
            self.scheduler, self.executor, self.receive, self.send, self.clock, stall_seconds=2.0, **more
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


def test_calls_are_answered_by_their_number():
    house = House(executor_calls=frozenset({"save"}))
    house.submit(A, "one", max_tokens=20)
    house.steps(2)
    for number, (name, args) in enumerate(
        [("stats", ()), ("check", ()), ("reset_prefix_cache", ()), ("save", ("x",)), ("shutdown", ())]
    ):
        house.inbox.append((B, Call(number, name, args)))
    house.steps(1)
    replies = [m for m in house.sent[B] if isinstance(m, CallReply)]
    assert [reply.number for reply in replies] == [0, 1, 2, 3, 4]
    assert replies[0].result["running"] == 1
    assert replies[1].result is True
    assert replies[2].result is False  # the first block of the request is full, and held
    assert replies[3].result == 1
    assert house.executor.calls == [("save", ("x",))]
    assert replies[4].error == "there is no call 'shutdown'"
    assert house.executor.alive


def test_calls_on_the_executor_run_between_steps():
    house = House(depth=3, executor_calls=frozenset({"save"}))
    house.submit(A, "one", max_tokens=20)
    house.steps(2)
    assert house.said(A, "one") == []
    seen = []
    house.executor.call = lambda name, args: seen.append(len(house.loop._in_flight))
    house.inbox.append((A, Call(1, "save")))
    house.steps(1)
    assert seen == [0]
    assert len(house.said(A, "one")) >= 2


@pytest.mark.parametrize(
    ("error", "text"),
    [(RequestFailed("cannot do that"), "cannot do that"), (OSError("/secret"), "save failed; the log says why")],
)
def test_a_call_that_fails_is_answered_and_the_loop_lives(error, text):
    house = House(executor_calls=frozenset({"save"}))

    def call(name, args):
        raise error

    house.executor.call = call
    house.inbox.append((A, Call(7, "save")))
    house.submit(A, "one")
    house.drain()
    (reply,) = (m for m in house.sent[A] if isinstance(m, CallReply))
    assert (reply.number, reply.error) == (7, text)
    assert len(house.said(A, "one")) == 4


def test_a_broken_invariant_is_reported_by_the_check_call():
    house = House()
    house.scheduler._slots.pop()
    house.inbox.append((A, Call(1, "check")))
    house.steps(1)
    assert house.sent[A][0].error.startswith("I9")


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

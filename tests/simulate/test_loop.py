"""The whole loop with random clients: every request gets its own tokens, exactly one end, and leaves nothing behind."""

import random

from ferrule.engine.loop import EngineLoop
from ferrule.engine.scheduler import DefaultScheduler
from ferrule.interfaces.scheduler import SchedulerLimits
from ferrule.types import CacheGroup, EngineRequest, FinishReason, TokenSampling
from ferrule.wire.messages import Cancel, Pause, Submit
from ferrule_testkit.fakes import VirtualClock, solo
from ferrule_testkit.simulate import load
from tests.fakes.executor import FakeExecutor
from tests.shared import grid

GROUPS = (CacheGroup("full", 2), CacheGroup("sliding", 2, 5))
CLIENTS = (b"a", b"b", b"c")


def draw(rng, number):
    prompt = tuple(rng.choice((3, 4)) for _ in range(rng.randint(1, 12)))
    sampling = TokenSampling(seed=number, max_tokens=rng.randint(1, 20), stop_token_ids=(5,))
    return EngineRequest(id=f"r{number}", prompt_ids=prompt, work=sampling)


def judge(deltas, expected, cancelled):
    """Check for all of the text and its end, or for a beginning of it and the end that the client asked for."""
    said = [token for delta in deltas for token in delta.token_ids]
    assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    if said == expected.token_ids:
        assert (deltas[-1].finish, deltas[-1].stop_reason) == (expected.finish, expected.stop_reason)
    else:
        assert deltas[-1].finish is cancelled
        assert said == expected.token_ids[: len(said)]


@grid({"depth": [1, 2, 3], "policy": ["fcfs", "chaos"]})
def test_random_clients(policy, depth):
    rng = random.Random(f"{policy}{depth}")
    executor = FakeExecutor(GROUPS, vocab_size=12)
    executor.init_cache(30)
    limits = SchedulerLimits(
        groups=GROUPS, num_blocks=30, max_num_seqs=6, max_num_batched_tokens=10, max_model_len=34, depth=depth
    )
    scheduler = DefaultScheduler(limits, load("policy", policy)())
    inbox, requests, owners, cancelled, heard = [], {}, {}, {}, {}

    class Clients:
        def receive(self, timeout):
            messages = inbox[:]
            inbox.clear()
            return messages

        def send(self, client, message):
            for delta in message.deltas:
                assert owners[delta.id] == client
                heard.setdefault(delta.id, []).append(delta)

    clock = VirtualClock()
    loop = EngineLoop(scheduler, executor, Clients(), clock, debug=True)
    for step in range(4000):
        clock.advance(rng.random() / 50)
        if step < 1200 and rng.random() < 0.25:
            request = draw(rng, step)
            requests[request.id] = request
            owners[request.id] = rng.choice(CLIENTS)
            inbox.append((owners[request.id], Submit(request)))
        if requests and rng.random() < 0.05:
            id = rng.choice(list(requests)[-6:])
            reason = rng.choice((FinishReason.ABORT, FinishReason.STOP))
            client = rng.choice(CLIENTS)
            inbox.append((client, Cancel((id,), reason)))
            if client == owners[id]:
                cancelled.setdefault(id, reason)
        if requests and rng.random() < 0.1:
            id = rng.choice(list(requests)[-6:])
            inbox.append((rng.choice(CLIENTS), Pause(id, step < 1200 and rng.random() < 0.7)))
        if step == 1200:
            inbox.extend((owners[id], Pause(id, False)) for id in requests)
        loop.step()
        scheduler.check()
    assert not scheduler.has_work()
    assert len(requests) > 200
    assert scheduler.stats().preemptions > 0
    assert scheduler.stats().blocks_used == 0
    for id, request in requests.items():
        judge(heard[id], solo(executor.model, request, limits.max_model_len), cancelled.get(id))

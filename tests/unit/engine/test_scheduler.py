"""DefaultScheduler, its queue and the built-in policies, one behaviour at a time. The simulator covers the rest."""

import pytest

from ferrule.engine.queue import WaitingQueue
from ferrule.engine.request import MAX_PREEMPTIONS, Request
from ferrule.engine.scheduler import DefaultScheduler, Draft
from ferrule.interfaces.scheduler import RequestView, SchedulerLimits
from ferrule.types import (
    CacheGroup,
    EngineRequest,
    FinishReason,
    HostTensor,
    MediaItem,
    Pooling,
    RowResult,
    StepResult,
    TokenLogprobs,
    TokenSampling,
)
from ferrule_plugins.policy.chaos import ChaosPolicy
from ferrule_plugins.policy.fcfs import FcfsPolicy
from ferrule_plugins.policy.priority import PriorityPolicy
from ferrule_plugins.policy.priority_ageing import AGE_SECONDS, PriorityAgeingPolicy

STOP_TOKEN = 99


def make(policy=None, **more):
    more = {
        "groups": (CacheGroup("full", 4),),
        "num_blocks": 40,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        **more,
    }
    return DefaultScheduler(SchedulerLimits(**more), policy or FcfsPolicy())


def request(id, prompt=8, max_tokens=8, *, priority=0, arrival=0.0, salt=None, **sampling):
    ids = tuple(range(prompt)) if isinstance(prompt, int) else tuple(prompt)
    sampling = TokenSampling(seed=0, max_tokens=max_tokens, **sampling)
    return EngineRequest(
        id=id, prompt_ids=ids, work=sampling, priority=priority, arrival=arrival, cache_salt=salt or id
    )


def answer(plan, token=7, **rows):
    """Return a result in which every row that samples says `token`."""
    return StepResult(
        plan.step,
        tuple(
            rows.get(
                chunk.id,
                RowResult(id=chunk.id, epoch=chunk.epoch, token_ids=(token,) if chunk.ends else ()),
            )
            for chunk in plan.chunks
        ),
    )


def advance(scheduler, now=0.0, token=7):
    """Run one synchronous step: return what was planned, as (id, start, count), and the deltas."""
    plan = scheduler.schedule(now)
    if plan is None:
        return [], []
    deltas = scheduler.commit(plan, answer(plan, token), now)
    scheduler.check()
    return [(chunk.id, chunk.start, chunk.count) for chunk in plan.chunks], deltas


def drain(scheduler):
    """Run all steps until nothing is left, and return them as `advance` does."""
    steps = []
    while scheduler.has_work():
        steps.append(advance(scheduler)[0])
    return steps


# ------------------------------------------------------------------------------------------- the rule


def test_prompts_are_split_over_steps_and_decoding_rows_come_first():
    scheduler = make(max_num_batched_tokens=10)
    scheduler.add(request("a", 4), 0.0)
    scheduler.add(request("b", 14), 0.0)
    assert advance(scheduler)[0] == [("a", 0, 4), ("b", 0, 6)]
    assert advance(scheduler)[0] == [("a", 4, 1), ("b", 6, 8)]
    assert advance(scheduler)[0] == [("a", 5, 1), ("b", 14, 1)]


def test_long_prefill_threshold_leaves_room_for_others():
    scheduler = make(long_prefill_token_threshold=3)
    scheduler.add(request("a", 8), 0.0)
    scheduler.add(request("b", 2), 0.0)
    assert advance(scheduler)[0] == [("a", 0, 3), ("b", 0, 2)]


def test_one_prompt_is_in_progress_unless_more_may_be():
    """Let the second long prompt wait for the first one, and those behind it too; whole ones join."""
    scheduler = make(long_prefill_token_threshold=3)
    for id, size in (("a", 8), ("b", 5), ("c", 2)):
        scheduler.add(request(id, size), 0.0)
    assert advance(scheduler)[0] == [("a", 0, 3)]
    assert advance(scheduler)[0] == [("a", 3, 3)]
    assert advance(scheduler)[0] == [("a", 6, 2), ("b", 0, 3), ("c", 0, 2)]


def test_prompts_in_progress_share_a_step_evenly():
    scheduler = make(max_num_partial_prefills=2, max_long_partial_prefills=2, max_num_batched_tokens=10)
    for id in "abc":
        scheduler.add(request(id, 12), 0.0)
    assert advance(scheduler)[0] == [("a", 0, 5), ("b", 0, 5)]
    assert advance(scheduler)[0] == [("a", 5, 5), ("b", 5, 5)]
    assert advance(scheduler)[0] == [("a", 10, 2), ("b", 10, 2), ("c", 0, 5)]


def test_shorter_prompts_pass_long_ones_that_wait_for_another():
    limits = {"max_num_partial_prefills": 2, "max_num_batched_tokens": 12, "long_prefill_token_threshold": 6}
    scheduler = make(max_long_partial_prefills=1, **limits)
    for id, size in (("a", 16), ("b", 9), ("c", 3)):
        scheduler.add(request(id, size), 0.0)
    assert advance(scheduler)[0] == [("a", 0, 6), ("c", 0, 3)]
    scheduler = make(max_long_partial_prefills=2, **limits)
    for id, size in (("a", 16), ("b", 9), ("c", 3)):
        scheduler.add(request(id, size), 0.0)
    assert advance(scheduler)[0] == [("a", 0, 6), ("b", 0, 6)]


def test_a_prompt_is_long_beyond_a_twenty_fifth_of_the_context_where_no_threshold_is_set():
    for size, passed in ((9, True), (8, False)):
        scheduler = make(max_num_partial_prefills=2, max_model_len=200, num_blocks=200, max_num_batched_tokens=8)
        for id, length in (("a", 30), ("b", size), ("c", 2)):
            scheduler.add(request(id, length), 0.0)
        assert [id for id, _, _ in advance(scheduler)[0]] == (["a", "c"] if passed else ["a", "b"])


def test_without_chunked_prefill_prompts_go_whole_and_policy_budgets_are_not_asked():
    scheduler = make(ChaosPolicy(), chunked_prefill=False, max_num_batched_tokens=16, max_model_len=17)
    for id in ("a", "b"):
        scheduler.add(request(id, 12, 2), 0.0)
    for _ in range(2):
        steps, _ = advance(scheduler)
        assert [step for step in steps if step[2] > 1] == [(steps[-1][0], 0, 12)]


def test_no_more_requests_run_than_slots():
    scheduler = make(max_num_seqs=2)
    for id in "abc":
        scheduler.add(request(id, 2, 2), 0.0)
    advance(scheduler)
    assert (scheduler.stats().running, scheduler.stats().waiting) == (2, 1)
    _, deltas = advance(scheduler)
    assert [delta.finish for delta in deltas] == [FinishReason.LENGTH] * 2
    plan = scheduler.schedule(0.0)
    assert len(plan.releases) == 2
    assert plan.admits[0].slot in plan.releases
    assert plan.admits[0].id == "c"


def test_depth_2_plans_past_a_sample_that_the_host_has_not_seen():
    scheduler = make(depth=2)
    scheduler.add(request("a", 4, 3), 0.0)
    first = scheduler.schedule(0.0)
    second = scheduler.schedule(0.0)
    assert (second.chunks[0].start, second.chunks[0].count, second.chunks[0].ends) == (4, 1, "sample")
    third = scheduler.schedule(0.0)
    assert third.chunks[0].start == 5
    assert scheduler.schedule(0.0) is None  # three samples are on their way, and max_tokens is 3
    assert scheduler.commit(first, answer(first), 0.0)[0].token_ids == (7,)
    scheduler.commit(second, answer(second), 0.0)
    assert scheduler.commit(third, answer(third), 0.0)[0].finish is FinishReason.LENGTH


def test_stop_token_at_depth_2_drops_the_row_that_was_sent_after_it():
    scheduler = make(depth=2)
    scheduler.add(request("a", 4, 9, stop_token_ids=(STOP_TOKEN,)), 0.0)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    (delta,) = scheduler.commit(first, answer(first, STOP_TOKEN), 0.0)
    assert (delta.finish, delta.stop_reason, delta.token_ids) == (FinishReason.STOP, STOP_TOKEN, (STOP_TOKEN,))
    assert scheduler.commit(second, answer(second), 0.0) == []
    assert not scheduler.has_work()
    scheduler.check()


# ------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize(("min_tokens", "ends_after"), [(0, 1), (1, 2), (3, 4)])
def test_stop_token_counts_only_after_min_tokens(min_tokens, ends_after):
    scheduler = make()
    scheduler.add(request("a", 4, 6, stop_token_ids=(STOP_TOKEN,), min_tokens=min_tokens), 0.0)
    for step in range(1, ends_after + 1):
        _, (delta,) = advance(scheduler, token=STOP_TOKEN)
        assert (delta.finish is FinishReason.STOP) == (step == ends_after)


def test_context_limit_ends_a_request():
    scheduler = make(max_model_len=10)
    scheduler.add(request("a", 8, 50), 0.0)
    assert advance(scheduler)[1][0].finish is None
    assert advance(scheduler)[1][0].finish is FinishReason.LENGTH


def test_an_error_row_ends_its_request_and_no_other():
    scheduler = make()
    scheduler.add(request("a", 4), 0.0)
    scheduler.add(request("b", 4), 0.0)
    plan = scheduler.schedule(0.0)
    bad = RowResult(id="a", epoch=plan.chunks[0].epoch, error="not finite")
    a, b = scheduler.commit(plan, answer(plan, a=bad), 0.0)
    assert (a.finish, a.error) == (FinishReason.ERROR, "not finite")
    assert (b.finish, b.token_ids) == (None, (7,))
    assert scheduler.stats().corrupted_requests == 1


def test_a_row_without_its_token_is_an_error():
    scheduler = make()
    scheduler.add(request("a", 4), 0.0)
    plan = scheduler.schedule(0.0)
    (delta,) = scheduler.commit(plan, StepResult(plan.step, (RowResult(id="a", epoch=plan.chunks[0].epoch),)), 0.0)
    assert delta.finish is FinishReason.ERROR


def test_a_result_with_missing_rows_is_not_a_result():
    scheduler = make()
    scheduler.add(request("a", 4), 0.0)
    plan = scheduler.schedule(0.0)
    with pytest.raises(ValueError):
        scheduler.commit(plan, StepResult(plan.step, ()), 0.0)


@pytest.mark.parametrize("moment", ["waiting", "prefilling", "decoding", "in flight"])
def test_cancel_ends_a_request_at_any_moment(moment):
    scheduler = make(max_num_batched_tokens=4)
    scheduler.add(request("a", 8), 1.0)
    steps = {"waiting": 0, "prefilling": 1, "decoding": 3, "in flight": 3}[moment]
    for _ in range(steps):
        advance(scheduler, 2.0)
    late = scheduler.schedule(2.0) if moment == "in flight" else None
    (delta,) = scheduler.cancel(["a", "nobody", "a"], FinishReason.ABORT, 3.0)
    assert (delta.id, delta.finish, delta.times.finished) == ("a", FinishReason.ABORT, 3.0)
    if late is not None:
        assert scheduler.commit(late, answer(late), 3.0) == []
    assert not scheduler.has_work()
    assert scheduler.stats().blocks_used == 0
    assert scheduler.cancel(["a"], FinishReason.ABORT, 3.0) == []
    scheduler.check()


@pytest.mark.advisory("GHSA-v97p-wpxp-px84")
def test_late_result_is_not_credited_to_a_new_request_of_the_same_id():
    scheduler = make(depth=2)
    scheduler.add(request("a", 4), 0.0)
    late = scheduler.schedule(0.0)
    scheduler.cancel(["a"], FinishReason.ABORT, 0.0)
    scheduler.add(request("a", 4), 0.0)
    plan = scheduler.schedule(0.0)
    assert scheduler.commit(late, answer(late, 1), 0.0) == []
    assert scheduler.commit(plan, answer(plan, 2), 0.0)[0].token_ids == (2,)


@pytest.mark.parametrize(
    ("spec", "limits"),
    [
        (request("a", 0), {}),
        (request("a", 64), {}),
        (request("a", 70), {}),
        (request("a", 4, 0), {}),
        (request("a", 30, 30), {"num_blocks": 15}),
        (request("a", 16, 8), {"chunked_prefill": False}),
    ],
)
def test_what_can_never_run_is_refused(spec, limits):
    scheduler = make(**limits)
    with pytest.raises(ValueError):
        scheduler.add(spec, 0.0)
    assert not scheduler.has_work()
    scheduler.check()


def test_the_longest_request_that_fits_is_served():
    scheduler = make(num_blocks=16)  # 15 blocks of 4: 60 computed tokens and one more
    scheduler.add(request("a", 30, 31), 0.0)
    assert all(drain(scheduler))
    with pytest.raises(ValueError, match="KV cache"):
        scheduler.add(request("b", 30, 32), 0.0)


def test_an_id_that_is_here_is_refused():
    scheduler = make()
    scheduler.add(request("a"), 0.0)
    with pytest.raises(ValueError, match="already here"):
        scheduler.add(request("a"), 0.0)


# ------------------------------------------------------------------------------------------- prefix cache


def test_equal_prompts_share_their_cache_and_say_so():
    scheduler = make()
    scheduler.add(request("a", 12, 1, salt="s"), 0.0)
    assert advance(scheduler)[1][0].cached == 0
    scheduler.add(request("b", 12, 1, salt="s"), 0.0)
    steps, (delta,) = advance(scheduler)
    assert steps == [("b", 8, 4)]
    assert delta.cached == 8
    stats = scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.prompt_tokens) == (24, 8, 24)


def test_generated_tokens_are_reused_by_the_next_turn():
    scheduler = make()
    scheduler.add(request("a", 4, 6, salt="s"), 0.0)
    while scheduler.has_work():
        advance(scheduler)
    scheduler.add(request("b", (0, 1, 2, 3, 7, 7, 7, 7, 7, 50), salt="s"), 0.0)
    assert advance(scheduler)[0] == [("b", 8, 2)]


def test_prompt_logprobs_skip_the_cache_but_fill_it():
    scheduler = make()
    scheduler.add(request("a", 9, 1, salt="s"), 0.0)
    advance(scheduler)
    entries = tuple(TokenLogprobs(p, -1.0, 1) for p in range(1, 9))
    scheduler.add(request("b", 9, 2, salt="s", prompt_logprobs=1), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan.chunks[0].start == 0
    row = RowResult(id="b", epoch=plan.chunks[0].epoch, token_ids=(7,), logprobs=(), prompt_logprobs=entries)
    assert scheduler.commit(plan, StepResult(plan.step, (row,)), 0.0)[0].prompt_logprobs == entries


def test_reset_forgets_prefixes():
    scheduler = make()
    scheduler.add(request("a", 12, 2, salt="s"), 0.0)
    advance(scheduler)
    assert not scheduler.reset_cache()  # live blocks stay
    advance(scheduler)
    assert scheduler.reset_cache()
    assert scheduler.stats().blocks_cached == 0


# ------------------------------------------------------------------------------------------- preemption


def test_the_youngest_gives_way_and_goes_on_where_it_was():
    scheduler = make(num_blocks=7, prefix_caching=False)
    scheduler.add(request("a", 8, 12), 0.0)
    scheduler.add(request("b", 8, 12), 0.0)
    said = {"a": [], "b": []}
    preempted = {}
    for step in range(60):
        for delta in advance(scheduler, token=step)[1]:
            said[delta.id] += delta.token_ids
            if delta.finish is not None:
                preempted[delta.id] = delta.num_preemptions
    assert [len(said[id]) for id in said] == [12, 12]
    assert preempted == {"a": 0, "b": 1}
    assert scheduler.stats().preemptions == 1


def test_a_readmitted_request_finds_its_own_prefix():
    scheduler = make(num_blocks=7)
    scheduler.add(request("a", 8, 8), 0.0)
    scheduler.add(request("b", 8, 12), 0.0)
    starts = []
    for _ in range(60):
        starts += [start for id, start, _ in advance(scheduler)[0] if id == "b"]
    again = starts.index(next(b for a, b in zip(starts, starts[1:], strict=False) if b <= a), 1)
    assert starts[again] > 0


def test_a_request_that_was_preempted_too_often_runs_alone():
    scheduler = make()
    scheduler.add(request("a", 4, 4), 0.0)
    scheduler.add(request("b", 4, 4), 0.0)
    scheduler.add(request("c", 4, 2), 0.0)
    advance(scheduler)
    scheduler.add(request("d", 4, 2), 0.0)
    tired = scheduler.running["b"]
    scheduler._preempt(tired, Draft(0), 0.0)
    tired.num_preemptions = MAX_PREEMPTIONS
    company = [{id for id, _, _ in step} for step in drain(scheduler)]
    assert {"b"} in company
    assert all(ids == {"b"} for ids in company if "b" in ids)


def test_a_policy_that_names_no_candidate_is_told_so():
    class Wrong(FcfsPolicy):
        def victim(self, running):
            return "nobody"

    scheduler = make(Wrong(), num_blocks=7)
    scheduler.add(request("a", 8, 12), 0.0)
    scheduler.add(request("b", 8, 12), 0.0)
    with pytest.raises(ValueError, match=r"Wrong\.victim"):
        drain(scheduler)


def test_pressure_costs_few_recomputed_tokens():
    """Run 64 long requests in a cache of 1.2 times the longest one, without thrashing."""
    scheduler = make(num_blocks=1 + 29, prefix_caching=False, max_num_seqs=64, max_num_batched_tokens=64)
    for i in range(64):
        scheduler.add(request(f"r{i}", 32, 64 + 1), 0.0)
    computed = 0
    preemptions = []
    while scheduler.has_work():
        steps, deltas = advance(scheduler)
        computed += sum(count for _, _, count in steps)
        preemptions += [delta.num_preemptions for delta in deltas if delta.finish is not None]
    assert len(preemptions) == 64
    assert max(preemptions) <= MAX_PREEMPTIONS
    assert computed < 64 * (32 + 64) / 0.3


# ------------------------------------------------------------------------------------------- order


def test_fcfs_does_not_let_a_small_one_pass_a_large_one():
    scheduler = make(num_blocks=14)
    scheduler.add(request("a", 20, 2), 0.0)
    scheduler.add(request("b", 40, 2), 0.0)
    scheduler.add(request("c", 2, 2), 0.0)
    order = [id for step in drain(scheduler) for id, start, _ in step if start == 0]
    assert order == ["a", "b", "c"]


def test_priority_runs_the_lowest_value_first_then_by_arrival():
    scheduler = make(PriorityPolicy(), max_num_seqs=1)
    for id, priority in (("a", 1), ("b", 0), ("c", -1), ("d", 0)):
        scheduler.add(request(id, 2, 1, priority=priority), 0.0)
    order = [id for step in drain(scheduler) for id, _, _ in step]
    assert order == ["c", "b", "d", "a"]


def view(id="x", **more):
    fields = {"arrival": 0.0, "sequence": 1, "priority": 0, "num_prompt": 4, "num_known": 5, "num_computed": 4}
    return RequestView(id=id, num_preemptions=0, **{**fields, **more})


def test_no_wait_makes_up_for_priority():
    policy = PriorityPolicy()
    later = policy.key(view(arrival=1e6, sequence=9), 2e6)
    assert later < policy.key(view(priority=1, arrival=0.0), 2e6)
    assert policy.key(view(arrival=1e6 - 1, sequence=10), 2e6) < later


def test_with_ageing_priority_is_made_up_for_by_waiting():
    policy = PriorityAgeingPolicy()
    old = view(priority=1, arrival=0.0)
    assert policy.key(view(arrival=AGE_SECONDS - 1, sequence=9), 0.0) < policy.key(old, 0.0)
    assert policy.key(view(arrival=AGE_SECONDS + 1, sequence=9), 0.0) > policy.key(old, 0.0)


def test_victims():
    views = [view("a", sequence=2, priority=5), view("b", sequence=3), view("c", sequence=4, priority=1)]
    assert FcfsPolicy().victim(views) == "c"
    assert PriorityPolicy().victim(views) == "a"
    chaos = ChaosPolicy(3)
    assert chaos.victim(views) == chaos.victim(views)
    assert {ChaosPolicy(seed).victim(views) for seed in range(20)} == {"a", "b", "c"}


def test_chaos_budgets_are_within_the_limit_and_differ():
    budgets = {ChaosPolicy(seed).budget(2, 3, 10) for seed in range(200)}
    assert budgets == set(range(1, 11))


class Reversing(FcfsPolicy):
    """A policy by which the last request is the first, from second 10 on."""

    refresh_seconds = 5.0

    def key(self, view, now):
        return (view.sequence if now < 10 else -view.sequence,)


def test_queue_takes_keys_anew_when_the_policy_asks_for_it():
    queue = WaitingQueue(Reversing())
    entries = [Request(request(f"r{i}"), i, 10, None) for i in range(3)]
    queue.refresh(0.0)
    for entry in entries:
        queue.push(entry, 0.0)
    queue.refresh(4.0)
    assert queue.head() is entries[0]
    queue.refresh(12.0)
    assert queue.head() is entries[2]
    queue.check()
    queue.remove(entries[2])
    assert queue.head() is entries[1]
    assert len(queue) == 2


def test_queue_check_names_what_is_wrong():
    queue = WaitingQueue(FcfsPolicy())
    for i in range(3):
        queue.push(Request(request(f"r{i}"), i, 10, None), 0.0)
    queue._entries.reverse()
    with pytest.raises(AssertionError, match="out of order"):
        queue.check()
    queue._entries.reverse()
    queue.head().slot = 1
    with pytest.raises(AssertionError, match="I9"):
        queue.check()
    queue.head().slot = -1
    del queue._keys["r1"]
    with pytest.raises(AssertionError, match="disagree"):
        queue.check()


def test_times_are_those_of_the_phases():
    scheduler = make(max_num_batched_tokens=4)
    scheduler.add(request("a", 8, 2, arrival=1.0), 2.0)
    advance(scheduler, 3.0)
    advance(scheduler, 4.0)
    _, (delta,) = advance(scheduler, 5.0)
    times = delta.times
    assert (times.arrival, times.scheduled, times.first_token, times.finished) == (1.0, 3.0, 4.0, 5.0)


def test_check_finds_lost_slots_and_requests():
    scheduler = make()
    scheduler.add(request("a"), 0.0)
    advance(scheduler)
    scheduler._slots.free.pop()
    with pytest.raises(AssertionError, match="I9"):
        scheduler.check()
    scheduler = make()
    scheduler.add(request("a"), 0.0)
    scheduler._requests["a"].sent = 100
    with pytest.raises(AssertionError, match="I7"):
        scheduler.check()
    scheduler._requests.clear()
    with pytest.raises(AssertionError, match="I4"):
        scheduler.check()


# ------------------------------------------------------------------------------------------- embeddings, sleep


def embedded(id, digest, tokens=12, start=0, prompt=None, kind="image", **changes):
    sampling = TokenSampling(seed=0, max_tokens=4)
    tensor = HostTensor(shape=(2,), dtype="float16", data=digest)
    item = MediaItem(kind=kind, digest=digest, start=start, count=tokens, data={"pixels": tensor})
    ids = (0,) * tokens if prompt is None else prompt
    return EngineRequest(id=id, prompt_ids=ids, work=sampling, media=(item,), **changes)


def text(id, *prompt):
    return EngineRequest(id=id, prompt_ids=prompt, work=TokenSampling(seed=0, max_tokens=4))


@pytest.mark.parametrize(("one", "two", "start"), [(b"x", b"x", 8), (b"x", b"y", 0)])
def test_media_share_a_prefix_only_with_their_like(one, two, start):
    """Tell media apart by their digests: their ids are placeholders."""
    scheduler = make()
    scheduler.add(embedded("a", one), 0.0)
    drain(scheduler)
    scheduler.add(embedded("b", two), 0.0)
    ((_, found, _),) = advance(scheduler)[0]
    assert found == start


def test_text_before_an_item_is_shared_and_its_place_counts():
    """Share text in blocks of four tokens."""
    scheduler, system = make(), (1, 2, 3, 4, 5, 6)
    prompt = (*system, 0, 0, 0, 9, 9, 9, 9)
    scheduler.add(embedded("a", b"x", 3, 6, prompt), 0.0)
    drain(scheduler)
    for id, other, found in (
        ("text", text("text", *prompt), 4),
        ("other", embedded("other", b"y", 3, 6, prompt), 4),
        ("moved", embedded("moved", b"x", 3, 7, prompt), 4),
        ("same", embedded("same", b"x", 3, 6, (*prompt, 7)), 12),
        ("salt", embedded("salt", b"x", 3, 6, prompt, cache_salt="s"), 0),
    ):
        scheduler.add(other, 0.0)
        assert [(row[0], row[1]) for row in advance(scheduler)[0]] == [(id, found)]
        drain(scheduler)


def test_the_second_turn_finds_the_first_and_encodes_nothing():
    scheduler = make()
    scheduler.add(embedded("a", b"x", 6, 2, (1, 2, *[0] * 6, 3, 4)), 0.0)
    assert [item.count for item in scheduler.schedule(0.0).encodes] == [6]
    scheduler = make()
    scheduler.add(embedded("a", b"x", 6, 2, (1, 2, *[0] * 6, 3, 4)), 0.0)
    drain(scheduler)
    scheduler.add(embedded("b", b"x", 6, 2, (1, 2, *[0] * 6, 3, 4, 7, 7, 5)), 0.0)
    plan = scheduler.schedule(0.0)
    assert (plan.chunks[0].start, plan.encodes) == (12, ())
    assert [(item.start, item.count, item.data) for item in plan.admits[0].media] == [(2, 6, {})]


def test_a_step_encodes_within_its_budget_and_chunks_end_before_what_it_does_not():
    scheduler = make(encode_budget=4, max_num_batched_tokens=16)
    items = [embedded("a", bytes([n]), 3, 1 + 4 * n).media[0] for n in range(3)]
    spec = EngineRequest(
        id="a", prompt_ids=(1, *[0, 0, 0, 2] * 3), work=TokenSampling(seed=0, max_tokens=4), media=tuple(items)
    )
    scheduler.add(spec, 0.0)
    rows = []
    for _ in range(3):
        plan = scheduler.schedule(0.0)
        rows.append((plan.chunks[0].start, plan.chunks[0].count, len(plan.encodes)))
        scheduler.commit(plan, answer(plan), 0.0)
    assert rows == [(0, 5, 1), (5, 4, 1), (9, 4, 1)]


def test_outputs_are_kept_up_to_a_bound_and_embeddings_while_they_are_used():
    scheduler = make(encoded_tokens=8, prefix_caching=False)
    encodes, forgets = [], []
    for id, digest, kind in (
        ("a", b"x", "image"),
        ("b", b"x", "image"),
        ("c", b"y", "image"),
        ("d", b"z", "embeds"),
        ("e", b"z", "embeds"),
        ("f", b"y", "image"),
    ):
        scheduler.add(embedded(id, digest, 4, kind=kind), 0.0)
        while scheduler.has_work():
            plan = scheduler.schedule(0.0)
            encodes += [(id, item.count) for item in plan.encodes]
            forgets += [id for _ in plan.forgets]
            scheduler.commit(plan, answer(plan), 0.0)
            scheduler.check()
    assert [id for id, _ in encodes] == ["a", "c", "d", "e"]
    assert forgets == ["d", "d", "e"]
    with pytest.raises(ValueError, match="9 tokens of media do not fit the 8"):
        scheduler.add(embedded("g", b"w", 9), 0.0)


def test_media_are_sent_with_every_admission_and_encoded_again_when_they_are_forgotten():
    scheduler = make()
    spec = embedded("a", b"x")
    scheduler.add(spec, 0.0)
    first = scheduler.schedule(0.0)
    scheduler.commit(first, answer(first), 0.0)
    assert scheduler.evacuate(0.0)
    second = scheduler.schedule(0.0)
    assert first.admits[0].media == second.admits[0].media
    assert first.encodes == second.encodes
    assert first.encodes[0].data == spec.media[0].data
    assert second.admits[0].known_ids == (0,) * 12 + (7,)
    assert second.releases == ()  # the runner has forgotten all slots


def test_evacuation_takes_all_back_in_their_order_and_is_no_preemption():
    scheduler = make(num_blocks=80)
    for id in "abc":
        scheduler.add(request(id, prompt=6), 0.0)
    advance(scheduler)
    advance(scheduler)
    assert scheduler.stats().running == 3
    assert scheduler.evacuate(1.0)
    scheduler.check()
    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.blocks_used, stats.blocks_cached, stats.preemptions) == (0, 3, 0, 0, 0)
    assert [id for id, _, _ in advance(scheduler)[0]][:2] == ["a", "b"]
    drain(scheduler)
    assert scheduler.evacuate(2.0)


# ------------------------------------------------------------------------------------------- pauses


def test_paused_requests_hold_up_nobody():
    """Give the slots and blocks of four unread requests to others, whatever their number and the cache's size."""
    scheduler = make(num_blocks=9, max_num_seqs=2)
    for name in "abcd":
        scheduler.add(request(name, 8, 8), 0.0)
        while not any(row[0] == name for row in advance(scheduler)[0]):
            pass
        scheduler.pause(name, True, 0.0)
        assert not scheduler.has_work()
    scheduler.add(request("e", 8, 8), 0.0)
    assert all(row[0] == "e" for step in drain(scheduler) for row in step)
    for name in "abcd":
        scheduler.pause(name, False, 0.0)
    drain(scheduler)
    assert scheduler.stats().preemptions == 0


def test_a_request_that_was_paused_finds_its_blocks_in_the_cache():
    scheduler = make()
    scheduler.add(request("a", 8, 8), 0.0)
    advance(scheduler)
    advance(scheduler)
    scheduler.pause("a", True, 0.0)
    scheduler.pause("a", True, 0.0)
    scheduler.pause("a", False, 0.0)
    assert advance(scheduler)[0] == [("a", 8, 2)]


# ------------------------------------------------------------------------------------------- vectors


def pooled(id, prompt):
    return EngineRequest(id=id, prompt_ids=tuple(range(prompt)), work=Pooling(), cache_salt="shared")


def vectors(plan):
    """Return a result in which every row that ends has a vector that names it."""
    rows = [
        RowResult(id=chunk.id, epoch=chunk.epoch, vector=chunk.id.encode() if chunk.ends else None)
        for chunk in plan.chunks
    ]
    return StepResult(plan.step, tuple(rows))


def test_a_pooled_request_ends_with_its_vector():
    scheduler = make(max_num_batched_tokens=6)
    scheduler.add(pooled("a", 10), 0.0)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)  # two steps in flight
    assert [(plan.chunks[0].count, plan.chunks[0].ends) for plan in (first, second)] == [(6, ""), (4, "pool")]
    assert scheduler.schedule(0.0) is None
    assert scheduler.commit(first, vectors(first), 1.0) == []
    (delta,) = scheduler.commit(second, vectors(second), 2.0)
    assert (delta.vector, delta.finish, delta.token_ids) == (b"a", FinishReason.STOP, ())
    assert (delta.times.first_token, delta.times.finished) == (2.0, 2.0)
    stats = scheduler.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, scheduler.has_work()) == (10, 0, False)
    scheduler.add(pooled("b", 10), 3.0)  # finds the blocks of the first
    plan = scheduler.schedule(3.0)
    assert (plan.chunks[0].start, plan.chunks[0].ends) == (8, "pool")
    (delta,) = scheduler.commit(plan, vectors(plan), 3.0)
    assert (delta.vector, delta.cached) == (b"b", 8)
    scheduler.check()


def test_a_prompt_as_long_as_the_context_can_be_pooled_and_no_longer_one():
    scheduler = make(max_model_len=12)
    scheduler.add(pooled("a", 12), 0.0)
    plan = scheduler.schedule(0.0)
    assert scheduler.commit(plan, vectors(plan), 0.0)[0].finish is FinishReason.STOP
    with pytest.raises(ValueError, match="13 tokens"):
        scheduler.add(pooled("b", 13), 0.0)


def test_a_model_that_keeps_nothing_has_its_prompts_whole():
    scheduler = make(groups=(), num_blocks=2, chunked_prefill=False, max_num_batched_tokens=16)
    for id, prompt in (("a", 10), ("b", 9), ("c", 5)):
        scheduler.add(pooled(id, prompt), 0.0)
    with pytest.raises(ValueError, match="do not fit one step"):
        scheduler.add(pooled("d", 17), 0.0)
    steps = []
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        steps.append([(chunk.id, chunk.count, chunk.ends, chunk.new_blocks) for chunk in plan.chunks])
        scheduler.commit(plan, vectors(plan), 0.0)
        scheduler.check()
    assert steps == [[("a", 10, "pool", ())], [("b", 9, "pool", ()), ("c", 5, "pool", ())]]
    assert (scheduler.stats().blocks_used, scheduler.stats().prefix_queries) == (0, 0)


@pytest.mark.parametrize("wanted", [pooled("a", 4), request("a", 4)])
def test_a_row_that_ends_with_something_else_fails_its_request(wanted):
    scheduler = make()
    scheduler.add(wanted, 0.0)
    plan = scheduler.schedule(0.0)
    wrong = answer(plan) if wanted.work.ends == "pool" else vectors(plan)
    (delta,) = scheduler.commit(plan, wrong, 0.0)
    assert (delta.finish, delta.vector) == (FinishReason.ERROR, None)
    assert "did not return" in delta.error

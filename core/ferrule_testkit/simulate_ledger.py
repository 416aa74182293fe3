"""The ledger: what must hold of plans, deltas and figures, written down beside the scheduler and not in it.

Numbers I1 to I23 are those of docs/engine.md. The ledger reads only what crosses the `Scheduler` interface, so it
judges any scheduler; what is inside (blocks, queues) is judged by `Scheduler.check`, called after each step.
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrule.interfaces.scheduler import GuessLimits, SchedulerLimits
from ferrule.types import (
    Admit,
    Chunk,
    EngineRequest,
    EngineStats,
    FinishReason,
    RequestDelta,
    StepPlan,
    Targets,
)
from ferrule_testkit.fakes import Solo, longest
from ferrule_testkit.simulate_media import MediaLedger

MAX_PREEMPTIONS = 8
SECONDS_PER_LEVEL = 60.0  # documented bound of the policy `priority_ageing`
COUNTERS = (
    "prefix_queries",
    "prefix_hits",
    "preemptions",
    "prompt_tokens",
    "generation_tokens",
    "steps",
    "drafts",
    "draft_tokens",
    "accepted_tokens",
    "corrupted_requests",
)


class Violation(AssertionError):
    """An invariant does not hold."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)


class Track:
    """One live request as seen from outside."""

    def __init__(self, request: EngineRequest, sequence: int, solo: Solo, limit: int) -> None:
        self.request = request
        self.sequence = sequence
        self.solo = solo
        self.limit = limit
        self.slot = -1
        self.epoch = 0
        self.prefilling = False  # what was known when this life began is not all computed
        self.next_start = -1  # where its next chunk must begin; -1: wherever the cache ends
        self.num_blocks = 0  # that this life has got in each group
        self.guessed = False  # its last chunk had guesses, whose result is not known
        self.restores = False  # this life begins with saved states
        self.cached = -1  # where its first life began
        self.num_tokens = 0
        self.num_prompt_logprobs = 0
        self.num_preemptions = 0
        self.paused = False
        self.gives_back = False  # its slot, since a pause: that release is not a preemption
        self.num_unsure = 0  # pauses that may have come behind a preemption whose release was not planned yet

    @property
    def num_known(self) -> int:
        return len(self.request.prompt_ids) + self.num_tokens

    def rank(self, policy: str) -> tuple[float, ...]:
        """Return the rank of a request in the order of the policy; the lowest comes first."""
        request = self.request
        if policy == "fcfs":
            return (self.sequence,)
        if policy == "priority":
            return (request.priority, request.arrival, self.sequence)
        return (request.arrival + SECONDS_PER_LEVEL * request.priority, self.sequence)


def check_blocks(limits: SchedulerLimits, track: Track, chunk: Chunk) -> None:
    """Check I3: a request has blocks for its chunk, and none that begin behind all positions it may ever compute."""
    if chunk.new_blocks:
        track.num_blocks += len(chunk.new_blocks[0])
    if limits.groups and limits.groups[0].paged:
        room, size = track.num_blocks * limits.groups[0].block_size, limits.groups[0].block_size
        require(chunk.start + chunk.count <= room, f"I3: {chunk.id} has blocks for {room} positions, too few")
        require(room - size < track.limit - 1, f"I3: {chunk.id} has blocks for {room} positions, too many")


def check_asked(limits: GuessLimits, chunk: Chunk, requests: int) -> None:
    """Check I24: guesses are asked for within the limits, for rows that sample, while few enough requests are here."""
    known = chunk.start + chunk.count - chunk.drafts + 1
    most = min(limits.most, limits.max_len - known) if limits.max_len else limits.most
    require(chunk.wanted <= (max(0, most) if chunk.ends == "sample" else 0), f"I24: {chunk.id} asks for guesses")
    crowded = limits.max_requests and requests > limits.max_requests
    require(not (crowded and chunk.wanted), f"I24: {chunk.id} asks for guesses while too many others are here")


def check_guessed(stats: EngineStats) -> None:
    places = [stats.drafts, *stats.accepted_by_place]
    require(places == sorted(places, reverse=True), "I24: a guess counts that stands behind a wrong one")
    require(stats.accepted_tokens <= stats.draft_tokens, "I24: more guesses are right than there are")


class Ledger:
    """A record of every request from `add` to its terminal delta. `policy` names the order to expect, or is ""."""

    def __init__(self, limits: SchedulerLimits, policy: str = "") -> None:
        self.limits = limits
        self.live: dict[str, Track] = {}
        self.finished = self.tokens = self.hits = 0
        self.restored = 0  # lives that began with saved states
        self.preemptions = self.vectors = 0
        self.media = MediaLedger(limits)
        self.quiet_steps = 0  # since the last delta
        self._policy = policy
        self._states = any(not group.paged for group in limits.groups)
        self.now = 0.0  # of the plan that is checked
        self._long = limits.long_prefill_token_threshold or limits.max_model_len // 25  # longer prompts are long
        self._sequence = 0
        self._epoch = 0
        self._slots: dict[int, Track] = {}
        self._last: EngineStats | None = None
        self._may_be_late = False  # releases of an earlier, empty round may come with the next plan

    # ------------------------------------------------------------------------------------ requests

    def add(self, request: EngineRequest, solo: Solo) -> None:
        self._sequence += 1
        limit = longest(request, self.limits.max_model_len)
        self.live[request.id] = Track(request, self._sequence, solo, limit)

    def cancelled(self, ids: Sequence[str], reason: FinishReason, deltas: Sequence[RequestDelta]) -> None:
        """Check I14: each live id of a cancellation ends at once, and no other."""
        expected = [id for id in dict.fromkeys(ids) if id in self.live]
        require([d.id for d in deltas] == expected, f"I14: cancel of {expected} ended {[d.id for d in deltas]}")
        for delta in deltas:
            require(delta.finish is reason and not delta.token_ids, f"I14: {delta.id} ended by {delta.finish}")
            self._finish(self.live[delta.id], delta)

    def pause(self, id: str, paused: bool) -> None:
        """Give a request no steps from now on, or give it steps again."""
        track = self.live[id]
        if paused and track.slot >= 0 and not track.gives_back:
            track.gives_back = True
            track.num_unsure += self._may_be_late
        track.paused = paused
        self.quiet_steps = 0

    # ------------------------------------------------------------------------------------ plans

    def planned(self, plan: StepPlan | None) -> None:
        if plan is None:
            self._may_be_late = True
            return
        for slot in plan.releases:
            self._released(slot, plan)
        for admit in plan.admits:
            self._admitted(admit)
        require(len(self._slots) <= self.limits.max_num_seqs, f"I8: {len(self._slots)} requests run")
        for slot, track in self._slots.items():
            require(track.request.id in self.live, f"I9: slot {slot} is kept for {track.request.id}, which has ended")
        require(0 < plan.num_tokens <= self.limits.max_num_batched_tokens, f"I8: a step of {plan.num_tokens} tokens")
        ids = {chunk.id for chunk in plan.chunks}
        require(len(ids) == len(plan.chunks), "I8: a request is twice in one plan")
        require(all(a.id in ids for a in plan.admits), "I10: a request was admitted and given nothing")
        for chunk in plan.chunks:
            self._chunk(chunk)
        self._save(plan)
        require(not (wrong := self.media.wrong_plan(plan)), str(wrong))
        self._count_prefills(plan)
        self._may_be_late = False

    def _save(self, plan: StepPlan) -> None:
        """Check I18: states are saved at borders of blocks, no more of them than there is room for."""
        for chunk in plan.chunks:
            if chunk.save:
                room = self.limits.num_snapshots if self._states else 0
                require(0 < chunk.save <= room, f"I18: {chunk.id} saves to snapshot {chunk.save} of {room}")
                end, size = chunk.start + chunk.count, self.limits.groups[0].block_size
                require(not end % size, f"I18: {chunk.id} saves its states after {end} tokens, inside a block")
                require(not chunk.drafts, f"I18: {chunk.id} saves its states behind guesses")

    def _count_prefills(self, plan: StepPlan) -> None:
        """Check I8: not too many prompts are in progress. Under a pace one more may wait while another passes."""
        found = [track for track in self._slots.values() if track.prefilling]
        long, most_long = self._num_long(found), self.limits.max_long_partial_prefills
        parts, most = sum(self.live[c.id].prefilling for c in plan.chunks), self.limits.max_num_partial_prefills
        waits = most == 1 and bool(self.limits.prompt_share or self.limits.targets != Targets())
        fits = len(found) - waits <= most and long - waits <= most_long
        require(parts <= most and fits, f"I8: of {len(found)} prompts in progress {long} are long, {parts} computed")

    def _num_long(self, tracks: Sequence[Track]) -> int:
        return sum(len(track.request.prompt_ids) > self._long for track in tracks)

    def _released(self, slot: int, plan: StepPlan) -> None:
        require(slot in self._slots, f"I9: slot {slot} is released, but no request has it")
        track = self._slots.pop(slot)
        track.slot = -1
        if track.request.id not in self.live:
            return
        if track.gives_back:
            track.gives_back = False
            return
        track.num_preemptions += 1
        self.preemptions += 1
        gone = set(plan.releases)
        others = [t.sequence for t in self._slots.values() if t.request.id in self.live and t.slot not in gone]
        oldest = self._may_be_late or any(sequence < track.sequence for sequence in others)
        require(oldest, f"I11: {track.request.id} was preempted, and no running request is older")
        require(track.num_preemptions <= MAX_PREEMPTIONS, f"I12: {track.request.id} was preempted too often")

    def _admitted(self, admit: Admit) -> None:
        require(admit.id in self.live, f"I13: {admit.id} is admitted, but is not here")
        track = self.live[admit.id]
        require(track.slot < 0 and admit.slot not in self._slots, f"I9: slot {admit.slot} of {admit.id} is taken")
        require(0 <= admit.slot < self.limits.max_num_seqs, f"I8: there is no slot {admit.slot}")
        require(admit.epoch > self._epoch, f"I9: epoch {admit.epoch} of {admit.id} is not new")
        known = track.request.prompt_ids + tuple(track.solo.token_ids[: track.num_tokens])
        require(admit.known_ids == known, f"I12: {admit.id} is admitted with other tokens than it has")
        require(admit.num_prompt == len(track.request.prompt_ids), f"I7: prompt length of {admit.id}")
        require(admit.work == track.request.work, f"I9: {admit.id} is admitted as somebody else")
        require(not (wrong := self.media.wrong_admission(admit, track.request)), str(wrong))
        self._overtakes(track)
        track.prefilling = True
        self._epoch = track.epoch = admit.epoch
        track.slot = admit.slot
        track.next_start = -1
        track.guessed, track.num_blocks = False, 0
        track.restores = admit.restore > 0
        self.restored += admit.restore > 0
        require(self._states or not admit.restore, f"I18: {admit.id} begins with a state, and there are none")
        self._slots[admit.slot] = track

    def _overtakes(self, track: Track) -> None:
        """Check I11: no waiting request should have come first, except a long prompt that waits for another one."""
        if self._policy not in ("fcfs", "priority", "priority_ageing"):
            return
        most = self.limits.max_long_partial_prefills
        passed = most < self.limits.max_num_partial_prefills and self._num_long(list(self._slots.values())) >= most
        for other in self.live.values():
            # whoever cannot be in time may be passed, until it has waited four times its target
            late = self.now < other.request.arrival + 4 * self.limits.targets.first_token
            if other.slot < 0 and not (other.paused or late or (passed and self._num_long([other]))):
                first = track.rank(self._policy) <= other.rank(self._policy)
                require(first, f"I11: {track.request.id} overtook {other.request.id}")

    def _chunk(self, chunk: Chunk) -> None:
        track = self.live.get(chunk.id)
        require(track is not None, f"I13: {chunk.id} runs, but is not here")
        if track is None:
            return
        require(not track.paused, f"I19: {chunk.id} runs although it is paused")
        require((chunk.slot, chunk.epoch) == (track.slot, track.epoch), f"I9: {chunk.id} runs in another's slot")
        require(not track.guessed, f"I20: {chunk.id} runs on before it is known which guesses are right")
        check_asked(self.limits.guesses, chunk, sum(not other.paused for other in self.live.values()))
        end = chunk.start + chunk.count
        if track.next_start < 0:
            hit_allowed = self.limits.prefix_caching and chunk.start < track.num_known
            states = not self._states or track.restores == bool(chunk.start)
            require(states, f"I18: {chunk.id} begins at {chunk.start} without the states there")
            require(not chunk.start or hit_allowed, f"I5: {chunk.id} begins at {chunk.start} of {track.num_known}")
            owed = track.request.work.prompt_logprobs is not None and not track.num_tokens
            owed = owed and track.num_prompt_logprobs < len(track.request.prompt_ids) - 1
            require(not (owed and chunk.start), f"I15: {chunk.id} owes prompt logprobs, but begins at {chunk.start}")
            if track.cached < 0:
                track.cached = chunk.start
                self.hits += chunk.start
        else:
            require(chunk.start == track.next_start, f"I7: {chunk.id} skips from {track.next_start} to {chunk.start}")
        require(end < track.limit, f"I7: {chunk.id} computes {end} tokens of at most {track.limit - 1}")
        check_blocks(self.limits, track, chunk)
        threshold = self.limits.long_prefill_token_threshold
        if not self.limits.chunked_prefill:
            require(bool(chunk.ends), f"I8: the prompt of {chunk.id} was split")
        elif threshold:
            require(chunk.count - chunk.drafts <= threshold, f"I8: {chunk.id} got {chunk.count}, over the threshold")
        track.next_start = end
        track.guessed = chunk.drafts > 0
        size = self.limits.groups[0].block_size if self._states else 1
        tail = (track.num_known - 1) % size + 1 if self._states and self.limits.num_snapshots else 0
        track.prefilling = track.prefilling and not chunk.ends and end < track.num_known - tail

    # ------------------------------------------------------------------------------------ deltas

    def credited(self, deltas: Sequence[RequestDelta], failing: set[str]) -> None:
        """Check the deltas of a commit. `failing` are the ids whose rows the device was told to spoil."""
        self.quiet_steps = 0 if deltas else self.quiet_steps + 1
        for delta in deltas:
            require(delta.id in self.live, f"I13: a delta for {delta.id}, which is not here")
            track = self.live[delta.id]
            require(not track.paused, f"I19: a delta for {delta.id}, which is paused")
            self._content(track, delta)
            if delta.finish is FinishReason.ERROR:
                require(delta.id in failing and bool(delta.error), f"I15: {delta.id} failed for no reason")
                self._finish(track, delta)
            elif delta.finish is not None:
                done = track.num_tokens == len(track.solo.token_ids)
                same = (delta.finish, delta.stop_reason) == (track.solo.finish, track.solo.stop_reason)
                require(done and same, f"I15: {delta.id} ended by {delta.finish} after {track.num_tokens} tokens")
                listed = track.num_prompt_logprobs == len(track.solo.prompt_logprobs)
                require(listed, f"I15: {delta.id} ended without all of its prompt logprobs")
                self._finish(track, delta)
            else:
                require(track.num_tokens < len(track.solo.token_ids), f"I13: {delta.id} should have ended")

    def _content(self, track: Track, delta: RequestDelta) -> None:
        first = track.num_tokens
        track.num_tokens += len(delta.token_ids)
        if track.guessed and delta.token_ids:
            track.guessed, track.next_start = False, track.num_known - 1
        self.tokens += len(delta.token_ids)
        solo = track.solo
        expected = tuple(solo.token_ids[first : track.num_tokens])
        require(delta.token_ids == expected, f"I15: {delta.id} said {delta.token_ids}, alone it says {expected}")
        same = list(delta.logprobs) == solo.logprobs[first : track.num_tokens]
        require(same, f"I15: {delta.id} has other logprobs than alone")
        first = track.num_prompt_logprobs
        track.num_prompt_logprobs += len(delta.prompt_logprobs)
        same = list(delta.prompt_logprobs) == solo.prompt_logprobs[first : track.num_prompt_logprobs]
        require(same, f"I15: {delta.id} has other prompt logprobs than alone")
        vector = solo.vector if delta.finish is FinishReason.STOP else None
        self.vectors += vector is not None
        require(delta.vector == vector, f"I21: {delta.id} has another vector than alone, or at another time")
        if delta.token_ids:
            require(delta.cached == track.cached, f"I13: {delta.id} counts {delta.cached} cached, had {track.cached}")

    def _finish(self, track: Track, delta: RequestDelta) -> None:
        id = track.request.id
        late = delta.num_preemptions - track.num_preemptions  # its release may not be planned yet
        require(
            0 <= late <= 1 + track.num_unsure,
            f"I17: {id} counts {delta.num_preemptions} preemptions, had {track.num_preemptions}",
        )
        _check_times(track, delta)
        del self.live[id]
        self.finished += 1
        self.quiet_steps = 0

    # ------------------------------------------------------------------------------------ figures

    def figures(self, stats: EngineStats, has_work: bool) -> None:
        paused = sum(track.paused for track in self.live.values())
        require(has_work == (paused < len(self.live)), f"I10: has_work is {has_work} with {len(self.live)} requests")
        require(stats.paused == paused, f"I19: {stats.paused} requests count as paused, {paused} are")
        require(stats.running + stats.waiting == len(self.live), "I17: running + waiting is not what is here")
        require(stats.running <= self.limits.max_num_seqs, f"I8: {stats.running} requests run")
        require(min(used := stats.blocks_used, stats.blocks_cached) >= 0, "I17: a gauge is negative")
        require(used + stats.blocks_cached <= stats.blocks_total, "I1: more blocks than there are")
        require(0 <= stats.snapshots <= self.limits.num_snapshots, f"I18: {stats.snapshots} snapshots are kept")
        require(stats.blocks_total == self.limits.num_blocks - 1, "I1: blocks are lost")
        require(bool(self.live) or not used, f"I4: {used} blocks in use without a request")
        require(stats.generation_tokens == self.tokens, f"I17: {stats.generation_tokens} tokens, {self.tokens} seen")
        require(stats.prefix_hits <= stats.prefix_queries, "I17: more hits than queries")
        check_guessed(stats)
        if self._last is not None:
            for name in COUNTERS:
                require(getattr(stats, name) >= getattr(self._last, name), f"I17: {name} fell")
        self._last = stats

    def progress(self) -> None:
        """Check I10: some request gets a delta before all could have been recomputed as often as allowed."""
        known = sum(track.limit for track in self.live.values())
        bound = (MAX_PREEMPTIONS + 1) * known + self.limits.num_blocks + self.limits.max_num_seqs + 2
        require(self.quiet_steps <= bound, f"I10: nothing was heard for {self.quiet_steps} steps")


def _check_times(track: Track, delta: RequestDelta) -> None:
    require(delta.times is not None, f"I13: {delta.id} ended without its times")
    if delta.times is not None:
        times = [delta.times.arrival, delta.times.scheduled, delta.times.first_token, delta.times.finished]
        reached = [time for time in times if time]
        require(reached == sorted(reached), f"I17: times of {delta.id} run backwards: {times}")
        answered = track.num_tokens > 0 or delta.vector is not None
        require(bool(delta.times.first_token) == answered, f"I17: first token of {delta.id} at {times}")

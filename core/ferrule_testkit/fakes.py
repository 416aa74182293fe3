"""A model without weights, a device without arithmetic, an executor and a clock: the engine's surroundings, faked.

The fake model's next token is a hash of the whole context, read *through the block tables* from simulated memory. Any
wrong block, stale slot, missed write or foreign reuse therefore changes the text, or is a `Fault` at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any
from zlib import crc32

from ferrule.interfaces.scheduler import RequestView, SchedulingPolicy
from ferrule.types import (
    AdapterLoad,
    Admit,
    CacheGroup,
    Chunk,
    EngineRequest,
    FinishReason,
    MediaItem,
    Pooling,
    RowResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from ferrule_testkit.simulate_media import encoded, item_at


class Fault(AssertionError):
    """A plan asked for something that no correct plan asks for."""


class VirtualClock:
    """Time that moves only when it is told to. Seconds."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True)
class FakeModel:
    """Pure functions. A "cell" is what a token leaves in the cache; it depends on all tokens before it and on a scope.

    The scope is adapter and salt: what else a real cache depends on, or who may see it. Group g stores cell + g, so
    that the cell of another group is a wrong one. With a recurrent group the next token depends on a state too, which
    takes in one token after the other and begins with the scope. Where a media item stands, its embeddings count and
    not the id.

    Without any group it is an encoder, which keeps nothing: a vector depends on all tokens that its own step computed.
    """

    all_groups: tuple[CacheGroup, ...]
    vocab_size: int

    @cached_property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Those with blocks."""
        return tuple(group for group in self.all_groups if group.paged)

    @cached_property
    def stateful(self) -> bool:
        return len(self.groups) < len(self.all_groups)

    def next_state(self, state: int, token: int) -> int:
        """Return the state after `token`; always 0 for a model without state."""
        return hash((state, token)) & 0xFFFFFFFFFFFF if self.stateful else 0

    def place(self, media: Sequence[MediaItem], position: int) -> int:
        """Return where the model sees a position: all tokens of a media item are at one place."""
        hidden = sum(min(item.count, position - item.start + 1) - 1 for item in media if item.start <= position)
        return position - hidden

    def cell(self, scope: int, position: int, token: int, probes: Sequence[int]) -> int:
        """Return a token's cell. `probes` are each group's newest and oldest visible cell; 0 where there is none."""
        return hash((scope, position, token, *probes)) & 0xFFFFFFFFFFFF

    def sample(self, seed: int, position: int, visible: Sequence[int], state: int) -> int:
        """Return the token at `position`, from the state before it and all cells that its predecessor sees."""
        return hash((seed, position, state, *visible)) % self.vocab_size

    def pool(self, normalize: bool | None, visible: Sequence[int], state: int) -> bytes:
        """Return the vector of a prompt, from the cells and the state that `sample` would use."""
        return hash((normalize, state, *visible)).to_bytes(8, "little", signed=True)

    def logprob(self, token: int, cell: int) -> TokenLogprobs:
        """Return a made-up log-probability of `token` after the token that left `cell`."""
        return TokenLogprobs(token, -float(hash((token, cell)) % 997), 1)


def longest(request: EngineRequest, max_model_len: int) -> int:
    """Return the most tokens that a request may have. A pooled vector counts as one token, which needs no position."""
    most = max_model_len + isinstance(request.work, Pooling)
    return min(len(request.prompt_ids) + request.work.max_tokens, most)


def scope(adapter: str | None = None, cache_salt: str | None = None) -> int:
    return crc32(repr((adapter, cache_salt)).encode())


def scope_of(request: EngineRequest) -> int:
    adapter = None if request.adapter is None else request.adapter.name
    return scope(adapter, request.cache_salt)


@dataclass
class Solo:
    """A request's expected output: computed alone, without a cache or a batch."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    vector: bytes | None = None
    finish: FinishReason = FinishReason.LENGTH
    stop_reason: int | None = None


def solo(model: FakeModel, request: EngineRequest, max_model_len: int) -> Solo:
    """Run a request alone, from the definitions: it shares no code with the device."""
    out = Solo()
    ids = list(request.prompt_ids)
    num_prompt = len(ids)
    work = request.work
    scope = scope_of(request)
    cells: list[int] = []
    state = scope
    while True:
        for p in range(len(cells), len(ids)):
            probes: list[int] = []
            for g, group in enumerate(model.groups):
                lo = group.dead_before(p)
                probes += (cells[p - 1] + g, cells[lo] + g) if lo < p else (0, 0)
            item = item_at(request.media, p)
            content = ids[p] if item is None else hash((encoded(item), p - item.start))
            cells.append(model.cell(scope, model.place(request.media, p), content, probes))
            state = model.next_state(state, content)
        if work.prompt_logprobs is not None and not out.token_ids:
            out.prompt_logprobs = [model.logprob(ids[p], cells[p - 1]) for p in range(1, num_prompt)]
        visible: list[int] = []
        for g, group in enumerate(model.groups):
            visible += [cell + g for cell in cells[group.dead_before(len(ids) - 1) :]]
        if isinstance(work, Pooling):
            out.vector = model.pool(work.normalize, visible if model.all_groups else cells, state)
            out.finish = FinishReason.STOP
            return out
        token = model.sample(work.seed, len(ids), visible, state)
        if work.logprobs is not None:
            out.logprobs.append(model.logprob(token, cells[-1]))
        ids.append(token)
        out.token_ids.append(token)
        if token in work.stop_token_ids and len(out.token_ids) > work.min_tokens:
            out.finish, out.stop_reason = FinishReason.STOP, token
            return out
        if len(out.token_ids) == work.max_tokens or len(ids) == max_model_len:
            return out


# ------------------------------------------------------------------------------------------- a policy


class BullyPolicy(SchedulingPolicy):
    """A policy that admits whoever suffered most first, to be thrown out first, for the bound on preemptions."""

    def key(self, view: RequestView, now: float) -> tuple[float, ...]:
        return (-view.num_preemptions, -view.sequence)

    def victim(self, running: Sequence[RequestView]) -> str:
        return max(running, key=lambda view: (view.num_preemptions, view.sequence)).id


# ------------------------------------------------------------------------------------------- the device


class SlotState:
    """The device's state of one slot. `adapter` was in its adapter slot when the request took the slot."""

    __slots__ = (
        *("adapter", "adapter_slot", "alive_from", "computed", "epoch", "guesses", "id", "ids", "media", "num_prompt"),
        *("scope", "tables", "work"),
    )

    def __init__(self, admit: Admit, adapter: str | None, scope: int, num_groups: int) -> None:
        self.id = admit.id
        self.adapter_slot, self.adapter = admit.adapter_slot, adapter
        self.epoch = admit.epoch
        self.ids = list(admit.known_ids)
        self.num_prompt = admit.num_prompt
        self.media = admit.media
        self.work = admit.work
        self.scope = scope
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.alive_from = [0] * num_groups  # table entries before this index are dead: never read again
        self.guesses: tuple[int, ...] = ()  # of what follows `ids`
        self.computed = -1  # unknown until the first chunk says where the cached prefix ends


class FakeDevice:
    """Executes plans in order, and knows nothing but the plans.

    `scope_of_admit` tells what the cells of a request depend on besides its tokens, from its admission and the adapter
    in its adapter slot. Ids in `failing` get an error row. It has room for `num_snapshots` states beside those of the
    slots, and for the embeddings of `encoded_tokens`. `guess` is its speculator: what may follow the known tokens of a
    request.
    """

    def __init__(
        self,
        model: FakeModel,
        num_blocks: int,
        scope_of_admit: Callable[[Admit, str | None], int] = lambda admit, adapter: scope(adapter),
        num_snapshots: int = 0,
        guess: Callable[[str, Sequence[int]], tuple[int, ...]] = lambda id, ids: (),
        encoded_tokens: int = 1 << 30,
    ) -> None:
        self._encoded: dict[bytes, tuple[int, int]] = {}  # by digest: tokens, and what stands for their embeddings
        self._encoded_tokens = encoded_tokens
        self.model = model
        self.right_guesses = self.wrong_guesses = 0
        self._guess = guess
        self.failing: set[str] = set()
        self.num_blocks = num_blocks
        self.adapters: dict[int, str] = {}  # by slot, once they are loaded
        self._scope = scope_of_admit
        self._size = model.all_groups[0].block_size if model.all_groups else 1
        self._memory: list[list[int | None]] = [[None] * self._size for _ in range(num_blocks)]
        self._holders = [0] * num_blocks  # live table entries that name the block
        self._slots: dict[int, SlotState] = {}
        self._recurrent: dict[int, int] = {}  # by slot; it stays when the slot is released
        self._snapshots: list[tuple[int, int] | None] = [None] * num_snapshots  # position and state, where written

    def load(self, need: AdapterLoad) -> None:
        self.adapters[need.slot] = need.adapter.name

    def run(self, plan: StepPlan) -> StepResult:
        for slot in plan.releases:
            self._release(slot)
        for admit in plan.admits:
            if admit.slot in self._slots:
                raise Fault(f"I9: slot {admit.slot} is given to {admit.id} while {self._slots[admit.slot].id} has it")
            if admit.adapter_slot and admit.adapter_slot not in self.adapters:
                raise Fault(f"I22: {admit.id} is admitted with adapter slot {admit.adapter_slot}, which is empty")
            adapter = self.adapters.get(admit.adapter_slot)
            state = SlotState(admit, adapter, self._scope(admit, adapter), len(self.model.groups))
            self._slots[admit.slot] = state
            self._begin_state(admit, state)
        self._encode(plan)
        states = [self._extend(chunk) for chunk in plan.chunks]
        rows = tuple(self._row(state, chunk) for state, chunk in zip(states, plan.chunks, strict=True))
        self._save(plan)
        return StepResult(plan.step, rows)

    def _encode(self, plan: StepPlan) -> None:
        for digest in plan.forgets:
            if self._encoded.pop(digest, None) is None:
                raise Fault(f"I23: {digest.hex()} is forgotten, and was not encoded")
        for item in plan.encodes:
            if item.digest in self._encoded:
                raise Fault(f"I23: {item.digest.hex()} is encoded twice")
            self._encoded[item.digest] = item.count, encoded(item)
        total = sum(count for count, _ in self._encoded.values())
        if total > self._encoded_tokens:
            raise Fault(f"I23: {total} tokens are encoded, and there is room for {self._encoded_tokens}")

    def _content(self, state: SlotState, position: int) -> int:
        item = item_at(state.media, position)
        if item is None:
            return state.ids[position]
        if item.digest not in self._encoded:
            raise Fault(f"I23: {state.id} computes position {position} of an item that is not encoded")
        return hash((self._encoded[item.digest][1], position - item.start))

    def _release(self, slot: int) -> None:
        state = self._slots.pop(slot, None)
        if state is None:
            raise Fault(f"I9: slot {slot} is released, but no request has it")
        for table, alive in zip(state.tables, state.alive_from, strict=True):
            for block in table[alive:]:
                self._holders[block] -= 1

    def _begin_state(self, admit: Admit, state: SlotState) -> None:
        """Set the state to zero, which is the scope, or to what was saved."""
        self._recurrent[admit.slot] = state.scope
        if admit.restore:
            saved = self._snapshots[self._place(admit.restore)]
            if saved is None:
                raise Fault(f"I18: {admit.id} begins with snapshot {admit.restore}, which was never written")
            state.computed, self._recurrent[admit.slot] = saved
            self._bury(state, state.computed)
        elif self.model.stateful:
            state.computed = 0

    def _place(self, snapshot: int) -> int:
        if not 0 < snapshot <= len(self._snapshots):
            raise Fault(f"I18: there is no snapshot {snapshot}, only {len(self._snapshots)}")
        return snapshot - 1

    def _save(self, plan: StepPlan) -> None:
        saves = {chunk.save: chunk for chunk in plan.chunks if chunk.save}
        if len(saves) < sum(chunk.save > 0 for chunk in plan.chunks):
            raise Fault("I18: a plan saves two states to one snapshot")
        for snapshot, chunk in saves.items():
            self._snapshots[self._place(snapshot)] = (chunk.start + chunk.count, self._recurrent[chunk.slot])

    def _extend(self, chunk: Chunk) -> SlotState:
        """Check the chunk against the slot and append its blocks."""
        state = self._slots.get(chunk.slot)
        if state is None or (state.id, state.epoch) != (chunk.id, chunk.epoch):
            raise Fault(f"I9: slot {chunk.slot} does not belong to {chunk.id} in epoch {chunk.epoch}")
        if state.adapter != self.adapters.get(state.adapter_slot):
            raise Fault(f"I22: the adapter of {chunk.id} was replaced while it runs")
        if state.computed < 0:
            state.computed = chunk.start
            for g, group in enumerate(self.model.groups):
                state.alive_from[g] = group.dead_before(chunk.start) // self._size
        if chunk.start != state.computed or chunk.count < 1:
            raise Fault(f"I7: {chunk.id} computes {chunk.count} from {chunk.start}, after {state.computed}")
        end = chunk.start + chunk.count
        known = end - chunk.drafts
        if known > len(state.ids) or (chunk.ends and known != len(state.ids)):
            raise Fault(f"I7: {chunk.id} computes up to {known} of {len(state.ids)} known tokens")
        if chunk.new_ids != state.guesses[: chunk.drafts] or (chunk.drafts and chunk.ends != "sample"):
            raise Fault(
                f"I20: {chunk.id} computes {chunk.new_ids} behind {known} tokens, but {state.guesses} may follow"
            )
        if chunk.ends not in ("", state.work.ends):
            raise Fault(f"I21: {chunk.id} ends with {chunk.ends}, and its work is to {state.work.ends}")
        state.ids += chunk.new_ids
        state.guesses = ()
        for g, blocks in enumerate(chunk.new_blocks):
            table = state.tables[g]
            for block in blocks:
                if len(table) >= state.alive_from[g]:
                    self._holders[block] += 1
                table.append(block)
        return state

    def _row(self, state: SlotState, chunk: Chunk) -> RowResult:
        groups, work, vector, end = self.model.groups, state.work, None, chunk.start + chunk.count
        cells, prompt_logprobs, drawn, logprobs, states = [], [], [], [], []
        known = end - chunk.drafts
        for p in range(chunk.start, end):
            probes: list[int] = []
            for g, group in enumerate(groups):
                lo = group.dead_before(p)
                probes += (self._read(state, g, p - 1), self._read(state, g, lo)) if lo < p else (0, 0)
            content = self._content(state, p)
            cell = self.model.cell(state.scope, self.model.place(state.media, p), content, probes)
            cells.append(cell)
            self._recurrent[chunk.slot] = self.model.next_state(self._recurrent[chunk.slot], content)
            states.append(self._recurrent[chunk.slot])
            for g in range(len(groups)):
                self._write(state, g, p, cell + g)
            if work.prompt_logprobs is not None and p + 1 < state.num_prompt:
                prompt_logprobs.append(self.model.logprob(state.ids[p + 1], cell))
            if chunk.ends and p + 1 >= known:
                visible: list[int] = []
                for g, group in enumerate(groups):
                    visible += self._read_range(state, g, group.dead_before(p), p + 1)
                if isinstance(work, Pooling):
                    vector = self.model.pool(work.normalize, visible if self.model.all_groups else cells, states[-1])
                else:
                    drawn.append(self.model.sample(work.seed, p + 1, visible, states[-1]))
                    logprobs.append(self.model.logprob(drawn[-1], cell))
        state.computed = end
        if chunk.ends == "sample":
            right = self._count_right(state.ids[known:], drawn)
            self.right_guesses += right
            self.wrong_guesses += chunk.drafts - right
            self._take_back(state, chunk, known + right, states)
            state.ids += drawn[right : right + 1]
            state.guesses = self._guess(state.id, state.ids)[: chunk.wanted]
            self._draft(state, chunk.wanted)
            drawn, logprobs = drawn[: right + 1], logprobs[: right + 1]
        self._bury(state, state.computed)
        if state.id in self.failing:
            return RowResult(id=state.id, epoch=state.epoch, error="injected")
        return RowResult(
            id=state.id,
            epoch=state.epoch,
            token_ids=tuple(drawn),
            drafts=state.guesses,
            logprobs=tuple(logprobs) if work.logprobs is not None else (),
            prompt_logprobs=tuple(prompt_logprobs),
            vector=vector,
        )

    def _draft(self, state: SlotState, count: int) -> None:
        """Write what a speculator's own layers keep of the newest token and of guesses, where there are blocks."""
        positions = range(len(state.ids) - 1, len(state.ids) - 1 + count)
        for g, table in enumerate(state.tables):
            for position in positions[: max(0, len(table) * self._size - positions.start)]:
                self._write(state, g, position, hash((state.id, position, "draft")))

    def _count_right(self, guesses: Sequence[int], drawn: Sequence[int]) -> int:
        return sum(takewhile(bool, map(int.__eq__, guesses, drawn)))

    def _take_back(self, state: SlotState, chunk: Chunk, computed: int, states: Sequence[int]) -> None:
        """Keep the first `computed` tokens only. Cells of the other tokens stay, to be written again."""
        del state.ids[computed:]
        state.computed = computed
        self._recurrent[chunk.slot] = states[computed - chunk.start - 1]

    def _bury(self, state: SlotState, computed: int) -> None:
        for g, group in enumerate(self.model.groups):
            dead = group.dead_before(computed) // self._size
            for block in state.tables[g][state.alive_from[g] : dead]:
                self._holders[block] -= 1
            state.alive_from[g] = max(dead, state.alive_from[g])

    def _block(self, state: SlotState, group: int, position: int) -> int:
        table = state.tables[group]
        index = position // self._size
        if index >= len(table):
            raise Fault(f"I3: {state.id} has no block for position {position} in group {group}")
        if not table[index]:
            raise Fault(f"I3: {state.id} uses the null block for position {position} in group {group}")
        return table[index]

    def _read(self, state: SlotState, group: int, position: int) -> int:
        value = self._memory[self._block(state, group, position)][position % self._size]
        if value is None:
            raise Fault(f"I5: {state.id} reads position {position}, which was never written")
        return value

    def _read_range(self, state: SlotState, group: int, first: int, end: int) -> list[int]:
        cells: list[Any] = []
        size = self._size
        for index in range(first // size, -(-end // size)):
            cells += self._memory[self._block(state, group, index * size)]
        cells = cells[first - first // size * size :][: end - first]
        if None in cells:
            raise Fault(f"I5: {state.id} reads a position that was never written")
        return cells

    def _write(self, state: SlotState, group: int, position: int, cell: int) -> None:
        block = self._block(state, group, position)
        if self._holders[block] != 1:
            raise Fault(f"I6: {state.id} writes block {block}, which {self._holders[block]} live entries name")
        self._memory[block][position % self._size] = cell

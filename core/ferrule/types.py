"""The nouns: every value that crosses a process or a layer, as frozen msgspec structs.

Nothing here imports another part of Ferrule. Times are seconds on the monotonic clock of the process that took
them; token positions count from 0; a "slot" is a row of the runner's persistent per-request state. What there are
thousands of is left out of garbage collection (`gc=False`): frozen values have no cycles, and scans would stall steps.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar, Literal

from msgspec import Struct


class FinishReason(StrEnum):
    """The reason why a request ended; every request ends exactly once."""

    STOP = "stop"  # end-of-sequence or stop token, or a stop string that the frontend found
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # the client left or cancelled
    ERROR = "error"  # this request failed; its neighbours did not


# --------------------------------------------------------------------------------------------- requests


class ThoughtLimit(Struct, frozen=True, kw_only=True, gc=False):
    """A limit on thoughts: after at most `tokens` tokens of them, `end_ids` are generated, and the output goes on
    freely.

    Thoughts begin with the output (`inside`) and behind each text of `opens`; a text of `closes` ends them. `again`:
    they may begin again, and all of them count together.
    """

    tokens: int
    inside: bool
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    end_ids: tuple[int, ...]
    again: bool = False


class TokenSampling(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="sample"):
    """Work of a request that generates: what the engine and the sampler need of its parameters, all of it resolved.

    `seed` is always set (the frontend draws one when the user gave none), so that a recomputed or re-batched
    request repeats its samples: the noise of a sample is a function of (seed, position, draw) alone.
    """

    ends: ClassVar[Literal["sample"]] = "sample"
    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids included unless ignore_eos
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences
    processors: tuple[tuple[str, dict[str, Any]], ...] = ()  # logits-processor plugins: (name, kwargs)
    extra_args: dict[str, Any] = {}  # plain data for plugins, as the caller gave it
    thoughts: ThoughtLimit | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def plain(self) -> bool:
        """True when logits need no change before sampling."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        barred = self.min_tokens or self.allowed_token_ids or self.bad_words
        return not (penalties or barred or self.logit_bias or self.processors)


class Pooling(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="pool"):
    """Work of a request whose answer is one vector of its prompt, which the model computes by `Pools.pool`.

    It generates no tokens: what the engine reads of any work is constant here.
    """

    ends: ClassVar[Literal["pool"]] = "pool"
    max_tokens: ClassVar[int] = 1  # the vector comes as a first token would, and needs no position
    min_tokens: ClassVar[int] = 0
    stop_token_ids: ClassVar[tuple[int, ...]] = ()
    logprobs: ClassVar[None] = None
    prompt_logprobs: ClassVar[None] = None
    thoughts: ClassVar[None] = None
    normalize: bool | None = None  # to a length of 1; None: as the model usually does


Work = TokenSampling | Pooling


class CompiledGrammar(Struct, frozen=True, kw_only=True, gc=False, tag="grammar"):
    """A constraint as the engine takes it: what a backend's `compile` made, and a digest of what it was made of."""

    backend: str
    digest: bytes
    data: bytes


class Adapter(Struct, frozen=True, kw_only=True, gc=False):
    """Weights that add to the model's for some requests. No two adapters have one `name`; `path` is their folder.

    An adapter that is loaded again has another `name`, because cached blocks are found by it. `served` is the name that
    clients use.
    """

    name: str
    path: str = ""
    served: str = ""

    @property
    def title(self) -> str:
        """The name by which people know it."""
        return self.served or self.name


class AdapterInfo(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The limits of requests for an adapter, where they are not those of requests without one."""

    max_len: int = 0  # longest text, in tokens; 0: as without an adapter
    num_added: int = 0  # tokens that it adds to the vocabulary: the ids from the model's `vocab_size` on


class AdapterLoad(Struct, frozen=True, kw_only=True, gc=False, tag="adapter"):
    """An adapter that is to be loaded into a slot of the device's bank, from 1 on, in the place of what is there.

    Slot 0 stands for none of them: the adapter is read into the host's memory and checked, no more.
    """

    adapter: Adapter
    slot: int


Need = CompiledGrammar | AdapterLoad  # what is loaded before the request that needs it is queued


class HostTensor(Struct, frozen=True, kw_only=True, gc=False):
    """A tensor in row order, little-endian. `dtype` is torch's name of its type, without the module's."""

    shape: tuple[int, ...]
    dtype: str
    data: bytes


class MediaItem(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A medium at positions [start, start + count) of a prompt, whose ids there are placeholders.

    `digest` is one of kind and content. Of kind "embeds", `data["embeds"]` are the embeddings [count, size] themselves;
    of other kinds, `data` is what `Model.encode` makes embeddings of. `grid` is the arrangement of the positions, for
    `Model.positions`.
    """

    kind: str
    digest: bytes
    start: int
    count: int
    grid: tuple[int, ...] = ()
    data: dict[str, HostTensor] = {}


class Targets(Struct, frozen=True, omit_defaults=True, gc=False):
    """Seconds that a first token, from its request's arrival on, and each next one are to take; 0: no wish."""

    first_token: float = 0.0
    inter_token: float = 0.0


class EngineRequest(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One sequence to work on, admitted by the gate: valid for this model and sure to fit the cache.

    `id` is ours and random. `arrival` is on the admitting process's monotonic clock (one machine: comparable).
    Lower `priority` runs first. Items of `media` are in the order of their positions, and do not overlap.
    """

    id: str
    prompt_ids: tuple[int, ...]
    work: Work
    arrival: float = 0.0
    priority: int = 0
    adapter: Adapter | None = None
    adapter_slot: int = 0  # where the engine has loaded it
    media: tuple[MediaItem, ...] = ()
    cache_salt: str | None = None
    grammar: CompiledGrammar | None = None
    targets: Targets = Targets()
    key_name: str = ""  # of the API key that the request came with


# ------------------------------------------------------------------------------------------- the step


class Admit(Struct, frozen=True, kw_only=True, gc=False):
    """The admission of a request to a slot. `known_ids` is its prompt plus, after preemption, what it has generated.

    The first `num_prompt` ids are the prompt. The runner clears the slot before it writes anything. States of recurrent
    layers are then those of the snapshot `restore`, which an earlier plan saved; 0: zeros.
    `scope`: a digest of adapter and cache salt. Nothing of a request may be told to others of another scope.
    """

    slot: int
    id: str
    epoch: int
    known_ids: tuple[int, ...]
    num_prompt: int
    work: Work
    adapter_slot: int = 0  # of the adapter that its tokens are computed with; 0: none
    media: tuple[MediaItem, ...] = ()  # without data; their digests are those of `StepPlan.encodes`
    grammar: CompiledGrammar | None = None
    restore: int = 0
    scope: bytes = b""


class Chunk(Struct, frozen=True, kw_only=True, gc=False):
    """One row of a step: compute positions [start, start + count) of the request in `slot`.

    `ends` says what comes of the last position. "sample": its logits are sampled, and the token becomes position
    start + count. "pool": the prompt ends here, and its vector is computed. "": nothing. With depth 2 a sampled token
    may be an input of the next plan before the host has seen it: the runner keeps ids per slot.
    `new_ids`: the chunk's last ids, where the runner does not have them yet.
    `drafts`: how many of these are guesses (`RowResult.drafts`) of what will be sampled. A token is sampled for each of
    them and one behind; they count up to the first that differs from its guess. The request's next chunk begins with
    the last one that counted, so it is planned when this result is known.
    `wanted`: the most guesses that its result may have of what follows. 0: nothing is guessed for it.
    `new_blocks[g]`: block ids appended to the slot's table in cache group g by this plan.
    `save`: the snapshot, from 1 on, to which states of recurrent layers are copied when the chunk is computed; 0: none.
    """

    slot: int
    id: str
    epoch: int
    start: int
    count: int
    ends: Literal["sample", "pool", ""]
    new_ids: tuple[int, ...] = ()
    drafts: int = 0
    wanted: int = 0
    new_blocks: tuple[tuple[int, ...], ...] = ()
    save: int = 0


class StepPlan(Struct, frozen=True, kw_only=True, gc=False):
    """The work of the runner in one step: differences only, done in the order of the fields, and then the saves of
    chunks.

    A request appears at most once in `chunks`. Embeddings of `encodes` are kept by digest until a plan forgets them. A
    chunk computes positions of an item only when its embeddings are kept.
    """

    step: int
    releases: tuple[int, ...] = ()  # slots
    admits: tuple[Admit, ...] = ()
    forgets: tuple[bytes, ...] = ()  # digests
    encodes: tuple[MediaItem, ...] = ()
    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


class TokenLogprobs(Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position: the chosen token's, its rank (1 = most likely), and the top list."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


class RowResult(Struct, frozen=True, kw_only=True, gc=False):
    """The result of one chunk. `token_ids` is empty for a chunk that did not sample, `vector` None where no vector was
    made.

    Of a chunk with guesses, `token_ids` are the right ones, and one token more. `drafts` are guesses of what follows.
    `prompt_logprobs` has one entry for each position p in (start, start + count] that is still in the prompt: the
    log-probability of known token p given the ones before it. `error` ends this request and no other; `invalid` says
    that the request itself is to blame.
    """

    id: str
    epoch: int
    token_ids: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    vector: bytes | None = None  # float32, little-endian
    error: str | None = None
    invalid: bool = False


class StepSeconds(Struct, frozen=True, gc=False):
    """Seconds of one step, or of all steps of a request. They are measured with --collect-detailed-traces.

    `forward` is the model's forward pass, until the device has ended it; 0.0 where that was not measured. `execute` is
    the step on its worker, from its inputs to its result: forward pass, sampling, copies. `scheduler` is its planning.
    """

    execute: float
    forward: float = 0.0
    scheduler: float = 0.0

    def __add__(self, other: StepSeconds | None) -> StepSeconds:
        if other is None:
            return self
        return StepSeconds(self.execute + other.execute, self.forward + other.forward, self.scheduler + other.scheduler)


class StepResult(Struct, frozen=True, gc=False):
    """Rows in the order of the plan's chunks."""

    step: int
    rows: tuple[RowResult, ...]
    seconds: StepSeconds | None = None  # where steps are measured


# ------------------------------------------------------------------------------------- engine → frontend


class RequestTimes(Struct, frozen=True, gc=False):
    """Monotonic seconds in the engine's process; 0.0 where a phase was not reached."""

    arrival: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    seconds: StepSeconds | None = None  # of the steps that computed it, where steps are measured


class Guesses(Struct, frozen=True, gc=False):
    """Guesses of next tokens for one request so far. The fields are those of `EngineStats`."""

    drafts: int
    draft_tokens: int
    accepted_by_place: tuple[int, ...]

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted_by_place)


class RequestDelta(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """News of one request. `finish` is set on the last one, and nothing follows it.

    `stop_reason` is the stop token's id. `cached` counts prompt tokens that came from the prefix cache and is final
    in the first delta with tokens. With finish ERROR, `error` is fit for the client; `invalid`: a 400, not a 500.
    """

    id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    vector: bytes | None = None  # as in `RowResult`
    finish: FinishReason | None = None
    stop_reason: int | None = None
    cached: int = 0
    num_preemptions: int = 0
    error: str | None = None
    times: RequestTimes | None = None  # with `finish`
    guesses: Guesses | None = None  # so far, where there were some
    invalid: bool = False


class EngineStats(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Gauges now, and counters since start (monotone)."""

    running: int = 0
    waiting: int = 0  # those that are paused included
    paused: int = 0  # get no steps, because their output is not read
    blocks_total: int = 0
    blocks_used: int = 0  # held by live requests
    blocks_cached: int = 0  # free, but holding a reusable prefix
    snapshots: int = 0  # saved states of recurrent layers, at the ends of reusable prefixes
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0  # tokens
    preemptions: int = 0
    prompt_tokens: int = 0  # of requests that produced their first token
    prompt_cached: int = 0  # those of them that came from the prefix cache
    generation_tokens: int = 0
    steps: int = 0
    drafts: int = 0  # rows of steps that had guesses of next tokens
    draft_tokens: int = 0  # these guesses
    accepted_by_place: tuple[int, ...] = ()  # right guesses: how many were the first of their row, the second, …
    corrupted_requests: int = 0  # ended by non-finite logits or an id out of range
    stalled_seconds: float = 0.0  # work exists, but no step has ended for this long
    sleep_level: int = 0  # 0: awake
    running_adapters: tuple[str, ...] = ()  # titles of those that running requests use
    waiting_adapters: tuple[str, ...] = ()  # and of those that waiting requests are for
    restarts: int = 0  # engines that have died and were followed by another; counters go on over them
    # What follows is counted by the API processes, and 0 where the engine says it.
    buffered_bytes: int = 0  # that they keep for their clients
    choice_prompt_tokens: int = 0  # of choices with a first token; those of a beam search once, not for each step
    choice_prompt_cached: int = 0  # those of them that came from the prefix cache
    choice_generation_tokens: int = 0  # read by a client or not, of engines that have died too

    @property
    def cache_usage(self) -> float:
        return self.blocks_used / self.blocks_total if self.blocks_total else 0.0

    @property
    def accepted_tokens(self) -> int:
        """Right guesses."""
        return sum(self.accepted_by_place)


# ------------------------------------------------------------------------------------- what a model is


class CacheGroup(Struct, frozen=True):
    """Layers that share a block table. The engine needs no more than this to keep their cache.

    `kind`: "full", "sliding" or "recurrent". `window`: tokens a sliding layer sees (itself included), 0 for full.
    All groups draw blocks of `block_size` tokens from one pool; block 0 is the null block and is never written.
    A recurrent group has no blocks: its layers keep one state for each slot, cleared or restored at admission
    (`Admit.restore`). It is a model's last group, and `Chunk.new_blocks` has no entry for it.
    """

    kind: str
    block_size: int
    window: int = 0
    num_layers: int = 1

    @property
    def paged(self) -> bool:
        return self.kind != "recurrent"

    def dead_before(self, computed: int) -> int:
        """Return the position below which none is ever read again once `computed` positions are in the cache."""
        return max(0, computed - self.window + 1) if self.window else 0


class PromptBorder(Struct, frozen=True):
    """Prompts longer than `length` are computed differently from their first token on (length-dependent rope).

    They do not share cached prefixes with shorter prompts; with `exact`, only with prompts of the same length.
    """

    length: int
    exact: bool = False

    def scope(self, num_prompt: int) -> str | None:
        """Part of the key of a prompt's cached blocks: prompts of one scope share blocks. None within the border."""
        return None if num_prompt <= self.length else str(num_prompt) if self.exact else "long"


class ModelInfo(Struct, frozen=True, kw_only=True):
    """A description of the model that the executor gives to the other components after `start`."""

    architecture: str
    implementation: str  # plugin that runs it, with its distribution
    vocab_size: int  # logits width
    max_model_len: int
    dtype: str
    device: str
    attention: str
    groups: tuple[CacheGroup, ...]
    page_bytes: int  # bytes of one block over all layers of the largest group; 0 for a model that has only states
    max_blocks: int  # how many blocks the device's budget allows
    num_parameters: int = 0
    weight_bytes: int = 0
    notes: tuple[str, ...] = ()  # "attention triton refused: no GPU" …
    quantization: str | None = None
    tasks: tuple[str, ...] = ("generate",)  # "generate" of a model that `Generates`, "embed" of one that `Pools`
    splits_prompts: bool = True  # the model's `Model.splits_prompts`
    depth: int = 1  # steps in flight that this executor and platform profit from
    prompt_share: int = 0  # the platform's `Execution.prompt_share`
    prompt_border: PromptBorder | None = None
    hidden_size: int = 0  # width of the embeddings that a prompt may be given as; 0: the model takes none
    max_num_seqs: int | None = None  # requests whose states fit, where that is fewer than the option's default
    max_snapshots: int = 0  # saved states of recurrent layers that the device's budget allows, beside `max_blocks`
    state_bytes: int = 0  # of one request's states, and so of a snapshot
    adapter_slots: int = 0  # adapters that can be loaded at a time
    lookahead: int = 0  # positions behind the last known token that a speculator writes to
    own_len: int = 0  # longest text without an adapter, where adapters may have longer ones; 0: `max_model_len`
    adapters: dict[str, AdapterInfo] = {}  # those of --lora-modules, by their `Adapter.name`

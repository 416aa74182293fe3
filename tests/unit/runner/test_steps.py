"""The runner, driven by plans made by hand, against transformers' generate on a tiny random Llama."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ferrule.assembly.model import pack
from ferrule.interfaces.model import BuildContext
from ferrule.interfaces.sampler import LogprobsMode, SampleBatch, Sampled
from ferrule.plugin import Plugins
from ferrule.runner.model_runner import ModelRunner, RunnerParts
from ferrule.runner.state import RunnerLimits
from ferrule.types import Admit, Chunk, RowResult, StepPlan, TokenSampling
from ferrule_plugins.attention.cpu import CpuAttention
from ferrule_plugins.model.llama import Llama
from ferrule_plugins.platform.cpu_kernels import cpu_kernels
from ferrule_plugins.sampler.default import DefaultSampler

VOCAB, BLOCK, MAX_LEN, BLOCKS = 128, 4, 96, 120
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
}


class NoPlugins(Plugins):
    def names(self, kind: str) -> tuple[str, ...]:
        return ()

    def load(self, kind: str, name: str) -> Any:
        raise LookupError(name)

    def origin(self, kind: str, name: str) -> str:
        return ""


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.35)
    return model


def _model(weights: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32, **changes: Any) -> Llama:
    context = BuildContext(
        config={**CONFIG, **changes},
        dtype=dtype,
        device=torch.device("cpu"),
        block_size=BLOCK,
        max_model_len=MAX_LEN,
        kernels=cpu_kernels(),
    )
    model = Llama(context)
    model.load_weights(weights.items())
    return model


def _runner(model: Llama, slots: int = 4, mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS) -> ModelRunner:
    dtype = model.embed_tokens.weight.dtype
    limits = RunnerLimits(slots=slots, max_model_len=MAX_LEN, vocab_size=VOCAB, dtype=dtype, device=torch.device("cpu"))
    limits, sampler = replace(limits, logprobs_mode=mode), DefaultSampler(NoPlugins())
    runner = ModelRunner(RunnerParts(model=model, attention=CpuAttention(), sampler=sampler, limits=limits))
    runner.init_cache(BLOCKS)
    return runner


@pytest.fixture
def runner(reference: LlamaForCausalLM) -> ModelRunner:
    return _runner(_model(reference.state_dict()))


@dataclass
class Request:
    """A request as the planner knows it: its place, and how far it has come."""

    prompt: tuple[int, ...]
    sampling: TokenSampling
    slot: int = 0
    known: int = 0
    computed: int = 0
    blocks: int = 0
    tokens: list[int] = field(default_factory=list)
    rows: list[RowResult] = field(default_factory=list)

    @property
    def id(self) -> str:
        return f"r{self.slot}"

    @property
    def total(self) -> int:
        return len(self.prompt) + self.sampling.max_tokens


class Driver:
    """A planner of the simplest kind. Results are read only when all plans are made: what any depth may do."""

    def __init__(self, runner: ModelRunner, groups: int = 1, budget: int = 1000) -> None:
        self.runner = runner
        self.groups = groups
        self.budget = budget
        self.step = 0
        self.free = iter(random.Random(5).sample(range(1, BLOCKS), BLOCKS - 1))

    def admit(self, request: Request, slot: int) -> Admit:
        request.slot, request.known = slot, len(request.prompt)
        return Admit(
            slot=slot,
            id=request.id,
            epoch=0,
            known_ids=request.prompt,
            num_prompt=len(request.prompt),
            work=request.sampling,
        )

    def chunk(self, request: Request, budget: int) -> Chunk:
        start = request.computed
        count = min(request.known - start, budget)
        request.computed += count
        samples = request.computed == request.known
        request.known += samples
        wanted = -(-request.computed // BLOCK) - request.blocks
        request.blocks += wanted
        blocks = tuple(tuple(next(self.free) for _ in range(wanted)) for _ in range(self.groups))
        return Chunk(
            slot=request.slot,
            id=request.id,
            epoch=0,
            start=start,
            count=count,
            ends="sample" if samples else "",
            new_blocks=blocks,
        )

    def run(self, requests: Sequence[Request]) -> None:
        """Admit all, run them to their last token, and release them."""
        admits = tuple(self.admit(request, slot) for slot, request in enumerate(requests))
        plans = []
        while live := [r for r in requests if r.known < r.total]:
            budget, chunks = self.budget, []
            for request in live:
                if budget:
                    chunks.append(self.chunk(request, budget))
                    budget -= chunks[-1].count
            plans.append(StepPlan(step=self.step, chunks=tuple(chunks), admits=admits))
            admits, self.step = (), self.step + 1
        by_slot = {request.slot: request for request in requests}
        for plan, result in [(plan, self.runner.execute(plan)) for plan in plans]:
            for chunk, row in zip(plan.chunks, result.rows, strict=True):
                by_slot[chunk.slot].rows.append(row)
                by_slot[chunk.slot].tokens += row.token_ids
        self.runner.execute(StepPlan(step=self.step, chunks=(), releases=tuple(by_slot)))
        self.runner.check()


def _prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed * 100 + length).randrange(VOCAB) for _ in range(length))


def _greedy(tokens: int = 12, **changes: Any) -> TokenSampling:
    return TokenSampling(seed=0, max_tokens=tokens, temperature=0.0, **changes)


def _expected(model: LlamaForCausalLM, prompt: tuple[int, ...], tokens: int = 12) -> list[int]:
    out = model.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, eos_token_id=None)
    return out[0, len(prompt) :].tolist()


# ------------------------------------------------------------------------------------------- correctness


@pytest.mark.parametrize("length", [1, 3, 4, 5, 17])
def test_alone(runner: ModelRunner, reference: LlamaForCausalLM, length: int) -> None:
    request = Request(_prompt(length), _greedy())
    Driver(runner).run([request])
    assert request.tokens == _expected(reference, request.prompt)


@pytest.mark.parametrize("budget", [1000, 7, 3, 1])
def test_mixed_lengths_chunked(runner: ModelRunner, reference: LlamaForCausalLM, budget: int) -> None:
    requests = [Request(_prompt(length), _greedy(6 + length % 5)) for length in (2, 9, 21, 5)]
    Driver(runner, budget=budget).run(requests)
    for request in requests:
        assert request.tokens == _expected(reference, request.prompt, request.sampling.max_tokens)


def test_windowed_layers_in_their_own_group(reference: LlamaForCausalLM) -> None:
    """Share storages between two groups; a window is checked against full attention with the distant keys masked."""
    weights = reference.state_dict()
    windows = {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}
    ours = _runner(_model(weights, **windows))
    assert [(g.kind, g.window, g.num_layers) for g in ours.cache.groups] == [("full", 0, 1), ("sliding", 6, 1)]
    assert len(ours.cache.page_elements) == 1
    prompts = [_prompt(11), _prompt(3)]
    together = [Request(p, _greedy(16)) for p in prompts]
    Driver(ours, groups=2, budget=5).run(together)
    for prompt, request in zip(prompts, together, strict=True):
        known = list(prompt)
        for token in request.tokens:
            assert token == _next_with_window(weights, known, windows)
            known.append(token)


def _next_with_window(weights: dict[str, torch.Tensor], ids: list[int], windows: dict[str, Any]) -> int:
    """Return the next token from one pass without a cache."""

    class Whole:
        positions = torch.arange(len(ids))
        lengths = torch.full((len(ids),), len(ids))
        embeds = None

        def attend(self, layer: str, q: Any, k: Any, v: Any, options: Any) -> torch.Tensor:
            k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
            distance = self.positions.unsqueeze(1) - self.positions
            seen = (distance >= 0) & (distance < (options.window or 1000))
            scores = torch.einsum("qhd,khd->hqk", q, k) * options.scale
            return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)

    model = _model(weights, **windows)
    return int(model.logits(model.forward(torch.tensor(ids), Whole()))[-1].argmax())


@pytest.mark.parametrize("budget", [1000, 7])
@pytest.mark.parametrize("prompt", [9, 40])
def test_a_rotation_that_depends_on_the_length(prompt: int, budget: int) -> None:
    """Generate from below the trained length to beyond it, as transformers' generate does, however the prompt is
    chunked.
    """
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    changes = {"max_position_embeddings": 16, "rope_parameters": rope}
    torch.manual_seed(1)
    theirs = LlamaForCausalLM(LlamaConfig(**{**CONFIG, **changes})).eval()
    for parameter in theirs.parameters():
        parameter.data.normal_(0, 0.35)
    requests = [Request(_prompt(prompt), _greedy(14)), Request(_prompt(5), _greedy(14))]
    Driver(_runner(_model(theirs.state_dict(), **changes)), budget=budget).run(requests)
    for request in requests:
        theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)  # it remembers the longest text it saw
        assert request.tokens == _expected(theirs, request.prompt, 14)


def test_logits_of_another_width_are_noticed(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner._model, "logits", lambda hidden: torch.zeros(hidden.shape[0], VOCAB + 1))
    with pytest.raises(RuntimeError, match="vocab_size"):
        Driver(runner).run([Request(_prompt(3), _greedy(1))])


@pytest.mark.parametrize("budget", [1000, 4])
def test_logprobs_equal_transformers(runner: ModelRunner, reference: LlamaForCausalLM, budget: int) -> None:
    wanted = Request(_prompt(13), _greedy(5, logprobs=4, prompt_logprobs=2))
    plain = Request(_prompt(6), _greedy(5))
    Driver(runner, budget=budget).run([wanted, plain])
    ids = torch.tensor([[*wanted.prompt, *wanted.tokens]])
    with torch.inference_mode():
        theirs = reference(ids).logits[0].log_softmax(-1)
    entries = [e for row in wanted.rows for e in row.prompt_logprobs] + [e for row in wanted.rows for e in row.logprobs]
    assert [e.token_id for e in entries] == ids[0, 1:].tolist()
    for position, entry in enumerate(entries):
        own = theirs[position, entry.token_id]
        assert entry.logprob == pytest.approx(float(own), abs=1e-4)
        assert entry.rank == int((theirs[position] > own).sum()) + 1
        top = theirs[position].topk(2 if position < 12 else 4)
        assert [token for token, _ in entry.top] == top.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)
    assert not any(row.logprobs or row.prompt_logprobs for row in plain.rows)


@pytest.mark.parametrize("mode", LogprobsMode)
def test_what_logprobs_are_in_each_mode(reference: LlamaForCausalLM, mode: LogprobsMode) -> None:
    """Return raw logprobs of the prompt; the mode decides whether they are log-probabilities."""
    request = Request(_prompt(9), _greedy(3, logprobs=0, prompt_logprobs=0, logit_bias=((7, 2.5),)))
    Driver(_runner(_model(reference.state_dict()), mode=mode)).run([request])
    ids = torch.tensor([[*request.prompt, *request.tokens]])
    with torch.no_grad():
        theirs = reference(ids).logits[0]
    if mode.processed:
        theirs[8:, 7] += 2.5
    theirs = theirs.log_softmax(-1) if mode.normalised else theirs
    entries = [e for r in request.rows for e in r.prompt_logprobs] + [e for r in request.rows for e in r.logprobs]
    wanted = theirs[:-1].gather(1, ids[0, 1:, None]).flatten().tolist()
    assert [entry.logprob for entry in entries] == pytest.approx(wanted, abs=1e-4)


def test_logprobs_do_not_depend_on_sampling(runner: ModelRunner) -> None:
    """Return logprobs of the raw logits."""
    shaped = {"logit_bias": ((3, 50.0),), "repetition_penalty": 1.5, "min_tokens": 2, "stop_token_ids": (1,)}
    plain, biased = Request(_prompt(8), _greedy(1, logprobs=3)), Request(_prompt(8), _greedy(1, logprobs=3, **shaped))
    Driver(runner).run([plain, biased])
    assert biased.tokens == [3]
    assert biased.rows[0].logprobs[0].top == plain.rows[0].logprobs[0].top
    assert biased.rows[0].logprobs[0].rank > 1


def test_all_of_the_vocabulary(runner: ModelRunner) -> None:
    request = Request(_prompt(4), _greedy(1, logprobs=-1))
    Driver(runner).run([request])
    assert len(request.rows[0].logprobs[0].top) == VOCAB


def test_prompt_logprobs_hold_few_logits_at_a_time(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Request(_prompt(20), _greedy(1, prompt_logprobs=1))
    Driver(runner).run([whole])
    monkeypatch.setattr("ferrule.runner.logprobs.CHUNK_ELEMENTS", VOCAB * 3)
    pieces = Request(_prompt(20), _greedy(1, prompt_logprobs=1))
    Driver(runner).run([pieces])
    mine, theirs = (request.rows[0].prompt_logprobs for request in (pieces, whole))
    assert [e.token_id for e in mine] == [e.token_id for e in theirs]
    assert [e.logprob for e in mine] == pytest.approx([e.logprob for e in theirs], abs=1e-5)


# ------------------------------------------------------------------------------------- slots and isolation


def _seeded(seed: int = 3, tokens: int = 12) -> TokenSampling:
    return TokenSampling(seed=seed, max_tokens=tokens, temperature=0.9, top_p=0.95)


@pytest.mark.advisory("GHSA-v97p-wpxp-px84")
def test_a_slot_used_again_remembers_nothing(reference: LlamaForCausalLM) -> None:
    model = _model(reference.state_dict())
    penalised = TokenSampling(seed=9, max_tokens=8, repetition_penalty=1.8, logit_bias=((5, 20.0),), logprobs=2)
    used, fresh = _runner(model, slots=1), _runner(model, slots=1)
    driver = Driver(used)
    driver.run([Request(_prompt(30), penalised)])
    later, first = Request(_prompt(6), _seeded()), Request(_prompt(6), _seeded())
    driver.run([later])
    Driver(fresh).run([first])
    assert later.tokens == first.tokens
    assert not later.rows[0].logprobs


def test_seeded_samples_do_not_depend_on_neighbours(reference: LlamaForCausalLM) -> None:
    model = _model(reference.state_dict())
    alone = Request(_prompt(7), _seeded())
    Driver(_runner(model)).run([alone])
    others = [Request(_prompt(n, n), TokenSampling(seed=n, max_tokens=9, top_k=n)) for n in (3, 12, 5)]
    among = Request(_prompt(7), _seeded())
    Driver(_runner(model), budget=6).run([*others, among])
    assert among.tokens == alone.tokens


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="the processor has no bfloat16")
def test_bfloat16_has_the_same_bits_alone_and_batched(reference: LlamaForCausalLM) -> None:
    """Compare tokens: half precision rounds so coarsely that one different bit soon means another token."""
    model = _model(reference.state_dict(), torch.bfloat16)
    pack(model)
    shapes = [(length, TokenSampling(seed=length, max_tokens=12, logprobs=1)) for length in (7, 3, 30, 16)]
    together = [Request(_prompt(length), sampling) for length, sampling in shapes]
    Driver(_runner(model)).run(together)
    for (length, sampling), among in zip(shapes, together, strict=True):
        alone = Request(_prompt(length), sampling)
        Driver(_runner(model)).run([alone])
        assert among.tokens == alone.tokens
        assert [row.logprobs for row in among.rows] == [row.logprobs for row in alone.rows]


def test_preempted_request_goes_on_with_the_same_samples(reference: LlamaForCausalLM) -> None:
    model = _model(reference.state_dict())
    whole = Request(_prompt(7), _seeded())
    Driver(_runner(model)).run([whole])
    known = (*whole.prompt, *whole.tokens[:5])
    runner, blocks = _runner(model), tuple(range(1, 9))
    admit = Admit(slot=2, id="again", epoch=1, known_ids=known, num_prompt=len(whole.prompt), work=whole.sampling)
    result = runner.execute(
        StepPlan(
            step=0,
            chunks=(
                Chunk(
                    slot=2,
                    id="again",
                    epoch=1,
                    start=0,
                    count=len(known),
                    ends="sample",
                    new_blocks=(blocks,),
                ),
            ),
            admits=(admit,),
        )
    )
    assert result.rows[0].token_ids == (whole.tokens[5],)
    assert result.rows[0].epoch == 1


def test_admission_in_the_step_that_releases_the_slot(runner: ModelRunner, reference: LlamaForCausalLM) -> None:
    first, second = (
        Admit(slot=0, id=name, epoch=0, known_ids=_prompt(n), num_prompt=n, work=_greedy())
        for name, n in (("a", 9), ("b", 4))
    )
    runner.execute(
        StepPlan(
            step=0,
            chunks=(Chunk(slot=0, id="a", epoch=0, start=0, count=9, ends="sample", new_blocks=((1, 2, 3),)),),
            admits=(first,),
        )
    )
    plan = StepPlan(
        step=1,
        chunks=(Chunk(slot=0, id="b", epoch=0, start=0, count=4, ends="sample", new_blocks=((3,),)),),
        admits=(second,),
        releases=(0,),
    )
    assert list(runner.execute(plan).rows[0].token_ids) == _expected(reference, _prompt(4), 1)


def test_ids_that_the_host_appends_are_used(runner: ModelRunner, reference: LlamaForCausalLM) -> None:
    prompt = _prompt(9)
    admit = Admit(slot=0, id="a", epoch=0, known_ids=prompt[:5], num_prompt=5, work=_greedy())
    runner.execute(
        StepPlan(
            step=0,
            chunks=(Chunk(slot=0, id="a", epoch=0, start=0, count=4, ends="", new_blocks=((1,),)),),
            admits=(admit,),
        )
    )
    chunk = Chunk(slot=0, id="a", epoch=0, start=4, count=5, ends="sample", new_ids=prompt[5:], new_blocks=((2, 3),))
    assert list(runner.execute(StepPlan(step=1, chunks=(chunk,))).rows[0].token_ids) == _expected(reference, prompt, 1)


def test_the_last_position_of_the_context(runner: ModelRunner) -> None:
    request = Request(_prompt(MAX_LEN - 3), _greedy(4))
    request_blocks = tuple(range(1, MAX_LEN // BLOCK + 1))
    admit = Admit(
        slot=0, id="a", epoch=0, known_ids=request.prompt, num_prompt=len(request.prompt), work=request.sampling
    )
    plans = [
        StepPlan(
            step=0,
            chunks=(
                Chunk(
                    slot=0,
                    id="a",
                    epoch=0,
                    start=0,
                    count=MAX_LEN - 3,
                    ends="sample",
                    new_blocks=(request_blocks,),
                ),
            ),
            admits=(admit,),
        )
    ]
    plans += [
        StepPlan(step=n, chunks=(Chunk(slot=0, id="a", epoch=0, start=MAX_LEN - 4 + n, count=1, ends="sample"),))
        for n in (1, 2, 3)
    ]
    assert [len(runner.execute(plan).rows[0].token_ids) for plan in plans] == [1, 1, 1, 1]


# ------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_ends_alone(
    reference: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    model = _model(reference.state_dict())
    honest: Callable[[torch.Tensor], torch.Tensor] = model.logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        logits = honest(hidden)
        logits[1] = value
        return logits

    requests = [Request(_prompt(n), _greedy(1)) for n in (5, 6, 7)]
    monkeypatch.setattr(model, "logits", poisoned)
    Driver(_runner(model)).run(requests)
    assert [r.rows[0].error is None for r in requests] == [True, False, True]
    assert requests[1].tokens == []
    assert requests[2].tokens == _expected(reference, requests[2].prompt, 1)


def test_nan_in_one_requests_cache_stays_there(reference: LlamaForCausalLM) -> None:
    """Fail a request whose ids hit a poisoned embedding row; the next owner of its blocks does not notice."""
    model = _model(reference.state_dict())
    bad, blocks = 77, ((1, 2, 3),)
    prompt = tuple(t for t in _prompt(12) if t != bad)[:9]
    model.embed_tokens.weight[bad] = float("nan")
    runner = _runner(model)
    admit = Admit(slot=0, id="a", epoch=0, known_ids=(*prompt[:8], bad), num_prompt=9, work=_greedy())
    result = runner.execute(
        StepPlan(
            step=0,
            chunks=(Chunk(slot=0, id="a", epoch=0, start=0, count=9, ends="sample", new_blocks=blocks),),
            admits=(admit,),
        )
    )
    assert result.rows[0].error is not None
    clean = Admit(slot=1, id="b", epoch=0, known_ids=prompt[:6], num_prompt=6, work=_greedy())
    plan = StepPlan(
        step=1,
        chunks=(Chunk(slot=1, id="b", epoch=0, start=0, count=6, ends="sample", new_blocks=((3, 1),)),),
        admits=(clean,),
        releases=(0,),
    )
    assert list(runner.execute(plan).rows[0].token_ids) == _expected(reference, prompt[:6], 1)


@pytest.mark.advisory("vllm-issue-54195")
@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
def test_an_id_outside_the_vocabulary_ends_its_request_alone(
    runner: ModelRunner, reference: LlamaForCausalLM, token: int
) -> None:
    bad = Admit(slot=0, id="a", epoch=0, known_ids=(1, token, 2), num_prompt=3, work=_greedy())
    good = Admit(slot=1, id="b", epoch=0, known_ids=_prompt(6), num_prompt=6, work=_greedy())
    chunks = (
        Chunk(slot=0, id="a", epoch=0, start=0, count=3, ends="sample", new_blocks=((1,),)),
        Chunk(slot=1, id="b", epoch=0, start=0, count=6, ends="sample", new_blocks=((2, 3),)),
    )
    rows = runner.execute(StepPlan(step=0, chunks=chunks, admits=(bad, good))).rows
    assert "vocabulary" in str(rows[0].error)
    assert list(rows[1].token_ids) == _expected(reference, _prompt(6), 1)


def test_broken_plans_are_noticed(runner: ModelRunner) -> None:
    admit = Admit(slot=0, id="a", epoch=0, known_ids=_prompt(9), num_prompt=9, work=_greedy())
    with pytest.raises(RuntimeError, match="no block"):
        runner.execute(
            StepPlan(
                step=0,
                chunks=(Chunk(slot=0, id="a", epoch=0, start=0, count=9, ends="sample", new_blocks=((1,),)),),
                admits=(admit,),
            )
        )
    with pytest.raises(RuntimeError, match="no request was admitted"):
        runner.execute(
            StepPlan(
                step=0,
                chunks=(Chunk(slot=3, id="x", epoch=0, start=0, count=1, ends="sample", new_blocks=((1,),)),),
            )
        )
    with pytest.raises(IndexError):
        runner.execute(
            StepPlan(
                step=0,
                chunks=(),
                admits=(Admit(slot=99, id="a", epoch=0, known_ids=(1,), num_prompt=1, work=_greedy()),),
            )
        )
    with pytest.raises(IndexError):
        runner.execute(
            StepPlan(
                step=0,
                chunks=(),
                admits=(Admit(slot=0, id="a", epoch=0, known_ids=(1,) * (MAX_LEN + 1), num_prompt=1, work=_greedy()),),
            )
        )


def test_the_check_sees_a_written_null_block(runner: ModelRunner) -> None:
    runner.check()
    runner._storages[0][0, 3] = 1.0
    with pytest.raises(RuntimeError, match="null block"):
        runner.check()


def test_a_sampler_error_is_its_rows(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        rows = len(batch.rows)
        return Sampled(torch.zeros(rows, dtype=torch.long), torch.ones(rows, dtype=torch.bool), errors={1: "no"})

    monkeypatch.setattr(runner._sampler, "sample", failing)
    requests = [Request(_prompt(n), _greedy(1)) for n in (5, 6)]
    Driver(runner).run(requests)
    assert [r.rows[0].error for r in requests] == [None, "no"]

"""Graphs without a device: which size, padding, fixed buffers, and when steps are launched as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ferrule.config import Config, DeviceConfig, DeviceSettings, ModelConfig, SchedulerConfig
from ferrule.config.resolve import resolve
from ferrule.errors import ConfigError
from ferrule.interfaces.model import BuildContext
from ferrule.interfaces.platform import StepInput
from ferrule.interfaces.sampler import SampleBatch, Sampled, Sampler
from ferrule.interfaces.speculator import LoadedDraft, SpeculatorContext
from ferrule.runner.model_runner import ModelRunner, RunnerParts
from ferrule.runner.state import RunnerLimits
from ferrule.types import Admit, Chunk, RowResult, StepPlan, TokenSampling
from ferrule_plugins.attention.cpu import CpuAttention
from ferrule_plugins.model.llama import Llama
from ferrule_plugins.platform.cuda import CudaPlatform
from ferrule_plugins.platform.cuda_graphs import GraphLimits, GraphRecorder
from ferrule_plugins.platform.cuda_stage import PinnedTransfers
from ferrule_plugins.speculator.draft_model import DraftModel
from tests.fakes.lazy_device import PagedAttention, tape_capture
from tests.unit.plugins.platform.test_cuda import Numbers

VOCAB, BLOCK, MAX_LEN = 64, 4, 32
CPU = torch.device("cpu")
ASKING = TokenSampling(seed=0, max_tokens=8, temperature=0.0, logprobs=3)


class Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Best(Sampler):
    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        most, tokens = logits.max(-1)
        return Sampled(tokens, torch.isfinite(most), logits.log_softmax(-1))


def _recorder(
    sizes: tuple[int, ...] = (1, 2, 4),
    capture: Any = tape_capture,
    memory: Callable[[], int] = lambda: 0,
    **limits: Any,
) -> GraphRecorder:
    given = {"max_len": MAX_LEN, "budget_bytes": 1 << 20, **limits}
    transfers = PinnedTransfers(pinned=False, event=Event)
    return GraphRecorder(GraphLimits(sizes, **given), transfers, CPU, lambda: capture, memory)


def _runner(
    recorder: GraphRecorder | None = None, attention: Any = None, drafts: Any = None, **changes: Any
) -> ModelRunner:
    """Make a runner. `drafts` makes the recorder of a draft model, which has the target's weights."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": MAX_LEN,
        **changes,
    }
    build = BuildContext(config=config, dtype=torch.float32, device=CPU, block_size=BLOCK, max_model_len=MAX_LEN)
    model = Llama(build)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.35)
    limits = RunnerLimits(slots=4, max_model_len=MAX_LEN, vocab_size=VOCAB, dtype=torch.float32, device=CPU)
    parts = RunnerParts(
        model=model,
        attention=attention or PagedAttention(),
        sampler=Best(None),  # type: ignore[arg-type]
        limits=limits,
        recorder=recorder,
        speculator=drafts and _speculator(model, build),
        draft_recorder=drafts or (lambda: None),
    )
    runner = ModelRunner(parts)
    runner.init_cache(60)
    return runner


def _speculator(model: Llama, build: BuildContext) -> DraftModel:
    context = SpeculatorContext(
        num_tokens=4,
        num_slots=4,
        target=model,
        build=build,
        settings={"model": "itself", "least_certainty": 0},
        load=lambda settings: LoadedDraft(model=model, build=build, tokenizer=lambda: None),
        tokenizer=lambda: None,
    )
    return DraftModel(context)


def _run(runner: ModelRunner, rows: int, steps: int = 6, groups: int = 1, wanted: int = 0) -> list[list[RowResult]]:
    """Run prompts of different lengths in one step, then decode; from step 3 on, with one row less."""
    prompts = [tuple(range(3 + n, 8 + 2 * n)) for n in range(rows)]
    blocks = [
        tuple(tuple(range(1 + 8 * (groups * n + g), 9 + 8 * (groups * n + g))) for g in range(groups)) for n in range(4)
    ]
    admits = tuple(
        Admit(slot=n, id=str(n), epoch=0, known_ids=ids, num_prompt=len(ids), work=ASKING)
        for n, ids in enumerate(prompts)
    )
    chunks = tuple(
        Chunk(slot=n, id=str(n), epoch=0, start=0, count=len(ids), ends="sample", wanted=wanted, new_blocks=blocks[n])
        for n, ids in enumerate(prompts)
    )
    results = [list(runner.execute(StepPlan(step=0, chunks=chunks, admits=admits)).rows)]
    for step in range(1, steps):
        live = [n for n in reversed(range(rows)) if n or step < 3 or rows == 1]
        chunks = tuple(
            Chunk(slot=n, id=str(n), epoch=0, start=len(prompts[n]) + step - 1, count=1, ends="sample", wanted=wanted)
            for n in live
        )
        results.append(list(runner.execute(StepPlan(step=step, chunks=chunks)).rows))
    runner.execute(StepPlan(step=steps, chunks=(), releases=tuple(range(rows))))
    runner.check()
    return results


def _alike(mine: list[list[RowResult]], theirs: list[list[RowResult]]) -> None:
    """Check for the same tokens, and logprobs up to what a product of another height rounds."""
    for ours, others in zip(mine, theirs, strict=True):
        assert [(row.id, row.token_ids, row.error) for row in ours] == [(r.id, r.token_ids, r.error) for r in others]
        for row, other in zip(ours, others, strict=True):
            values = [value for entry in row.logprobs for _, value in entry.top]
            assert values == pytest.approx([value for entry in other.logprobs for _, value in entry.top], abs=1e-5)


@pytest.mark.parametrize("sizes", [(1, 2, 4), (16,)])
def test_passes_of_a_draft_model_are_padded_too(sizes: tuple[int, ...]) -> None:
    """Guess what comes, since both are one model: with a graph that fits, or for more rows than there may be."""
    recorder = _recorder(sizes)
    results = _run(_runner(drafts=lambda: recorder), 3, wanted=4)
    assert recorder.recorded
    for number, rows in enumerate(results):
        for row in rows:
            later = [r.token_ids[0] for step in results[number + 1 :] for r in step if r.id == row.id]
            assert list(row.drafts[: len(later)]) == later[:4]
            assert len(row.drafts) == 4


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_replayed_steps_give_what_launched_ones_give(rows: int) -> None:
    """Replay, padded or not. The tape freezes all that the host knew: lengths, tables and ids are read from the
    buffers.
    """
    recorder = _recorder()
    _alike(_run(_runner(recorder), rows), _run(_runner(), rows))
    assert recorder.recorded == {1: (1,), 2: (1, 2), 3: (2, 4), 4: (4,)}[rows]


def test_a_step_that_fills_its_graph_has_the_same_bits() -> None:
    recorder = _recorder((2,), max_len=MAX_LEN)
    wide = PagedAttention()
    runner = _runner(recorder, wide)
    rows = [StepInput(torch.arange(2) * (MAX_LEN + 1), 0)]
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))

    def compute(inputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.sin(inputs[0].unsqueeze(1) + weight[:2]) @ weight

    launched = compute([rows[0].values])
    replayed = recorder.run(rows, compute)
    assert replayed is not None
    assert torch.equal(replayed, launched)
    runner.release_cache()


def test_sliding_layers_have_tables_of_their_own() -> None:
    windows = {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}
    recorder = _recorder()
    _alike(_run(_runner(recorder, **windows), 3, groups=2), _run(_runner(**windows), 3, groups=2))
    assert recorder.recorded == (2, 4)


def test_padding_writes_nothing() -> None:
    """Leave the null block, which `check` reads, and the blocks that no row has at zero."""
    runner = _runner(_recorder((4,)))
    _run(runner, 1)
    (storage, _) = runner._storages
    assert storage[1:3].any()
    assert not storage[0].any()
    assert not storage[9:].any()


def test_what_is_launched_as_it_is() -> None:
    """Launch prompts, more rows than the largest graph, a context beyond the longest, a backend that cannot be
    recorded.
    """
    few = _recorder((1, 2))
    _alike(_run(_runner(few), 4), _run(_runner(), 4))
    assert few.recorded == ()
    short = _recorder(max_len=7)
    _alike(_run(_runner(short), 1), _run(_runner(), 1))
    assert short.recorded == (1,)  # contexts 6 and 7; the rest is longer
    other = _recorder()
    _run(_runner(other, CpuAttention()), 2)
    assert other.recorded == ()


def test_start_up_records_as_far_as_its_time_reaches_and_then_one_size_at_a_time() -> None:
    ticks = iter(range(100))
    recorder = GraphRecorder(
        GraphLimits((1, 2, 4, 8, 16, 24), MAX_LEN, 1 << 20, warm_seconds=2.5),
        PinnedTransfers(pinned=False, event=Event),
        CPU,
        lambda: tape_capture,
        lambda: 0,
        clock=lambda: float(next(ticks)),
    )
    runner = _runner(recorder)
    assert runner.capture()
    assert recorder.recorded == (1, 2, 24)
    _alike(_run(runner, 3), _run(_runner(), 3))
    assert recorder.recorded == (1, 2, 4, 24)
    assert runner.capture()
    assert recorder.recorded == (1, 2, 4, 8, 24)
    assert not runner.capture()
    assert recorder.recorded == (1, 2, 4, 8, 16, 24)


def test_without_memory_for_another_graph_steps_are_launched() -> None:
    recorder = _recorder((1, 2))
    inputs = [StepInput(torch.zeros(1, dtype=torch.int64), 0)]
    assert recorder.run(inputs, lambda given: given[0][:, None] + 1) is not None

    def too_large(given: list[torch.Tensor]) -> torch.Tensor:
        raise torch.OutOfMemoryError

    assert recorder.run([StepInput(torch.zeros(2, dtype=torch.int64), 0)], too_large) is None
    assert recorder.recorded == (1,)
    assert recorder.run(inputs, too_large) is not None  # it is replayed
    assert not recorder.warm(inputs, too_large)


def test_what_was_recorded_is_forgotten_when_weights_or_cache_move() -> None:
    recorder = _recorder()
    runner = _runner(recorder)
    runner.capture()
    assert recorder.recorded == (1, 2, 4)
    model = runner.model
    runner.release_cache()
    assert recorder.recorded == ()
    runner.init_cache(60)
    before = _run(runner, 2)
    runner.use(None)
    assert recorder.recorded == ()
    with torch.no_grad():
        model.embed_tokens.weight.copy_(model.embed_tokens.weight.flip(0))  # type: ignore[attr-defined]
    runner.use(model)
    runner.init_cache(60)
    after = _run(runner, 2)
    assert after != before
    assert recorder.recorded == (1, 2)


def test_a_model_that_waits_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    recorder = _recorder()
    runner = _runner(recorder)
    model, forward = runner.model, runner.model.forward

    def asks(ids: torch.Tensor, ctx: Any) -> torch.Tensor:
        hidden = forward(ids, ctx)
        return hidden if len(torch.nonzero(hidden[0] < 1e30)) else hidden * 0

    model.forward = asks  # type: ignore[method-assign]
    _alike(_run(runner, 2), _run(_runner(), 2))
    assert recorder.recorded == ()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["no more graphs are recorded"]


def test_an_error_of_the_step_itself_is_not_hidden() -> None:
    recorder = _recorder()

    def broken(inputs: list[torch.Tensor]) -> torch.Tensor:
        raise RuntimeError("an illegal memory access")

    with pytest.raises(RuntimeError, match="illegal"):
        recorder.run([StepInput(torch.zeros(1, dtype=torch.long), 0)], broken)


def test_graphs_keep_to_the_memory_that_was_set_aside() -> None:
    free = iter(range(10_000, 0, -400))
    recorder = _recorder((1, 2, 4, 8), memory=lambda: next(free), budget_bytes=1000)
    counts: list[int] = []

    def compute(inputs: list[torch.Tensor]) -> torch.Tensor:
        counts.append(len(inputs[0]))
        return inputs[0].float().unsqueeze(1) * 2

    def run(rows: int) -> torch.Tensor | None:
        return recorder.run([StepInput(torch.arange(1, rows + 1), 0)], compute)

    for rows in (2, 1, 8):
        assert run(rows).flatten().tolist() == [2.0 * n for n in range(1, rows + 1)]  # type: ignore[union-attr]
    assert recorder.recorded == (1, 2, 8)  # 3 x 400 bytes are more than 1000
    counts.clear()
    assert run(3).flatten().tolist() == [2.0, 4.0, 6.0]  # type: ignore[union-attr]
    assert counts == []  # the graph of 8 rows serves 3
    assert run(9) is None


def test_entries_that_are_one_more_than_the_rows_are_padded_too() -> None:
    recorder = _recorder((4,))
    seen: list[list[list[int]]] = []

    def compute(inputs: list[torch.Tensor]) -> torch.Tensor:
        seen.append([each.tolist() for each in inputs])
        return inputs[0].unsqueeze(1)

    def run(inputs: Sequence[StepInput]) -> None:
        recorder._fill(recorder._place(4, inputs)[0], inputs, 4)
        compute(recorder._place(4, inputs)[1])

    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    run([StepInput(torch.tensor([7, 8]), 0), StepInput(starts, 2), StepInput(torch.tensor([[1, 2], [3, 4]]), -1)])
    assert seen == [[[7, 8, 0, 0], [0, 1, 2, 2, 2], [[1, 2], [3, 4], [-1, -1], [-1, -1]]]]


# ------------------------------------------------------------------------------------------------- options


def _settings(
    sizes: tuple[int, ...] = (512,),
    rows: int | None = None,
    eager: bool = False,
    longest: int = 8192,
    **compilation: Any,
) -> DeviceSettings:
    return DeviceSettings.of(
        resolve(
            Config(
                model=ModelConfig(model="none", enforce_eager=eager, max_seq_len_to_capture=longest),
                scheduler=SchedulerConfig(max_num_seqs=rows, cuda_graph_sizes=sizes),
                device=DeviceConfig(compilation_config=compilation),
            )
        )
    )


def _limits(**given: Any) -> GraphLimits | None:
    return GraphLimits.of(_settings(**given))


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({}, (1, 2, 4, *range(8, 257, 8))),
        ({"rows": 600}, (1, 2, 4, *range(8, 513, 8))),
        ({"rows": 6}, (1, 2, 4, 8)),
        ({"rows": 1}, (1,)),
        ({"sizes": (20,)}, (1, 2, 4, 8, 16)),
        ({"sizes": (16, 2, 2)}, (2, 16)),
        ({"cudagraph_capture_sizes": [3]}, (3,)),
        ({"max_capture_size": 8}, (1, 2, 4, 8)),
        ({"level": 1, "sizes": (1, 2)}, (1, 2)),
        ({"level": 3, "sizes": (1, 2)}, (1, 2)),
    ],
)
def test_the_documented_sizes(given: dict[str, Any], sizes: tuple[int, ...]) -> None:
    limits = _limits(**given)
    assert limits is not None
    assert (limits.sizes, limits.max_len) == (sizes, 8192)
    assert limits.budget_bytes > 8 * len(sizes) << 20


@pytest.mark.parametrize(
    "given",
    [
        {"eager": True},
        {"level": 0},
        {"mode": 0},
        {"use_cudagraph": False},
        {"sizes": (0,)},
        {"longest": 0},
        {"eager": True, "level": 3},
    ],
)
def test_no_graphs(given: dict[str, Any]) -> None:
    assert _limits(**given) is None


@pytest.mark.parametrize(
    "given",
    [
        *({"level": level} for level in (4, True, [1])),
        {"mode": "fast"},
        *({"cudagraph_capture_sizes": sizes} for sizes in (["a"], 7, [2**70])),
    ],
)
def test_what_cannot_be_meant(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        _limits(**given)


def test_what_has_no_effect_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Say it once, for all recorders: those of the model, and of what guesses."""
    execution = CudaPlatform(Numbers()).execution()
    for _ in range(2):
        assert execution.recorder(_settings(splitting_ops=["a"], level=2)) is not None
    assert [record.getMessage() for record in caplog.records] == [
        "--compilation-config: splitting_ops has no effect here"
    ]

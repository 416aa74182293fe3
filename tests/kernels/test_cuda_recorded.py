"""Recorded decode steps over the real kernels: padded rows read and write nothing, and real ones do not notice them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ferrule.interfaces.model import BuildContext
from ferrule.interfaces.sampler import SampleBatch, Sampled, Sampler
from ferrule.runner.model_runner import ModelRunner, RunnerParts
from ferrule.runner.state import RunnerLimits
from ferrule.types import Admit, Chunk, RowResult, StepPlan, TokenSampling
from ferrule_kernels import cuda
from ferrule_plugins.attention.triton import TritonAttention
from ferrule_plugins.model.llama import Llama
from ferrule_plugins.platform.cuda_graphs import GraphLimits, GraphRecorder, cuda_capture, cuda_free_bytes
from ferrule_plugins.platform.cuda_stage import PinnedTransfers
from tests.fakes.lazy_device import NoEvent
from tests.shared import allocated

VOCAB, BLOCK, MAX_LEN = 64, 16, 48
ASKING = TokenSampling(seed=0, max_tokens=8, temperature=0.0, logprobs=1)
pytestmark = pytest.mark.skipif(cuda.available() is not None, reason=str(cuda.available()))


class Best(Sampler):
    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        most, tokens = logits.max(-1)
        return Sampled(tokens, torch.isfinite(most), logits.log_softmax(-1))


def _transfers(device: torch.device) -> PinnedTransfers:
    return PinnedTransfers() if device.type == "cuda" else PinnedTransfers(pinned=False, event=NoEvent)


def _recorder(device: torch.device, sizes: tuple[int, ...]) -> GraphRecorder:
    """Make a recorder. Without a device, a replay is the same Python once more: on the same buffers, with what the host
    knew then.
    """
    limits = GraphLimits(sizes, MAX_LEN, 1 << 30)
    if device.type == "cuda":
        return GraphRecorder(limits, _transfers(device), device, cuda_capture, cuda_free_bytes)
    return GraphRecorder(limits, _transfers(device), device, lambda: lambda function: function, lambda: 0)


def _runner(device: torch.device, recorder: GraphRecorder | None = None) -> ModelRunner:
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": MAX_LEN,
    }
    context = BuildContext(config=config, dtype=torch.float32, device=device, block_size=BLOCK, max_model_len=MAX_LEN)
    model = Llama(context)
    for parameter in allocated(model).parameters():
        parameter.data.copy_(torch.randn(parameter.shape) * 0.35)
    limits = RunnerLimits(slots=4, max_model_len=MAX_LEN, vocab_size=VOCAB, dtype=torch.float32, device=device)
    parts = RunnerParts(
        model=model,
        attention=TritonAttention(),
        sampler=Best(None),  # type: ignore[arg-type]
        limits=limits,
        transfers=_transfers(device),
        recorder=recorder,
    )
    runner = ModelRunner(parts)
    runner.init_cache(16)
    return runner


def _run(runner: ModelRunner, rows: int, steps: int = 4) -> list[list[RowResult]]:
    prompts = [tuple(range(3 + n, 8 + 6 * n)) for n in range(rows)]
    admits = tuple(
        Admit(slot=n, id=str(n), epoch=0, known_ids=ids, num_prompt=len(ids), work=ASKING)
        for n, ids in enumerate(prompts)
    )
    chunks = tuple(
        Chunk(
            slot=n,
            id=str(n),
            epoch=0,
            start=0,
            count=len(ids),
            ends="sample",
            new_blocks=(tuple(range(1 + 3 * n, 4 + 3 * n)),),
        )
        for n, ids in enumerate(prompts)
    )
    results = [list(runner.execute(StepPlan(step=0, chunks=chunks, admits=admits)).rows)]
    for step in range(1, steps):
        chunks = tuple(
            Chunk(slot=n, id=str(n), epoch=0, start=len(prompts[n]) + step - 1, count=1, ends="sample")
            for n in range(rows)
        )
        results.append(list(runner.execute(StepPlan(step=step, chunks=chunks)).rows))
    runner.execute(StepPlan(step=steps, chunks=(), releases=tuple(range(rows))))
    runner.check()
    return results


@pytest.mark.parametrize(("rows", "sizes"), [(2, (2,)), (3, (4,)), (1, (4,))])
def test_a_recorded_step_gives_what_a_launched_one_gives(
    device: torch.device, rows: int, sizes: tuple[int, ...]
) -> None:
    recorder = _recorder(device, sizes)
    runner = _runner(device, recorder)
    runner.capture()
    assert recorder.recorded == sizes
    mine, theirs = _run(runner, rows), _run(_runner(device), rows)
    for ours, others in zip(mine, theirs, strict=True):
        assert [(row.token_ids, row.error) for row in ours] == [(row.token_ids, row.error) for row in others]
        found, wanted = ([row.logprobs[0].logprob for row in each] for each in (ours, others))
        assert found == pytest.approx(wanted, abs=1e-4)

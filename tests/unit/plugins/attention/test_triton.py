"""The Triton backend: its kit under the interpreter, what it refuses, padding rows, equal bits, tokens of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ferrule.config import Config, DeviceConfig, LoadConfig, ModelConfig, SchedulerConfig
from ferrule.config.resolve import resolve
from ferrule.env import Environment
from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.model import AttentionOptions, LayerCache
from ferrule.plugin import discover
from ferrule.types import Admit, CacheGroup, Chunk, StepPlan, TokenSampling
from ferrule_kernels.attention import FP8
from ferrule_kernels.cuda import rope_cache
from ferrule_plugins.attention.triton import TritonAttention
from ferrule_plugins.executor.uni import UniExecutor
from ferrule_plugins.platform import cpu
from ferrule_plugins.platform.cuda_kernels import triton_layers
from ferrule_testkit.caps import fake_caps
from ferrule_testkit.checkpoints import tiny_checkpoint
from ferrule_testkit.kits import AttentionKit
from ferrule_testkit.kits.attention import attention as definition
from ferrule_testkit.kits.attention import layout_of

PLATFORM = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.slow
class TestConformance(AttentionKit):
    plugin = TritonAttention
    platform = PLATFORM
    device = PLATFORM
    if PLATFORM == "cpu":  # the interpreter is slow; tests/kernels have more sizes
        dtypes = ("float32", "float16")
        block_sizes = (4,)
        head_dims = (8, 80)


def tokens(folder: Path, backend: str) -> list[int]:
    """Decode greedily two prompts that run together, one of which comes in pieces."""
    env = Environment(cpu_kvcache_space=0.01)
    config = resolve(
        Config(
            model=ModelConfig(model=str(folder), dtype="float32"),
            load=LoadConfig(use_tqdm_on_load=False),
            scheduler=SchedulerConfig(max_num_seqs=2),
            device=DeviceConfig(device=PLATFORM, attention_backend=backend),
            env=env,
        )
    )
    executor, greedy = UniExecutor(), TokenSampling(seed=0, max_tokens=8, temperature=0.0)
    made: list[int] = []
    try:
        executor.start(config, discover())
        executor.init_cache(20)
        prompts = tuple(range(5, 30)), tuple(range(40, 44))
        admits = tuple(
            Admit(slot=slot, id="ab"[slot], epoch=0, known_ids=ids, num_prompt=len(ids), work=greedy)
            for slot, ids in enumerate(prompts)
        )
        for step in range(7):
            first = (0, 20, 25)[step] if step < 3 else 23 + step
            count, samples = {0: (20, False), 1: (5, True)}.get(step, (1, True))
            chunks = [
                Chunk(
                    slot=0,
                    id="a",
                    epoch=0,
                    start=first,
                    count=count,
                    ends="sample" if samples else "",
                    new_blocks=((1, 2),) if step == 0 else (),
                )
            ]
            if step:
                start, other = (0, 4) if step == 1 else (2 + step, 1)
                chunks.append(
                    Chunk(
                        slot=1,
                        id="b",
                        epoch=0,
                        start=start,
                        count=other,
                        ends="sample",
                        new_blocks=((3,),) if step == 1 else (),
                    )
                )
            due = admits[:1] if step == 0 else admits[1:] if step == 1 else ()
            result = executor.submit(StepPlan(step=step, chunks=tuple(chunks), admits=due)).result()
            made += [token for row in result.rows for token in row.token_ids]
    finally:
        executor.shutdown()
    return made


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "qwen3"])  # which has norms more
def test_a_model_gives_the_tokens_of_the_reference(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path)
    wanted = tokens(folder, "torch_sdpa")
    assert len(wanted) == 12
    assert tokens(folder, "triton") == wanted


def test_layers_leave_norms_rotation_and_cache_to_one_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write nothing separately where layers have Triton's kernels: on a GPU, or here by asking for them."""
    folder = tiny_checkpoint("qwen3", tmp_path)
    wanted = tokens(folder, "torch_sdpa")
    kernels = Kernels((replace(triton_layers(), late=False),))
    monkeypatch.setattr(cpu, "cpu_kernels", lambda: kernels)
    monkeypatch.setattr(rope_cache, "write_cache", None)
    assert tokens(folder, "triton") == wanted


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_a_cache_of_8_bits(name: str) -> None:
    torch.manual_seed(0)
    kind = TritonAttention.cache_type(name, torch.float32)
    assert kind == FP8[name]
    attention, scoring, layout = TritonAttention(), AttentionOptions(scale=0.3), layout_of([(21, 21)], 4)
    spec = LayerCache(CacheGroup("full", 4), 2, 16)
    cache = torch.zeros(attention.cache_shape(spec, 9), device=PLATFORM).to(kind)
    q, k, v = (torch.randn(21, heads, 16).to(kind).float() for heads in (4, 2, 2))  # numbers that 8 bits hold
    layout = replace(
        layout,
        **{
            name: getattr(layout, name).to(PLATFORM)
            for name in ("query_start", "context_lens", "block_table", "slot_mapping")
        },
    )
    out = attention.run(*(x.to(PLATFORM) for x in (q, k, v)), cache, attention.plan(layout), scoring).cpu()
    torch.testing.assert_close(out.double(), definition(q.double(), k.double(), v.double(), scoring), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("platform", "dim", "dtype", "said"),
    [
        ("abacus", 64, torch.float32, "NVIDIA GPUs only, not on abacus"),
        ("cuda", 64, torch.float64, "not in float64"),
        ("cuda", 264, torch.float16, "up to 256, not 264"),
    ],
)
def test_what_is_refused(platform: str, dim: int, dtype: torch.dtype, said: str) -> None:
    spec, caps = LayerCache(CacheGroup("full", 16), 2, dim), fake_caps(platform)
    assert said in (TritonAttention.refuses(spec, AttentionOptions(scale=1.0), caps, dtype) or "")


def test_a_processor_is_for_the_interpreter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, caps = LayerCache(CacheGroup("full", 16), 2, 64), fake_caps()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    reason = TritonAttention.refuses(spec, AttentionOptions(scale=1.0), caps, torch.float32)
    assert "needs the GPUs to be hidden" in (reason or "")


@pytest.mark.parametrize(("capability", "served"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_caches_of_8_bits_by_generation(
    capability: tuple[int, int], served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    for name, kind in FP8.items():
        assert TritonAttention.cache_type(name, torch.bfloat16) == (kind if served else None)
    assert TritonAttention.cache_type("auto", torch.bfloat16) == torch.bfloat16

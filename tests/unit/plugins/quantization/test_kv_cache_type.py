"""`--kv-cache-dtype`: from the option to each attention's cache; twice the room; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ferrule import LLM, SamplingParams
from ferrule.errors import ConfigError
from ferrule_contrib.tiny import path
from ferrule_plugins.attention.cpu_native import CpuNativeAttention
from ferrule_plugins.attention.torch_sdpa import TorchSDPA

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["The capital of France is", "one two three four five six seven eight nine ten", "a"]


def serve(**options: Any) -> LLM:
    return LLM(str(path()), dtype="float32", max_model_len=256, use_tqdm_on_load=False, **options)


def answers(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_every_attention_of_the_cpu_caches_the_same_eight_bits() -> None:
    """In float32 they differ only in the order of sums, so greedy tokens are the same; blocks take a quarter."""
    with serve() as whole:
        page = whole.model.page_bytes
    found = {}
    for name in ("cpu_native", "cpu", "torch_sdpa"):
        with serve(kv_cache_dtype="fp8", attention_backend=name) as llm:
            assert llm.model.page_bytes * 4 == page
            found[name] = answers(llm)
    assert found["cpu_native"] == found["cpu"] == found["torch_sdpa"]


def test_a_type_that_no_attention_caches_stops_the_start() -> None:
    with pytest.raises(ConfigError, match=r"no cache of bfloat16 for a model in float32 \(--kv-cache-dtype\)"):
        serve(kv_cache_dtype="bfloat16", attention_backend="cpu_native")


@pytest.mark.parametrize("attention", [CpuNativeAttention, TorchSDPA])
def test_names_of_types(attention: type[TorchSDPA]) -> None:
    named = {
        name: attention.cache_type(name, torch.bfloat16) for name in ("auto", "bfloat16", "fp8", "fp8_e5m2", "int8")
    }
    assert named == {
        "auto": torch.bfloat16,
        "bfloat16": torch.bfloat16,
        "fp8": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "int8": None,
    }

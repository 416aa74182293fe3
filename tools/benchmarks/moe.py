"""Decoding of a mixture of experts beside a dense model that reads as many bytes: `python -m tools.benchmarks.moe`.

Shapes: `experts`, 8 experts of which 2 are active, beside a dense model whose feed-forward blocks are as large as two
experts; `latent`, DeepSeek-V2-Lite cut to 4 layers, beside a dense model with blocks as large as its active experts and
with ordinary attention. Weights are random. Turns alternate between both models and a measurement of memory, so that
what others do on the machine meets all three; printed are medians of the turns, and the spread.

The limit is the time in which memory brings the bytes that the dense model reads for a token.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ferrule.config import Config, LoadConfig, ModelConfig, SchedulerConfig
from ferrule.config.resolve import resolve
from ferrule.env import before_libraries, read
from ferrule.plugin import discover
from ferrule.types import TokenSampling
from ferrule_kernels.cpu import library
from tools.benchmarks.runner import Bench

_COMMON = {"vocab_size": 32000, "max_position_embeddings": 4096, "hidden_act": "silu", "rms_norm_eps": 1e-6}
_SMALL = {**_COMMON, "hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 4}
_LITE = {**_COMMON, "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 16}
_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
SHAPES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "experts": (
        {
            **_SMALL,
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "intermediate_size": 4096,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        {**_SMALL, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 8192},
    ),
    "latent": (
        {
            **_LITE,
            **_LATENT,
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
        },
        {**_LITE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 11264},
    ),
}
_READ_BYTES = 256 << 20  # more than caches hold


def model(config: Mapping[str, Any], folder: Path, quantization: str | None, tokens: int) -> Bench:
    """A model with random weights in memory."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    options = Config(
        model=ModelConfig(model=str(folder), max_model_len=tokens, quantization=quantization, skip_tokenizer_init=True),
        load=LoadConfig(load_format="dummy", use_tqdm_on_load=False),
        scheduler=SchedulerConfig(max_num_seqs=2),
        env=read(),
    )
    plugins = discover()
    executor = plugins.load("executor", "uni")()
    info = executor.start(resolve(options), plugins)
    executor.init_cache(64 + tokens // 16)
    return Bench(executor, info, TokenSampling(seed=0, max_tokens=1, temperature=0.0))


def read_rate(memory: torch.Tensor) -> float:
    """Bytes per second that the processor reads."""
    began = time.perf_counter()
    library.load().ferrule_read(memory.data_ptr(), memory.numel())
    return memory.numel() / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="experts")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    before_libraries()
    memory = torch.ones(_READ_BYTES, dtype=torch.uint8)
    library.load().ferrule_read.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    spare = options.steps * options.turns + 1
    with tempfile.TemporaryDirectory() as root:
        sparse, dense = (
            model(config, Path(root, str(number)), options.quantization, options.context + spare)
            for number, config in enumerate(SHAPES[options.shape])
        )
    for bench in (sparse, dense):
        bench.start(1, options.context, spare)
    rates: list[tuple[float, float, float]] = []
    for turn in range(options.turns):
        at = options.context + turn * options.steps
        seconds = [bench.decode(1, at, options.steps) for bench in (sparse, dense)]
        rates.append((1 / seconds[0], 1 / seconds[1], read_rate(memory)))
    report(sparse, dense, rates)


def report(sparse: Bench, dense: Bench, rates: list[tuple[float, float, float]]) -> None:
    """One line for each model, and the ratios, of which each turn has its own."""
    table = dense.info.vocab_size * dense.info.hidden_size * 2
    active = dense.info.weight_bytes - table
    for bench, column in ((sparse, 0), (dense, 1)):
        values = [row[column] for row in rates]
        print(f"{bench.info.architecture:24}{bench.info.weight_bytes / 1e9:7.2f} GB  {spread(values)} tokens/s")
    print(f"{'memory':24}{active / 1e9:7.2f} GB  {spread([row[2] / active for row in rates])} times per second")
    print(f"beside the dense model  {spread([row[0] / row[1] for row in rates])}")
    print(f"of memory's limit       {spread([row[0] * active / row[2] for row in rates])}")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):8.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()

"""Shapes, requests and limits of the GPU benchmark: what is computed rather than measured.

The requests are those that small engines publish figures for: 256, of 100 to 1024 random tokens each, answered by 100
to 1024 tokens whatever they are; seed 0.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ITEM = 2  # bytes of bfloat16
_ARCHITECTURES: Mapping[str, str] = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_QWEN3: Mapping[str, Any] = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


@dataclass(frozen=True)
class Shape:
    """A model's sizes: transformers' `model_type`, and its configuration."""

    model_type: str
    config: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Write a checkpoint's folder without weights."""
        from transformers import AutoConfig

        named = {"architectures": [_ARCHITECTURES[self.model_type]], "dtype": "bfloat16"}
        AutoConfig.for_model(self.model_type, **named, **self.config).save_pretrained(folder)

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of one layer."""
        c = self.config
        hidden, heads, kv, size = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        return int(hidden * size * (2 * heads + 2 * kv) + 3 * hidden * c["intermediate_size"])

    @property
    def body(self) -> int:
        """Numbers in all matrices that each token is multiplied by; the head is not, except where logits are wanted."""
        return int(self.config["num_hidden_layers"] * self.layer_weights)

    @property
    def head(self) -> int:
        return int(self.config["hidden_size"] * self.config["vocab_size"])

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token."""
        c = self.config
        return int(2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"] * ITEM)

    def attention_flops(self, pairs: int) -> int:
        """Return the operations for `pairs` pairs of a query and a key: scores and weighted values of every head and
        layer.
        """
        c = self.config
        return int(4 * c["num_hidden_layers"] * c["num_attention_heads"] * c["head_dim"] * pairs)


SHAPES: Mapping[str, Shape] = {
    "qwen3-0.6b": Shape(
        "qwen3",
        {
            **_QWEN3,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.1-8b": Shape(
        "llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "qwen3-14b": Shape(
        "qwen3",
        {
            **_QWEN3,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "tie_word_embeddings": False,
        },
    ),
}
TINY = Shape(
    "llama",
    {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
)


@dataclass(frozen=True)
class Scale:
    """The size of a measurement, in tokens and runs."""

    requests: int
    least: int  # tokens of a request, in and out each
    most: int
    prefill: int
    prompt: int  # of the single stream
    decode: int
    traced: tuple[int, int]  # requests, and tokens of each
    runs: int

    @property
    def max_len(self) -> int:
        return max(self.prefill, 2 * self.most, self.prompt + self.decode) + 8


FULL = Scale(requests=256, least=100, most=1024, prefill=8192, prompt=128, decode=256, traced=(64, 96), runs=3)
DRY = Scale(requests=4, least=4, most=12, prefill=64, prompt=8, decode=8, traced=(2, 4), runs=1)


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    out: int


def requests(scale: Scale, vocab_size: int, seed: int = 0) -> list[Request]:
    draw = random.Random(seed)
    ids = min(vocab_size, 10001) - 1
    prompts = [
        [draw.randint(0, ids) for _ in range(draw.randint(scale.least, scale.most))] for _ in range(scale.requests)
    ]
    return [Request(prompt, draw.randint(scale.least, scale.most)) for prompt in prompts]


# ------------------------------------------------------------------------------------------------- limits


def decode_seconds(shape: Shape, context: float, copy_bytes: float) -> float:
    """Return the least time of one token of a single stream: every weight and the context's cache are read once."""
    return ((shape.body + shape.head) * ITEM + context * shape.kv_bytes) / copy_bytes


def prefill_seconds(shape: Shape, tokens: int, flops: float) -> float:
    """Return the least time of a prompt: its products and causal attention at the rate of matrix products."""
    return (2 * shape.body * tokens + 2 * shape.head + shape.attention_flops(tokens * (tokens + 1) // 2)) / flops


def batch_seconds(shape: Shape, work: Sequence[Request], copy_bytes: float, flops: float) -> float:
    """Return a time that no engine can beat: all products at the machine's rate, or all bytes at its bandwidth.

    The weights are read in every step, of which there are as many as the longest answer has tokens; each answer's token
    reads its own context. Prompts' attention reads are left out, and nothing is counted twice.
    """
    products = reads = 0
    for request in work:
        inside, out = len(request.prompt), request.out
        pairs = inside * (inside + 1) // 2
        context = sum(range(inside + 1, inside + out))
        products += 2 * shape.body * (inside + out - 1) + 2 * shape.head * out + shape.attention_flops(pairs + context)
        reads += context * shape.kv_bytes
    reads += max(request.out for request in work) * (shape.body + shape.head) * ITEM
    return max(products / flops, reads / copy_bytes)

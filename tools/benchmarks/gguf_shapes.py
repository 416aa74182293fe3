"""GGUF files of Q8_0 with random weights, for `tools.benchmarks.llama_cpp`.

    python -m tools.benchmarks.gguf_shapes FOLDER [SHAPE ...]

The shapes are those of the other benchmarks: `experts` and `latent` of `tools.benchmarks.moe`, `mamba2` and
`delta` of `tools.benchmarks.state_models`. Tensors are called as llama.cpp calls them
(https://github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType

_WORDS = 32_000
_BLOCK = 32
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _attention(at: str, hidden: int, queries: int, keys: int, gated: bool = False) -> Shapes:
    yield f"{at}.attn_q.weight", (queries * (2 if gated else 1), hidden)
    yield f"{at}.attn_k.weight", (keys, hidden)
    yield f"{at}.attn_v.weight", (keys, hidden)
    yield f"{at}.attn_output.weight", (hidden, queries)


def _feed_forward(at: str, hidden: int, inner: int, kind: str = "", *experts: int) -> Shapes:
    yield f"{at}.ffn_gate{kind}.weight", (*experts, inner, hidden)
    yield f"{at}.ffn_up{kind}.weight", (*experts, inner, hidden)
    yield f"{at}.ffn_down{kind}.weight", (*experts, hidden, inner)


def experts() -> Shapes:
    """8 experts, of which 2 are active."""
    for layer in range(6):
        at = f"blk.{layer}"
        yield f"{at}.attn_norm.weight", (1024,)
        yield f"{at}.ffn_norm.weight", (1024,)
        yield from _attention(at, 1024, 1024, 256)
        yield f"{at}.ffn_gate_inp.weight", (8, 1024)
        yield from _feed_forward(at, 1024, 4096, "_exps", 8)
    yield from _outside(1024)


def latent() -> Shapes:
    """DeepSeek-V2-Lite, cut to 4 layers. Queries have DeepSeek-V2's rank: llama.cpp wants it of all but 27 layers."""
    for layer in range(4):
        at = f"blk.{layer}"
        yield f"{at}.attn_norm.weight", (2048,)
        yield f"{at}.ffn_norm.weight", (2048,)
        yield f"{at}.attn_q_a.weight", (1536, 2048)
        yield f"{at}.attn_q_a_norm.weight", (1536,)
        yield f"{at}.attn_q_b.weight", (16 * 192, 1536)
        yield f"{at}.attn_kv_a_mqa.weight", (512 + 64, 2048)
        yield f"{at}.attn_kv_a_norm.weight", (512,)
        yield f"{at}.attn_k_b.weight", (16, 512, 128)
        yield f"{at}.attn_v_b.weight", (16, 128, 512)
        yield f"{at}.attn_output.weight", (2048, 16 * 128)
        if layer == 0:
            yield from _feed_forward(at, 2048, 10944)
            continue
        yield f"{at}.ffn_gate_inp.weight", (64, 2048)
        yield from _feed_forward(at, 2048, 1408, "_exps", 64)
        yield from _feed_forward(at, 2048, 2 * 1408, "_shexp")
    yield from _outside(2048)


def mamba2() -> Shapes:
    """As mamba2-370m is published, with another vocabulary."""
    for layer in range(48):
        at = f"blk.{layer}"
        yield f"{at}.attn_norm.weight", (1024,)
        yield f"{at}.ssm_in.weight", (2 * 2048 + 2 * 128 + 32, 1024)
        yield f"{at}.ssm_conv1d.weight", (2048 + 2 * 128, 4)
        yield f"{at}.ssm_conv1d.bias", (2048 + 2 * 128,)
        yield f"{at}.ssm_dt.bias", (32,)
        yield f"{at}.ssm_a", (32, 1)
        yield f"{at}.ssm_d", (32, 1)
        yield f"{at}.ssm_norm.weight", (1, 2048)
        yield f"{at}.ssm_out.weight", (1024, 2048)
    yield from _outside(1024)


def delta(key_heads: int = 16) -> Shapes:
    """As Qwen 3.5 0.8B is published, with another vocabulary; fewer heads of keys than of values in larger models."""
    keys, values = key_heads * 128, 16 * 128
    for layer in range(24):
        at = f"blk.{layer}"
        yield f"{at}.attn_norm.weight", (1024,)
        yield f"{at}.post_attention_norm.weight", (1024,)
        yield from _feed_forward(at, 1024, 3584)
        if layer % 4 == 3:
            yield from _attention(at, 1024, 8 * 256, 2 * 256, gated=True)
            yield f"{at}.attn_q_norm.weight", (256,)
            yield f"{at}.attn_k_norm.weight", (256,)
            continue
        yield f"{at}.attn_qkv.weight", (2 * keys + values, 1024)
        yield f"{at}.attn_gate.weight", (values, 1024)
        yield f"{at}.ssm_conv1d.weight", (2 * keys + values, 4)
        yield f"{at}.ssm_dt.bias", (16,)
        yield f"{at}.ssm_a", (16,)
        yield f"{at}.ssm_beta.weight", (16, 1024)
        yield f"{at}.ssm_alpha.weight", (16, 1024)
        yield f"{at}.ssm_norm.weight", (128,)
        yield f"{at}.ssm_out.weight", (1024, values)
    yield from _outside(1024)


def _outside(hidden: int) -> Shapes:
    yield "token_embd.weight", (_WORDS, hidden)
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (_WORDS, hidden)


_HEADS = {"attention.head_count": 16, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0}
SHAPES: Mapping[str, tuple[str, Callable[[], Shapes], Mapping[str, Any]]] = {
    "experts": (
        "llama",
        experts,
        {
            **_HEADS,
            "embedding_length": 1024,
            "block_count": 6,
            "feed_forward_length": 4096,
            "attention.head_count_kv": 4,
            "rope.dimension_count": 64,
            "expert_count": 8,
            "expert_used_count": 2,
        },
    ),
    "latent": (
        "deepseek2",
        latent,
        {
            **_HEADS,
            "embedding_length": 2048,
            "block_count": 4,
            "feed_forward_length": 10944,
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": 1536,
            "attention.kv_lora_rank": 512,
            "attention.key_length": 576,
            "attention.value_length": 512,
            "attention.key_length_mla": 192,
            "attention.value_length_mla": 128,
            "rope.dimension_count": 64,
            "leading_dense_block_count": 1,
            "expert_feed_forward_length": 1408,
            "expert_count": 64,
            "expert_used_count": 6,
            "expert_shared_count": 2,
            "expert_weights_scale": 1.0,
        },
    ),
    "delta": (
        "qwen35",
        delta,
        {
            **_HEADS,
            "embedding_length": 1024,
            "block_count": 24,
            "feed_forward_length": 3584,
            "attention.head_count": 8,
            "attention.head_count_kv": 2,
            "attention.key_length": 256,
            "attention.value_length": 256,
            "rope.dimension_count": 64,
            "rope.dimension_sections": [11, 11, 10, 0],
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 16 * 128,
            "ssm.state_size": 128,
            "ssm.time_step_rank": 16,
            "ssm.group_count": 16,
            "full_attention_interval": 4,
        },
    ),
    "mamba2": (
        "mamba2",
        mamba2,
        {
            "attention.layer_norm_rms_epsilon": 1e-5,
            "embedding_length": 1024,
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "block_count": 48,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 2048,
            "ssm.state_size": 128,
            "ssm.time_step_rank": 32,
            "ssm.group_count": 1,
        },
    ),
}


def write(shape: str, file: Path) -> None:
    architecture, tensors, keys = SHAPES[shape]
    writer, draw = GGUFWriter(str(file), architecture), np.random.default_rng(0)
    writer.add_context_length(4096)
    writer.add_vocab_size(_WORDS)
    for key, value in keys.items():
        add: Any = {float: writer.add_float32, list: writer.add_array}.get(type(value), writer.add_uint32)
        add(f"{architecture}.{key}", value)
    _add_tokens(writer)
    for name, dims in tensors():
        if len(dims) > 1 and dims[-1] % _BLOCK == 0 and "norm" not in name and "gate_inp" not in name:
            writer.add_tensor(name, _blocks(dims, draw), raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, _floats(name, dims, draw))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _floats(name: str, dims: tuple[int, ...], draw: np.random.Generator) -> np.ndarray[Any, Any]:
    if name.endswith(("norm.weight", "ssm_d")):
        return np.ones(dims, np.float32)
    if name.endswith("ssm_a"):
        return -np.ones(dims, np.float32)
    return (draw.standard_normal(dims) * 0.02).astype(np.float32)


def _blocks(dims: tuple[int, ...], draw: np.random.Generator) -> np.ndarray[Any, Any]:
    """Bytes of blocks: a scale in float16 and 32 numbers."""
    blocks = np.empty((*dims[:-1], dims[-1] // _BLOCK, 2 + _BLOCK), np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(0.0003).tobytes(), np.uint8)
    blocks[..., 2:] = draw.integers(-127, 128, (*blocks.shape[:-1], _BLOCK), np.int8).view(np.uint8)
    return blocks.reshape(*dims[:-1], -1)


def _add_tokens(writer: GGUFWriter) -> None:
    """SentencePiece's three, all bytes, and words up to the size of the vocabulary."""
    named = [("<unk>", TokenType.UNKNOWN), ("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL)]
    named += [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]
    named += [(f"word{number}", TokenType.NORMAL) for number in range(_WORDS - len(named))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in named])
    writer.add_token_scores([0.0] * _WORDS)
    writer.add_token_types([kind for _, kind in named])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)}; all by default")
    given = parser.parse_args(arguments)
    for shape in given.shapes or SHAPES:
        write(shape, given.folder / f"{shape}-q8_0.gguf")


if __name__ == "__main__":
    main()

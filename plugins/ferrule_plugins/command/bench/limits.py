"""The machine's limits, the cost of a model's tokens, and how near to the limits a run came.

A decode step reads all weights once, and the KV cache of its rows: these bytes are compared with the bandwidth. A token
of a prompt costs two operations per weight that it is multiplied by: these are compared with the rate of products in
the weights' type. Limits are measured by `ferrule_kernels.cpu.machine` in a process of its own, before the run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from urllib.parse import urlsplit

from ferrule import checkpoint
from ferrule.errors import CheckpointError
from ferrule.types import ModelInfo
from ferrule_files.safetensors import shapes
from ferrule_files.shards import weight_files

_SECONDS = 60.0
_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}
_TABLES = ("embed_tokens.weight", "wte.weight")
_PACKED_TABLES = ("embed_tokens.table.packed_weight", "embed_tokens.table.packed_factors")
_HEADS = ("lm_head.weight", "embed_out.weight")


@dataclass(frozen=True)
class Limits:
    """The machine's limits per second: bytes read, and operations in bfloat16 and int8; 0.0 for a limit that is not
    known.
    """

    threads: int = 0
    read_bytes: float = 0.0
    bf16: float = 0.0
    int8: float = 0.0

    @property
    def figures(self) -> dict[str, float]:
        return {
            "limit_threads": self.threads,
            "limit_read_gb_s": round(self.read_bytes / 1e9, 2),
            "limit_bf16_tflop_s": round(self.bf16 / 1e12, 3),
            "limit_int8_top_s": round(self.int8 / 1e12, 3),
        }


@dataclass(frozen=True)
class Cost:
    """The cost of a model's tokens; 0 stands for a number that is not known.

    `body` counts the weights that every token is multiplied by, `head` those that only a sampled token is multiplied
    by. A decode step reads `step_bytes`, and `token_bytes` more for each token in the cache.
    """

    body: int = 0
    head: int = 0
    step_bytes: int = 0
    token_bytes: int = 0

    def operations(self, tokens: float, sampled: float) -> float:
        """Return the number of operations in products with weights; attention is left out."""
        return 2.0 * (tokens * self.body + sampled * self.head)

    def decode_bytes(self, rows: float, context: float) -> float:
        return self.step_bytes + rows * context * self.token_bytes


def measure() -> Limits:
    """Measure this machine's limits, which takes about two seconds. Without kernels, print the reason and return
    zeros.
    """
    command = [sys.executable, "-m", "ferrule_kernels.cpu.machine"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        print(f"The machine's limits could not be measured: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        return Limits()
    limits = Limits(**json.loads(done.stdout))
    print(
        f"This machine, {limits.threads} threads: reads {limits.read_bytes / 1e9:.1f} GB/s, "
        f"multiplies {limits.bf16 / 1e12:.2f} TFLOP/s in bf16 and {limits.int8 / 1e12:.2f} TOP/s in int8"
    )
    return limits


def cost_of(folder: str | None, info: ModelInfo | None = None) -> Cost:
    """Return the cost of a checkpoint's tokens; `info` overrides the guesses about the types of its weights and its
    cache.

    For a model that is not a local folder with safetensors, only the numbers in `info` are known.
    """
    cost, table, width = Cost(), 0, _WIDTHS.get(info.dtype if info else "", 2)
    try:
        if folder and (Path(folder) / "config.json").is_file():
            cost, table = _of_files(Path(folder), width)
    except CheckpointError:
        cost, table = Cost(), 0  # the server runs it all the same: only the fractions of the limits stay unknown
    if info is None or not info.weight_bytes:
        return cost
    token_bytes = info.page_bytes // info.groups[0].block_size if info.groups else 0
    step_bytes = info.weight_bytes - table  # rows of the table are looked up, not multiplied
    if info.quantization is None and cost.body:
        step_bytes = (cost.body + cost.head) * width
    return Cost(cost.body or info.num_parameters, cost.head, step_bytes, token_bytes)


def _of_files(folder: Path, width: int) -> tuple[Cost, int]:
    """Return the cost read from a checkpoint's files, and the size of the embedding's table in memory, in bytes, where
    a float takes `width` bytes.
    """
    config = checkpoint.read(folder)
    files = weight_files(folder, ".safetensors", "model.safetensors")
    tensors = {name: entry for file in files for name, entry in shapes(file).items()}
    matrices = {name: prod(shape) for name, (shape, _) in tensors.items() if len(shape) > 1}
    tables, heads_of = ({name for name in tensors if name.endswith(endings)} for endings in (_TABLES, _HEADS))
    tied = not heads_of or bool(config.get("tie_word_embeddings"))
    table, head = (sum(matrices[name] for name in names) for names in (tables, heads_of))
    unread = (heads_of if tied else tables) if heads_of else set()  # of a step: one of two, or none where there is one
    packed = {name for name in tensors if name.endswith(_PACKED_TABLES)}
    heads = int(config.get("num_attention_heads") or 0)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    dim = int(config.get("head_dim") or (int(config.get("hidden_size") or 0) // max(heads, 1)))
    cost = Cost(
        body=sum(matrices.values()) - table - head,
        head=table if tied else head,
        step_bytes=sum(size for name, (_, size) in tensors.items() if name not in unread | packed),
        token_bytes=int(config.get("num_hidden_layers") or 0) * 2 * kv_heads * dim * 2,
    )
    return cost, table * width + sum(tensors[name][1] for name in packed)


def decode_figures(limits: Limits, cost: Cost, rows: float, context: float, seconds: float) -> dict[str, float]:
    """Return figures of decode steps that take `seconds` each, with `rows` rows of `context` tokens each."""
    if not cost.step_bytes or not seconds:
        return {}
    rate = cost.decode_bytes(rows, context) / seconds
    return {"decode_gb_s": round(rate / 1e9, 2), **_share("decode_of_limit", rate, limits.read_bytes)}


def computed(name: str, limits: Limits, cost: Cost, work: tuple[float, float], seconds: float) -> dict[str, float]:
    """Return figures of computing, under `name`: `work` is the number of tokens, and how many of them were sampled."""
    if not cost.body or not seconds:
        return {}
    rate = cost.operations(*work) / seconds
    return {f"{name}_tflop_s": round(rate / 1e12, 3), **_share(f"{name}_of_limit", rate, limits.bf16)}


def _share(name: str, rate: float, limit: float) -> dict[str, float]:
    return {name: round(rate / limit, 3)} if limit else {}


def here(url: str) -> bool:
    """Return whether a server's address is this machine's."""
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")

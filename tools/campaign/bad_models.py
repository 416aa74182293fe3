"""Checkpoints and sizes that cannot be served."""

from __future__ import annotations

import json
import math
import resource
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch

from ferrule_contrib import tiny
from tools.campaign.case import Case


def changed(**values: Any) -> Callable[[Path], Sequence[str]]:
    """Prepare the embedded model with other values in its configuration, without its weights: only sizes are judged."""

    def prepare(folder: Path) -> Sequence[str]:
        return [str(_copy(folder, values))]

    return prepare


def unweighted(**values: Any) -> Callable[[Path], Sequence[str]]:
    """Prepare the embedded model with other values in its configuration and made-up weights, so that no file
    contradicts the sizes.
    """

    def prepare(folder: Path) -> Sequence[str]:
        return [str(_copy(folder, values)), "--load-format", "dummy"]

    return prepare


def poisoned(name: str, value: float) -> Callable[[Path], Sequence[str]]:
    """Prepare the embedded model with one number of the tensor `name` replaced."""

    def prepare(folder: Path) -> Sequence[str]:
        model = _copy(folder, {})
        file = next(model.glob("*.safetensors"))
        tensors = safetensors.torch.load_file(file)
        tensors[name].view(-1)[5] = value
        safetensors.torch.save_file(tensors, file, {"format": "pt"})
        return [str(model)]

    return prepare


def growing_texts(folder: Path) -> Sequence[str]:
    """Prepare the embedded model with a tokenizer that makes a thousand million letters of one."""
    model = _copy(folder, {})
    file = model / "tokenizer.json"
    tenfold = {"type": "Replace", "pattern": {"String": "o"}, "content": "o" * 10}
    changed = {"normalizer": {"type": "Sequence", "normalizers": [tenfold] * 9}}
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changed), encoding="utf-8")
    return [str(model)]


def with_args(*args: str) -> Callable[[Path], Sequence[str]]:
    return lambda folder: args


def _copy(folder: Path, values: dict[str, Any]) -> Path:
    model = folder / "model"
    shutil.copytree(tiny.path(), model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**config, **values}), encoding="utf-8")
    return model


_ABSURD: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (10**9, -1, math.nan, math.inf, "5"),
    "hidden_size": (10**9, 0, -256, math.nan, "256"),
    "intermediate_size": (10**15, -1, "512"),
    "vocab_size": (10**12, 0, "2048", 2048.5),
    "num_attention_heads": (10**9, 0, -8, "8"),
    "num_key_value_heads": (10**9, 0, 3, "4"),
    "head_dim": (10**9, -1, "32"),
    "max_position_embeddings": (10**18, 0, -1, "2048", math.nan),
    "rms_norm_eps": (math.nan, math.inf, -1.0, "1e-5"),
    "rope_parameters": (
        {"rope_type": "default", "rope_theta": math.nan},
        {"rope_type": "default", "rope_theta": "x"},
        5,
    ),
}
MODELS = (
    *(
        Case(f"{load}-{key}-{value!r:.24}", key.partition("_parameters")[0], maker(**{key: value}))
        for load, maker in (("weights", changed), ("dummy", unweighted))
        for key, values in _ABSURD.items()
        for value in values
    ),
    Case("dummy-large", "GiB", unweighted(num_hidden_layers=4096, hidden_size=1 << 16, intermediate_size=1 << 18)),
    Case("nan-weight", r"layers\.2\.mlp\.down_proj", poisoned("model.layers.2.mlp.down_proj.weight", math.nan)),
    Case("inf-weight", r"layers\.1\.", poisoned("model.layers.1.self_attn.q_proj.weight", math.inf)),
    Case("nan-norm", r"norm\.weight", poisoned("model.norm.weight", math.nan)),
    Case("nan-embedding", "embed|lm_head", poisoned("model.embed_tokens.weight", math.nan)),
    Case("growing-texts", r"tokenizer\.json", growing_texts),
    Case("blocks", "num-gpu-blocks-override", with_args("--num-gpu-blocks-override", str(10**12))),
    Case("blocks-gib", "num-gpu-blocks-override", with_args("--num-gpu-blocks-override", str(10**7))),
    Case("seqs", "max-num-seqs", with_args("--max-num-seqs", str(10**9))),
    Case(
        "seqs-tokens",
        "max-num-seqs",
        with_args("--max-num-seqs", str(10**9), "--max-num-batched-tokens", str(10**9)),
    ),
    Case("batched-tokens", "max-num-batched-tokens", with_args("--max-num-batched-tokens", str(10**15))),
    Case("cache-space", "FERRULE_CPU_KVCACHE_SPACE", env={"FERRULE_CPU_KVCACHE_SPACE": "100000"}),
    Case("memory-3-gib", "", limits={resource.RLIMIT_AS: 3 << 30}),
    Case(
        "memory-3-gib-cache", "KVCACHE", limits={resource.RLIMIT_AS: 3 << 30}, env={"FERRULE_CPU_KVCACHE_SPACE": "3.5"}
    ),
    Case("memory-640-mib", "map segment|memory", limits={resource.RLIMIT_AS: 640 << 20}),
)

"""Adapters of low rank, with random weights, in PEFT's layout."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch


def write_adapter(
    folder: Path | str,
    modules: Iterable[tuple[str, int, int]],
    *,
    rank: int = 4,
    seed: int = 0,
    tensors: dict[str, torch.Tensor] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter for `modules`, each a name with inputs and outputs, and return its folder.

    `config` are keys of ``adapter_config.json``, `tensors` further tensors by their names in the file.
    """
    from safetensors.torch import save_file

    target, draw = Path(folder), torch.Generator().manual_seed(seed)
    target.mkdir(parents=True, exist_ok=True)
    content: dict[str, torch.Tensor] = {}
    names = []
    for name, inputs, outputs in modules:
        names.append(name.rpartition(".")[2])
        prefix = f"base_model.model.{name}"
        content[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=draw) * inputs**-0.5
        content[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=draw) * rank**-0.5
    save_file({**content, **(tensors or {})}, target / "adapter_model.safetensors")
    stated = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(set(names)),
        "bias": "none",
        **config,
    }
    (target / "adapter_config.json").write_text(json.dumps(stated))
    return target

"""Adapters in PEFT's layout, written by hand, and checkpoints with one merged into them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

TARGETS = ("q_proj", "v_proj", "down_proj")


def write_adapter(
    checkpoint: Path, folder: Path, seed: int, *, rank: int = 4, base: str = "tiny", **changes: Any
) -> Path:
    """Write an adapter of random weights for some linears of each layer of a checkpoint; `changes` of its settings."""
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in TARGETS:
            rows, columns = weight.shape
            key = f"base_model.model.{module}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, columns, generator=draw) * columns**-0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(rows, rank, generator=draw) * 0.5
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(TARGETS),
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    return folder


def merged(checkpoint: Path, adapter: Path, folder: Path) -> Path:
    """Write the checkpoint with an adapter's products added to its weights."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights, factors = load_file(checkpoint / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for key, down in factors.items():
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix("base_model.model.").replace(".lora_A", "")
            up = factors[key.replace(".lora_A", ".lora_B")]
            product = (config["lora_alpha"] / config["r"]) * (up @ down)
            weights[name] = (weights[name].float() + product).to(weights[name].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder

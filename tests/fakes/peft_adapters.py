"""Adapters that PEFT makes of a tiny checkpoint, with random weights, and the checkpoint with each merged into it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from ferrule.types import Adapter


def make_adapter(checkpoint: Path, folder: Path, *, seed: int = 1, safe: bool = True, **settings: Any) -> Adapter:
    """Write an adapter to `folder`, and the checkpoint with it merged to the folder `merged` within that one.

    `settings` are those of `peft.LoraConfig`.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    wrapped = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | settings))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=draw))
            elif parameter.requires_grad:
                size = parameter.shape[-1] if parameter.dim() > 1 else 4
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * size**-0.5)
    wrapped.save_pretrained(folder, safe_serialization=safe)
    merged: Any = wrapped.merge_and_unload()
    merged.save_pretrained(folder / "merged")
    for file in checkpoint.glob("token*"):
        shutil.copy(file, folder / "merged")
    return Adapter(name=folder.name, path=str(folder))

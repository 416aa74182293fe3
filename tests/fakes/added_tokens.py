"""Adapters that PEFT makes of a tiny checkpoint with more tokens than it has, and the checkpoint with each merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ferrule.types import Adapter

ROWS = {"input_embeddings": ("embed_tokens", "wte"), "output_embeddings": ("lm_head",)}


def make_adapter(
    checkpoint: Path, folder: Path, count: int, *, seed: int = 1, separate: bool = False, **settings: Any
) -> Adapter:
    """Write an adapter that adds `count` tokens to `folder`, and the checkpoint with it merged to `folder`/merged.

    With `separate` the rows are in a file ``new_embeddings.safetensors``, else whole tables are saved. `settings` are
    those of `peft.LoraConfig`.
    """
    draw = torch.Generator().manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    size = model.config.vocab_size
    model.resize_token_embeddings(size + count, mean_resizing=False)
    with torch.no_grad():
        for table, scale in ((model.get_input_embeddings(), 1.0), (model.get_output_embeddings(), 2.5)):
            rows = table.weight[:size].std() * torch.randn(count, table.weight.shape[1], generator=draw)
            table.weight[size:] = scale * rows
    wrapped = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | settings))
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * parameter.shape[-1] ** -0.5)
    wrapped.save_pretrained(folder, save_embedding_layers=True)
    if separate:
        _separate(folder / "adapter_model.safetensors", size)
    wrapped.merge_and_unload().save_pretrained(folder / "merged")
    for file in checkpoint.glob("token*"):
        shutil.copy(file, folder / "merged")
    return Adapter(name=folder.name, path=str(folder))


def _separate(file: Path, size: int) -> None:
    """Take whole tables out of an adapter's file, and write their last rows to ``new_embeddings.safetensors``."""
    tensors, rows = load_file(file), {}
    for name in [name for name in tensors if name.endswith(".weight") and ".lora_" not in name]:
        for own, modules in ROWS.items():
            if any(module in name for module in modules):
                rows[own] = tensors.pop(name)[size:].clone()
    save_file(tensors, file)
    save_file(rows, file.with_name("new_embeddings.safetensors"))


def full_checkpoint(checkpoint: Path, folder: Path) -> Path:
    """Write a copy of a checkpoint whose tokenizer names each of the model's tokens, so that others come after them."""
    shutil.copytree(checkpoint, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    named = {*content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"])}
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    add_tokens(checkpoint, folder, {f"<unused{id}>": id for id in range(size) if id not in named})
    return folder


def add_tokens(checkpoint: Path, folder: Path, tokens: dict[str, int], *, special: bool = False) -> None:
    """Write the checkpoint's tokenizer to an adapter's folder, with more tokens of the given ids."""
    for file in checkpoint.glob("token*"):
        shutil.copy(file, folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"] += [
        {
            "id": id,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": special,
        }
        for text, id in tokens.items()
    ]
    file.write_text(json.dumps(content))

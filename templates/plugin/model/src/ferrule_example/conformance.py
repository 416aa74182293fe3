"""A small checkpoint for the conformance kit: a random Llama, and a gate for each layer. No server imports this."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ferrule_testkit.checkpoints import tiny_checkpoint


def write(folder: Path) -> None:
    tiny_checkpoint("llama", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["example"]}))
    tensors = load_file(folder / "model.safetensors")
    gates = {f"model.layers.{n}.gate": torch.tensor([0.5 + n]) for n in range(config["num_hidden_layers"])}
    save_file({**tensors, **gates}, folder / "model.safetensors")


SETTINGS = {"write": (write,), "hugging_face": False}  # transformers does not know this architecture

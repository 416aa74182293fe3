"""What `ferrule plugins check` should know: how to write checkpoints to try the model with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from acme_memory.model import AcmeMemory
from ferrule.interfaces.model import BuildContext


def writer(*kinds: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        config = {
            "architectures": ["AcmeMemoryForCausalLM"],
            "model_type": "acme_memory",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": len(kinds),
            "num_attention_heads": 2,
            "vocab_size": 64,
            "max_position_embeddings": 128,
            "layer_types": list(kinds),
        }
        (folder / "config.json").write_text(json.dumps(config))
        context = BuildContext(
            config=config, dtype=torch.float32, device=torch.device("cpu"), block_size=16, max_model_len=128
        )
        draw = torch.Generator().manual_seed(1)
        tensors = {
            f"model.{name}": torch.randn(parameter.shape, generator=draw) * parameter.shape[-1] ** -0.5
            for name, parameter in AcmeMemory(context).named_parameters()
        }
        save_file(tensors, folder / "model.safetensors")

    return write


MODEL = {"write": (writer("memory", "memory"), writer("attention", "memory", "attention")), "hugging_face": False}

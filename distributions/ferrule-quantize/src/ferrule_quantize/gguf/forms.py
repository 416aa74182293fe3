"""The forms of each architecture's files: how a checkpoint's tensors become a file's, and which windows readers assume.

What a reader of llama.cpp expects of each: https://github.com/ggml-org/llama.cpp/tree/master/src/models
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from ferrule_nn import Naming


@dataclass(frozen=True, kw_only=True)
class Form:
    """One architecture.

    `by_group`: the tensor of queries, keys and values has those of each key head in turn, where a file has all queries
    first. `merged_gates`: a file has the gates and what they multiply in one tensor, as the checkpoint does. `period`:
    all layers but each `period`-th have the window, which no key states; `windowed`: all layers have it.
    """

    by_group: bool = False
    merged_gates: bool = False
    period: int = 0
    windowed: bool = False

    def windows(self, window: int, layers: int) -> tuple[int, ...]:
        """Return the window of each layer as readers assume it, 0 for none."""
        if not self.period:
            return (window if self.windowed else 0,) * layers
        return tuple(window if (index + 1) % self.period else 0 for index in range(layers))


FORMS: Mapping[str, Form] = {
    "arcee": Form(),
    "bloom": Form(by_group=True),
    "cohere2": Form(period=4),
    "command-r": Form(),
    "ernie4_5": Form(),
    "falcon": Form(by_group=True),
    "gemma": Form(),
    "gemma2": Form(period=2),
    "gemma3": Form(period=6),
    "glm4": Form(merged_gates=True),
    "gpt2": Form(),
    "gptneox": Form(by_group=True),
    "granite": Form(),
    "granitemoe": Form(),
    "hunyuan-dense": Form(),
    "llama": Form(),
    "mpt": Form(),
    "nemotron": Form(),
    "olmo": Form(),
    "olmo2": Form(),
    "olmoe": Form(),
    "phi2": Form(),
    "phi3": Form(merged_gates=True, windowed=True),
    "qwen2": Form(),
    "qwen2moe": Form(),
    "qwen3": Form(),
    "qwen3moe": Form(),
    "seed_oss": Form(),
    "smollm3": Form(),
    "stablelm": Form(),
    "starcoder": Form(),
    "starcoder2": Form(),
}
SAME = {"MistralForCausalLM": "llama", "YiForCausalLM": "llama"}  # models that differ from another in their name alone
_HALVES = ("gate_proj", "up_proj")


def by_our_names(tensors: Mapping[str, torch.Tensor], naming: Naming, form: Form) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors under our names, as views, so that nothing is read."""
    ignored = re.compile("|".join((r"rotary_emb\.inv_freq$", *naming.ignored)))
    transposed = [re.compile(pattern) for pattern in naming.transposed]
    found: dict[str, torch.Tensor] = {}
    for source, whole in tensors.items():
        if ignored.search(source):
            continue
        for name, tensor in naming.tensors(source, whole):
            if tensor.dim() == 2 and any(pattern.search(source) for pattern in transposed):
                tensor = tensor.t()
            found.update(_apart(name, tensor, form))
    return found


def _apart(name: str, tensor: torch.Tensor, form: Form) -> Iterator[tuple[str, torch.Tensor]]:
    if form.merged_gates or ".gate_up_proj." not in name:
        yield name, tensor
        return
    for half, part in zip(_HALVES, tensor.chunk(2), strict=True):
        yield name.replace("gate_up_proj", half), part

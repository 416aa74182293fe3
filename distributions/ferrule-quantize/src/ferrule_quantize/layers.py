"""The choice of tensors to quantize in a float checkpoint: the decoder's linear layers, by their names and shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ferrule.checkpoint import Values, architectures
from ferrule.errors import CheckpointError, ConfigError

_WEIGHT = ".weight"
_IN_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.\d+\.")
# Other networks of a composite model, routers of experts, and matrices that are not those of products.
_LEFT = re.compile(
    r"(?:^|\.)(?:visual|vision|audio|image)\w*\.|(?:^|\.)\w*(?:norm|embed|conv)\w*(?:$|\.)"
    r"|\.(?:gate|router|shared_expert_gate|gate_inp)(?:$|\.)"
)
_STACKED = re.compile(r"\.experts\.\w+$")
_TURNED = ("GPT2LMHeadModel", "OpenAIGPTLMHeadModel")  # weights are [inputs, outputs]


@dataclass(frozen=True)
class Chosen:
    """The choice for a checkpoint's tensors: `quantized` layers, and linear layers that are `ignored`, by name."""

    quantized: frozenset[str]
    ignored: tuple[str, ...]

    def layer(self, tensor: str) -> str | None:
        """Return the layer whose weights the tensor is, if they are to be quantized."""
        name = tensor.removesuffix(_WEIGHT)
        return name if name != tensor and name in self.quantized else None


def check_float(config: Values) -> None:
    """Raise ConfigError for a quantized checkpoint or an unsupported layout. Raises CheckpointError."""
    for key in ("quantization_config", "compression_config"):
        if config.get(key) or config.outer.get(key):
            raise ConfigError(f"{config.file}: the checkpoint is quantized already.", "Name the float checkpoint.")
    name = architectures(config)[0]
    if name in _TURNED:
        raise ConfigError(f"{name} cannot be quantized: its weights are stored with inputs first.")


class HasProblem(Protocol):
    """A format, which may not take a linear layer of every size."""

    def problem(self, outputs: int, inputs: int) -> str | None: ...


def choose(tensors: Mapping[str, torch.Tensor], target: HasProblem, ignore: Sequence[str]) -> Chosen:
    """Choose the layers to quantize by types and shapes alone.

    Raises ConfigError, and CheckpointError where nothing can be quantized.
    """
    patterns = [compiled(text) for text in ignore]
    quantized, ignored = [], ["lm_head"]
    for name, tensor in tensors.items():
        layer = name.removesuffix(_WEIGHT)
        if tensor.dim() == 3 and _STACKED.search(name):
            raise ConfigError(f"{name} cannot be quantized: it has the weights of all experts in one tensor.")
        if layer == name or tensor.dim() != 2 or not tensor.is_floating_point() or not _IN_LAYER.search(layer):
            continue
        if _LEFT.search(layer) or any(pattern.fullmatch(layer) for pattern in patterns):
            ignored.append(layer)
            continue
        problem = target.problem(*tensor.shape)
        if problem:
            raise ConfigError(f"{layer} cannot be quantized: {problem}.", "--group-size or --ignore may help.")
        quantized.append(layer)
    if not quantized:
        raise CheckpointError("The checkpoint has no linear layer to quantize that is known by its name.")
    return Chosen(frozenset(quantized), tuple(ignored))


def compiled(text: str) -> re.Pattern[str]:
    """Compile an expression of --ignore. Raises ConfigError."""
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"--ignore {text!r} is not a regular expression: {error}.") from None

"""The tensors of a model, wherever its submodules keep them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, cast, runtime_checkable

import torch

from ferrule.interfaces.model import HasPackedTensors

__all__ = ["device_tensors", "weight_tensors"]


@runtime_checkable
class QuantizedLayer(Protocol):
    """A linear layer that says whether its weights are quantized."""

    in_features: int
    out_features: int
    quantized: bool


def weight_tensors(model: object) -> list[torch.Tensor]:
    """Return the parameters, and the tensors that `HasPackedTensors` submodules name, each once, in the order of the
    submodules.
    """
    return _unique(tensor for part in _submodules(model) for tensor in _weights(part))


def device_tensors(model: object, device: torch.device) -> list[torch.Tensor]:
    """Return the weights and buffers that lie in the memory of `device`, each once, in the order of the submodules."""
    here = torch.empty(0, device=device).device  # with the number that tensors have
    tensors = (tensor for part in _submodules(model) for tensor in (*_weights(part), *part.buffers(recurse=False)))
    return [tensor for tensor in _unique(tensors) if tensor.device == here and tensor.layout == torch.strided]


def count_parameters(model: object) -> int:
    """Count the numbers that a model has learned, before its weights are packed.

    For a quantized layer, the numbers that its parameters stand for are counted: the parameters hold words, blocks and
    scales.
    """
    total, seen = 0, set[int]()
    for part in _submodules(model):
        own = {name: each for name, each in part.named_parameters(recurse=False) if id(each) not in seen}
        seen.update(map(id, own.values()))
        kept, layer = {name: each.numel() for name, each in own.items()}, cast(object, part)
        total += kept.pop("bias", 0)
        if kept and isinstance(layer, QuantizedLayer) and layer.quantized:
            table = getattr(getattr(layer, "tied", None), "weight", None)  # where a tied head's weights are counted
            total += layer.in_features * layer.out_features if table is None or not table.numel() else 0
        else:
            total += sum(kept.values())
    return total


def _submodules(model: object) -> list[torch.nn.Module]:
    return list(model.modules()) if isinstance(model, torch.nn.Module) else []


def _weights(part: torch.nn.Module) -> list[torch.Tensor]:
    packed = part.packed_tensors() if isinstance(part, HasPackedTensors) else ()
    return [*part.parameters(recurse=False), *packed]


def _unique(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())

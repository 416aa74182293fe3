"""The tensors of a model, wherever its submodules keep them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ferrule.interfaces.model import HasPackedTensors


def weight_tensors(model: object) -> list[torch.Tensor]:
    """Parameters, and what `HasPackedTensors` submodules name, each once, in the order of the submodules."""
    return _unique(tensor for part in _submodules(model) for tensor in _weights(part))


def device_tensors(model: object, device: torch.device) -> list[torch.Tensor]:
    """Weights and buffers that lie in memory of the kind of `device`, each once, in the order of the submodules."""
    tensors = (tensor for part in _submodules(model) for tensor in (*_weights(part), *part.buffers(recurse=False)))
    return [
        tensor for tensor in _unique(tensors) if tensor.device.type == device.type and tensor.layout == torch.strided
    ]


def _submodules(model: object) -> list[torch.nn.Module]:
    return list(model.modules()) if isinstance(model, torch.nn.Module) else []


def _weights(part: torch.nn.Module) -> list[torch.Tensor]:
    packed = part.packed_tensors() if isinstance(part, HasPackedTensors) else ()
    return [*part.parameters(recurse=False), *packed]


def _unique(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())

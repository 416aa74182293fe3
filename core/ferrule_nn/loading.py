"""From checkpoint tensors to parameters.

A parameter's name in the model *is* its name in the checkpoint, after the model's renames. A module may say two more
things: `parts` (a `MergedLinear`'s slices go by their own names, `q_proj` beside `qkv_proj`), and `absorbs` (names that
a checkpoint may hold and that mean nothing, such as the head of a tied model).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ferrule.errors import CheckpointError
from ferrule_nn.linear import Linear
from ferrule_nn.stored import Stored

# Buffers that old checkpoints hold and that are derived from config.json.
_DERIVED = (r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$",)


@dataclass(frozen=True)
class _Target:
    """Rows [start, stop) of a parameter, or all of it when `stop` is 0."""

    parameter: str
    start: int = 0
    stop: int = 0


@dataclass(frozen=True, kw_only=True)
class Naming:
    """How a checkpoint's names become the model's.

    `renames`: regular expressions and replacements, applied in order. `ignored`: expressions of names that are dropped.
    `transposed`: expressions of matrices that are stored [in, out]. All but `renames` see the checkpoint's own name.
    """

    renames: Sequence[tuple[str, str]] = ()
    ignored: Sequence[str] = ()
    transposed: Sequence[str] = ()

    def rename(self, name: str) -> str:
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name


def load_into(
    module: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], naming: Naming | None = None
) -> set[str]:
    """Copy `weights` into the parameters of `module`, casting; return the names of the parameters that were filled.

    Raises CheckpointError, naming the tensor, for one that the model does not have, for a shape that does not fit, and
    for a merged parameter of which only some parts came.
    """
    naming = naming or Naming()
    parameters: dict[str, torch.nn.Parameter] = dict(module.named_parameters())
    targets, absorbed = _targets(module, parameters)
    ignored = re.compile("|".join((*_DERIVED, *naming.ignored)))
    transposed = re.compile("|".join(naming.transposed)) if naming.transposed else None
    seen: set[str] = set()
    awaited = _Awaited(module, targets)
    for source, tensor in weights:
        name = naming.rename(source)
        if ignored.search(source) or name in absorbed:
            continue
        target = targets.get(name)
        if target is None:
            raise CheckpointError(f"The checkpoint holds a tensor that the model does not have: {source!r}.")
        if transposed is not None and tensor.dim() == 2 and transposed.search(source):
            tensor = tensor.t()
        if target.parameter not in parameters:
            raise CheckpointError(f"The checkpoint holds {source!r} beside other tensors of the same weights.")
        parameter = parameters[target.parameter]
        if parameter.is_meta:
            parameter = parameters[target.parameter] = _with_memory(module, target.parameter)
        _copy(parameter, target, tensor, source)
        seen.add(name)
        layer = awaited.complete(name, target)
        if layer is not None and layer.filled():  # their memory is free when nothing here holds them any more
            for own in awaited.names(layer, target):
                del parameters[own]
    return _filled(targets, seen)


class _Awaited:
    """What each linear layer still lacks: a parameter comes whole, or in all its parts."""

    def __init__(self, module: torch.nn.Module, targets: Mapping[str, _Target]) -> None:
        self._module = module
        self._parts: dict[str, set[str]] = {}
        for name, target in targets.items():
            self._parts.setdefault(target.parameter, set())
            if target.stop:
                self._parts[target.parameter].add(name)

    def complete(self, name: str, came: _Target) -> Linear | None:
        """The layer whose last tensor this was."""
        layer = self._module.get_submodule(came.parameter.rpartition(".")[0])
        if not isinstance(layer, Linear):
            return None
        lacks = self._parts.get(came.parameter, set())
        lacks.discard(name)
        if not came.stop or not lacks:
            self._parts.pop(came.parameter, None)
        return None if any(own in self._parts for own in self.names(layer, came)) else layer

    @staticmethod
    def names(layer: Linear, came: _Target) -> list[str]:
        """Of the layer's parameters, of which one came."""
        before = came.parameter.removesuffix(came.parameter.rpartition(".")[2])
        return [before + own for own, _ in layer.named_parameters(recurse=False)]


def _targets(module: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> tuple[dict[str, _Target], set[str]]:
    targets = {name: _Target(name) for name in parameters}
    absorbed: set[str] = set()
    for path, child in module.named_modules():
        parts: Mapping[str, int] = getattr(child, "parts", {})
        parent = path.rpartition(".")[0]
        paths = (path, *(f"{parent}.{part}" if parent else part for part in parts))
        absorbed.update(f"{path}.{name}" for path in paths for name in getattr(child, "absorbs", ()))
        start = 0
        for part, rows in parts.items():
            for suffix, _ in child.named_parameters(recurse=False):
                name = f"{parent}.{part}.{suffix}" if parent else f"{part}.{suffix}"
                targets[name] = _Target(f"{path}.{suffix}", start, start + rows)
            start += rows
    return targets, absorbed


def _with_memory(module: torch.nn.Module, name: str) -> torch.nn.Parameter:
    before, _, own = name.rpartition(".")
    layer = module.get_submodule(before)
    if not isinstance(layer, Linear):
        raise RuntimeError(f"{name} has no memory, and no layer that could give it some")
    return layer.own(own)


def _copy(parameter: torch.Tensor, target: _Target, tensor: torch.Tensor, source: str) -> None:
    if isinstance(parameter, Stored):
        if not parameter.takes(tensor.dtype):
            raise CheckpointError(
                f"Tensor {source!r} is of {tensor.dtype}, but the format has {parameter.dtype} there."
            )
        view = parameter.cut(target.start, target.stop)
        tensor = parameter.fit(tensor, view)
    else:
        view = parameter[target.start : target.stop] if target.stop else parameter
    if view.shape != tensor.shape:
        raise CheckpointError(
            f"Tensor {source!r} has the shape {tuple(tensor.shape)}, but the model needs {tuple(view.shape)}.",
            "The weights do not belong to this config.json.",
        )
    with torch.no_grad():
        view.copy_(tensor)


def _filled(targets: Mapping[str, _Target], seen: set[str]) -> set[str]:
    """Parameters that came whole. Raises CheckpointError for one that came in part."""
    filled = {targets[name].parameter for name in seen}
    whole = {name for name in seen if not targets[name].stop}
    for name, target in targets.items():
        if target.stop and target.parameter in filled and target.parameter not in whole and name not in seen:
            raise CheckpointError(f"The checkpoint lacks the tensor {name!r}.")
    return filled

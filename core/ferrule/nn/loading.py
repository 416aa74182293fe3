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
    parameters = dict(module.named_parameters())
    targets, absorbed = _targets(module, parameters)
    ignored = re.compile("|".join((*_DERIVED, *naming.ignored)))
    transposed = re.compile("|".join(naming.transposed)) if naming.transposed else None
    seen: set[str] = set()
    for source, tensor in weights:
        name = naming.rename(source)
        if ignored.search(source) or name in absorbed:
            continue
        target = targets.get(name)
        if target is None:
            raise CheckpointError(f"The checkpoint holds a tensor that the model does not have: {source!r}.")
        if transposed is not None and tensor.dim() == 2 and transposed.search(source):
            tensor = tensor.t()
        _copy(parameters[target.parameter], target, tensor, source)
        seen.add(name)
    return _filled(targets, seen)


def _targets(module: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> tuple[dict[str, _Target], set[str]]:
    targets = {name: _Target(name) for name in parameters}
    absorbed: set[str] = set()
    for path, child in module.named_modules():
        absorbed.update(f"{path}.{name}" for name in getattr(child, "absorbs", ()))
        parts: Mapping[str, int] = getattr(child, "parts", {})
        parent = path.rpartition(".")[0]
        start = 0
        for part, rows in parts.items():
            for suffix, _ in child.named_parameters(recurse=False):
                name = f"{parent}.{part}.{suffix}" if parent else f"{part}.{suffix}"
                targets[name] = _Target(f"{path}.{suffix}", start, start + rows)
            start += rows
    return targets, absorbed


def _copy(parameter: torch.Tensor, target: _Target, tensor: torch.Tensor, source: str) -> None:
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

"""Loading: a checkpoint's tensors become parameters.

A parameter's name in the model *is* its name in the checkpoint, after the model's renames. A `Linear` adds two rules:
tensors of its `projections` have names of their own, `q_proj` beside `qkv_proj`, and its `ignored_tensors` are dropped,
such as the head of a tied model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from ferrule.errors import CheckpointError, ConfigError
from ferrule_kernels.cpu.pages import copy_to_new
from ferrule_nn.division import DividedParameter
from ferrule_nn.linear import Linear, MergedLinear
from ferrule_nn.parameters import CheckpointParameter

# Buffers that old checkpoints hold and that are derived from config.json.
_DERIVED = (r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$",)
# What bitsandbytes keeps beside a weight, under a name that no parameter can have: `weight.absmax` is `weight_absmax`.
_BESIDE = re.compile(r"\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state)(\.\w+)?$")


@dataclass(frozen=True)
class _Target:
    """Rows [start, stop) of a parameter, those of its layer's `projection`; all of it when `stop` is 0."""

    parameter: str
    start: int = 0
    stop: int = 0
    projection: int | None = None


@dataclass(frozen=True, kw_only=True)
class Naming:
    """The rules by which a checkpoint's names become the model's.

    `renames`: regular expressions and replacements, applied in order. `ignored`: expressions of names that are dropped.
    `transposed`: expressions of matrices that are stored [in, out]. `stacked`: expressions of tensors that hold one for
    each expert, and the names of those, with ``{}`` for the expert's number. `ignored` and `transposed` see the
    checkpoint's own name, `stacked` the one that `renames` have made.
    """

    renames: Sequence[tuple[str, str]] = ()
    ignored: Sequence[str] = ()
    transposed: Sequence[str] = ()
    stacked: Sequence[tuple[str, str]] = (
        (r"\.experts\.(gate_up_proj|down_proj)$", r".experts.{}.\1.weight"),
        (r"\.experts\.(gate_up_proj|down_proj)_(bias|blocks|scales)$", r".experts.{}.\1.\2"),
    )

    def of_text_part(self) -> Naming:
        """Return the naming for a composite model's files: the text part under our names, without media parts."""
        text = (
            (r"^(model\.language_model|language_model\.model)\.", "model."),
            (r"^language_model\.lm_head\.", "lm_head."),
        )
        media = (
            r"^(model\.)?(vision_tower|vision_embedder|audio_tower|multi_modal_projector|embed_vision|embed_audio)\."
        )
        return replace(self, renames=(*text, *self.renames), ignored=(*self.ignored, media))

    def rename(self, name: str) -> str:
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return _BESIDE.sub(r".weight_\1", name)

    def tensors(self, source: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model's names for a tensor of the checkpoint, and their tensors: views where it is stacked."""
        several = self.of_expert(source)
        if several is None:
            yield self.rename(source), tensor
        else:
            yield from ((several.replace("{}", str(index)), part) for index, part in enumerate(tensor))

    def of_expert(self, source: str) -> str | None:
        """Return the name of a part of a stacked tensor, with ``{}`` for the expert's number; else None."""
        name = self.rename(source)
        for pattern, replacement in self.stacked:
            if re.search(pattern, name):
                return re.sub(pattern, replacement, name)
        return None


def load_into(
    module: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], naming: Naming | None = None
) -> set[str]:
    """Copy `weights` into the parameters of `module`, casting; return the names of the parameters that were filled.

    Raises CheckpointError, naming the tensor, for one that the model does not have, for a shape that does not fit, and
    for a merged parameter of which only some projections came. A quantized layer is packed as soon as its last tensor
    came; rows that its scheme takes as they come are not copied to the parameter. Tensors on the meta device have no
    values and are only checked.
    """
    naming = naming or Naming()
    parameters: dict[str, torch.nn.Parameter] = dict(module.named_parameters())
    targets, dropped = _targets(module, parameters)
    ignored = re.compile("|".join((*_DERIVED, *naming.ignored)))
    transposed = re.compile("|".join(naming.transposed)) if naming.transposed else None
    seen: set[str] = set()
    pending, takers = _Pending(module, targets), _takers(module)
    for source, whole in weights:
        if ignored.search(source):
            continue
        for name, tensor in naming.tensors(source, whole):
            if name in dropped:
                continue
            target = targets.get(name)
            if target is None:
                raise CheckpointError(
                    f"The checkpoint holds a tensor that the model does not have: {source!r}.",
                    "If the weights are quantized, and config.json does not say so, --quantization names the method.",
                )
            if target.parameter not in parameters:
                raise CheckpointError(f"The checkpoint holds {source!r} beside other tensors of the same weights.")
            parameter = parameters[target.parameter]
            if parameter.is_meta and not tensor.is_meta:
                parameter = parameters[target.parameter] = _materialized(module, target.parameter)
            if transposed is not None and tensor.dim() == 2 and transposed.search(source):
                tensor = tensor.t()
            if not target.stop:
                tensor = _in_order(module, parameter, target, tensor)
            layer = module.get_submodule(target.parameter.rpartition(".")[0])
            _fill(layer, parameter, target, tensor, source, takers.get(target.parameter))
            seen.add(name)
            for own in pending.packed(name, target):  # else their memory would stay
                parameters.pop(own, None)
        several = naming.of_expert(source) or ""
        if "{}" in several and several.replace("{}", str(len(whole))) in targets:
            raise CheckpointError(f"The checkpoint holds {source!r} of {len(whole)} experts, and the model has more.")
    return _filled(targets, seen) | _ones(module, parameters, {targets[name].parameter for name in seen})


def _ones(module: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter], filled: set[str]) -> set[str]:
    """Fill the optional parameters for which no tensor came. Returns their names."""
    names = {name for name, own in parameters.items() if isinstance(own, CheckpointParameter) and own.optional}
    for name in names - filled:
        own = _materialized(module, name) if parameters[name].is_meta else parameters[name]
        own.data.fill_(1)
    return names - filled


class _Pending:
    """The tensors that each linear layer still needs: a parameter comes whole, or in all its projections."""

    def __init__(self, module: torch.nn.Module, targets: Mapping[str, _Target]) -> None:
        self._module = module
        self._projections: dict[str, set[str]] = {}  # parameter → names of tensors that did not come
        for name, target in targets.items():
            self._projections.setdefault(target.parameter, set())
            if target.stop:
                self._projections[target.parameter].add(name)

    def completed(self, name: str, target: _Target) -> Linear | None:
        """Note that a tensor came. Returns the layer if that was the last one it needed."""
        layer = self._module.get_submodule(target.parameter.rpartition(".")[0])
        if not isinstance(layer, Linear):
            return None
        missing = self._projections.get(target.parameter, set())
        missing.discard(name)
        if not target.stop or not missing:
            self._projections.pop(target.parameter, None)
        return None if any(own in self._projections for own in self.parameter_names(layer, target)) else layer

    def packed(self, name: str, target: _Target) -> list[str]:
        """Note that a tensor came, and pack the layer if it is quantized and complete. Returns its parameters then."""
        layer = self.completed(name, target)
        if layer is None or not layer.quantized:
            return []
        names = self.parameter_names(layer, target)
        with _named(target):
            layer.pack()
        return names

    @staticmethod
    def parameter_names(layer: Linear, target: _Target) -> list[str]:
        """Return the full names of the parameters of `layer`, to which `target` belongs."""
        prefix = target.parameter.removesuffix(target.parameter.rpartition(".")[2])
        return [prefix + own for own, _ in layer.named_parameters(recurse=False)]


def _targets(module: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> tuple[dict[str, _Target], set[str]]:
    """Return the target of each checkpoint name, and the names that are dropped."""
    targets = {name: _Target(name) for name in parameters}
    dropped: set[str] = set()
    for path, child in module.named_modules():
        if not isinstance(child, Linear):
            continue
        parent = path.rpartition(".")[0]
        paths = [f"{parent}.{projection}" if parent else projection for projection in child.projections]
        dropped.update(f"{each}.{name}" for each in (path, *paths) for name in child.ignored_tensors)
        start = 0
        for index, (each, (projection, rows)) in enumerate(zip(paths, child.projections.items(), strict=True)):
            for suffix, _ in child.named_parameters(recurse=False):
                targets[f"{each}.{suffix}"] = _Target(f"{path}.{suffix}", start, start + rows, index)
            part = getattr(child, projection, None)  # a layer of its own within the merged one
            if isinstance(part, Linear):
                dropped.update(f"{each}.{name}" for name in part.ignored_tensors)
                targets.update(
                    (f"{each}.{own}", _Target(f"{path}.{projection}.{own}")) for own, _ in part.named_parameters()
                )
            start += rows
    return targets, dropped


def _materialized(module: torch.nn.Module, name: str) -> torch.nn.Parameter:
    path, _, own = name.rpartition(".")
    layer = module.get_submodule(path)
    if not isinstance(layer, Linear):
        raise RuntimeError(f"parameter {name} is on the meta device, and its layer cannot allocate it")
    return layer.materialize(own)


def _in_order(module: torch.nn.Module, parameter: torch.Tensor, target: _Target, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor for a whole parameter with its outputs in the parameter's order."""
    layer = module.get_submodule(target.parameter.rpartition(".")[0])
    if not isinstance(layer, MergedLinear) or tensor.dim() < parameter.dim():  # one for all outputs
        return tensor
    return layer.in_order(tensor, parameter.axis if isinstance(parameter, CheckpointParameter) else 0)


def _takers(module: torch.nn.Module) -> dict[str, Linear]:
    """Return the layers whose schemes are asked to take rows of a parameter, by its name."""
    layers = ((path, layer) for path, layer in module.named_modules() if isinstance(layer, Linear))
    return {f"{path}.{layer.scheme.row_parameter}": layer for path, layer in layers if layer.quantized}


@contextmanager
def _named(target: _Target) -> Iterator[None]:
    """Add the name of the layer to a scheme's error."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{target.parameter.rpartition('.')[0]}: {error.message}", error.hint) from None


def _fill(
    layer: torch.nn.Module,
    parameter: torch.Tensor,
    target: _Target,
    tensor: torch.Tensor,
    source: str,
    taker: Linear | None,
) -> None:
    if isinstance(parameter, CheckpointParameter):
        if not parameter.accepts(tensor.dtype):
            raise CheckpointError(
                f"Tensor {source!r} is of {tensor.dtype}, but the format has {parameter.dtype} there."
            )
        view = parameter.outputs(target.start, target.stop)
        tensor = parameter.expanded(_part(layer, parameter, target, view, tensor), view)
    else:
        view = parameter[target.start : target.stop] if target.stop else parameter
        tensor = _part(layer, parameter, target, view, tensor)
    if view.shape != tensor.shape:
        raise CheckpointError(
            f"Tensor {source!r} has the shape {tuple(tensor.shape)}, but the model needs {tuple(view.shape)}.",
            "The weights do not belong to this config.json.",
        )
    if taker is not None:
        with _named(target):
            if taker.scheme.pack_rows(taker, target.start, tensor):
                return
    with torch.no_grad():
        copy_to_new(view, tensor)


def _part(
    layer: torch.nn.Module, parameter: torch.Tensor, target: _Target, view: torch.Tensor, tensor: torch.Tensor
) -> torch.Tensor:
    """Return this rank's part of a checkpoint's tensor for `view`.

    Raises CheckpointError where it cannot be divided.
    """
    try:
        if isinstance(layer, Linear):
            return layer.part(target.parameter.rpartition(".")[2], parameter, view, tensor, target.projection)
        return parameter.part(tensor) if isinstance(parameter, DividedParameter) else tensor
    except ConfigError as error:
        raise CheckpointError(f"{target.parameter}: {error.message}", error.hint) from None


def _filled(targets: Mapping[str, _Target], seen: set[str]) -> set[str]:
    """Return the names of the parameters that were filled. Raises CheckpointError if one lacks a projection."""
    filled = {targets[name].parameter for name in seen}
    whole = {name for name in seen if not targets[name].stop}
    for name, target in targets.items():
        if target.stop and target.parameter in filled and target.parameter not in whole and name not in seen:
            raise CheckpointError(f"The checkpoint lacks the tensor {name!r}.")
    return filled

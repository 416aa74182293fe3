"""The contents of a loaded model: packed matrices, and the parameters beside them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ferrule import __version__
from ferrule.assembly.model import Loaded
from ferrule.checkpoint import Values
from ferrule.errors import ConfigError
from ferrule_kernels.cpu.dense import DenseMatrix
from ferrule_kernels.cpu.matmul import PackedMatrix
from ferrule_nn import Dense, Head, Linear, PacksForCpu
from ferrule_plugins.quantization.packed import FACTORS, METHOD, WEIGHT, LayerForm, stated
from ferrule_quant.mixed_projections import Apart

Matrix = DenseMatrix | PackedMatrix


@dataclass(frozen=True)
class Contents:
    """The tensors to write, by the model's own names, and the forms of the packed layers (`kept`).

    The largest come first: a file's pages count beside the memory that they are copied to, least at the beginning.
    """

    tensors: Mapping[str, torch.Tensor]
    kept: Mapping[str, LayerForm]


def contents(loaded: Loaded) -> Contents:
    """Return the tensors to write, without copying them.

    Raises ConfigError where no layer is packed, or one has a form that Ferrule cannot write.
    """
    info, model = loaded.info, loaded.model
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"The model implementation {info.implementation} is not a torch.nn.Module.")
    if info.quantization == METHOD:
        raise ConfigError("The model's weights are packed already: name the checkpoint that they were made from.")
    kept: dict[str, LayerForm] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, part in model.named_modules():
        if isinstance(part, Linear) and not isinstance(part.scheme, Apart):  # its parts are layers of their own
            matrix = _matrix(name, part, info.quantization)
            if matrix is not None:
                kept[name] = LayerForm.of(matrix, table=_is_tied(part) and part.scheme.rows(part) is not None)
                tensors.update(_packed(name, matrix))
            elif isinstance(part.scheme, Dense) and not _is_tied(part):
                tensors[f"{name}.weight"] = part.scheme.plain(part)
    if not kept:
        raise ConfigError(
            f"Nothing can be packed: {info.implementation} has no packed form for weights of {info.dtype}.",
            "Weights of bfloat16 (--dtype bfloat16) and quantized ones (-q int8) of native models have one.",
        )
    for name, parameter in model.named_parameters():
        if parameter.numel():  # those of packed layers are empty
            tensors.setdefault(name, parameter.detach())
    tensors.update(loaded.cache_scales.tensors())
    ordered = sorted(tensors.items(), key=lambda item: -item[1].nbytes)
    return Contents(dict(ordered), kept)


def _matrix(name: str, layer: Linear, method: str | None) -> Matrix | None:
    """Return the packed weights; None for a layer that is not packed, or by a library. Raises ConfigError for another
    form.
    """
    matrix = layer.scheme.matrix if isinstance(layer.scheme, PacksForCpu) else None
    if matrix is not None or isinstance(layer.scheme, Dense):
        return matrix
    raise ConfigError(
        f"{name} has no form that can be written: {method} has another form, or compiled kernels are missing here.",
        "The log says which kernels there are.",
    )


def _is_tied(layer: Linear) -> bool:
    return isinstance(layer, Head) and layer.tied is not None


def _packed(name: str, matrix: Matrix) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"{name}.{WEIGHT}", matrix.packed
    if isinstance(matrix, PackedMatrix) and matrix.factors is not None:
        yield f"{name}.{FACTORS}", matrix.factors


def configuration(loaded: Loaded, kept: Mapping[str, LayerForm]) -> dict[str, Any]:
    """Return the ``config.json`` of the folder: the checkpoint's, with --hf-overrides applied, and the forms of the
    weights.
    """
    checkpoint = loaded.context.config
    outer = copy.deepcopy(dict(checkpoint.outer if isinstance(checkpoint, Values) else checkpoint))
    _drop(outer)
    packed = stated(kept, loaded.context.dtype, loaded.info.quantization)
    outer["quantization_config"] = {**packed, "made_by": f"ferrule {__version__}"}
    return outer


def _drop(values: dict[str, Any]) -> None:
    """Remove the source's description of its weights, wherever a composite model has it."""
    for key in ("quantization_config", "compression_config"):
        values.pop(key, None)
    for value in values.values():
        if isinstance(value, dict):
            _drop(value)

"""Outliers of SqueezeLLM's checkpoints: weights that are added to those of the tables.

`rows` [n + 1], `cols` and `vals` [count] are a sparse matrix [n, k], compressed by rows. `full_rows` [k, count] are
some outputs in full, and `full_row_indices` says which. How many there are is known only when they come, and
configurations do not say that there are any. https://github.com/SqueezeAILab/SqueezeLLM, squeezellm/quant.py and
quant_cuda_kernel.cu.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule_files.safetensors import read_header
from ferrule_files.shards import weight_files
from ferrule_nn import CheckpointParameter, checkpoint_parameter
from ferrule_plugins.load_format import pt
from ferrule_quant.packed_words import outputs

SPARSE, FULL = "include_sparse", "topX"  # of a configuration: whether there are outliers, and outputs in full
_SPARSE = ("rows", "cols", "vals")
_FULL = ("full_rows", "full_row_indices")
_UNUSED = ("startrows",)  # of one of its kernels


def stated(folder: Path) -> dict[str, Any]:
    """Return what the names of a folder's tensors say of outliers, as a configuration. Raises CheckpointError."""
    ends = {name.rpartition(".")[2] for name in _names(folder)}
    return {key: True for key, names in ((SPARSE, _SPARSE), (FULL, _FULL)) if set(names) <= ends}


def _names(folder: Path) -> Iterable[str]:
    files = weight_files(folder, ".safetensors", "model.safetensors")
    if files:
        return [name for file in files for name in read_header(file)]
    return [name for file in pt.PyTorchFiles.files(folder) for name in pt.read_file(file)]


def expected(config: Mapping[str, Any]) -> bool:
    return bool(config.get(SPARSE) or config.get(FULL))


class OutlierParameter(CheckpointParameter):
    """A parameter that keeps tensors of any size, one for each projection that the layer merges.

    Its own numbers, one for each projection, mean nothing. `most` limits the number of entries of such a tensor.
    """

    kind: torch.dtype
    most: int
    given: dict[int, torch.Tensor]

    def __new__(
        cls, like: CheckpointParameter, kind: torch.dtype, most: int, given: dict[int, torch.Tensor]
    ) -> OutlierParameter:
        made: OutlierParameter = super().__new__(cls, like.data, like.axis, like.offsets)  # type: ignore[assignment]
        made.kind, made.most, made.given = kind, most, given
        return made

    def with_data(self, data: torch.Tensor) -> OutlierParameter:
        like = CheckpointParameter(data, self.axis, self.offsets)
        return OutlierParameter(like, self.kind, self.most, self.given)

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in (self.dtype, torch.int64) or dtype.is_floating_point == self.kind.is_floating_point

    def expanded(self, tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == view.dtype and tensor.shape == view.shape:  # random weights: there are no outliers
            return tensor
        if tensor.numel() > self.most or tensor.is_floating_point() != self.kind.is_floating_point:
            raise CheckpointError(
                f"A tensor of outliers is {tensor.dtype} {list(tensor.shape)}, which the layer cannot have."
            )
        self.given[int(view.storage_offset())] = tensor.to(view.device, self.kind, copy=True)
        return view


def allocate(layer: Any, config: Mapping[str, Any]) -> None:
    """Give the layer parameters for the outliers that the configuration announces."""
    n, k = layer.out_features, layer.in_features
    sparse, full = bool(config.get(SPARSE)), bool(config.get(FULL))
    most = {"rows": n + 1, "cols": n * k, "vals": n * k, "full_rows": n * k, "full_row_indices": n}
    for name in (*_SPARSE * sparse, *_FULL * full):
        like = checkpoint_parameter(layer, (-1,), torch.uint8, count=lambda _: 1)
        kind = torch.float32 if name in ("vals", "full_rows") else torch.int64
        setattr(layer, name, OutlierParameter(like, kind, most[name], {}))
    layer.ignored_tensors = (*layer.ignored_tensors, *_UNUSED)


def add(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """Add the layer's outliers to `weight` [n, k] in place, and return it.

    Raises CheckpointError for ones that do not fit.
    """
    for group, added in ((_SPARSE, _add_sparse), (_FULL, _add_full)):
        own = [getattr(layer, name).given for name in group if hasattr(layer, name)]
        if not any(own):
            continue
        if any(each.keys() != own[0].keys() for each in own):
            raise CheckpointError(f"The checkpoint has some of {', '.join(group)} of a layer and not the others.")
        parts = torch.split(weight, list(outputs(layer))) if len(own[0]) > 1 else (weight,)
        if len(parts) != len(own[0]):
            raise CheckpointError("The checkpoint has outliers of some projections of a layer and not of others.")
        for part, *tensors in zip(parts, *([each[at] for at in sorted(each)] for each in own), strict=True):
            added(part, tensors)
    return weight


def _add_sparse(weight: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    starts, columns, values = tensors
    n, k = weight.shape
    whole = starts.shape == (n + 1,) and columns.shape == values.shape == (values.numel(),)
    if not whole or int(starts[0]) or int(starts[-1]) != len(values) or bool((starts.diff() < 0).any()):
        raise CheckpointError("The rows of a layer's outliers are not those of a sparse matrix of its shape.")
    _check(columns, k)
    rows = torch.repeat_interleave(torch.arange(n, device=weight.device), starts.diff())
    weight.index_put_((rows, columns), values.to(weight.dtype), accumulate=True)


def _add_full(weight: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    values, rows = tensors
    if rows.ndim != 1 or values.shape != (weight.shape[1], len(rows)):
        raise CheckpointError("The outputs in full of a layer's outliers are of another shape.")
    _check(rows, len(weight))
    weight.index_add_(0, rows, values.t().to(weight.dtype))


def _check(places: torch.Tensor, count: int) -> None:
    if places.numel() and (int(places.min()) < 0 or int(places.max()) >= count):
        raise CheckpointError("An outlier of the checkpoint is not within its layer.")

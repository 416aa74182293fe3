"""Weights of which two of four are zero, without the zeros: ``sparse-24-bitmask`` of compressed-tensors.

    compressed   the others, [n, k / 2]: of the type that the weights have, which may be quantized
    bitmask      uint8 [n, k / 8]: which inputs they belong to, the lowest bit first
    shape        of the weights, which the model knows

Kernels here multiply all four, so the zeros come back when the weights are loaded.
https://github.com/vllm-project/compressed-tensors describes the format, up to version 0.9 in code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_nn import checkpoint_parameter
from ferrule_quant.names import chosen, listed, targeted
from ferrule_quant.products import Quantized, Shared, Wide

_WHY = "no kernel leaves out the zeros of sparse weights: they take 16 bits as others do, or 32 with --dtype float32"


class Sparsity:
    """The ``sparsity_config`` of a checkpoint. Raises ValueError with what is not supported."""

    def __init__(self, config: Any) -> None:
        stated = config or {"format": "dense"}
        form = stated.get("format", "dense") if isinstance(stated, Mapping) else None
        if form not in ("dense", "sparse-24-bitmask"):
            raise ValueError(f"reads sparse weights in the form 'sparse-24-bitmask', not {form!r:.80}")
        self.any = form != "dense"
        self._targets, self._left = listed(stated, "targets"), listed(stated, "ignore")

    def means(self, layer: LinearLayer) -> bool:
        """Return whether the layer's weights are sparse."""
        return self.any and targeted(layer, self._targets) and not chosen(layer, self._left)


class Sparse(LinearScheme):
    """A scheme that fills in the zeros, and hands the layer over to the scheme of its weights."""

    def __init__(self, inner: Quantized) -> None:
        self._inner = inner

    def allocate(self, layer: Any) -> None:
        self._inner.allocate(layer)
        dtype, k = layer.weight.dtype, layer.in_features
        if k % 8:
            raise CheckpointError(f"{k} inputs of a sparse layer do not fill bytes of 8 bits.")
        kept = checkpoint_parameter(layer, (-1, k // 2), dtype)
        mask = checkpoint_parameter(layer, (-1, k // 8), torch.uint8)
        layer.weight, layer.compressed, layer.bitmask = None, kept, mask
        layer.ignored_tensors = (*layer.ignored_tensors, "shape")

    def pack(self, layer: Any) -> None:
        kept, mask = layer.compressed.detach(), layer.bitmask.detach()
        layer.weight = torch.nn.Parameter(filled(kept, mask), requires_grad=False)
        layer.compressed = layer.bitmask = None
        layer.scheme = self._inner
        self._inner.pack(layer)

    def packed_tensors(self) -> Iterable[torch.Tensor]:
        return self._inner.packed_tensors()

    def matmul(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return self._inner.matmul(layer, x)


class SparseFloats(Quantized):
    """A scheme for sparse weights that are not quantized."""

    def __init__(self, shared: Shared, dtype: torch.dtype | None) -> None:
        super().__init__(shared, dtype, wide=True)

    def allocate(self, layer: Any) -> None:
        self.given = layer.weight.dtype

    def weights(self, layer: Any) -> Wide:
        return Wide(layer.weight.detach(), _WHY)


def filled(kept: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Spread numbers [n, k / 2] by bits [n, k / 8] to [n, k]. Raises CheckpointError for another number of set bits."""
    places = torch.stack([mask >> bit & 1 for bit in range(8)], dim=-1).flatten(1).bool()
    if not bool((places.sum(1) == kept.shape[1]).all()):
        raise CheckpointError("The bits of a sparse layer are not half of its inputs.", "The file may be damaged.")
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[kept.dtype.itemsize]  # fp8 has no masks
    weight = torch.zeros(places.shape, dtype=bits, device=kept.device)
    weight[places] = kept.contiguous().view(bits).flatten()
    return weight.view(kept.dtype)

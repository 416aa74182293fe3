"""Float weights that are quantized as they load."""

from __future__ import annotations

from typing import Any

import torch

from ferrule_kernels.matmul import Form
from ferrule_quant.products import Fp8, Quantized, Rounded, Shared, fitting, products_of


class Online(Quantized):
    """A scheme for float weights that are quantized once loaded.

    On a CPU its kernel does it, elsewhere torch, to the same numbers.
    """

    def __init__(self, form: Form, shared: Shared, dtype: torch.dtype | None) -> None:
        super().__init__(shared, dtype, wide=form.digits == 2)
        self.form = form

    def units(self, layer: Any) -> tuple[int, int]:
        return 1, self.form.group or 1

    def weights(self, layer: Any) -> Rounded | Fp8:
        self.given = layer.weight.dtype
        return Rounded(layer.weight.detach(), self.form)

    def pack_rows(self, layer: Any, first: int, rows: torch.Tensor) -> bool:
        coming = products_of(layer).coming_rows(self, layer, self.form)
        if coming is not None:
            with fitting():
                coming.put(first, rows.to(layer.weight.dtype))
        return coming is not None

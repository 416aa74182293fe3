"""Matrices in the layout of oneDNN, the CPU's matrix library, which comes with torch."""

from __future__ import annotations

import torch


class Packed:
    """A matrix in the layout of oneDNN: two to three times as fast as one that is not.

    It takes float32, and bfloat16 on processors that our own kernel does not support.

    Its kernels sum up a row in an order that does not depend on the other rows, except for a single row of float32,
    which is doubled for that reason. So a token's hidden state has the same bits alone and in a batch.
    """

    def __init__(self, matrix: torch.Tensor) -> None:
        self.matrix = matrix  # opaque: of torch's layout `mkldnn`, without a storage

    @classmethod
    def of(cls, weight: torch.Tensor) -> Packed | None:
        """Pack a weight. Returns None if it is empty, its type is not supported, or torch lacks oneDNN."""
        library = torch.ops.mkldnn
        if not weight.is_cpu or not weight.numel() or not torch._C._has_mkldnn:
            return None
        if weight.dtype == torch.bfloat16 and library._is_mkldnn_bf16_supported() or weight.dtype == torch.float32:
            return cls(library._reorder_linear_weight(weight.detach(), None))
        return None

    def plain(self) -> torch.Tensor:
        """Return the matrix [out, in] in torch's order."""
        return self.matrix.to_dense()

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply x [tokens, in] by the transposed weight: [tokens, out]."""
        alone = x.shape[0] == 1 and x.dtype == torch.float32
        rows = x.expand(2, -1) if alone else x
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.matrix, bias, "none", [], "")
        return y[:1] if alone else y

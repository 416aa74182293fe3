"""Best, drawn and banned tokens: tensors to the kernels in ``sampling.cpp``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ferrule_kernels.cpu import library

_DRAW = np.dtype(
    [("row", "i8"), ("top_k", "i8"), ("noise", "f8"), ("top_p", "f8"), ("temperature", "f4"), ("min_p", "f4")]
)
_INT, _AT = ctypes.c_int64, ctypes.c_void_p


class Sampling:
    """Raises KernelsUnavailableError. All logits are float32, contiguous and on the CPU."""

    def __init__(self) -> None:
        kernels: Any = library.load()
        self._best, self._draw, self._mask = kernels.ferrule_best, kernels.ferrule_draw, kernels.ferrule_mask
        self._best.argtypes = (_AT, _INT, _INT, _AT, _AT)
        self._draw.argtypes = (_AT, _INT, _AT, _INT, _AT)
        self._mask.argtypes = (_AT, _INT, _AT, _INT, _AT, _INT)
        self._best.restype = self._draw.restype = self._mask.restype = None

    def best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's best token [rows] int64, and its logit [rows] float32: NaN for a row that holds one."""
        rows, vocab = logits.shape
        tokens, most = torch.empty(rows, dtype=torch.long), torch.empty(rows)
        self._best(logits.data_ptr(), rows, vocab, tokens.data_ptr(), most.data_ptr())
        return tokens, most

    def draw(self, logits: torch.Tensor, wanted: Sequence[tuple[int, int, float, float, float, float]]) -> torch.Tensor:
        """A token for each (row, top_k, noise, top_p, temperature, min_p); these rows of logits are overwritten."""
        draws = np.array(list(wanted), dtype=_DRAW)
        tokens = torch.empty(len(draws), dtype=torch.long)
        self._draw(draws.ctypes.data, len(draws), logits.data_ptr(), logits.shape[1], tokens.data_ptr())
        return tokens

    def mask(self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
        """Ban, in place, each token of `rows` [n] int64 whose bit in `words` [n, any] int32 is 0 or missing."""
        rows, words = rows.contiguous(), words.contiguous()
        self._mask(logits.data_ptr(), logits.shape[1], rows.data_ptr(), len(rows), words.data_ptr(), words.shape[1])

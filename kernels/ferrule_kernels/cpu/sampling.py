"""Best, drawn and banned tokens: tensors to the kernels in ``sampling.cpp``."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ferrule_kernels.cpu import library

_INT, _AT = ctypes.c_int64, ctypes.c_void_p


class Sampling:
    """The sampling kernels. All logits are float32, contiguous and on the CPU. Raises KernelsUnavailableError."""

    def __init__(self) -> None:
        kernels: Any = library.load()
        self._best, self._draw, self._mask = kernels.ferrule_best, kernels.ferrule_draw, kernels.ferrule_mask
        self._surest = kernels.ferrule_surest
        self._best.argtypes = (_AT, _INT, _INT, _AT, _AT, _AT)
        self._draw.argtypes = (_AT, _INT, _AT, _INT, _AT)
        self._mask.argtypes = (_AT, _INT, _AT, _INT, _AT, _INT)
        self._surest.argtypes = (_AT, _INT, _INT, _AT)
        self._best.restype = self._draw.restype = self._mask.restype = self._surest.restype = None

    def best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return each row's best token, int64, its logit, float32, and whether that logit is finite: three of [rows].

        A row that holds NaN has NaN as its logit. Rows whose logit is not finite are overwritten with zeros.
        """
        rows, vocab = logits.shape
        tokens, most = torch.empty(rows, dtype=torch.long), torch.empty(rows)
        finite = torch.empty(rows, dtype=torch.bool)
        self._best(logits.data_ptr(), rows, vocab, tokens.data_ptr(), most.data_ptr(), finite.data_ptr())
        return tokens, most, finite

    def surest(self, logits: torch.Tensor) -> torch.Tensor:
        """Return each row's likeliest token and the logarithm of its probability: [rows, 2] float32."""
        logits = logits.contiguous()
        rows, vocab = logits.shape
        found = torch.empty(rows, 2)
        self._surest(logits.data_ptr(), rows, vocab, found.data_ptr())
        return found

    def draw(self, logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Draw a token [draws] int64 for each row of `draws`, overwriting its row of logits.

        `draws` is [draws, 6] float64, in the order of the rows: row, top_k (0: all), noise in [0, 1), top_p,
        temperature, min_p.
        """
        tokens = torch.empty(len(draws), dtype=torch.long)
        self._draw(draws.data_ptr(), len(draws), logits.data_ptr(), logits.shape[1], tokens.data_ptr())
        return tokens

    def mask(self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
        """Ban, in place, each token of `rows` [n] int64 whose bit in `words` [n, any] int32 is 0 or missing."""
        rows, words = rows.contiguous(), words.contiguous()
        self._mask(logits.data_ptr(), logits.shape[1], rows.data_ptr(), len(rows), words.data_ptr(), words.shape[1])

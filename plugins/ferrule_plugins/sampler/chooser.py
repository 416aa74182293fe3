"""The operations that a device may have kernels for: choosing tokens, masks, penalties, log-probabilities.

Torch's version is the definition. The platform of CPUs supplies compiled kernels for the choice, that of GPUs Triton's
for all of it, which never wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.sampler import Best, Chooser, Draws, Penalised, Reading, SamplerKernels
from ferrule.runner import logprobs
from ferrule.types import TokenSampling
from ferrule_kernels.cpu import sampling
from ferrule_plugins.sampler.draw import draw
from ferrule_plugins.sampler.penalties import Penalties
from ferrule_plugins.sampler.plan import Ranked

NEVER = float("-inf")


class TorchChooser(Chooser):
    """A chooser for any device, by torch; it waits for devices that compute asynchronously."""

    def __init__(self) -> None:
        self._penalties = Penalties()

    def warm(self, logits: torch.Tensor, history: torch.Tensor) -> None:
        """Do nothing: everything is ready."""

    def best(self, logits: torch.Tensor) -> Best:
        most, tokens = logits.max(-1)
        finite = torch.isfinite(most)
        if not bool(finite.all()):
            logits[~finite] = 0.0
        return Best(tokens, most, finite)

    def draw(self, logits: torch.Tensor, best: Best, draws: Draws) -> torch.Tensor:
        rows = draws.there()[:, 0].long()
        every = len(rows) == len(logits)
        samplings = [
            TokenSampling(seed=0, max_tokens=1, top_k=int(top_k), top_p=top_p, temperature=temperature, min_p=min_p)
            for _, top_k, _, top_p, temperature, min_p in draws.table.tolist()
        ]
        drawn = draw(logits if every else logits[rows], samplings, draws.there()[:, 2])
        return drawn if every else best.tokens.index_copy(0, rows, drawn)

    def mask(self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
        for row, some in zip(rows.tolist(), words.cpu().numpy(), strict=True):
            _mask(logits[row], some)

    def penalise(self, logits: torch.Tensor, history: torch.Tensor, penalised: Penalised) -> None:
        self._penalties.apply(logits, history, penalised.table)

    def rank(self, logits: torch.Tensor, rows: torch.Tensor | None, tops: Sequence[int], read: Reading) -> Ranked:
        found = logits if rows is None else logits[rows]
        if read.normalised:
            found = found.log_softmax(-1)
        elif rows is None and not read.kept:
            found = found.clone()
        return lambda tokens: logprobs.rank(found, tokens, tops)


class CompiledChooser(TorchChooser):
    """A chooser with kernels, for contiguous float32 logits in the CPU's memory; torch handles all others."""

    def __init__(self, kernel: sampling.Sampling) -> None:
        super().__init__()
        self._kernel = kernel

    def best(self, logits: torch.Tensor) -> Best:
        return Best(*self._kernel.best(logits)) if _is_ours(logits) else super().best(logits)

    def draw(self, logits: torch.Tensor, best: Best, draws: Draws) -> torch.Tensor:
        if not _is_ours(logits):
            return super().draw(logits, best, draws)
        drawn = self._kernel.draw(logits, draws.there())
        if len(drawn) == len(logits):
            return drawn
        return best.tokens.index_copy(0, draws.there()[:, 0].long(), drawn)

    def mask(self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
        if _is_ours(logits):
            self._kernel.mask(logits, rows, words)
        else:
            super().mask(logits, rows, words)


def chooser(kernels: Kernels) -> Chooser:
    """Return the device's chooser, or torch's."""
    part = kernels.part(SamplerKernels)
    return TorchChooser() if part is None else part.chooser()


def _mask(logits: torch.Tensor, words: np.ndarray[Any, np.dtype[np.int32]]) -> None:
    """Mask one row [vocab]: if few words allow tokens, keep those; else ban those that the words do not allow."""
    vocab, some = logits.shape[0], np.flatnonzero(words)
    if 8 * len(some) < len(words):
        where, bit = np.nonzero(np.unpackbits(words[some].view(np.uint8), bitorder="little").reshape(-1, 32))
        ids = some[where] * 32 + bit
        allowed = torch.from_numpy(ids[ids < vocab]).to(logits.device)
        kept = logits[allowed]
        logits.fill_(NEVER)[allowed] = kept
    else:
        reaching = np.pad(words, (0, max(0, -(-vocab // 32) - len(words))))
        banned = np.unpackbits(~reaching.view(np.uint8), count=vocab, bitorder="little").view(np.bool_)
        logits.masked_fill_(torch.from_numpy(banned).to(logits.device), NEVER)


def _is_ours(logits: torch.Tensor) -> bool:
    return logits.dtype == torch.float32 and logits.is_contiguous()

"""The parts of the target that heads share with it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ferrule.errors import ConfigError
from ferrule.interfaces.model import Generates
from ferrule.interfaces.speculator import SpeculatorContext
from ferrule_nn import Decoder
from ferrule_plugins.speculator.head_files import HeadFiles, TargetSizes

_TABLE, _ROWS = "embed_tokens.weight", 64
Map = Callable[[torch.Tensor], torch.Tensor]


class TargetParts:
    """The embedding and the head of the target, called and not copied: either may be packed, quantized or tied."""

    def __init__(self, context: SpeculatorContext) -> None:
        self._target, self._build = context.target, context.build
        self._vocab = TargetSizes.of(context).vocab

    @property
    def head(self) -> Map:
        """The map from hidden states to logits. Raises ConfigError where the target has none."""
        if not isinstance(self._target, Generates):
            raise ConfigError("--speculative-config: the model gives vectors and generates no text.")
        return self._target.logits

    @property
    def embedding(self) -> Map:
        """The map from ids to hidden states. Raises ConfigError where the target does not show it."""
        if not isinstance(self._target, Decoder):
            raise ConfigError(
                f"--speculative-config: {type(self._target).__name__} is not made of this server's layers, and heads "
                "that have no embedding of their own cannot use its embedding.",
                "Take weights that include embed_tokens.weight, or another method.",
            )
        return self._target.embed_tokens

    def without_copy(self, files: HeadFiles) -> HeadFiles:
        """Return a head's files without `embed_tokens` where that is a copy of the target's table, by some of its rows.

        Training leaves it as it is, so published files hold such copies.
        """
        outlined = torch.empty(0, device=self._build.device).is_meta
        table = None if outlined or not isinstance(self._target, Decoder) else files.tensor(_TABLE)
        if table is None or len(table) != self._vocab:
            return files
        ids = torch.linspace(0, len(table) - 1, _ROWS).long()
        own = self.embedding(ids.to(self._build.device)).cpu()
        return files.narrowed(lambda name: name != _TABLE) if torch.equal(own, table[ids].to(own.dtype)) else files

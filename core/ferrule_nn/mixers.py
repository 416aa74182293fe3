"""Models whose layers are x + mixer(norm(x)): with a state space, attention, or a feed-forward block as the mixer."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import nn

from ferrule.interfaces.model import BuildContext, ForwardContext
from ferrule_nn.attention import Attention
from ferrule_nn.decoder import Decoder
from ferrule_nn.loading import Naming
from ferrule_nn.rope import Rope, Rotation
from ferrule_nn.states import StateLayer


class MixerLayer(nn.Module):
    """A layer x + mixer(norm(x)). x may be float32 beside weights of another type."""

    def __init__(self, norm: nn.Module, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.mixer = mixer
        self.dtype = torch.get_default_dtype()  # of the weights
        self.mixes_tokens = isinstance(mixer, Attention | StateLayer)

    def forward(self, x: torch.Tensor, ctx: ForwardContext, rotation: Rotation | None) -> torch.Tensor:
        y = self.norm(x.to(self.dtype))
        mixed: torch.Tensor = self.mixer(y, ctx, rotation) if self.mixes_tokens else self.mixer(y)
        return x + mixed


class MixerDecoder(Decoder):
    """Embedding, layers of one mixer each, norm, head; without rotary positions.

    The names are those of checkpoints that follow Mamba's: embeddings, layers.N.{norm, mixer}, norm_f, lm_head.
    """

    naming: ClassVar[Naming] = Naming(
        renames=((r"^(backbone|model)\.", ""), (r"^embeddings?\.", "embed_tokens."), (r"^norm_f\.", "norm."))
    )
    wide_sums = False  # whether the sum over layers is float32

    @abstractmethod
    def make_mixer(self, index: int) -> nn.Module:
        """Make the mixer of layer `index`."""

    def make_rope(self, ctx: BuildContext) -> Rope | None:
        return None

    def make_layer(self, index: int) -> nn.Module:
        return MixerLayer(self.make_norm(), self.make_mixer(index))

    def forward(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        embedded = self.embed(ids, ctx)
        x = embedded.float() if self.wide_sums else embedded
        for layer in self.layers:
            x = layer(x, ctx, None)
        hidden: torch.Tensor = self.norm(x.to(embedded.dtype))
        return hidden

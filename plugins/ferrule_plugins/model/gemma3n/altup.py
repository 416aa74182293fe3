"""What only Gemma 3n has: streams of hidden states (AltUp, Baykal et al. 2023), and MLPs with few open gates."""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import nn
from torch.nn import functional as F

from ferrule_nn import DecoderSpec, GatedMLP, Linear, parameter


class SparseMLP(GatedMLP):
    """A gated MLP that keeps the share 1 - `sparsity` of its gates, as if they were normally distributed."""

    divided = False  # the border is one of all gates

    def __init__(self, spec: DecoderSpec, inner_size: int, sparsity: float) -> None:
        super().__init__(spec.hidden_size, inner_size, spec.act)
        self.cut = NormalDist().inv_cdf(sparsity)  # in standard deviations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        border = gate.mean(-1, keepdim=True) + gate.std(-1, keepdim=True, unbiased=False) * self.cut
        y: torch.Tensor = self.down_proj(self.act(F.relu(gate - border)) * up)
        return y


class AltUp(nn.Module):
    """A prediction and correction of the streams [streams, tokens, hidden]."""

    def __init__(self, streams: int, active: int, spec: DecoderSpec) -> None:
        super().__init__()
        hidden = spec.hidden_size
        self.active, self.input_scale = active, 1.0 / hidden
        self.correct_output_scale = parameter(hidden)
        self.correction_coefs = Linear(streams, streams)
        self.prediction_coefs = Linear(streams, streams * streams)
        self.modality_router = Linear(hidden, streams)
        self.router_norm = spec.make_norm(hidden)

    def modalities(self, x: torch.Tensor) -> torch.Tensor:
        """Return each stream's modality for x [tokens, hidden]: [tokens, streams]."""
        return torch.tanh(self.modality_router(self.router_norm(x) * self.input_scale).float()).to(x.dtype)

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        coefs = self.prediction_coefs(self.modalities(streams[self.active])).unflatten(-1, (len(streams), -1))
        mixed: torch.Tensor = streams.permute(1, 2, 0) @ coefs.transpose(1, 2)
        return mixed.permute(2, 0, 1) + streams

    def correct(self, predicted: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        coefs: torch.Tensor = self.correction_coefs(self.modalities(found)) + 1.0
        return (found - predicted[self.active]) * coefs.t().unsqueeze(-1) + predicted


def as_large(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the rows of x with the magnitude of those of `other`."""
    size = other.square().mean(-1, keepdim=True).sqrt()
    return x * size / x.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt()

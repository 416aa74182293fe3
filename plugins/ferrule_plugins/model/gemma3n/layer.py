"""A layer of Gemma 3n (Gemma Team 2025), which computes one of four streams of hidden states.

It predicts all streams (AltUp, Baykal et al. 2023), computes the active one, and corrects the others by what it found.
Beside attention runs a low-rank path (LAuReL, Menghani et al. 2024).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from ferrule_nn import Linear, activation
from ferrule_plugins.model.gemma3n.altup import AltUp
from ferrule_plugins.model.gemma_sharing import SharingDecoder
from ferrule_plugins.model.sharing_attention import LayerInputs


class Gemma3nLayer(nn.Module):
    def __init__(self, owner: SharingDecoder, index: int) -> None:
        super().__init__()
        hidden, own, c = owner.spec.hidden_size, owner.own_size, owner.config
        rank = int(c["laurel_rank"])
        self.input_layernorm = owner.make_norm()
        self.self_attn = owner.make_attention(index)
        self.post_attention_layernorm = owner.make_norm()
        self.pre_feedforward_layernorm = owner.make_norm()
        self.mlp = owner.make_mlp(index)
        self.post_feedforward_layernorm = owner.make_norm()
        self.altup = AltUp(int(c["altup_num_inputs"]), int(c["altup_active_idx"]), owner.spec)
        self.laurel = nn.Module()
        self.laurel.linear_left, self.laurel.linear_right = Linear(hidden, rank), Linear(rank, hidden)
        self.laurel.post_laurel_norm = owner.make_norm()
        self.act = activation(owner.spec.act)
        self.scale_corrected = bool(c["altup_correct_scale"])
        self.per_layer_input_gate, self.per_layer_projection = Linear(hidden, own), Linear(own, hidden)
        self.post_per_layer_input_norm = owner.make_norm()

    def forward(self, streams: torch.Tensor, given: LayerInputs) -> torch.Tensor:
        altup = self.altup
        predicted = altup.predict(streams)
        active = predicted[altup.active]
        x = self.input_layernorm(active)
        laurel: Any = self.laurel
        low_rank = x + laurel.post_laurel_norm(laurel.linear_right(laurel.linear_left(x)))
        attended = active + self.post_attention_layernorm(self.self_attn(x, given))
        both = (attended + low_rank) * 0.5**0.5
        found = both + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(both)))
        corrected: torch.Tensor = altup.correct(predicted, found)
        first = corrected[altup.active]
        if self.scale_corrected:
            first = first * altup.correct_output_scale
        first = self.act(self.per_layer_input_gate(first)) * cast(torch.Tensor, given.own)
        first = self.post_per_layer_input_norm(self.per_layer_projection(first))
        return torch.cat((corrected[:1], corrected[1:] + first))

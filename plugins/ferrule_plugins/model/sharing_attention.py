"""Attention of Gemma 3n and 4: late layers read an earlier one's cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ferrule.interfaces.model import AttentionOptions, ForwardContext
from ferrule_nn import AttentionSpec, Linear, Rope, Rotation, Shared, outputs


@dataclass
class LayerInputs:
    """The inputs of a layer beside the hidden states."""

    ctx: ForwardContext
    rotation: Rotation | None
    shared: dict[str, tuple[torch.Tensor, torch.Tensor]]  # keys and values of the step's tokens, by the layer's name
    own: torch.Tensor | None  # [tokens, hidden_size_per_layer_input]


class SharingAttention(nn.Module):
    """Attention with norms on queries, keys and values. With a `donor` it has queries only, and that layer's cache.

    The donor's keys and values of the step's tokens are written once more, to the same places.
    """

    def __init__(self, name: str, spec: AttentionSpec, rope: Rope | None, donor: str, keys_are_values: bool) -> None:
        super().__init__()
        self.name, self.donor, self.spec = donor or name, donor, spec.of_rank()
        self.options = AttentionOptions(scale=1.0, window=spec.window)
        self._rope = (rope,)  # in a tuple, so that torch does not register it as a submodule of every layer
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        make_norm: Any = spec.qk_norm
        self.q_proj = Linear(spec.hidden_size, q_size, spec.qkv_bias, split=outputs(spec.num_heads))
        self.o_proj = Linear(q_size, spec.hidden_size, spec.out_bias, split=spec.split_inputs)
        self.q_norm = make_norm(spec.head_dim)
        if not donor:
            self.k_norm = make_norm(spec.head_dim)
            make = partial(Linear, spec.hidden_size, kv_size, spec.qkv_bias, split=outputs(Shared(spec.num_kv_heads)))
            self.k_proj = make()
            self.v_proj = None if keys_are_values else make()

    def forward(self, x: torch.Tensor, given: LayerInputs) -> torch.Tensor:
        """Attend with the layer's own or shared keys and values: x [tokens, hidden] → [tokens, hidden]."""
        q = self._turned(self.q_norm(self._heads(self.q_proj(x))), given)
        if not self.donor:
            keys = self._heads(self.k_proj(x))
            values = keys if self.v_proj is None else self._heads(self.v_proj(x))
            wide = values.float()
            values = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.k_norm.eps)).to(x.dtype)
            given.shared[self.name] = self._turned(self.k_norm(keys), given), values
        out = given.ctx.attend(self.name, q, *given.shared[self.name], self.options)
        y: torch.Tensor = self.o_proj(out.reshape(out.shape[0], -1))
        return y

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], -1, self.spec.head_dim)

    def _turned(self, x: torch.Tensor, given: LayerInputs) -> torch.Tensor:
        rope = self._rope[0]
        return x if rope is None or given.rotation is None else rope.rotate(x, given.rotation)

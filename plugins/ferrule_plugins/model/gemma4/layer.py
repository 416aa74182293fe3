"""A layer of Gemma 4 (Gemma Team 2026): experts may stand beside its feed-forward block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from ferrule_nn import Experts, GatedMLP, Linear, MoESpec, Router, activation, parameter
from ferrule_nn.norm import add_and_norm
from ferrule_plugins.model.gemma_sharing import SharingDecoder
from ferrule_plugins.model.sharing_attention import LayerInputs

RENAMES = (  # the checkpoint has these among the layer's own
    (r"\.(router|experts|(?:pre|post)_feedforward_layernorm_[12])\.", r".beside.\1."),
    (r"\.router\.proj\.", ".router."),
)


class ScaledRouter(Router):
    """A router that is given x / rms(x) * scale / sqrt(hidden), and multiplies an expert's weight by a factor of its
    own.
    """

    def __init__(self, spec: MoESpec, eps: float) -> None:
        super().__init__(spec)
        self.eps = eps
        self.scale = parameter(spec.hidden_size)
        self.per_expert_scale = parameter(spec.routing.num_experts)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        weights, ids = super().forward((wide * self.scale.float() * x.shape[1] ** -0.5).to(x.dtype))
        return weights * self.per_expert_scale.float().take(ids.long()), ids


class ExpertsBeside(nn.Module):
    """Experts beside the feed-forward block: the sum of norm(the block's result) and norm(the experts' result for the
    layer's own norm of x).
    """

    def __init__(self, spec: MoESpec, make_norm: Callable[[int], nn.Module], eps: float) -> None:
        super().__init__()
        self.router = ScaledRouter(spec, eps)
        block = partial(GatedMLP, spec.hidden_size, spec.inner_size, spec.act)
        self.experts = Experts(spec.routing.num_experts, block)
        self.post_feedforward_layernorm_1 = make_norm(spec.hidden_size)
        self.pre_feedforward_layernorm_2 = make_norm(spec.hidden_size)
        self.post_feedforward_layernorm_2 = make_norm(spec.hidden_size)

    def forward(self, x: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """Return the sum for x and the block's result `dense`, [tokens, hidden] → [tokens, hidden]."""
        weights, ids = self.router(x)
        y = self.experts(self.pre_feedforward_layernorm_2(x), weights, ids, False)
        both: torch.Tensor = self.post_feedforward_layernorm_1(dense) + self.post_feedforward_layernorm_2(y)
        return both


class Gemma4Layer(nn.Module):
    """A sandwich layer, then x + norm(projection(gate(x) * own input)), all times a scalar."""

    def __init__(self, owner: SharingDecoder, index: int) -> None:
        super().__init__()
        self.input_layernorm = owner.make_norm()
        self.self_attn = owner.make_attention(index)
        self.post_attention_layernorm = owner.make_norm()
        self.pre_feedforward_layernorm = owner.make_norm()
        self.mlp = owner.make_mlp(index)
        self.beside = owner.make_experts()
        self.post_feedforward_layernorm = owner.make_norm()
        self.layer_scalar = parameter(1)
        own, hidden = int(owner.config["hidden_size_per_layer_input"] or 0), owner.spec.hidden_size
        if own:
            self.act = activation(owner.spec.act)
            self.per_layer_input_gate, self.per_layer_projection = Linear(hidden, own), Linear(own, hidden)
            self.post_per_layer_input_norm = owner.make_norm()

    def forward(self, x: torch.Tensor, given: LayerInputs) -> torch.Tensor:
        y = self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), given))
        x, y = add_and_norm(self.pre_feedforward_layernorm, x, y)
        y = self.mlp(y) if self.beside is None else self.beside(x, self.mlp(y))
        x = x + self.post_feedforward_layernorm(y)
        if given.own is not None:
            inner = self.act(self.per_layer_input_gate(x)) * given.own
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(inner))
        return x * self.layer_scalar

"""Decoders whose layers have experts, and how config.json describes these."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import nn

from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext
from ferrule_kernels.moe import Routing
from ferrule_nn.configuration import need
from ferrule_nn.decoder import Decoder
from ferrule_nn.moe import MoE, MoESpec

_SCORES = ("softmax", "sigmoid")  # some files have the name of a method for the choice here


def read_routing(ctx: BuildContext, renormalise: bool = False, **changes: Any) -> Routing:
    """Read the router's settings under the names that most config.json files use.

    `renormalise` is for a file without `norm_topk_prob`. Raises CheckpointError for a missing name, and for numbers
    that contradict each other.
    """
    c = ctx.config
    given = {
        "num_experts": int(need(c, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")),
        "top_k": int(need(c, "num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")),
        "renormalise": bool(c.get("norm_topk_prob", renormalise)),
    }
    try:
        routing = Routing(**{**given, **changes})
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from None
    stated = c.get("scoring_func")
    if stated in _SCORES and stated != routing.scores:
        raise CheckpointError(
            f"config.json: 'scoring_func' {stated!r} is not supported; this model has {routing.scores}."
        )
    return routing


def read_grouped_routing(ctx: BuildContext, **changes: Any) -> Routing:
    """Read the settings of routers like DeepSeek-V3's: sigmoids, groups of experts, and a factor on the weights."""
    c = ctx.config
    groups = int(c.get("n_group") or 1)
    given = {
        "scores": "sigmoid",
        "groups": groups,
        "kept_groups": int(c.get("topk_group") or 1),
        "group_depth": 2 if groups > 1 else 1,
        "scale": float(c.get("routed_scaling_factor", 1.0)),
    }
    return read_routing(ctx, **{**given, **changes})


def read_moe(ctx: BuildContext, routing: Routing, **changes: Any) -> MoESpec:
    """Read the experts' settings under the names that most config.json files use.

    Raises CheckpointError for a missing name.
    """
    c = ctx.config
    inner = int(need(c, "moe_intermediate_size", "intermediate_size"))
    given = {
        "hidden_size": int(need(c, "hidden_size")),
        "inner_size": inner,
        "routing": routing,
        "act": str(c.get("hidden_act") or "silu"),
        "shared_size": inner * int(c.get("n_shared_experts") or c.get("moe_num_shared_experts") or 0),
    }
    return MoESpec(**{**given, **changes})


def sparse_layers(ctx: BuildContext) -> list[int]:
    """Return the layers with experts: from `first_k_dense_replace` on, or each `decoder_sparse_step`-th (Qwen)."""
    c = ctx.config
    if kinds := c.get("mlp_layer_types"):
        return [index for index, kind in enumerate(kinds) if kind == "sparse"]
    num_layers, step = int(need(c, "num_hidden_layers")), int(c.get("decoder_sparse_step") or 1)
    dense = c.get("mlp_only_layers") or ()
    first = int(c.get("first_k_dense_replace") or 0)
    return [index for index in range(first, num_layers) if (index + 1) % step == 0 and index not in dense]


class MoEDecoder(Decoder):
    """A `Decoder` in which the feed-forward block of some layers is a mixture of experts.

    A family overrides `describe_experts`, and `describe_sparse` where other names than the usual say which layers.
    """

    def make_positions(self, ctx: BuildContext) -> None:
        """Read the experts' settings too: this runs before the layers are made, and `ctx` has the defaults."""
        super().make_positions(ctx)
        self.moe = self.describe_experts(ctx)
        self.sparse: Container[int] = self.describe_sparse(ctx)

    def describe_experts(self, ctx: BuildContext) -> MoESpec:
        """Read the configuration of the experts."""
        return read_moe(ctx, read_routing(ctx))

    def describe_sparse(self, ctx: BuildContext) -> Container[int]:
        """Return the numbers of the layers that have experts."""
        return sparse_layers(ctx)

    def make_mlp(self, index: int) -> nn.Module:
        return MoE(self.moe) if index in self.sparse else super().make_mlp(index)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the weights, without the layers after the last, which predict further tokens.

        Their number is `num_nextn_predict_layers`.
        """

        def is_further(name: str) -> bool:
            found = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
            return found is not None and int(found[1]) >= self.spec.num_layers

        if not self.config.get("num_nextn_predict_layers"):
            return super().load_weights(weights)
        return super().load_weights((name, tensor) for name, tensor in weights if not is_further(name))

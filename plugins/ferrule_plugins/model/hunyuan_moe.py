"""Hunyuan with experts (Tencent 2025): the dense model's attention, and an expert that all tokens use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ferrule.checkpoint import changed
from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext
from ferrule_nn import MoEDecoder, MoESpec, Naming, need, read_moe, read_routing
from ferrule_plugins.model.hunyuan import HunyuanDense

_BY_LAYER = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")


class HunyuanMoe(MoEDecoder, HunyuanDense):
    config_defaults = {**HunyuanDense.config_defaults, "num_shared_expert": 1}
    naming = Naming(
        renames=(
            *HunyuanDense.naming.renames,
            (r"\.gate\.wg\.", ".gate."),
            (r"\.shared_mlp\.", ".shared_expert."),
        )
    )

    def describe_experts(self, ctx: BuildContext) -> MoESpec:
        c = ctx.config
        c = changed(c, {name: _same(name, c[name]) for name in _BY_LAYER if c.get(name) is not None})
        ctx = replace(ctx, config=c)
        shared = int(need(c, "intermediate_size")) * int(c["num_shared_expert"])
        return read_moe(ctx, replace(read_routing(ctx), renormalise=True), shared_size=shared)


def _same(name: str, value: Any) -> int:
    """Return one number for all layers, where files may have a list with a number for each. Raises CheckpointError
    where these differ.
    """
    numbers = set(value) if isinstance(value, list) else {value}
    if len(numbers) != 1:
        raise CheckpointError(f"config.json: {name!r} differs between layers, which is not implemented.")
    return int(numbers.pop())

"""Granite 3 with experts, and with a shared one besides (Granite Team 2024). The checkpoint stacks the experts."""

from __future__ import annotations

from ferrule.interfaces.model import BuildContext
from ferrule_nn import MoEDecoder, MoESpec, Naming, read_moe, read_routing
from ferrule_plugins.model.granite import Granite


class GraniteMoe(MoEDecoder, Granite):
    naming = Naming(
        renames=(
            (r"^model\.", ""),
            (r"\.block_sparse_moe\.router\.layer\.", ".mlp.gate."),
            (r"\.block_sparse_moe\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
            (r"\.block_sparse_moe\.output_linear\.weight$", ".mlp.experts.down_proj"),
            (r"\.shared_mlp\.input_linear\.", ".mlp.shared_expert.gate_up_proj."),
            (r"\.shared_mlp\.output_linear\.", ".mlp.shared_expert.down_proj."),
        )
    )

    def describe_experts(self, ctx: BuildContext) -> MoESpec:
        shared = int(ctx.config.get("shared_intermediate_size") or 0)
        return read_moe(ctx, read_routing(ctx, renormalise=True), shared_size=shared)

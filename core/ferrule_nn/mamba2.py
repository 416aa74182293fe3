"""Mamba 2 (Dao and Gu 2024): a state space with one decay for each head, so that prefill is made of matrix products."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from ferrule.interfaces.model import ForwardContext, StateSpec
from ferrule_nn import ops
from ferrule_nn.configuration import first, need, number
from ferrule_nn.division import Section, inputs, outputs
from ferrule_nn.linear import Linear
from ferrule_nn.rope import Rotation
from ferrule_nn.states import GatedRMSNorm, Outcome, ShortConv, StateLayer, run_rows, wide_parameter

_CHUNK = 64  # tokens that are computed as if they attended to one another


@dataclass(frozen=True, kw_only=True)
class Mamba2Spec:
    """The numbers of one Mamba-2 layer. Heads of one group share B and C.

    `multipliers` scale the parts of the input projection: gate, h, B, C, step widths. Without `gated_norm` the gate
    alone multiplies what the scan gives. `width_limits` are the least and the largest step width (`time_step_limit`;
    `time_step_min` and `time_step_max` are about how weights were initialised).
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    groups: int = 1
    kernel: int = 4
    bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    act: str = "silu"
    norm_eps: float = 1e-5
    gated_norm: bool = True
    gate_first: bool = True
    width_limits: tuple[float, float] = (0.0, float("inf"))
    multipliers: tuple[float, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any], **changes: Any) -> Mamba2Spec:
        """Read config.json under the names that families use, then apply `changes`. Raises CheckpointError."""
        hidden = int(need(config, "hidden_size"))
        heads = int(need(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"))
        inner = int(first(config, "mamba_d_ssm") or first(config, "mamba_expand", "expand", default=2) * hidden)
        head_dim = first(config, "mamba_d_head", "mamba_head_dim", default="auto")
        bias = bool(first(config, "mamba_proj_bias", "use_bias", "add_bias_linear", default=False))
        least, most = config.get("time_step_limit") or (0.0, math.inf)
        spec = cls(
            hidden_size=hidden,
            num_heads=heads,
            head_dim=inner // heads if head_dim == "auto" else int(head_dim),
            state_size=int(need(config, "mamba_d_state", "ssm_state_size", "state_size")),
            groups=int(first(config, "mamba_n_groups", "mamba_ngroups", "n_groups", default=1)),
            kernel=int(first(config, "mamba_d_conv", "conv_kernel", default=4)),
            bias=bias,
            out_bias=bias,
            conv_bias=bool(first(config, "mamba_conv_bias", "use_conv_bias", default=True)),
            act=str(first(config, "mamba_hidden_act", "hidden_act", default="silu")),
            norm_eps=float(first(config, "rms_norm_eps", "layer_norm_epsilon", default=1e-5)),
            width_limits=(number(least), number(most)),
        )
        return replace(spec, **changes)

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def parts(self) -> list[int]:
        """Sizes of gate, h, B, C and step widths in the input projection."""
        shared = self.groups * self.state_size
        return [self.inner_size, self.inner_size, shared, shared, self.num_heads]

    @property
    def sections(self) -> list[Section]:
        """Division of the `parts` among ranks: by heads, or by groups, which several ranks may share."""
        heads = [Section(size, self.num_heads) for size in self.parts]
        shared = [Section(size, self.groups, True) for size in self.parts[2:4]]
        return [*heads[:2], *shared, heads[4]]


class Mamba2Mixer(StateLayer):
    """The mixer x → out(norm(scan(conv(h, B, C)), z)). State: [heads, head_dim, state_size] float32.

    Parameters have the names of published checkpoints: in_proj, conv1d, A_log, D, dt_bias, norm, out_proj.
    """

    def __init__(self, name: str, spec: Mamba2Spec) -> None:
        inner, heads = spec.inner_size, outputs().of(spec.num_heads)
        sections = spec.sections
        rates = wide_parameter(spec.num_heads, division=heads)
        super().__init__(name, StateSpec((len(rates), spec.head_dim, spec.state_size), torch.float32))
        self.in_proj = Linear(spec.hidden_size, sum(spec.parts), spec.bias, split=outputs(*sections))
        channels, split = sum(spec.parts[1:4]), outputs(*sections[1:4])
        self.conv1d = ShortConv(f"{name}.conv", channels, spec.kernel, spec.conv_bias, spec.act, split)
        self.A_log = rates
        self.D = wide_parameter(spec.num_heads, division=heads)
        self.dt_bias = wide_parameter(spec.num_heads, division=heads)
        split, self.norm = outputs(spec.num_heads), None
        if spec.gated_norm:
            self.norm = GatedRMSNorm(inner, spec.groups, spec.norm_eps, spec.gate_first, split=split)
        self.out_proj = Linear(inner, spec.hidden_size, spec.out_bias, split=inputs(spec.num_heads))
        shares = [section.share(self.in_proj.shard.size) for section in sections]
        self.spec = replace(spec, num_heads=shares[4], groups=shares[2] // spec.state_size)  # of this rank's heads
        self._kernels = ops.for_layers()
        self._fused: ops.Selective | None = None

    def pack(self) -> None:
        spec, (heads, dim, size) = self.spec, self.state.shape
        self._fused = ops.selective(
            self._kernels, self.A_log, self.D, self.dt_bias, (heads, dim, size), spec.groups, spec.width_limits
        )

    def forward(self, x: torch.Tensor, ctx: ForwardContext, rotation: Rotation | None = None) -> torch.Tensor:
        """Map [tokens, hidden] to [tokens, hidden]."""
        spec, parts = self.spec, self.spec.parts
        projected = self.in_proj(x)
        if spec.multipliers:
            scaled = zip(projected.split(parts, dim=-1), spec.multipliers, strict=True)
            projected = torch.cat([part * factor for part, factor in scaled], dim=-1)
        gate, mixed, width = projected.split([parts[0], sum(parts[1:4]), parts[4]], dim=-1)
        mixed = self.conv1d(mixed, ctx)
        if self._fused is not None and self._fused.accepts(mixed):
            y = self._fused(mixed, width, ctx.state(self.name)).flatten(1)
        else:
            y = self._scan(mixed, width, ctx)
        y = (y * F.silu(gate.float())).to(x.dtype) if self.norm is None else self.norm(y, gate)
        out: torch.Tensor = self.out_proj(y)
        return out

    def _scan(self, mixed: torch.Tensor, width: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Compute the kernel's result with torch, from h, B, C and step widths: float32 [tokens, heads * head_dim]."""
        spec = self.spec
        h, b, c = torch.split(mixed.float(), spec.parts[1:4], dim=-1)
        h = h.view(-1, spec.num_heads, spec.head_dim)
        b, c = (each.view(-1, spec.groups, spec.state_size) for each in (b, c))
        width = F.softplus(width.float() + self.dt_bias).clamp(*spec.width_limits)
        decay = width * -self.A_log.exp()
        y = run_rows(ctx.state(self.name), (decay, width.unsqueeze(-1) * h, b, c), self._step, self._chunk)
        skipped: torch.Tensor = h * self.D.unsqueeze(-1)
        return (y + skipped).flatten(-2)

    def _heads(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Repeat one entry for each group to one for each head."""
        return x.repeat_interleave(self.spec.num_heads // self.spec.groups, dim=dim)

    def _step(
        self, state: torch.Tensor, decay: torch.Tensor, h: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> Outcome:
        """Compute one token of n requests.

        state [n, heads, head_dim, states]; decay [n, heads], a logarithm; h [n, heads, head_dim]; b, c [n, groups,
        states].
        """
        state.mul_(decay.exp()[..., None, None])
        grouped = state.view(len(state), self.spec.groups, -1, self.spec.state_size)  # [n, groups, rows, states]
        grouped.addcmul_(h.reshape(*grouped.shape[:3], 1), b.unsqueeze(2))
        return (grouped @ c.unsqueeze(-1)).view(h.shape), state

    def _chunk(
        self, state: torch.Tensor, decay: torch.Tensor, h: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> Outcome:
        """Compute t tokens of one request: state [heads, head_dim, states], the others as in `_step` with t for n."""
        outputs = []
        for part in zip(*(torch.split(each, _CHUNK) for each in (decay, h, b, c)), strict=True):
            total = part[0].t().cumsum(-1)  # [heads, t], the decay up to each token, its own included
            h, b, c = (each.transpose(0, 1) for each in part[1:])  # [heads or groups, t, ...]
            between = (total.unsqueeze(2) - total.unsqueeze(1)).exp().tril_()  # [heads, t, t]
            y = (self._heads(c @ b.mT, 0) * between) @ h
            y += (self._heads(c, 0) @ state.mT) * total.exp().unsqueeze(-1)
            left = (total[:, -1:] - total).exp().unsqueeze(-1)  # of each token, at the end of the part
            state = state * total[:, -1].exp()[:, None, None] + (h * left).mT @ self._heads(b, 0)
            outputs.append(y.transpose(0, 1))
        return torch.cat(outputs), state

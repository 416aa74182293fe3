"""Gated delta net (Yang, Kautz and Hatamizadeh 2024): linear attention that overwrites what a key stood for.

S is a matrix for each head. A token with query q, key k, value v, decay a and strength b changes it and reads it:

    S ← a S;    S ← S + k ⊗ b (v - Sᵀk);    y = Sᵀq

Prefill uses the WY form (Yang et al. 2024, "Parallelizing linear transformers with the delta rule"): the corrections
b (v - Sᵀk) of all tokens of a part are the solution of one triangular system, after which only products are left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from ferrule.interfaces.model import ForwardContext, StateSpec
from ferrule_nn import ops
from ferrule_nn.division import Section, inputs, outputs
from ferrule_nn.linear import Linear, MergedLinear
from ferrule_nn.rope import Rotation
from ferrule_nn.states import GatedRMSNorm, Outcome, ShortConv, StateLayer, run_rows, wide_parameter

_CHUNK = 64  # tokens of one triangular system
_NORM_EPS = 1e-6  # of queries and keys


@dataclass(frozen=True, kw_only=True)
class DeltaSpec:
    """The numbers of one layer. Each key head serves num_value_heads / num_key_heads value heads.

    With `interleaved` the input projections are two tensors, in_proj_qkvz and in_proj_ba, that are ordered by key head;
    otherwise they are four, in_proj_qkv, in_proj_z, in_proj_b and in_proj_a.
    """

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4
    act: str = "silu"
    norm_eps: float = 1e-6
    interleaved: bool = False

    @property
    def keys(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.num_value_heads * self.value_dim


class GatedDelta(StateLayer):
    """The layer x → out(norm(delta(conv(q, k, v)), z)). State: [value heads, key_dim, value_dim] float32."""

    def __init__(self, name: str, spec: DeltaSpec) -> None:
        hidden, mixed, heads = spec.hidden_size, 2 * spec.keys + spec.values, spec.num_value_heads
        units = spec.num_key_heads  # each with its value heads
        keys, values = Section(spec.keys, units), Section(spec.values, units)
        rates = wide_parameter(heads, division=outputs(units).of(heads))
        super().__init__(name, StateSpec((len(rates), spec.key_dim, spec.value_dim), torch.float32))
        if spec.interleaved:
            self.in_proj_qkvz = Linear(hidden, mixed + spec.values, split=outputs(units))
            self.in_proj_ba = Linear(hidden, 2 * heads, split=outputs(units))
        else:
            split = outputs(keys, keys, values, values)
            self.in_proj_qkvz = MergedLinear(hidden, {"in_proj_qkv": mixed, "in_proj_z": spec.values}, split=split)
            split = outputs(units, units)
            self.in_proj_ba = MergedLinear(hidden, {"in_proj_b": heads, "in_proj_a": heads}, split=split)
        split = outputs(keys, keys, values)
        self.conv1d = ShortConv(f"{name}.conv", mixed, spec.kernel, bias=False, act=spec.act, split=split)
        self.A_log = rates
        self.dt_bias = wide_parameter(heads, division=outputs(units).of(heads))
        self.norm = GatedRMSNorm(spec.value_dim, eps=spec.norm_eps, gate_first=False, repeats=len(rates))
        self.out_proj = Linear(spec.values, hidden, split=inputs(units))
        self.spec = replace(spec, num_key_heads=units * len(rates) // heads, num_value_heads=len(rates))  # this rank's
        self._kernels = ops.for_layers()
        self._fused: ops.Delta | None = None

    def pack(self) -> None:
        spec = self.spec
        shape = (spec.num_key_heads, spec.num_value_heads, spec.key_dim, spec.value_dim)
        self._fused = ops.delta(self._kernels, self.A_log, self.dt_bias, shape, _NORM_EPS)

    def forward(self, x: torch.Tensor, ctx: ForwardContext, rotation: Rotation | None = None) -> torch.Tensor:
        """Map [tokens, hidden] to [tokens, hidden]."""
        mixed, gate, strength, width = self._projected(x)
        mixed = self.conv1d(mixed, ctx)
        if self._fused is not None and self._fused.accepts(mixed):
            y = self._fused(mixed, strength, width, ctx.state(self.name))
        else:
            y = self._scan(mixed, strength, width, ctx)
        out: torch.Tensor = self.out_proj(self.norm(y.flatten(1), gate))
        return out

    def _scan(
        self, mixed: torch.Tensor, strength: torch.Tensor, width: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """Compute the kernel's result with torch: float32 [tokens, value heads, value_dim]."""
        spec = self.spec
        q, k, v = torch.split(mixed.float(), [spec.keys, spec.keys, spec.values], dim=-1)
        q, k = (_unit(each.view(-1, spec.num_key_heads, spec.key_dim)) for each in (q, k))
        shared = spec.num_value_heads // spec.num_key_heads
        q, k = (each.repeat_interleave(shared, dim=1) for each in (q * spec.key_dim**-0.5, k))
        v = v.view(-1, spec.num_value_heads, spec.value_dim)
        decay = F.softplus(width.float() + self.dt_bias) * -self.A_log.exp()
        return run_rows(ctx.state(self.name), (decay, strength.float().sigmoid(), q, k, v), delta_step, delta_chunk)

    def _projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return q, k and v [tokens, …], gate [tokens, values], strength and width [tokens, value heads]."""
        spec = self.spec
        qkvz, ba = self.in_proj_qkvz(x), self.in_proj_ba(x)
        if not spec.interleaved:
            return *qkvz.split([2 * spec.keys + spec.values, spec.values], dim=-1), *ba.chunk(2, dim=-1)
        heads = spec.num_key_heads
        values = spec.values // heads
        parts = qkvz.unflatten(-1, (heads, -1)).split([spec.key_dim, spec.key_dim, values, values], dim=-1)
        q, k, v, gate = (part.flatten(-2) for part in parts)
        strength, width = (part.flatten(-2) for part in ba.unflatten(-1, (heads, -1)).chunk(2, dim=-1))
        return torch.cat((q, k, v), dim=-1), gate, strength, width


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Return vectors scaled to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


def delta_step(
    state: torch.Tensor, decay: torch.Tensor, strength: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Outcome:
    """Compute one token of n requests.

    state [n, heads, keys, values]; decay, a logarithm, and strength [n, heads]; q, k [n, heads, keys]; v [n, heads,
    values].
    """
    state.mul_(decay.exp()[..., None, None])
    correction = (v - (k.unsqueeze(2) @ state).squeeze(2)) * strength.unsqueeze(-1)
    state.addcmul_(k.unsqueeze(-1), correction.unsqueeze(2))
    return (q.unsqueeze(2) @ state).squeeze(2), state


def delta_chunk(
    state: torch.Tensor, decay: torch.Tensor, strength: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Outcome:
    """Compute t tokens of one request: state [heads, keys, values], the others as in `delta_step` with t for n."""
    outputs = []
    for part in zip(*(torch.split(each, _CHUNK) for each in (decay, strength, q, k, v)), strict=True):
        decay, strength, q, k, v = (each.transpose(0, 1) for each in part)  # [heads, t, ...]
        total = decay.cumsum(-1)  # up to each token, its own included
        between = (total.unsqueeze(2) - total.unsqueeze(1)).exp().tril_()  # [heads, t, t]
        since = total.exp().unsqueeze(-1)  # of the state before the part
        strong = k * strength.unsqueeze(-1)
        system = (strong @ k.mT) * between  # its diagonal is taken as 1
        wanted = v * strength.unsqueeze(-1) - (strong * since) @ state
        corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outputs.append((((q @ k.mT) * between) @ corrections + (q * since) @ state).transpose(0, 1))
        left = (total[:, -1:] - total).exp().unsqueeze(-1)  # of each token, at the end of the part
        state = state * since[:, -1:] + (k * left).mT @ corrections
    return torch.cat(outputs), state

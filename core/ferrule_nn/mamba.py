"""Mamba 1 (Gu and Dao 2023): a selective state space with its own decay for each channel and state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ferrule.interfaces.model import ForwardContext, StateSpec
from ferrule_nn.configuration import first, need
from ferrule_nn.division import inputs, outputs
from ferrule_nn.linear import Linear
from ferrule_nn.parameters import parameter
from ferrule_nn.rope import Rotation
from ferrule_nn.states import Outcome, ShortConv, StateLayer, run_rows, wide_parameter

_CHUNK = 64  # tokens whose states are in memory together


@dataclass(frozen=True, kw_only=True)
class MambaSpec:
    """The numbers of one Mamba layer. `norm` makes the norms of the step width, B and C, of that size each."""

    hidden_size: int
    inner_size: int
    state_size: int
    rank: int  # of the projection to step widths
    kernel: int = 4
    bias: bool = False
    conv_bias: bool = True
    act: str = "silu"
    norm: Callable[[int], nn.Module] | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], **changes: Any) -> MambaSpec:
        """Read config.json under the names that families use, then apply `changes`. Raises CheckpointError."""
        hidden = int(need(config, "hidden_size"))
        rank = first(config, "mamba_dt_rank", "time_step_rank", default="auto")
        spec = cls(
            hidden_size=hidden,
            inner_size=int(first(config, "mamba_expand", "expand", default=2) * hidden),
            state_size=int(need(config, "mamba_d_state", "state_size")),
            rank=-(-hidden // 16) if rank == "auto" else int(rank),
            kernel=int(first(config, "mamba_d_conv", "conv_kernel", default=4)),
            bias=bool(first(config, "mamba_proj_bias", "use_bias", default=False)),
            conv_bias=bool(first(config, "mamba_conv_bias", "use_conv_bias", default=True)),
            act=str(config.get("hidden_act", "silu")),
        )
        return replace(spec, **changes)


class MambaMixer(StateLayer):
    """The mixer x → out(scan(conv(h)) * silu(z)) with (h, z) = in(x). State: [inner, state_size] float32.

    Ranks divide the inner channels.

    Parameters have the names of published checkpoints: in_proj, conv1d, x_proj, dt_proj, A_log, D, out_proj, and
    dt_layernorm, b_layernorm, c_layernorm where `norm` makes norms with weights.
    """

    def __init__(self, name: str, spec: MambaSpec) -> None:
        inner, states, rank = spec.inner_size, spec.state_size, spec.rank
        rates = wide_parameter(inner, states, division=outputs().of(inner))
        super().__init__(name, StateSpec((len(rates), states), torch.float32))
        self.spec = spec
        self.in_proj = Linear(spec.hidden_size, 2 * inner, spec.bias, split=outputs(0, 0))
        self.conv1d = ShortConv(f"{name}.conv", inner, spec.kernel, spec.conv_bias, spec.act, outputs())
        self.x_proj = Linear(inner, rank + 2 * states, split=inputs())
        self.dt_proj = Linear(rank, inner, bias=True, split=outputs())
        self.A_log = rates
        self.D = parameter(inner, division=outputs().of(inner))
        self.out_proj = Linear(inner, spec.hidden_size, spec.bias, split=inputs())
        make = spec.norm or nn.Identity
        self.dt_layernorm, self.b_layernorm, self.c_layernorm = make(rank), make(states), make(states)

    def forward(self, x: torch.Tensor, ctx: ForwardContext, rotation: Rotation | None = None) -> torch.Tensor:
        """Map [tokens, hidden] to [tokens, hidden]."""
        h, gate = self.in_proj(x).chunk(2, dim=-1)
        h = self.conv1d(h, ctx)
        sizes = [self.spec.rank, self.spec.state_size, self.spec.state_size]
        width, b, c = self.x_proj(h).split(sizes, dim=-1)
        width = F.softplus(self.dt_proj(self.dt_layernorm(width)).float())
        inputs = width, h.float(), self.b_layernorm(b).float(), self.c_layernorm(c).float()
        y = run_rows(ctx.state(self.name), inputs, self._step, self._chunk)
        y = (y + inputs[1] * self.D.float()) * F.silu(gate.float())
        out: torch.Tensor = self.out_proj(y.to(x.dtype))
        return out

    def _changes(self, width: torch.Tensor, h: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factor and the summand by which each token changes the state: both [n, inner, states]."""
        decay = torch.exp(width.unsqueeze(-1) * -self.A_log.exp())
        return decay, (width * h).unsqueeze(-1) * b.unsqueeze(1)

    def _step(
        self, state: torch.Tensor, width: torch.Tensor, h: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> Outcome:
        """Compute one token of n requests: state [n, inner, states]; width, h [n, inner]; b, c [n, states]."""
        decay, added = self._changes(width, h, b)
        state = torch.addcmul(added, decay, state)
        return (state @ c.unsqueeze(-1)).squeeze(-1), state

    def _chunk(
        self, state: torch.Tensor, width: torch.Tensor, h: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> Outcome:
        """Compute t tokens of one request: state [inner, states], the others as in `_step` with t for n.

        There is one operation for each token.
        """
        outputs = []
        for part in zip(*(torch.split(each, _CHUNK) for each in (width, h, b, c)), strict=True):
            decay, states = self._changes(*part[:3])
            for multiplied, added in zip(decay.unbind(), states.unbind(), strict=True):
                state = added.addcmul_(multiplied, state)
            outputs.append((states @ part[3].unsqueeze(-1)).squeeze(-1))
        return torch.cat(outputs), state

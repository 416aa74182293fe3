"""AcmeMemory: every head writes each token into a matrix that decays, and reads the matrix instead of a past.

    x' = x + mix * (x_before - x)                      token shift, per channel
    S  = diag(decay) S + k^T v                         [head_dim, head_dim], float32
    y  = (q S + bonus * (q . k) v)

`layer_types` in config.json may make some layers ordinary attention.
"""

from __future__ import annotations

import torch
from torch import nn

from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext, ForwardContext, StateRows, StateSpec
from ferrule_nn import Decoder, Linear, Rotation, parameter


class Memory(nn.Module):
    """A layer in the place of attention. It keeps two states: the last token's input, and the matrices."""

    def __init__(self, name: str, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.name = name
        self.heads, self.dim = num_heads, hidden_size // num_heads
        self.mix = parameter(hidden_size)
        self.decay = parameter(num_heads, self.dim)
        self.bonus = parameter(num_heads)
        self.qkv_proj = Linear(hidden_size, 3 * hidden_size)
        self.o_proj = Linear(hidden_size, hidden_size)

    def state_specs(self) -> dict[str, StateSpec]:
        return {
            f"{self.name}.before": StateSpec((self.heads * self.dim,)),
            f"{self.name}.matrices": StateSpec((self.heads, self.dim, self.dim), torch.float32),
        }

    def forward(self, x: torch.Tensor, ctx: ForwardContext, rotation: Rotation | None = None) -> torch.Tensor:
        """Map [tokens, hidden] to [tokens, hidden]."""
        mixed = x + torch.sigmoid(self.mix) * (self._shift(x, ctx.state(f"{self.name}.before")) - x)
        qkv = self.qkv_proj(mixed).view(-1, 3, self.heads, self.dim)
        out: torch.Tensor = self.o_proj(self._scan(qkv.float(), ctx.state(f"{self.name}.matrices")).to(x.dtype))
        return out

    def _shift(self, x: torch.Tensor, state: StateRows) -> torch.Tensor:
        """Return each token's predecessor; that of a row's first token is in the state."""
        before = x.roll(1, 0)
        before[state.query_start[:-1]] = state.data[state.slots]
        state.data[state.slots] = x[state.query_start[1:] - 1]
        return before

    def _scan(self, qkv: torch.Tensor, state: StateRows) -> torch.Tensor:
        """Process one token of every row at a time: rows that have run out of tokens drop out."""
        out = torch.empty(qkv.shape[0], self.heads * self.dim, device=qkv.device)
        decay = torch.sigmoid(self.decay.float()).unsqueeze(-1)
        for step in range(max(state.query_lens_host)):
            rows = [row for row, length in enumerate(state.query_lens_host) if step < length]
            chosen = torch.tensor(rows, device=qkv.device)
            tokens, slots = state.query_start[chosen] + step, state.slots[chosen]
            q, k, v = qkv[tokens].unbind(1)  # each [rows, heads, dim]
            matrices = decay * state.data[slots] + k.unsqueeze(-1) * v.unsqueeze(-2)
            state.data[slots] = matrices
            now = self.bonus.float().unsqueeze(-1) * (q * k).sum(-1, keepdim=True) * v
            out[tokens] = ((q.unsqueeze(-2) @ matrices).squeeze(-2) + now).flatten(1)
        return out


class AcmeMemory(Decoder):
    """A decoder whose layers remember; those that `layer_types` calls "attention" attend."""

    conformance = "acme_memory.conformance:MODEL"

    def __init__(self, ctx: BuildContext) -> None:
        layers = int(ctx.config["num_hidden_layers"])
        self.kinds = tuple(ctx.config.get("layer_types") or ["memory"] * layers)
        if len(self.kinds) != layers or set(self.kinds) - {"memory", "attention"}:
            raise CheckpointError("config.json: 'layer_types' must call each layer memory or attention.")
        super().__init__(ctx)

    def make_attention(self, index: int) -> nn.Module:
        if self.kinds[index] == "attention":
            return super().make_attention(index)
        return Memory(f"layers.{index}.memory", self.spec.hidden_size, self.spec.num_heads)

    def state_specs(self) -> dict[str, StateSpec]:
        return {
            name: spec
            for layer in self.modules()
            if isinstance(layer, Memory)
            for name, spec in layer.state_specs().items()
        }

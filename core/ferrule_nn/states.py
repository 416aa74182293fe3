"""The common parts of layers with a state: its description, a loop over requests, the short convolution, gated norms.

A layer with a state computes the tokens of one request in two ways that give the same result: `step` takes one token of
many requests at once, which is decoding; `chunk` takes many tokens of one request, which is prefill. `run_rows` decides
which of the two each request of a step needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import nn
from torch.nn import functional as F

from ferrule.errors import ConfigError
from ferrule.interfaces.model import ForwardContext, StateRows, StateSpec
from ferrule.interfaces.ranks import WHOLE
from ferrule_nn import ops
from ferrule_nn.division import Division, Split, current_shard
from ferrule_nn.mlp import activation
from ferrule_nn.parameters import parameter

Outcome = tuple[torch.Tensor, torch.Tensor]  # outputs, and the state after them


class StateLayer(nn.Module):
    """A submodule with one state for each request. `name` is its key in `Model.state_specs`."""

    def __init__(self, name: str, state: StateSpec) -> None:
        super().__init__()
        self.name = name
        self.state = state


def wide_parameter(*shape: int, division: Division | None = None) -> nn.Parameter:
    """Return an uninitialised float32 parameter, for the decay rates that states are sensitive to."""
    return parameter(*shape, division=division, dtype=torch.float32)


def run_rows(
    rows: StateRows, inputs: Sequence[torch.Tensor], step: Callable[..., Outcome], chunk: Callable[..., Outcome]
) -> torch.Tensor:
    """Compute the outputs [tokens, ...] of a layer for a step's `inputs`, each [tokens, ...]; update states in place.

    step(state [n, *shape], *inputs [n, ...]) computes one token of n requests; chunk(state [*shape], *inputs [t, ...])
    computes t tokens of one request. Both may overwrite the state that they are given.
    """
    outputs = []
    for first, stop, begin, end in _spans(rows.query_lens_host):
        slots = rows.slots[first:stop]
        state = rows.data.index_select(0, slots)
        here = [each[begin:end] for each in inputs]
        if end - begin == stop - first:
            y, state = step(state, *here)
        else:
            y, last = chunk(state[0], *here)
            state = last.unsqueeze(0)
        rows.data.index_copy_(0, slots, state.to(rows.data.dtype))
        outputs.append(y)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _spans(lengths: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield rows [first, stop) and their tokens [begin, end): neighbours with one token each together, others alone."""
    row = token = 0
    for single, group in groupby(lengths, lambda length: length == 1):
        run = list(group)
        for count, length in [(len(run), len(run))] if single else [(1, length) for length in run]:
            yield row, row + count, token, token + length
            row, token = row + count, token + length


class ShortConv(StateLayer):
    """A causal convolution over the last `kernel` tokens, for each channel alone: x [tokens, channels] to the same.

    The state is the last kernel - 1 inputs, the oldest first. `weight` is [channels, 1, kernel], as in checkpoints.
    Ranks may `split` the channels.
    """

    def __init__(
        self,
        name: str,
        channels: int,
        kernel: int,
        bias: bool = True,
        act: str | None = "silu",
        split: Split | None = None,
    ) -> None:
        division = None if split is None else split.of(channels)
        weight = parameter(channels, 1, kernel, division=division)
        super().__init__(name, StateSpec((kernel - 1, len(weight))))
        self.kernel = kernel
        self.weight = weight
        self.bias = parameter(channels, division=division) if bias else None
        self.act = activation(act) if act else None
        self._silu = act in ("silu", "swish")
        self._kernels = ops.for_layers()
        self._fused: ops.Convolution | None = None

    def pack(self) -> None:
        self._fused = ops.short_conv(self._kernels, self.weight, self.bias, self._silu)

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        rows, act = ctx.state(self.name), self.act
        if self._fused is not None and self._fused.accepts(x, rows):
            y = self._fused(x, rows)
            act = None if self._silu else act
        else:
            y = run_rows(rows, (x,), self._step, self._chunk)
        return y if act is None else act(y)

    def _step(self, state: torch.Tensor, x: torch.Tensor) -> Outcome:
        """Compute one token of n requests: state [n, kernel - 1, channels], x [n, channels]."""
        seen = torch.cat((state, x.unsqueeze(1)), dim=1)
        return self._sum(seen.unbind(1), x.dtype), seen[:, 1:]

    def _chunk(self, state: torch.Tensor, x: torch.Tensor) -> Outcome:
        """Compute t tokens of one request: state [kernel - 1, channels], x [t, channels]."""
        seen = torch.cat((state, x))
        return self._sum([seen[lag : lag + len(x)] for lag in range(self.kernel)], x.dtype), seen[len(x) :]

    def _sum(self, inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the weighted sum of inputs [n, channels], the oldest first, computed in float32."""
        weights = self.weight.squeeze(1).t().float()
        y = inputs[0] * weights[0]
        for each, weight in zip(inputs[1:], weights[1:], strict=True):
            y.addcmul_(each, weight)
        return (y if self.bias is None else y.add_(self.bias)).to(dtype)


class GatedRMSNorm(nn.Module):
    """RMS norm of each part of x, and a factor silu(z), which comes first with `gate_first`.

    x float32 and z are [tokens, size]; it computes in float32 and returns z's type. There are `groups` equal parts with
    a weight each, or with `repeats` as many as the rows have, all with the same.

    With a `split` ranks have some of the parts each, or of a single one a share: its mean is that of all ranks.
    """

    def __init__(
        self,
        size: int,
        groups: int = 1,
        eps: float = 1e-5,
        gate_first: bool = True,
        repeats: int = 0,
        split: Split | None = None,
    ) -> None:
        super().__init__()
        shard = WHOLE if split is None else current_shard()
        if groups > 1 and groups % shard.size:
            raise ConfigError(f"{groups} norms cannot be divided among {shard.size} ranks.")
        self.spread = shard if groups % shard.size else None  # the ranks that have a part together
        self.groups = repeats or max(1, groups // shard.size)
        self.eps = eps
        self.gate_first = gate_first
        self.repeats = bool(repeats)
        self.weight = parameter(size, division=None if split is None else split.of(size))
        self._kernels = ops.for_layers()
        self._fused: ops.GatedNorm | None = None

    def pack(self) -> None:
        if self.spread is None:
            self._fused = ops.gated_norm(
                self._kernels, self.weight, self.groups, self.repeats, self.eps, self.gate_first
            )

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        if self._fused is not None and self._fused.accepts(x, z):
            return self._fused(x, z)
        gate = F.silu(z.float())
        x = x.float() * gate if self.gate_first else x.float()
        parts = x.view(*x.shape[:-1], self.groups, -1)
        squares = parts.square().mean(-1, keepdim=True)
        if self.spread is not None:
            squares = self.spread.collectives.all_reduce(squares) / self.spread.size
        parts = parts * torch.rsqrt(squares + self.eps)
        weight = self.weight.float()
        y = (parts * (weight if self.repeats else weight.view(self.groups, -1))).flatten(-2)
        return (y if self.gate_first else y * gate).to(z.dtype)

"""AWQ (Lin et al. 2023, https://arxiv.org/abs/2306.00978).

Before weights are rounded, those of each input of a linear layer are multiplied by a factor, and the input is divided
by the same factor where it is computed: in the norm, or in the linear layer before. Large inputs lose less in this way.
The factors are the mean sizes of the inputs to a power from 0 to 1, the one with the least error of the outputs.

The sources of inputs are found by running the layer: a norm feeds the linear layers that are given its result. A check
makes sure that nothing else has used that result: with the factors, the layer's result must be what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ferrule.errors import ConfigError
from ferrule_nn import Attention, GatedAttention, GatedMLP, LayerNorm, Linear, RMSNorm
from ferrule_quantize.calibrated.numbers import Numbers, float16, output_error
from ferrule_quantize.calibrated.walk import Inputs

_STEPS = 20  # powers that are tried
_SMALLEST = 1e-4  # of an input's mean size, and of a factor
_LARGEST = 15  # number of 4 bits
_SHARES = tuple(1 - 0.05 * step for step in range(11))  # of a group's range that the numbers reach
_CLOSE = 1e-3  # of the layer's result, with factors and without
_OTHERS = "--to gptq needs no factors."


@dataclass(frozen=True)
class Fold:
    """A group of linear layers, at `paths`, that have the same inputs.

    `divide` has the source of the inputs divide by the given factors, and returns the factors that this division has
    exactly. Inputs are in groups of `times * width` neighbours, `times` copies of `width` inputs: the copies of an
    input have one factor.
    """

    paths: tuple[str, ...]
    divide: Callable[[torch.Tensor], torch.Tensor]
    times: int = 1
    width: int = 1

    def shared(self, sizes: torch.Tensor) -> torch.Tensor:
        """Return the mean size of the inputs that share a factor, for each input."""
        parts = sizes.view(-1, self.times, self.width)
        return parts.mean(1, keepdim=True).expand_as(parts).flatten()


def quantize(weight: torch.Tensor, inputs: Inputs, group: int) -> Numbers:
    """Quantize float32 weights [outputs, inputs] to 4 bits with zero points, in ranges that may cut off weights."""
    grouped = weight.reshape(len(weight), -1, group).transpose(0, 1)  # [groups, outputs, group]
    at = torch.arange(weight.shape[1]).view(-1, group)
    products = inputs.products[at.unsqueeze(2), at.unsqueeze(1)] / max(1, inputs.count)  # [groups, group, group]
    best, least = _range(grouped, 1.0), torch.full(grouped.shape[:2], float("inf"))
    for share in _SHARES:
        found = _range(grouped, share)
        change = _restored(grouped, *found) - grouped
        error = ((change @ products) * change).sum(-1)
        better = error < least
        best = torch.where(better, found[0], best[0]), torch.where(better, found[1], best[1])
        least = torch.minimum(error, least)
    index = torch.arange(weight.shape[1]) // group
    numbers = _numbers(grouped, *best).transpose(0, 1).flatten(1).to(torch.int16)
    return Numbers(numbers, best[1].t().to(torch.int16), best[0].t(), index)


def rounded(weight: torch.Tensor, group: int) -> torch.Tensor:
    """Return the weights after rounding without factors, and without cutting any off."""
    grouped = weight.reshape(len(weight), -1, group)
    return _restored(grouped, *_range(grouped, 1.0)).flatten(1)


def _range(values: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zero points [...] of groups [..., group], for numbers that cover `share` of their range."""
    low, high = values.amin(-1).clamp(max=0) * share, values.amax(-1).clamp(min=0) * share
    scale = float16((high - low) / _LARGEST)
    return scale, (-low / scale).round().clamp(0, _LARGEST)


def _numbers(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return (values / scale.unsqueeze(-1)).round_().add_(zero.unsqueeze(-1)).clamp_(0, _LARGEST)


def _restored(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return (_numbers(values, scale, zero) - zero.unsqueeze(-1)) * scale.unsqueeze(-1)


def search(layers: Sequence[Linear], inputs: Sequence[Inputs], group: int, fold: Fold) -> torch.Tensor:
    """Return the factors [inputs] that change the outputs of layers with the same inputs least; all may be one."""
    sizes = fold.shared(inputs[0].sizes / max(1, inputs[0].count)).clamp(min=_SMALLEST)
    best, least = torch.ones_like(sizes), float("inf")
    for step in range(_STEPS):
        factors = sizes ** (step / _STEPS)
        factors = (factors / (factors.max() * factors.min()).sqrt()).clamp(_SMALLEST, 1 / _SMALLEST)
        error = 0.0
        for layer, own in zip(layers, inputs, strict=True):
            weight = layer.weight.detach()
            error += output_error(rounded(weight * factors, group) / factors - weight, own.products)
        if error < least:
            best, least = factors, error
    return best


def apply(layers: Iterable[Linear], inputs: Iterable[Inputs], fold: Fold, factors: torch.Tensor) -> None:
    """Divide the inputs by the factors, where they come from, and multiply the weights by them."""
    exact = fold.divide(factors)
    for layer, own in zip(layers, inputs, strict=True):
        layer.weight.data.mul_(exact)
        own.products.div_(exact.unsqueeze(0)).div_(exact.unsqueeze(1))
        own.sizes.div_(exact)


# ------------------------------------------------------------------------------------- where inputs come from


def folds(layer: nn.Module, run: Callable[[], object], dtypes: Mapping[str, torch.dtype]) -> list[Fold]:
    """Return the folds for a layer's linear layers.

    `run` runs the layer; `dtypes` are those of parameters in the checkpoint. Raises ConfigError where no norm feeds any
    of the linear layers.
    """
    found = []
    for path, fed in _fed_by_norms(layer, run).items():
        norm: Any = layer.get_submodule(path)
        found.append(Fold(tuple(fed), _norm_divider(norm, dtypes[f"{path}.weight"])))
    if not found:
        raise ConfigError("AWQ's factors have no place: no norm of a layer feeds its linear layers.", _OTHERS)
    pairs = (_pair(path, module) for path, module in layer.named_modules())
    return found + [pair for pair in pairs if pair is not None]


def check_same(before: torch.Tensor, after: torch.Tensor) -> None:
    """Raise ConfigError where factors have changed the layer's result [tokens, hidden]."""
    if not float((after - before).norm()) <= _CLOSE * float(before.norm()):
        raise ConfigError(
            "AWQ's factors change what a layer computes: its norms feed more than linear layers.", _OTHERS
        )


def _fed_by_norms(layer: nn.Module, run: Callable[[], object]) -> dict[str, list[str]]:
    """Return, for the path of each norm with weights, the paths of the linear layers that are given its results."""
    results: dict[int, tuple[str, torch.Tensor]] = {}  # the tensor is kept, so that no other has its id
    fed: dict[str, list[str]] = {}

    def norm_ran(path: str, out: torch.Tensor) -> None:
        results[id(out)] = path, out

    def linear_runs(path: str, x: torch.Tensor) -> None:
        if id(x) in results:
            fed.setdefault(results[id(x)][0], []).append(path)

    hooks = []
    for path, module in layer.named_modules():
        if isinstance(module, RMSNorm | LayerNorm) and module.weight is not None:
            hooks.append(module.register_forward_hook(lambda _, args, out, path=path: norm_ran(path, out)))
        elif isinstance(module, Linear):
            hooks.append(module.register_forward_pre_hook(lambda _, args, path=path: linear_runs(path, args[0])))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return fed


def _norm_divider(norm: RMSNorm | LayerNorm, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    def divide(factors: torch.Tensor) -> torch.Tensor:
        """Divide the norm's weight, rounded to the checkpoint's type, and return the factors by which it is divided."""
        if norm.weight is None:
            raise RuntimeError("a norm without weights cannot divide")
        old = norm.weight.detach() + norm.offset
        weight = (old / factors - norm.offset).to(dtype).float()
        new = weight + norm.offset
        usable = (old != 0) & (new != 0)
        exact = torch.where(usable, old / new, torch.ones_like(old))
        norm.weight.data.copy_(torch.where(usable, weight, norm.weight))
        bias = norm.bias if isinstance(norm, LayerNorm) else None
        if bias is not None:
            bias.data.div_(exact)
        return exact

    return divide


def _pair(path: str, module: nn.Module) -> Fold | None:
    """Return a fold for a linear layer whose inputs are another one's outputs, times values independent of it."""
    before = f"{path}." if path else ""
    if isinstance(module, GatedMLP) and type(module).gated is GatedMLP.gated:
        both = module.gate_up_proj
        up = both.projections["up_proj"]
        return Fold((f"{before}down_proj",), _row_divider(both, slice(both.out_features - up, None)))
    return _values_pair(before, module) if isinstance(module, Attention) else None


def _values_pair(before: str, module: Attention) -> Fold | None:
    """Return a fold for the output projection, whose inputs are sums of values, or such sums times a gate."""
    kind, spec = type(module), module.spec
    known = kind.forward in (Attention.forward, GatedAttention.forward) and kind.attend is Attention.attend
    if not known or kind.prepare is not Attention.prepare or spec.qkv_clip:
        return None
    times, head = spec.num_heads // spec.num_kv_heads, spec.head_dim
    values = slice(module.qkv_proj.out_features - spec.num_kv_heads * head, None)

    def divide(factors: torch.Tensor) -> torch.Tensor:
        _row_divider(module.qkv_proj, values)(factors.view(-1, times, head)[:, 0].flatten())
        return factors

    return Fold((f"{before}o_proj",), divide, times, head)


def _row_divider(layer: Linear, rows: slice) -> Callable[[torch.Tensor], torch.Tensor]:
    def divide(factors: torch.Tensor) -> torch.Tensor:
        layer.weight.data[rows] /= factors.unsqueeze(1)
        if layer.bias is not None:
            layer.bias.data[rows] /= factors
        return factors

    return divide

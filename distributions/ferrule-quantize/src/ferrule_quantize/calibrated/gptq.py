"""GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323).

Inputs are rounded one after the other; the weights of the inputs that follow are changed to make up for the error, as
far as the calibration texts tell how inputs go together. Numbers are symmetric: zero is in the middle. A group's scale
is chosen when its first input is reached, from the weights as they are by then.
"""

from __future__ import annotations

import torch

from ferrule.errors import CheckpointError
from ferrule_quantize.calibrated.numbers import Numbers, float16, output_error
from ferrule_quantize.calibrated.walk import Inputs

LEAST = 32  # tokens; with fewer, weights are rounded without regard to them
_BLOCK = 128  # inputs whose errors are passed on together
_DAMPING = 0.01  # of the mean square of the inputs, added to all
_MOST_DAMPING = 1e4
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)  # of a group's largest weight that the numbers reach


def quantize(weight: torch.Tensor, inputs: Inputs, bits: int, group: int, ordered: bool) -> Numbers:
    """Quantize float32 weights [outputs, inputs]. With `ordered`, the inputs of the largest size are rounded first.

    Raises CheckpointError for inputs that are not finite.
    """
    size, products = weight.shape[1], inputs.products / max(1, inputs.count)
    sizes = products.diagonal().clone()
    if not torch.isfinite(products).all():
        raise CheckpointError("A layer's inputs are not finite with the calibration texts.")
    index = torch.arange(size) // group
    plain = rounded(weight, sizes, bits, group)
    if inputs.count < LEAST or not bool(sizes.any()):
        return plain
    order = sizes.argsort(descending=True, stable=True) if ordered else torch.arange(size)
    numbers, scales = _compensated(weight[:, order], products[order][:, order], bits, group)
    back = order.argsort()
    found = Numbers(numbers[:, back], _middle(scales, bits), scales, index[back] if ordered else index)
    better = output_error(found.restored - weight, products) < output_error(plain.restored - weight, products)
    return found if better else plain


def rounded(weight: torch.Tensor, sizes: torch.Tensor, bits: int, group: int) -> Numbers:
    """Round each weight to its nearest number. `sizes` [inputs] are the mean squares of the inputs."""
    grouped, half = weight.reshape(len(weight), -1, group), 1 << (bits - 1)
    scales = torch.stack(
        [scale_of(grouped[:, at], sizes[at * group : (at + 1) * group], bits) for at in range(grouped.shape[1])], dim=1
    )
    numbers = (grouped / scales.unsqueeze(-1)).round_().add_(half).clamp_(0, 2 * half - 1).flatten(1)
    index = torch.arange(weight.shape[1]) // group
    return Numbers(numbers.to(torch.int16), _middle(scales, bits), scales, index)


def scale_of(values: torch.Tensor, sizes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the scales [outputs] with the least error of the outputs, for one group's weights [outputs, inputs].

    The inputs are taken to be independent here.
    """
    half = 1 << (bits - 1)
    weights = sizes / sizes.mean() if bool(sizes.any()) else torch.ones_like(sizes)
    largest = values.abs().amax(1)
    best, least = float16(largest / (half - 0.5)), torch.full_like(largest, float("inf"))
    for share in _SHARES:
        scale = float16(largest * (share / (half - 0.5)))
        numbers = (values / scale.unsqueeze(1)).round_().clamp_(-half, half - 1)
        error = ((numbers * scale.unsqueeze(1) - values).square_() * weights).sum(1)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def _compensated(
    weight: torch.Tensor, products: torch.Tensor, bits: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers [outputs, inputs] and scales [outputs, groups], in the order of the inputs."""
    (outputs, size), half = weight.shape, 1 << (bits - 1)
    sizes, inverse, left = products.diagonal().clone(), _inverse_root(products), weight.clone()
    numbers = torch.empty((size, outputs), dtype=torch.int16)
    scales = torch.empty(outputs, size // group)
    width = next(width for width in range(min(_BLOCK, group), 0, -1) if group % width == 0)
    for first in range(0, size, width):
        stop = first + width
        if first % group == 0:
            scale = scale_of(left[:, first : first + group], sizes[first : first + group], bits)
            scales[:, first // group] = scale
        block, own = left[:, first:stop].t().contiguous(), inverse[first:stop, first:stop]
        errors = torch.empty_like(block)
        for at in range(width):
            number = (block[at] / scale).round_().clamp_(-half, half - 1)
            error = (block[at] - number * scale) / own[at, at]
            block[at + 1 :].addr_(own[at, at + 1 :], error, alpha=-1)
            numbers[first + at], errors[at] = (number + half).to(torch.int16), error
        left[:, stop:].addmm_(errors.t(), inverse[first:stop, stop:], alpha=-1)
    return numbers.t().contiguous(), scales


def _inverse_root(products: torch.Tensor) -> torch.Tensor:
    """Return the upper triangular U with Uᵀ U = the inverse of the products, which are damped until there is one.

    Inputs that are always zero are taken to be independent of the others: their weights are rounded.
    """
    dead, mean = products.diagonal() == 0, float(products.diagonal().mean())
    damping = _DAMPING
    while damping < _MOST_DAMPING:
        damped = products.clone()
        damped.diagonal().add_(damping * mean + dead * mean)
        lower, problem = torch.linalg.cholesky_ex(damped)
        if not int(problem):
            upper, problem = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(problem) and bool(torch.isfinite(upper).all()):
                found: torch.Tensor = upper
                return found
        damping *= 10
    raise CheckpointError(
        "A layer's inputs with the calibration texts cannot be inverted.", "--calibration names others."
    )


def _middle(scales: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.full(scales.shape, 1 << (bits - 1), dtype=torch.int16)

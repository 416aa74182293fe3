"""Encodes floats as blocks of quantized numbers: the reverse of `ferrule_plugins.gguf.blocks`.

The `gguf` package makes the simple types. The k-quants, with two levels of scales, are made here, and chosen as ggml
does: of several candidates the one with the least weighted squared error.
https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from ferrule_quant.row_chunks import in_chunks

_SUPER = 256  # numbers of a block of the k-quants
_CANDIDATES = (-1.0, -0.6, -0.2, 0.2, 0.6, 1.0)  # steps more than the largest number, which makes a scale
_FINE_CANDIDATES = (-0.6, 0.0, 0.6)
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def encode(kind: str, rows: torch.Tensor) -> np.ndarray:
    """Encode rows [..., k] as bytes [..., bytes of a row], or as numbers where the type is one of floats."""
    if kind in _FLOATS:
        exact = rows.to(_FLOATS[kind]).contiguous()
        return exact.view(torch.uint8).numpy() if kind == "BF16" else exact.numpy()
    if kind not in _ENCODERS:
        from gguf import GGMLQuantizationType, quants

        made: np.ndarray = quants.quantize(rows.float().contiguous().numpy(), GGMLQuantizationType[kind])
        return made
    data = in_chunks(lambda blocks: _ENCODERS[kind](blocks.float()), rows.reshape(-1, _SUPER))
    return data.view(*rows.shape[:-1], -1).numpy()


def _reciprocal(values: torch.Tensor) -> torch.Tensor:
    """Zero of zero, and of what is so small that its reciprocal is infinite."""
    found = 1 / values
    return torch.where(found.isfinite(), found, torch.zeros_like(found))


def _half(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return floats [blocks, 1] as the bytes of float16, and the rounded values."""
    rounded = values.clamp(-65504, 65504).to(torch.float16)
    return rounded.view(torch.uint8), rounded.float()


def _affine(values: torch.Tensor, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and minima [..., 1], none below zero: values are near number * scale - minimum."""
    weights = values.square().mean(-1, keepdim=True).sqrt() + values.abs()
    low = values.amin(-1, keepdim=True).clamp(max=0)
    reach = values.amax(-1, keepdim=True) - low
    best = reach / largest, -low
    least = torch.full_like(low, torch.inf)
    weighted = weights * values
    w, x, xx = (each.sum(-1, keepdim=True) for each in (weights, weighted, weighted * values))
    above = values - low
    for more in _CANDIDATES:
        numbers = (above * ((largest + more) * _reciprocal(reach))).round_().clamp_(0, largest)
        wn = weights * numbers
        n, nn, xn = (each.sum(-1, keepdim=True) for each in (wn, wn * numbers, weighted * numbers))
        inverse = _reciprocal(w * nn - n * n)
        scale, shift = (w * xn - x * n) * inverse, (nn * x - n * xn) * inverse
        scale = torch.where(shift > 0, xn * _reciprocal(nn), scale)
        shift = shift.clamp(max=0)
        error = xx + scale * (scale * nn - 2 * xn) + shift * (2 * scale * n - 2 * x + shift * w)
        better = (error < least) & (scale > 0)
        best = torch.where(better, scale, best[0]), torch.where(better, -shift, best[1])
        least = torch.where(better, error, least)
    return best


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """Encode eight groups of 32, whose scales and minima have 6 bits, beside two floats of 16."""
    cells = blocks.view(-1, 8, 32)
    scales, minima = (each.squeeze(-1) for each in _affine(cells, 15))
    data_scale, step = _half(scales.amax(1, keepdim=True) / 63)
    data_min, min_step = _half(minima.amax(1, keepdim=True) / 63)
    s = (scales * _reciprocal(step)).round().clamp(0, 63)
    m = (minima * _reciprocal(min_step)).round().clamp(0, 63)
    inverse = _reciprocal(step * s).unsqueeze(-1)
    numbers = ((cells + (min_step * m).unsqueeze(-1)) * inverse).round_().clamp_(0, 15).to(torch.uint8)
    low, high = numbers.view(-1, 4, 2, 32).unbind(2)
    s, m = s.to(torch.uint8), m.to(torch.uint8)
    packed = torch.cat(
        (
            s[:, :4] | s[:, 4:] >> 4 << 6,
            m[:, :4] | m[:, 4:] >> 4 << 6,
            s[:, 4:] & 15 | (m[:, 4:] & 15) << 4,
        ),
        1,
    )
    return torch.cat((data_scale, data_min, packed, (low | high << 4).flatten(1)), 1)


def _symmetric(values: torch.Tensor, largest: int) -> torch.Tensor:
    """Return scales [..., 1]: values are near number * scale, with numbers from -largest to largest - 1."""
    weights = values.square()
    place = values.abs().argmax(-1, keepdim=True)
    outermost = values.gather(-1, place)
    best, most = -outermost / largest, torch.zeros_like(outermost)
    for more in _FINE_CANDIDATES:
        numbers = (values * (-(largest + more) * _reciprocal(outermost))).round_().clamp_(-largest, largest - 1)
        wn = weights * numbers
        xn, nn = (wn * values).sum(-1, keepdim=True), (wn * numbers).sum(-1, keepdim=True)
        scale = xn * _reciprocal(nn)
        gain = scale * xn  # how much less the squared error is than that of zeros
        best, most = torch.where(gain > most, scale, best), torch.maximum(gain, most)
    return best


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """Sixteen groups of 16, whose scales have 8 bits, beside a float of 16."""
    cells = blocks.view(-1, 16, 16)
    scales = _symmetric(cells, 32).squeeze(-1)
    outermost = scales.gather(1, scales.abs().argmax(1, keepdim=True))
    data_step, step = _half(-outermost / 128)
    s = (scales * _reciprocal(step)).round().clamp(-128, 127)
    inverse = _reciprocal(step * s).unsqueeze(-1)
    numbers = ((cells * inverse).round_().clamp_(-32, 31) + 32).to(torch.uint8)
    low, high = (numbers & 15).view(-1, 2, 2, 64), (numbers >> 4).view(-1, 2, 4, 32)
    halves = (low[:, :, 0] | low[:, :, 1] << 4).flatten(1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)
    quarters = (high << shifts).sum(2, dtype=torch.uint8).flatten(1)
    return torch.cat((halves, quarters, s.to(torch.int8).view(torch.uint8), data_step), 1)


_ENCODERS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {"Q4_K": _q4_k, "Q6_K": _q6_k}

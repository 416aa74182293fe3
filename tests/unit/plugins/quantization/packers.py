"""Layers in the layouts of quantized checkpoints, written number by number from what their tools document."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ferrule.interfaces.quantization import LinearLayer, QuantizationMethod
from ferrule_nn import Linear, MergedLinear, load_into

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Numbers:
    """Weights [n, k]: unsigned `numbers`, with `zeros` and `scales` [n, groups] for the groups of `index` [k]."""

    numbers: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    index: torch.Tensor

    @property
    def meant(self) -> torch.Tensor:
        return (self.numbers - self.zeros[:, self.index]) * self.scales[:, self.index].float()


def drawn(
    n: int, k: int, bits: int, group: int, symmetric: bool = False, seed: int = 0, shuffled: bool = False
) -> Numbers:
    """Draw random numbers, of which some reach both ends; zero points from 1 to the middle."""
    draw = torch.Generator().manual_seed(seed)
    groups = -(-k // group) if group else 1
    half = 1 << (bits - 1)
    numbers = torch.randint(0, 2 * half, (n, k), generator=draw)
    zeros = torch.randint(1, 2 * half, (n, groups), generator=draw)
    scales = (torch.rand((n, groups), generator=draw) * 0.02 + 0.005).half()
    index = torch.arange(k) // (group or k)
    if shuffled:
        index = index[torch.randperm(k, generator=draw)]
    return Numbers(numbers, torch.full_like(zeros, half) if symmetric else zeros, scales, index)


def words(numbers: torch.Tensor, bits: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
    """Pack [rows, numbers] as a stream of bits in each row, lowest first, in words of `kind`."""
    size = 8 * kind.itemsize
    stream = torch.stack([numbers >> bit & 1 for bit in range(bits)], dim=-1).flatten(1)
    each = stream.view(len(stream), -1, size).long()
    value = sum(each[..., bit] << bit for bit in range(size))
    assert isinstance(value, torch.Tensor)
    return torch.where(value >= 1 << (size - 1), value - (1 << size), value).to(kind)


# ------------------------------------------------------------------------------------------ GPTQ and AWQ


def gptq(given: Numbers, bits: int, less: int = 1, ordered: bool = True) -> Tensors:
    made = {
        "qweight": words(given.numbers, bits).t(),
        "qzeros": words((given.zeros.t() - less) % (1 << bits), bits),
        "scales": given.scales.t(),
    }
    return {**made, "g_idx": given.index.int()} if ordered else made


def compressed(given: Numbers, bits: int, symmetric: bool = False, ordered: bool = False) -> Tensors:
    """Pack as ``pack_to_int32`` of compressed-tensors: the last words of a row may hold fewer numbers."""

    def along(numbers: torch.Tensor) -> torch.Tensor:
        filled = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % 32))
        return words(filled, bits)[:, : -(-numbers.shape[1] * bits // 32)]

    made = {
        "weight_packed": along(given.numbers),
        "weight_scale": given.scales,
        "weight_shape": torch.tensor(given.numbers.shape),
    }
    if not symmetric:
        made["weight_zero_point"] = along(given.zeros.t()).t()
    return {**made, "weight_g_idx": given.index.int()} if ordered else made


def gptq_planes(given: Numbers, bits: int) -> Tensors:
    """Pack in planes: of 32 numbers first the lowest four bits of all, or two, then what is left of them."""
    planes = {2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [8]}[bits]

    def along(numbers: torch.Tensor) -> torch.Tensor:
        parts, below = [], 0
        for width in planes:
            plane = numbers.reshape(-1, 32) >> below & ((1 << width) - 1)
            parts.append(words(plane, width))
            below += width
        return torch.cat(parts, 1).view(len(numbers), -1)

    return {"qweight": along(given.numbers).t(), "qzeros": along(given.zeros.t()), "scales": given.scales.t()}


def awq_gemm(given: Numbers, bits: int = 4, order: list[int] | None = None) -> Tensors:
    order = order or {4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3]}[bits]

    def along(numbers: torch.Tensor) -> torch.Tensor:
        return words(numbers.view(len(numbers), -1, len(order))[..., order].flatten(1), bits)

    return {
        "qweight": along(given.numbers.t().contiguous()),
        "qzeros": along(given.zeros.t().contiguous()),
        "scales": given.scales.t(),
    }


def _filled_up(values: torch.Tensor, group: int) -> torch.Tensor:
    """Pad [n, groups] with zeros, to whole words, as ``calculate_zeros_width`` has it."""
    width = -(-values.shape[1] // 8)
    times = {64: 2, 32: 4}.get(group, 1)
    return torch.nn.functional.pad(values, (0, 8 * (-(-width // times) * times) - values.shape[1]))


def awq_gemv(given: Numbers, group: int) -> Tensors:
    zeros, scales = _filled_up(given.zeros, group), _filled_up(given.scales, group)
    return {"qweight": words(given.numbers, 4), "qzeros": words(zeros, 4), "scales": scales}


def awq_fast(given: Numbers, group: int) -> Tensors:
    n, k = given.numbers.shape
    packed = torch.zeros((n // 4, k), dtype=torch.int64)
    for row in range(n // 4):
        for chunk in range(k // 64):
            turns = []
            for output in range(4):
                for half in range(2):
                    inputs = given.numbers[4 * row + output, 64 * chunk + 32 * half : 64 * chunk + 32 * half + 32]
                    turns += [int(inputs[8 * a + 2 * b + c]) for b in range(4) for c in range(2) for a in range(4)]
            for place in range(64):
                for number in range(4):
                    packed[row, 64 * chunk + place] |= turns[4 * place + number] << 4 * number
    signed = torch.where(packed >= 1 << 15, packed - (1 << 16), packed).to(torch.int16)
    scaled = -(given.scales.float() * given.zeros).half()
    return {
        "qweight": signed,
        "scales": _filled_up(given.scales, group).t(),
        "qzeros": _filled_up(scaled, group).t(),
    }


# ------------------------------------------------------------------------------------------ Marlin


def _marlin_places(rows: Callable[[int], list[int]], interleave: list[int]) -> list[int]:
    """Return which of 1024 numbers of four tiles stands at each place."""
    places = []
    for thread in range(32):
        for tile in range(4):
            eight = [256 * tile + 16 * row + thread // 4 + 8 * block for block in range(2) for row in rows(thread)]
            places += [eight[number] for number in interleave]
    return places


def _tiled(numbers: torch.Tensor, places: list[int], bits: int) -> torch.Tensor:
    """Pack [k, n] to words [k / 16, ...]."""
    k, n = numbers.shape
    tiles = numbers.view(k // 16, 16, n // 16, 16).transpose(1, 2).reshape(k // 16, -1, 1024)
    return words(tiles[..., places].flatten(1), bits)


_GROUPED = [i + 8 * j for i in range(8) for j in range(8)]
_SINGLE = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]


def _scales(scales: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Reorder scales [n, groups] to [groups, n]."""
    return scales.t().reshape(-1, len(order))[:, order].view(scales.shape[1], scales.shape[0])


def marlin(given: Numbers) -> Tensors:
    places = _marlin_places(lambda i: [2 * (i % 4) + j for j in (0, 1, 8, 9)], [0, 2, 4, 6, 1, 3, 5, 7])
    order = _GROUPED if given.scales.shape[1] > 1 else _SINGLE
    return {"B": _tiled(given.numbers.t().contiguous(), places, 4), "s": _scales(given.scales, order)}


def marlin_sparse(given: Numbers, bits: int) -> Tensors:
    """Keep of each four inputs the first two that are not in the middle of the range; the others must be."""
    n, k = given.numbers.shape
    half = 1 << (bits - 1)
    kept, meta = torch.zeros((n, k // 2), dtype=torch.int64), torch.zeros(k // 32 * 2 * n, dtype=torch.int64)
    for row in range(n):
        for four in range(k // 4):
            values = given.numbers[row, 4 * four : 4 * four + 4]
            found = [place for place in range(4) if values[place] != half]
            first, second = (found + [place for place in (2, 3, 1) if place not in found])[:2]
            first, second = min(first, second), max(first, second)
            kept[row, 2 * four], kept[row, 2 * four + 1] = values[first], values[second]
            # Of a row 8 a + 4 b + 2 c + d among 64; then the words off the diagonal of each 2 x 2 are exchanged.
            a, b, c, d = row % 64 // 8, row // 4 % 2, row // 2 % 2, row % 2
            to, column = row // 64 * 64 + 32 * c + 4 * a + 2 * d + b, four // 4
            if (to + column) % 2:
                to, column = (to + 1, column - 1) if column % 2 else (to - 1, column + 1)
            meta[column // 2 * 2 * n + to * 2 + column % 2] |= (first | second << 2) << 4 * (four % 4)
    places = []
    for thread in range(32):
        for output in range(4):
            rows, column = [2 * (thread % 4) + j for j in (0, 1, 8, 9)], thread // 4
            eight = [
                16 * r + column // 2 * 256 + 8 * (column % 2) + 4 * block + output for block in range(2) for r in rows
            ]
            order = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else [0, 2, 1, 3, 4, 6, 5, 7]
            places += [eight[number] for number in order]
    signed = torch.where(meta >= 1 << 15, meta - (1 << 16), meta).to(torch.int16)
    grouped = [8 * i + j for i in range(8) for j in (0, 4, 1, 5, 2, 6, 3, 7)]
    scales = given.scales.t() if given.scales.shape[1] == 1 else _scales(given.scales, grouped)
    return {"B_24": _tiled(kept.t().contiguous(), places, bits), "B_meta": signed.view(k // 32, 2 * n), "s": scales}


def qqq(given: Numbers) -> Tensors:
    """Pack as QQQ: with groups, the channels' scale is a quarter of the first group's."""

    def rows(thread: int) -> list[int]:
        return [4 * (thread % 4) + j for j in range(4)]

    numbers = given.numbers.t().contiguous()
    if given.scales.shape[1] == 1:
        words_ = _tiled((numbers - 8) & 15, _marlin_places(rows, [4, 0, 5, 1, 6, 2, 7, 3]), 4)
        return {"B": words_, "s_channel": _scales(given.scales.float() / 16, _SINGLE)}
    words_ = _tiled(numbers, _marlin_places(rows, [0, 2, 4, 6, 1, 3, 5, 7]), 4)
    channel = given.scales[:, :1].float() / 4
    groups = (given.scales.float() / channel).half()
    return {"B": words_, "s_channel": _scales(channel, _SINGLE), "s_group": _scales(groups, _GROUPED)}


# ------------------------------------------------------------------------------------------ layers


def loaded(
    method: QuantizationMethod, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], **more: Any
) -> Linear:
    """Return a layer [n, k] of these tensors, packed."""
    holder = torch.nn.Module()
    holder.down_proj = layer = Linear(shape[1], shape[0], **more)
    assert layer.quantize("layers.0.mlp.down_proj", method)
    load_into(holder, [(f"down_proj.{name}", tensor.contiguous()) for name, tensor in tensors.items()])
    return layer


def merged(
    method: QuantizationMethod, parts: Mapping[str, Tensors], rows: Mapping[str, int], inputs: int, bias: bool = False
) -> Linear:
    """Return a layer of several projections, packed."""
    holder = torch.nn.Module()
    holder.qkv_proj = layer = MergedLinear(inputs, dict(rows), bias)
    assert layer.quantize("qkv_proj", method)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, own in parts.items():
            yield from ((f"{name}.{end}", tensor.contiguous()) for end, tensor in own.items())

    load_into(holder, tensors())
    layer.pack()
    return layer


def off(layer: Linear, meant: torch.Tensor, rows: int = 5) -> float:
    """Return the distance of the layer's products from those of the true weights, as a share of their size."""
    x = torch.randn(rows, meant.shape[1], generator=torch.Generator().manual_seed(1))
    expected = x @ meant.float().t()
    return float((layer(x) - expected).norm() / expected.norm())


def layer_of(name: str = "layers.0.mlp.down_proj", inputs: int = 64, outputs: int = 64) -> LinearLayer:
    return LinearLayer(name, inputs, outputs, head=name == "lm_head")

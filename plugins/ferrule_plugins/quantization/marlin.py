"""Checkpoints in the form of Marlin: 4 bits in the order in which a GPU's matrix units read them.

https://github.com/IST-DASLab/marlin (``Layer.pack``) describes it. A matrix [inputs, outputs] is cut into tiles of
16 x 16, and the 1024 numbers of four tiles side by side are permuted: each of 32 threads has eight numbers of each
tile. Numbers are unsigned around 8. Scales of 64 outputs are permuted too, of 32 where a scale is for all inputs.

Beside it are two descendants: ``marlin_24``, where two of four inputs are zero and only the others are kept
(https://github.com/vllm-project/vllm, gptq_marlin_24.py), and QQQ (https://github.com/HandH1998/QQQ,
qlinear_marlin.py), which quantizes activations to 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_nn import checkpoint_parameter
from ferrule_quant.method import CheckedMethod
from ferrule_quant.names import chosen
from ferrule_quant.packed_words import check_words, outputs, unpacked
from ferrule_quant.products import Integers, Quantized, Shared, kept

TILE = 16
SPAN = 64  # outputs that are permuted together
MARLIN_NAMES = ("B", "s")
AWQ_NAMES = ("qweight", "scales")
_PAIRS = (0, 1, 8, 9)  # inputs of a tile, past twice the thread's number, that it has for one output
FOUR = (0, 1, 2, 3)  # past four times that, for products of 8 bits
_INTERLEAVED = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
QQQ_CHANNELS = (4, 0, 5, 1, 6, 2, 7, 3)


def order_of_tiles(inputs: Sequence[int], step: int, interleaved: Sequence[int]) -> torch.Tensor:
    """Return which of the 1024 numbers of four tiles stands at each place."""
    return _order(_tiles(inputs, step), interleaved)


def _order(entries: torch.Tensor, interleaved: Sequence[int]) -> torch.Tensor:
    """Return `entries` with those of each word interleaved."""
    return entries.reshape(-1, len(interleaved))[:, list(interleaved)].flatten()


def _axes() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.arange(32)[:, None, None, None], torch.arange(4)[:, None, None], torch.arange(2)[:, None]


def _tiles(inputs: Sequence[int], step: int) -> torch.Tensor:
    """Return the numbers that threads have, as places in four tiles: [thread, tile, half of the outputs, input]."""
    thread, tile, half = _axes()
    rows = step * (thread % 4) + torch.tensor(inputs)
    return 256 * tile + 16 * rows + thread // 4 + 8 * half


def _sparse_tiles() -> torch.Tensor:
    """Return `_tiles` for sparse weights, where a thread has neighbouring outputs and its number chooses the tile."""
    thread, output, half = _axes()
    rows, column = 2 * (thread % 4) + torch.tensor(_PAIRS), thread // 4
    return 16 * rows + 256 * (column // 2) + 8 * (column % 2) + 4 * half + output


def in_order(words: torch.Tensor, order: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 [k / 16, words] to uint8 [n, k]."""
    places = unpacked(words, bits)
    blocks = places.view(-1, order.numel())
    numbers = torch.empty_like(blocks)
    numbers[:, order.to(words.device)] = blocks
    tiles = numbers.view(len(words), -1, TILE, TILE)
    return tiles.permute(1, 3, 0, 2).flatten(2).flatten(0, 1).contiguous()


def scales_in_order(scales: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Put scales [groups, n] in order, [n, groups]."""
    blocks = scales.reshape(-1, len(order))
    found = torch.empty_like(blocks)
    found[:, list(order)] = blocks
    return found.view(scales.shape).t().contiguous()


_GROUPS = tuple(i + 8 * j for i in range(8) for j in range(8))
CHANNELS = tuple(2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25))
_SPARSE_GROUPS = tuple(8 * i + j for i in range(8) for j in (0, 4, 1, 5, 2, 6, 3, 7))


class MarlinScheme(Quantized):
    """A scheme with parameters `B` int32 [k / 16, 2 n] and `s` [groups, n], or as `names` says."""

    bits = 4

    def __init__(
        self, shared: Shared, dtype: torch.dtype | None, group: int, names: tuple[str, str] = MARLIN_NAMES
    ) -> None:
        super().__init__(shared, dtype, wide=True)
        self.group, self.names = group, names

    def allocate(self, layer: Any) -> None:
        check_words(outputs(layer), SPAN)
        check_words((layer.in_features,), max(self.group, TILE))
        self.given = layer.weight.dtype
        self.form = kept(self.bits, self.group, self.wide, False)
        made = self.parameters(layer)
        layer.ignored_tensors = (*layer.ignored_tensors, "workspace", *self.ignored())
        layer.weight = None
        for name, parameter in made.items():
            setattr(layer, name, parameter)

    def ignored(self) -> tuple[str, ...]:
        return ("qzeros", "g_idx")

    def parameters(self, layer: Any) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that the checkpoint fills."""
        return {self.names[0]: self.words(layer, layer.in_features), self.names[1]: self.scales(layer, torch.float32)}

    def words(self, layer: Any, inputs: int) -> torch.nn.Parameter:
        """Make a parameter for the words of `inputs` inputs of each output."""
        per = 32 // self.bits
        return checkpoint_parameter(layer, (inputs // TILE, -1), torch.int32, count=lambda n: n * TILE // per)

    def scales(self, layer: Any, dtype: torch.dtype) -> torch.nn.Parameter:
        return checkpoint_parameter(layer, (self.groups(layer), -1), dtype)

    def groups(self, layer: Any) -> int:
        return layer.in_features // self.group if self.group else 1

    def weights(self, layer: Any) -> Integers:
        words, scales = (layer.get_parameter(name).detach() for name in self.names)
        numbers = in_order(words, order_of_tiles(_PAIRS, 2, _INTERLEAVED[4]), 4)
        order = _GROUPS if self.groups(layer) > 1 else CHANNELS
        return Integers(numbers, scales_in_order(scales, order), None, 4, self.group)


class SparseMarlinScheme(MarlinScheme):
    """A scheme with parameters `B_24` of half the inputs, `B_meta` int16 [k / 32, 2 n] and `s`; 4 or 8 bits.

    A word of `B_meta` says for each of four groups of four inputs which two are kept, two bits each. Words stand in the
    order of CUTLASS's ``reorder_meta``: 64 outputs are permuted, and the words of two columns alternate.
    """

    def __init__(self, shared: Shared, dtype: torch.dtype | None, bits: int, group: int) -> None:
        super().__init__(shared, dtype, group)
        self.bits = bits

    def parameters(self, layer: Any) -> dict[str, torch.nn.Parameter]:
        check_words((layer.in_features,), 2 * TILE)
        return {
            "B_24": self.words(layer, layer.in_features // 2),
            "B_meta": checkpoint_parameter(layer, (layer.in_features // 32, -1), torch.int16, count=lambda n: 2 * n),
            "s": self.scales(layer, torch.float32),
        }

    def weights(self, layer: Any) -> Integers:
        kept = in_order(layer.B_24.detach(), _order(_sparse_tiles(), _INTERLEAVED[self.bits]), self.bits)
        half = 1 << (self.bits - 1)
        places = _kept_places(layer.B_meta.detach())
        if not bool((places[:, 0::2] < places[:, 1::2]).all()):
            raise CheckpointError("The checkpoint keeps an input of a sparse layer twice.")
        dense = torch.full((layer.out_features, layer.in_features), half, dtype=torch.uint8, device=kept.device)
        dense.scatter_(1, places, kept)
        scales = layer.s.detach()
        order = _SPARSE_GROUPS if self.groups(layer) > 1 else tuple(range(SPAN))
        if self.bits == 8:
            dense = (dense.to(torch.int16) - half).to(torch.int8)
        return Integers(dense, scales_in_order(scales, order), None, self.bits, self.group)


def _kept_places(meta: torch.Tensor) -> torch.Tensor:
    """Map int16 [k / 32, 2 n] to the inputs that each output keeps, int64 [n, k / 2]."""
    columns, n = 2 * meta.shape[0], meta.shape[1] // 2
    row, column = torch.arange(n)[:, None].repeat(1, columns), torch.arange(columns).repeat(n, 1)
    row = row // 64 * 64 + row % 2 * 2 + row % 8 // 4 + row % 32 % 4 // 2 * 32 + row % 64 // 8 * 4
    up = ((row % 2 == 0) & (column % 2 == 1)).long() - ((row % 2 == 1) & (column % 2 == 0)).long()
    row, column = row + up, column - up  # the off-diagonal words of each 2 x 2 are exchanged
    at = column // 2 * (2 * n) + row * 2 + column % 2
    words = meta.flatten()[at.to(meta.device)].to(torch.int32)
    shifts = torch.arange(0, 16, 2, device=meta.device)
    places = (words.unsqueeze(-1) >> shifts & 3).flatten(1)
    return places + torch.arange(places.shape[1], device=meta.device) // 2 * 4


class QqqScheme(MarlinScheme):
    """A scheme with parameters `B`; `s_channel` float32 [1, n], and its factor `s_group` float16 [groups, n].

    Without groups numbers are signed, and `s_channel` is a sixteenth of the scale: its kernel shifts numbers up.
    """

    def __init__(self, shared: Shared, dtype: torch.dtype | None, group: int) -> None:
        super().__init__(shared, dtype, group)
        self.wide = False

    def ignored(self) -> tuple[str, ...]:
        return ("reduce_buffer",) if self.group else ("reduce_buffer", "s_group")

    def parameters(self, layer: Any) -> dict[str, torch.nn.Parameter]:
        made: dict[str, torch.nn.Parameter] = {
            "B": self.words(layer, layer.in_features),
            "s_channel": checkpoint_parameter(layer, (1, -1), torch.float32),
        }
        return {**made, "s_group": self.scales(layer, torch.float32)} if self.group else made

    def weights(self, layer: Any) -> Integers:
        interleaved = _INTERLEAVED[4] if self.group else QQQ_CHANNELS
        numbers = in_order(layer.B.detach(), order_of_tiles(FOUR, 4, interleaved), 4)
        channels = scales_in_order(layer.s_channel.detach(), CHANNELS)
        if not self.group:
            return Integers(numbers ^ 8, channels * 16, None, 4)
        return Integers(numbers, scales_in_order(layer.s_group.detach(), _GROUPS) * channels, None, 4, self.group)


class Qqq(CheckedMethod):
    """The method QQQ (https://arxiv.org/abs/2406.09904): 4 bits, and activations of 8 bits, a scale for each row."""

    conformance = "ferrule_testkit.samples.integers:QQQ"
    formats = ("qqq",)
    left_keys = ("modules_to_not_convert",)

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        bits, group = config.get("wbits", config.get("bits")), config.get("group_size", -1)
        if bits != 4 or group not in (-1, 128):
            raise ValueError(
                f"reads 4 bits in groups of 128, or of all inputs, and the checkpoint has {bits!r}, {group!r}"
            )

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        if layer.head or chosen(layer, self.left):
            return None
        return QqqScheme(self.shared, None, max(int(self.config.get("group_size", -1)), 0))

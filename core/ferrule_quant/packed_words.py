"""Numbers of few bits from the words that checkpoints pack them in."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule_kernels.cpu import blocks as kernels

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
AWQ_ORDER_8 = (0, 2, 1, 3)
_WORD = 32


def per_words(bits: int) -> tuple[int, int]:
    """Return (numbers, words): the fewest words that whole numbers fill. Three words hold 32 numbers of 3 bits."""
    words = bits // math.gcd(bits, _WORD)
    return words * _WORD // bits, words


def unpacked(words: torch.Tensor, bits: int = 4, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Unpack int32 [rows, words] to uint8 [rows, numbers], lowest bits first; a number may reach into the next word.

    With an `order`, number i of each group of len(order) belongs at place order[i]. Uses the compiled kernel, or torch
    where there is none.
    """
    count, across = per_words(bits)
    if kernels.takes(words) and count % 8 == 0 and len(order) in (0, 8):
        return kernels.unpack(words, bits, order)
    parts = words.reshape(len(words), -1, across)
    numbers = torch.empty((*parts.shape[:2], count), dtype=torch.uint8, device=words.device)
    for place in range(count):
        word, shift = divmod(place * bits, _WORD)
        number = parts[..., word] >> shift
        if shift + bits > _WORD:
            below = _WORD - shift
            number = number & ((1 << below) - 1) | parts[..., word + 1] << below
        numbers[..., place] = number & ((1 << bits) - 1)
    return in_order(numbers.flatten(1), order) if order else numbers.flatten(1)


def unpacked_planes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack groups of 32 numbers, cut into planes of 4, 2 and 1 of their bits that follow each other, lowest first."""
    blocks, found, first, done = words.reshape(len(words), -1, bits), None, 0, 0
    for width in (8, 4, 2, 1):
        if bits - done < width:
            continue
        part = unpacked(blocks[:, :, first : first + width].flatten(1), width)
        found = part if found is None else found | part << done
        first, done = first + width, done + width
    if found is None:
        raise ValueError(f"numbers of {bits} bits have no planes")
    return found


def in_order(numbers: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Put [rows, numbers] into their places, of which `order` gives those of each group of len(order)."""
    blocks = numbers.reshape(len(numbers), -1, len(order))
    found = torch.empty_like(blocks)
    found[..., list(order)] = blocks
    return found.flatten(1)


def outputs(layer: Any) -> tuple[int, ...]:
    """Return the number of outputs of each projection that the layer merges."""
    return tuple(layer.projections.values()) or (layer.out_features,)


def check_words(counts: Iterable[int], per: int = 8) -> None:
    """Check that counts of numbers fill their words, of `per` each. Raises CheckpointError."""
    for count in counts:
        if count % per:
            raise CheckpointError(f"A layer has {count} inputs or outputs, which do not fill words of {per} numbers.")

"""Products with weights that are looked up in tables of floats, in torch: the reference for the kernels.

A palette has for each output a table of 8 or 16 numbers, and for each weight its place there. An additive weight has
codebooks of vectors of weights, and for each group of inputs of an output a place in each of them: the weights are the
sum of what is found there, times a scale of the output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PALETTE_BITS = (3, 4)
ENTRIES = (8, 16)  # inputs of a group


@dataclass(frozen=True)
class PaletteForm:
    """The form in which a palette is stored: words of `lanes` lanes, of the multiplied numbers' `itemsize` bytes."""

    bits: int
    itemsize: int
    lanes: int

    def packed_bytes(self, outputs: int, inputs: int) -> int:
        """Return how many bytes a weight takes: whole words of all lanes, and a table of 64 bytes for each output."""
        words = -(-inputs // (self.itemsize * 8 // self.bits * self.lanes)) * self.lanes
        return -(-outputs // 4) * 4 * (64 + words * self.itemsize)


@dataclass(frozen=True)
class AdditiveForm:
    """The form in which an additive weight is stored. Each of its `projections` has codebooks of its own."""

    books: int
    bits: int
    group: int
    itemsize: int
    projections: int = 1

    def packed_bytes(self, outputs: int, inputs: int) -> int:
        """Return how many bytes codes, codebooks and scales take.

        Several codebooks are float32: their sum is rounded.
        """
        codes = -(-outputs // 4) * 4 * -(-inputs // self.group) * self.books * (1 if self.bits <= 8 else 2)
        books = (self.books << self.bits) * self.group * (self.itemsize if self.books == 1 else 4)
        return codes + books * self.projections + 4 * outputs


@dataclass(frozen=True)
class Palette:
    """Codes uint8 [n, k] of `bits` bits, and tables [n, 2 ** bits]."""

    codes: torch.Tensor
    table: torch.Tensor
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def weights(self) -> torch.Tensor:
        """Return the weights that the codes stand for, [n, k]."""
        return self.table.gather(1, self.codes.long())


@dataclass(frozen=True)
class Additive:
    """Codes [n, groups, books], uint8 or the bits of uint16 as int16; books [books, entries, inputs of a group]; and
    scales [n] or None."""

    codes: torch.Tensor
    books: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * self.books.shape[2]

    @property
    def problem(self) -> str | None:
        """Return why no kernel multiplies this weight, or None."""
        if self.books.shape[2] not in ENTRIES:
            return f"groups have 8 or 16 inputs, not {self.books.shape[2]}"
        if self.codes.dtype not in (torch.uint8, torch.int16):
            return f"codes are uint8 or int16, not {self.codes.dtype}"
        entries = self.books.shape[1]
        whole = entries >= 1 << 8 * self.codes.dtype.itemsize
        if not whole and self.codes.numel() and int(self.places().max()) >= entries:
            return f"a code is not one of {entries} entries"
        return None

    def places(self) -> torch.Tensor:
        """Return the codes as indices into their codebooks, int32."""
        return self.codes.to(torch.int32) & 0xFFFF

    def weights(self) -> torch.Tensor:
        """Return the weights that the codes stand for, with the scales applied: [n, k]."""
        found = self.places().long()
        each = [book[found[..., number]] for number, book in enumerate(self.books)]
        weight = torch.stack(each).sum(0).flatten(1)
        return weight if self.scales is None else weight * self.scales[:, None]


def multiply(x: torch.Tensor, weight: Palette | Additive, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x [m, k] by the transposed weight [n, k]: float32 [m, n]."""
    y = x.float() @ weight.weights().float().t()
    return y if bias is None else y + bias.float()

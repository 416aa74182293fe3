"""Products of linear layers, ours beside oneDNN's and the machine's limits: `python -m tools.benchmarks.matmul`.

For each shape and number of rows, one line for each form of the weights: microseconds, then for up to 16 rows the bytes
of weights read per second and their share of what can be read, for more rows operations per second and their share of
what the unit can do; last the ratio to oneDNN's bfloat16. What can be read is what a plain loop reads of as many bytes.
There are several copies of the weights, so that decoding reads them from memory. All take turns and the least time
counts: a disturbed machine changes ratios less.

`--step` takes all products of a decode step of the shape of Qwen3-0.6B instead, one after the other.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ferrule_kernels.cpu import library
from ferrule_kernels.cpu.dense import DenseMatrix
from ferrule_kernels.cpu.machine import Limits, measure
from ferrule_kernels.cpu.matmul import PackedMatrix, Workspace
from ferrule_kernels.cpu.onednn import Packed
from ferrule_kernels.matmul import Form

FORMS = {
    "int8": Form(8),
    "int8 weight only": Form(8, digits=2),
    "int4": Form(4, 32),
    "int4 weight only": Form(4, 32, digits=2),
}
SHAPES = "4096x1024,1024x2048,6144x1024,1024x3072,151936x1024"  # outputs x inputs, of Qwen3-0.6B
LAYERS = 28
READ, BASE = "plain read", "oneDNN bfloat16"
FEW = 16  # rows up to which a product is held against the memory
MANY = 64  # rows from which on two copies of the weights are enough

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Contender:
    """Products that follow each other, by one form. `nbytes` and `numbers` are those of all weights."""

    name: str
    products: Sequence[Product]
    inputs: Sequence[int]
    nbytes: int
    numbers: int
    best: float = float("inf")

    def run(self, x: dict[int, torch.Tensor], count: int) -> None:
        """Time the first `count` products; `best` becomes the least seconds of one product, in their mean."""
        began = time.perf_counter()
        for product, width in zip(self.products[:count], self.inputs, strict=False):
            product(x[width])
        self.best = min(self.best, (time.perf_counter() - began) / count)


def _makers(names: Sequence[str]) -> Iterator[tuple[str, Callable[[torch.Tensor], tuple[Product, int]]]]:
    """Yield, for each format that can be used here, its name and a function that makes a product of a weight, and
    returns its bytes.
    """
    workspace, kernels = Workspace(), library.load()

    def plain_read(weight: torch.Tensor) -> tuple[Product, int]:
        memory = weight.clone()  # whole pages of it are read
        at, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(memory.nbytes)

        def read(x: torch.Tensor) -> torch.Tensor:
            kernels.ferrule_read(at, size)
            return memory

        return read, memory.nbytes // 4096 * 4096

    def by_library(weight: torch.Tensor) -> tuple[Product, int]:
        packed = Packed.of(weight)
        if packed is None:
            raise ValueError("oneDNN has no bfloat16 here")
        return lambda x: packed.matmul(x, None), weight.nbytes

    def dense(weight: torch.Tensor) -> tuple[Product, int]:
        matrix = DenseMatrix(weight)
        return matrix.multiply, matrix.nbytes

    def quantized(form: Form) -> Callable[[torch.Tensor], tuple[Product, int]]:
        def make(weight: torch.Tensor) -> tuple[Product, int]:
            matrix = PackedMatrix(weight, form, None, workspace)
            return matrix.multiply, matrix.nbytes

        return make

    yield READ, plain_read
    if Packed.of(torch.zeros(1, 1, dtype=torch.bfloat16)) is not None:
        yield BASE, by_library
    yield "bfloat16", dense
    yield from ((name, quantized(form)) for name, form in FORMS.items() if name in names)


def contenders(shapes: Sequence[tuple[int, int]], names: Sequence[str] = tuple(FORMS)) -> list[Contender]:
    """Make the contenders. `shapes`: outputs and inputs of the products of each. `names`: which of `FORMS` beside
    bfloat16.
    """
    weights = {shape: (torch.randn(shape) * 0.05).bfloat16() for shape in set(shapes)}
    inputs, numbers, found = [shape[1] for shape in shapes], sum(out * width for out, width in shapes), []
    for name, make in _makers(names):
        made = [make(weights[shape]) for shape in shapes]
        found.append(Contender(name, [one for one, _ in made], inputs, sum(size for _, size in made), numbers))
    return found


def race(all_of_them: Sequence[Contender], rows: int, count: int, repeats: int) -> None:
    """Let all take turns with so many rows."""
    x = {width: torch.randn(rows, width).bfloat16() for width in set(all_of_them[0].inputs)}
    for one in all_of_them:
        one.best = float("inf")
    for _ in range(repeats):
        for one in all_of_them:
            one.run(x, count)


def lines(all_of_them: Sequence[Contender], rows: int, limits: Limits) -> Iterator[str]:
    """Yield a line for each contender of a `race`."""
    named, products = {one.name: one for one in all_of_them}, len(all_of_them[0].products)
    readable = named[READ].nbytes / products / named[READ].best
    for one in all_of_them:
        if rows <= FEW:
            rate, most, unit = one.nbytes / products / one.best, readable, "GB/s"
        elif one.name == READ:
            continue
        else:
            most = limits.bf16 if "bfloat16" in one.name else limits.int8
            rate, unit = 2 * rows * one.numbers / products / one.best, "GOP/s"
        share = f"{rate / most:5.0%} of the limit" if most else "the limit is not known"
        ratio = f"{named[BASE].best / one.best:5.2f} x" if BASE in named and one.name != READ else ""
        yield f"  {one.name:<17}{one.best * 1e6:10.1f} us {rate / 1e9:7.1f} {unit:<5} {share}  {ratio}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=SHAPES, help="outputs x inputs")
    parser.add_argument("--rows", default="1,4,16,32,256")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--mib", type=int, default=192, help="of bfloat16 weights that are read in turn")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--step", action="store_true", help="all products of a step, instead of each by itself")
    options = parser.parse_args()
    limits = measure()
    print(
        f"{limits.threads} threads; this machine at most: {limits.read_bytes / 1e9:.1f} GB/s, "
        f"bf16 {limits.bf16 / 1e9:.0f} GFLOP/s, int8 {limits.int8 / 1e9:.0f} GOP/s"
    )
    names, rows = options.forms.split(","), [int(count) for count in options.rows.split(",")]
    shapes = [tuple(int(size) for size in text.split("x")) for text in options.shapes.split(",")]
    pairs = [(outputs, inputs) for outputs, inputs in shapes]
    for shape in pairs if not options.step else pairs[:1]:
        copies = max(1, options.mib * 2**20 // (2 * shape[0] * shape[1]))
        mixed = [*(pairs[:-1] * LAYERS), pairs[-1]]
        all_of_them = contenders(mixed if options.step else [shape] * copies, names)
        for count in rows:
            products = len(all_of_them[0].products)
            race(
                all_of_them,
                count,
                min(products, 2) if count >= MANY and not options.step else products,
                options.repeats,
            )
            print("step" if options.step else f"{shape[0]} x {shape[1]}", f"{count} rows", sep=", ")
            print("\n".join(lines(all_of_them, count, limits)), flush=True)


if __name__ == "__main__":
    main()

"""Prints the tables of docs/quantization.md: ``python -m tools.quality [layers] [answers]``. Answers take minutes."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from ferrule.plugin import discover
from ferrule_contrib.tiny import path
from ferrule_testkit.quantized import quantized_checkpoint
from tools.quality.layers import measure
from tools.quality.schemes import schemes
from tools.tiny import quantized
from tools.tiny.quantized import Row, Test

# Formats of checkpoints that other tools write, in which the embedded model is measured. Others have the same numbers.
CHECKPOINTS = (
    "gptq",
    "gptq-zeros",
    "awq",
    "fp8-blocks",
    "nf4",
    "fp4",
    "mxfp4-compressed",
    "nvfp4-compressed",
)


def layers() -> Iterator[str]:
    yield "| weights | bits | bound | error | bound with outliers | error |\n|---|--:|--:|--:|--:|--:|"
    plugins = discover()
    for title, scheme in schemes():
        plain, other = (measure(scheme, plugins, outliers) for outliers in (False, True))
        yield (
            f"| {title} | {plain.bits:.2f} | {plain.bound:.2%} | {plain.error:.2%} | {other.bound:.2%} "
            f"| {other.error:.2%} |"
        )


def checkpoints(tests: list[Test]) -> Iterator[Row]:
    """Measure the embedded model in formats of checkpoints."""
    for name in CHECKPOINTS:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "model"
            quantized_checkpoint(path(), made, name)
            yield quantized.measure(tests, f"checkpoint in `{name}`", made)


def answers() -> Iterator[str]:
    tests = quantized.held_out()
    yield quantized.HEADING
    yield from map(str, quantized.rows(tests, quantized.METHODS))
    yield from map(str, checkpoints(tests))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.quality", description=__doc__)
    parser.add_argument("tables", nargs="*", default=["layers", "answers"], help="layers, answers, or both")
    tables = {"layers": layers, "answers": answers}
    wanted = parser.parse_args(argv).tables
    if unknown := [name for name in wanted if name not in tables]:
        parser.error(f"there is no table {unknown[0]!r}: {', '.join(tables)}")
    torch.set_grad_enabled(False)
    for name in wanted:
        for line in tables[name]():
            print(line, flush=True)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())

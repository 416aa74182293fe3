"""Micro-benchmarks of the kernels beside what the machine can do: `python -m tools.benchmarks.cuda_kernels [NAME ...]`.

A module of `ferrule_kernels.cuda` may have `cases(device)`, an iterator of `Case`: the kernel at shapes of models.
NAME is a module, or the beginning of a case's name. Products whose name begins with fp8 are held to the rate of fp8.
Without a GPU the cases run once each under Triton's interpreter, where TRITON_INTERPRET=1 is set: that tries them, and
times nothing.
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import torch

import ferrule_kernels.cuda as package
from ferrule_kernels.cuda.cases import Case
from ferrule_kernels.cuda.machine import Limits, measure, seconds

_APART = frozenset({"cases", "machine"})


@dataclass(frozen=True)
class Result:
    """A case, measured. `limit_share` is the least time that the machine's limits allow, over the time it took."""

    module: str
    name: str
    seconds: float = 0.0
    bytes_per_second: float = 0.0
    flops_per_second: float = 0.0
    limit_share: float = 0.0
    error: str | None = None


def modules() -> list[str]:
    """Return the names of the modules that may have cases."""
    return sorted(found.name for found in pkgutil.iter_modules(package.__path__) if found.name not in _APART)


def run(names: Sequence[str], device: torch.device, limits: Limits) -> Iterator[Result]:
    """Measure the cases that `names` select, all without any. A case that fails is a result with its error.

    Any Exception is caught: a broken kernel raises what Triton's compiler or the driver does, and the other modules'
    figures are wanted all the same. What failed is printed, and the command ends with 1.
    """
    for module in modules():
        try:
            for case in _cases(module, device):
                if not names or module in names or any(case.name.startswith(name) for name in names):
                    yield _measured(module, case, device, limits)
        except Exception as error:
            yield Result(module, "cases", error=f"{type(error).__name__}: {error}")


def _cases(module: str, device: torch.device) -> Iterator[Case]:
    make = getattr(import_module(f"{package.__name__}.{module}"), "cases", None)
    return iter(()) if make is None else make(device)


def _measured(module: str, case: Case, device: torch.device, limits: Limits) -> Result:
    """Measure a case. An Exception becomes its result, as in `run`."""
    try:
        took = seconds(case.run, device)
    except Exception as error:
        return Result(module, case.name, error=f"{type(error).__name__}: {error}")
    rate = limits.fp8_flops if case.name.startswith("fp8") else None
    share = limits.seconds(case.bytes, case.flops, rate) / took
    return Result(module, case.name, took, case.bytes / took, case.flops / took, share)


def line(result: Result) -> str:
    """Format a result as a row of the table."""
    if result.error is not None:
        return f"{result.module + '/' + result.name:58} failed: {result.error.splitlines()[0]}"
    return (
        f"{result.module + '/' + result.name:58} {result.seconds * 1e6:10.1f} us {result.bytes_per_second / 1e9:9.1f} "
        f"GB/s {result.flops_per_second / 1e12:8.1f} TFLOP/s {100 * result.limit_share:6.1f} % of the limit"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.cuda_kernels", description="Measure the kernels.")
    parser.add_argument("names", nargs="*", help="modules, or beginnings of the names of cases; all without any")
    parser.add_argument("--json", type=Path, help="write limits and results to this file too")
    options = parser.parse_args(argv)
    reason = package.available()
    if reason is not None:
        print(f"The kernels cannot run here: {reason}.", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    limits = measure(device, small=device.type == "cpu")
    fp8 = "" if limits.fp8_flops is None else f", fp8 {limits.fp8_flops / 1e12:.1f} TFLOP/s"
    print(
        f"{limits.name}: copies {limits.copy_bytes / 1e9:.1f} GB/s, {limits.half} {limits.half_flops / 1e12:.1f} "
        f"TFLOP/s{fp8}"
    )
    results = []
    for result in run(options.names, device, limits):
        print(line(result), flush=True)
        results.append(result)
    if options.json is not None:
        report = {"limits": asdict(limits), "results": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if not results or any(result.error for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m tools.coverage PYTEST_ARGUMENTS``: runs tests in several processes, counting which of our lines they run.

SlipCover counts a line the first times that it runs and then takes its probe out, so that tests are hardly slower.
What tests start as processes of their own is not counted. Prints a percentage per package; ends with 1 where one is
below its floor, and with pytest's status where tests failed.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from slipcover import Slipcover, pytest_plugin, slipcover

FLOORS = {
    "core/ferrule": 93,
    "core/ferrule_files": 93,
    "core/ferrule_nn": 95,
    "core/ferrule_parsing": 94,
    "core/ferrule_protocol": 95,
    "core/ferrule_quant": 90,
    "plugins/ferrule_plugins": 87,
    "kernels/ferrule_kernels": 85,
    "distributions/ferrule-quantize/src/ferrule_quantize": 92,
    "distributions/ferrule-tensorizer/src/ferrule_tensorizer": 94,
    "distributions/ferrule-tgi/src/ferrule_tgi": 94,
}
_OMITTED = "plugins/ferrule_plugins/attention/flex_attention.py"  # torch compiles its functions from their bytecode
# How often a line runs before its probe is taken out. Then every module is looked through, which takes as long as a
# million runs of a probe.
_RUNS = 10_000
_NOT_COUNTED = (
    r"#\s*pragma: no cover",
    r"if TYPE_CHECKING:",
    r"@triton\.jit",  # what Triton compiles does not run as Python
)


class Counting:
    """A plugin for a test process whose lines are counted, which keeps the counting out of what tests trace and
    start.
    """

    def __init__(self) -> None:
        self._switches = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("SLIPCOVER_")}
        if sys.version_info < (3, 12):  # from there on Python takes probes out
            Slipcover.deinstrument_seen = untraced(Slipcover.deinstrument_seen)
            slipcover.sys = _SysWithoutFrames()
            # Half of the time that it takes: to look for lines of annotations, which are texts here, and for branches.
            slipcover._get_annotation_only_lines = _nothing
            Slipcover.branches_from_code = staticmethod(_nothing)
            if (counter := pytest_plugin._slipcover_instance) is not None:
                counter.d_miss_threshold = _RUNS  # of what is imported from here on

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        os.environ.update(self._switches)  # SlipCover's plugin looks for them when it reports


def _nothing(code: CodeType) -> frozenset[int]:
    return frozenset()


class _SysWithoutFrames:
    """The module `sys` as SlipCover sees it: no frames, of which it would ask the locals.

    A frame that was asked keeps what its locals were until it ends: also what the test lets go of meanwhile.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)

    def _current_frames(self) -> dict[int, FrameType]:
        return {}


def untraced(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a function so that its caller's tracer and profiler do not see it."""

    @wraps(function)
    def run(*arguments: Any) -> None:
        tracing, profiling = sys.gettrace(), sys.getprofile()
        sys.settrace(None)
        sys.setprofile(None)
        try:
            function(*arguments)
        finally:
            sys.setprofile(profiling)
            sys.settrace(tracing)

    return run


class _Collector:
    """A plugin that collects what SlipCover's pytest plugin has gathered from the test processes."""

    found: dict[str, Any] | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        folder = os.environ.get("SLIPCOVER_COVERAGE_DIR")  # set by the plugin where tests run in several processes
        if folder is not None and (merged := Path(folder, "merged.json")).exists():
            self.found = json.loads(merged.read_bytes())["files"]


def percentages(files: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (package, percentage of its lines that ran) from SlipCover's `files`."""
    ran: Counter[str] = Counter()
    all_lines: Counter[str] = Counter()
    for file, lines in files.items():
        for package in FLOORS:
            if file.startswith(f"{package}/"):
                ran[package] += len(lines["executed_lines"])
                all_lines[package] += len(lines["executed_lines"]) + len(lines["missing_lines"])
    for package in FLOORS:
        yield package, 100 * ran[package] / max(1, all_lines[package])


def main(arguments: list[str]) -> int:
    os.environ["SLIPCOVER_ENABLED"] = "1"
    os.environ["SLIPCOVER_SOURCE"] = ",".join(FLOORS)
    os.environ["SLIPCOVER_OMIT"] = _OMITTED
    os.environ["SLIPCOVER_EXCLUDE_LINES"] = "\n".join(_NOT_COUNTED)
    collector = _Collector()
    status = int(pytest.main(arguments, plugins=[collector]))
    if collector.found is None:
        print("No lines were counted: the tests have to run in processes of their own (-n 2).")
        return status or 1
    for package, percentage in percentages(collector.found):
        print(f"{package}: {percentage:.1f} % of lines, at least {FLOORS[package]}")
        status = status or int(percentage < FLOORS[package])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

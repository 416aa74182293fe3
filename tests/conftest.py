"""Fixtures that several areas share."""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import random
import shutil
import signal
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi._compat import v2 as fastapi_fields
from hypothesis import HealthCheck, settings
from pydantic import TypeAdapter

from ferrule.config import PluginConfig
from ferrule.config.plugins import configured
from ferrule.env import Environment
from ferrule.launch.collector import settle
from ferrule.plugin import Plugins, discover
from ferrule_kernels.cpu import library
from ferrule_testkit.checkpoints import tiny_checkpoint
from tests import compiler
from tests.shared import once
from tools.coverage import Counting
from tools.wheels import Distribution, install

if not (list(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()):  # no GPU
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton, which reads it then, once

# After a start all of the cache's memory is written to: by default gigabytes.
os.environ.setdefault("FERRULE_CPU_KVCACHE_SPACE", "0.0625")

# The same examples every time, however long they take; FERRULE_TEST_SEED draws others.
settings.register_profile(
    "same",
    derandomize="FERRULE_TEST_SEED" not in os.environ,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("same")


_ADAPTERS: dict[tuple[object, str, str], TypeAdapter[object]] = {}


def _type_adapter(annotated: Any, *, config: object = None) -> TypeAdapter[object]:
    """Return a validator of a route's field, made once for all applications of a test process.

    Hundreds of tests build the application, and half of the time of that goes into the same validators.
    """
    key = annotated.__origin__, repr(annotated.__metadata__), repr(config)
    if key not in _ADAPTERS:
        _ADAPTERS[key] = TypeAdapter(annotated, config=config)  # type: ignore[call-overload]
    return _ADAPTERS[key]


fastapi_fields.TypeAdapter = _type_adapter  # type: ignore[misc,assignment]


def _ssl_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    """Return the context of an HTTP client; clients that ask for nothing of their own share one.

    Thousands of clients are made, most of them for one request, and to read all authorities takes 40 ms each time.
    """
    if verify is True and cert is None and not {"SSL_CERT_FILE", "SSL_CERT_DIR"} & set(os.environ):
        return _shared_context()
    return httpx.create_ssl_context(verify, cert, trust_env)


_shared_context = cache(httpx.create_ssl_context)
httpx._transports.default.create_ssl_context = _ssl_context


def _processor_seconds() -> float:
    """Return the CPU seconds of this process and of those that it started and saw ending."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


class ProcessorTime:
    """A plugin that adds to each report the CPU seconds of its phase: `report.processor_seconds`. One per test
    process.
    """

    def __init__(self) -> None:
        self._counted = 0.0

    def pytest_collection_finish(self) -> None:
        self._counted = _processor_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        before, self._counted = self._counted, _processor_seconds()
        report.processor_seconds = self._counted - before
        return report


class FileTimes:
    """A plugin that adds up the time of each test file, fixtures included, and prints the most expensive ones at the
    end.
    """

    SHOWN = 25

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._processor_seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._seconds[file] += report.duration
        self._processor_seconds[file] += getattr(report, "processor_seconds", 0.0)  # absent when a process has died

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if terminalreporter.config.get_verbosity() < 0 and len(self._seconds) < 2:
            return
        seconds, used = sum(self._seconds.values()), sum(self._processor_seconds.values())
        heading = f"the {self.SHOWN} most expensive of {len(self._seconds)} test files"
        terminalreporter.section(f"{heading}; all take {seconds:.0f} s, {used:.0f} s of them on a processor")
        for file, cost in self._processor_seconds.most_common(self.SHOWN):
            terminalreporter.write_line(f"{self._seconds[file]:7.1f} s, {cost:6.1f} s on a processor  {file}")


def pytest_collection_finish() -> None:
    """Let the garbage collector leave out modules and tests, which stay to the end, and look seldom, as in a server.

    pytest adds two handlers to every logger that does not propagate, three times in each test; torch has forty of them.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.collect()
    settle()


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of a shell's background job; children would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(ProcessorTime(), "processor-time")
    if hasattr(config, "workerinput") and "SLIPCOVER_ENABLED" in os.environ:
        config.pluginmanager.register(Counting(), "counting")
    if not hasattr(config, "workerinput"):  # the process that gathers what the others report
        config.pluginmanager.register(FileTimes(), "file-times")


class Site:
    """A folder of throw-away distributions at the front of this process's path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def install(self, *dists: Distribution) -> None:
        for dist in dists:
            install(dist, self.folder)
        importlib.invalidate_caches()

    def discover(self, allowed: Sequence[str] | None = None, **options: tuple[str, ...]) -> Plugins:
        """Discover plugins. `allowed` is the value of FERRULE_PLUGINS."""
        environment = Environment(plugins=None if allowed is None else tuple(allowed))
        return configured(discover(), PluginConfig(**options), environment)

    def python(self, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run another interpreter with this folder on its path."""
        path = os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.run(
            [sys.executable, *argv],
            env={**os.environ, "PYTHONPATH": path, **variables},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Seed each test alike, whichever ran before it; FERRULE_TEST_SEED draws other numbers."""
    seed = int(os.environ.get("FERRULE_TEST_SEED", "0"))
    random.seed(seed)
    if torch := sys.modules.get("torch"):
        # For devices that are not there, `torch.manual_seed` keeps a text of the whole stack: a millisecond each time.
        (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(seed)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = tmp_path / "site"
    site = Site(folder)
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield site
    for name in set(sys.modules) - before:
        if str(folder) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random Llama checkpoint with a tokenizer and a chat template; 256 positions. No test writes to it."""
    return once(tmp_path_factory, "llama", lambda folder: tiny_checkpoint("llama", folder))


@pytest.fixture(scope="session")
def emulated_kernels() -> ctypes.CDLL:
    """Compile the CPU kernels that use tile registers, for this processor, with the registers emulated in plain C++."""
    if shutil.which("g++") is None:
        pytest.skip("there is no compiler")
    parts = ("matmul", "attention", "blocks", "dense", "machine", "matmul_pack", "recording", "tables")
    sources = [Path(library.__file__).with_name(f"{name}.cpp") for name in parts]
    flags = "-march=native", "-DFERRULE_EMULATE_TILES"
    # matmul.cpp is compiled as it is installed: its sums are compared to the bit. The others take less time so.
    plain = compiler.shared_library(
        *sources, flags=flags, only=lambda source: () if source.stem == "matmul" else ("-O1",)
    )
    return ctypes.CDLL(str(plain))


@pytest.fixture(scope="session")
def cpu_kernels() -> object:
    """Return the kernels that the platform of CPUs supplies on this machine."""
    from ferrule_plugins.platform.cpu_kernels import cpu_kernels

    return cpu_kernels()

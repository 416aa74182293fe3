"""Fixtures that several areas share."""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from ferrule.config import PluginConfig
from ferrule.config.plugins import configured
from ferrule.env import Environment
from ferrule.plugin import Plugins, discover
from ferrule_testkit.wheels import Distribution, install

if not (list(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()):  # no GPU
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton, which reads it then, once

# The same examples every time, however long they take; FERRULE_TEST_SEED draws others.
settings.register_profile(
    "same",
    derandomize="FERRULE_TEST_SEED" not in os.environ,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("same")


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
        """`allowed` is what FERRULE_PLUGINS would say."""
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
    """Every test draws the same random numbers, whichever ran before it; FERRULE_TEST_SEED draws others."""
    seed = int(os.environ.get("FERRULE_TEST_SEED", "0"))
    random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


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

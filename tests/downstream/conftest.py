"""Strangers' packages, built and installed by pip as wheels, each into a folder of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools.wheels import install_project

HERE = Path(__file__).parent


class Installed:
    """The places of the packages, each installed when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, name: str) -> Path:
        site = self._folder / name
        if not site.exists():
            install_project(HERE / name, site)
        return site

    def environment(self, *names: str) -> dict[str, str]:
        """Return the variables that let another process find these packages, and only these."""
        path = os.pathsep.join([*(str(self(name)) for name in names), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("downstream"))


@pytest.fixture
def on_path(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Put a package on this process's path, for one test."""
    before = set(sys.modules)
    names: list[str] = []

    def put(name: str) -> None:
        monkeypatch.syspath_prepend(str(installed(name)))
        names.append(name)

    yield put
    for module in set(sys.modules) - before:
        if module.partition(".")[0] in names:
            del sys.modules[module]

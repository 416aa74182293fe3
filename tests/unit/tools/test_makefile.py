"""How the Makefile has pip install Ferrule, its distributions and PyTorch. pip is not run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tools import ROOT

CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
HAS_GPU = bool(list(Path("/dev").glob("nvidia[0-9]*"))) or Path("/dev/dxg").exists()

# In place of .venv/bin/python: writes down how it is called. It fails where it is to ask an index that $DOWN names.
PYTHON = """#!/bin/sh
echo "$@" >> calls
case "$*" in *"--index-url $DOWN torch") exit 1 ;; esac
"""


def make(folder: Path, *arguments: str, down: str = "nowhere") -> tuple[int, list[str]]:
    """Run `make` in a folder with the project's Makefile and a made-up .venv: its exit status, and pip's calls."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", *_distributions("pyproject.toml")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    ran = subprocess.run(["make", *arguments], cwd=folder, env={"PATH": os.environ["PATH"], "DOWN": down}, check=False)
    return ran.returncode, (folder / "calls").read_text().splitlines()


def _distributions(file: str = "") -> list[str]:
    return [str(found.relative_to(ROOT)) for found in sorted(ROOT.glob(f"distributions/*/{file}"))]


@pytest.mark.advisory("CVE-2026-54232")
def test_torch_alone_comes_from_the_index(tmp_path: Path) -> None:
    status, calls = make(tmp_path, "TORCH_INDEX=https://index.example/cpu", "install")
    assert status == 0
    assert [("--index-url https://index.example/cpu torch" in call, call.endswith("-e .")) for call in calls] == [
        (True, False),
        (False, True),
    ]
    assert "--no-deps" in calls[0]
    assert all("-c constraints.txt" in call for call in calls)


def test_without_an_index_pip_decides(tmp_path: Path) -> None:
    status, calls = make(tmp_path, "TORCH_INDEX=", "install")
    assert status == 0
    assert ["--index-url" in call for call in calls] == [False]


def test_an_index_that_the_user_names_must_be_there(tmp_path: Path) -> None:
    status, calls = make(tmp_path, "TORCH_INDEX=https://index.example/cpu", "install", down="https://index.example/cpu")
    assert status != 0
    assert len(calls) == 1


@pytest.mark.skipif(HAS_GPU, reason="with a GPU torch is what pip is configured with")
def test_without_a_gpu_the_cpu_build_is_taken_if_it_can_be(tmp_path: Path) -> None:
    for number, down in enumerate(("nowhere", CPU_BUILDS)):
        (folder := tmp_path / str(number)).mkdir()
        status, calls = make(folder, "install", down=down)
        assert status == 0
        assert [f"--index-url {CPU_BUILDS} torch" in call for call in calls] == [True, False]


def test_tests_have_the_distributions_of_the_repository(tmp_path: Path) -> None:
    """Install them from the repository: extras of `ferrule` name them, and pip would look for them in its index
    otherwise.
    """
    _, calls = make(tmp_path, "TORCH_INDEX=", ".venv/.installed-test")
    assert len(_distributions()) == 3
    assert calls[-1].endswith(" ".join(["-e .[test]", *(f"-e {folder}" for folder in _distributions())]))

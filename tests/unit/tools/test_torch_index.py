"""Which package index `make` installs PyTorch from, and that the Makefile asks. No network: servers are on loopback."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tools import ROOT, torch_index

TOOL = ROOT / "tools" / "torch_index.py"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


# ----------------------------------------------------------------------------------------------------- choosing


def unused(*_: object) -> bool:
    raise AssertionError("asked for nothing")


def yes(*_: object) -> bool:
    return True


def no(*_: object) -> bool:
    return False


@pytest.mark.parametrize(
    ("wanted", "pip", "has_gpu", "answers", "index", "words"),
    [
        (None, {}, no, yes, torch_index.CPU_INDEX, "CPU build from https://download.pytorch.org/whl/cpu"),
        (None, {}, no, no, "", "cannot be reached"),
        (None, {}, yes, unused, "", "NVIDIA GPU found"),
        (None, {"find-links": "/wheels", "constraint": "c.txt"}, no, yes, torch_index.CPU_INDEX, "CPU build from"),
        (None, {"index-url": "https://mirror.example/simple"}, unused, unused, "", "sets the index"),
        (None, {"no-index": "true"}, unused, unused, "", "sets the index"),
        (
            "https://mirror.example/cpu",
            {"no-index": "true"},
            unused,
            unused,
            "https://mirror.example/cpu",
            "TORCH_INDEX",
        ),
        ("", {}, unused, unused, "", "TORCH_INDEX is empty"),
    ],
)
def test_the_choice(
    wanted: str | None,
    pip: dict[str, str],
    has_gpu: Callable[[], bool],
    answers: Callable[[str], bool],
    index: str,
    words: str,
) -> None:
    choice = torch_index.choose(wanted, pip, has_gpu, answers)
    assert choice.url == index
    assert words in choice.message
    assert "\n" not in choice.message


@pytest.mark.parametrize(("has_gpu", "answers"), [(no, yes), (no, no), (yes, unused)])
def test_what_was_found_comes_with_how_to_choose_otherwise(
    has_gpu: Callable[[], bool], answers: Callable[[str], bool]
) -> None:
    assert "make TORCH_INDEX=" in torch_index.choose(None, {}, has_gpu, answers).message


def test_settings_are_those_of_pip_install_and_variables_win() -> None:
    shown = "\n".join(
        [
            ":env:.cert='/env.pem'",
            ":env:.find-links=''",
            "download.proxy='http://other:1'",
            "global.cert='/global.pem'",
            "global.find-links='/a\\n/b'",
            "global.proxy='http://global:1'",
            "install.proxy='http://install:1'",
        ]
    )
    assert torch_index.pip_settings(shown) == {
        "cert": "/env.pem",
        "find-links": "/a\n/b",
        "proxy": "http://install:1",
    }


# ------------------------------------------------------------------------------------------------------ the GPU


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the root of a machine without a GPU, whose programs are in its folder `bin`."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()  # the driver alone
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def nvidia_smi(machine: Path, script: str) -> None:
    path = machine / "bin" / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_machine_without_a_gpu(machine: Path) -> None:
    assert not torch_index.has_nvidia_gpu(machine)


@pytest.mark.parametrize("path", ["dev/nvidia0", "dev/nvidia3", "proc/driver/nvidia/gpus/0000:01:00.0/information"])
def test_a_gpu_is_found_by_what_its_driver_shows(machine: Path, path: str) -> None:
    (machine / path).parent.mkdir(parents=True, exist_ok=True)
    (machine / path).touch()
    assert torch_index.has_nvidia_gpu(machine)


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'", True),
        ("echo 'No devices found.'", False),
        ("echo 'NVIDIA-SMI has failed'; exit 9", False),
    ],
)
def test_a_gpu_is_found_by_the_drivers_tool(machine: Path, script: str, found: bool) -> None:
    nvidia_smi(machine, script)
    assert torch_index.has_nvidia_gpu(machine) is found


def test_a_tool_that_cannot_run_shows_no_gpu(machine: Path) -> None:
    (machine / "bin" / "nvidia-smi").write_text("not a program")
    (machine / "bin" / "nvidia-smi").chmod(0o755)
    assert not torch_index.has_nvidia_gpu(machine)


# ---------------------------------------------------------------------------------------------------- the index


class Index(BaseHTTPRequestHandler):
    """An index with a page for torch, which is also a proxy to one."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200 if self.path.endswith("/whl/cpu/torch/") else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def asked() -> list[str]:
    return []


@pytest.fixture
def server(asked: list[str]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), type("AskedIndex", (Index,), {"asked": asked})) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()


@pytest.mark.parametrize(("path", "found"), [("/whl/cpu", True), ("/whl/cpu/", True), ("/whl/other", False)])
def test_an_index_answers_if_it_has_a_page_for_torch(server: str, path: str, found: bool) -> None:
    assert torch_index.answers(server + path, {}) is found


def test_pips_proxy_is_used(server: str, asked: list[str]) -> None:
    assert torch_index.answers("http://index.invalid/whl/cpu", {"proxy": server})
    assert asked == ["http://index.invalid/whl/cpu/torch/"]


def test_a_port_where_nobody_listens_does_not_answer() -> None:
    with socket.socket() as bound:  # bound, so that nobody else listens there either
        bound.bind(("127.0.0.1", 0))
        assert not torch_index.answers(f"http://127.0.0.1:{bound.getsockname()[1]}", {})


def test_a_server_that_says_nothing_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not torch_index.answers(f"http://127.0.0.1:{silent.getsockname()[1]}", {}, seconds=0.2)


@pytest.mark.parametrize("index", ["nonsense", "http://", "http://name with spaces/", "ftp://127.0.0.1:1"])
def test_what_is_no_address_of_an_index_does_not_answer(index: str) -> None:
    assert not torch_index.answers(index, {})


def test_certificates_that_are_not_there_mean_no_answer(server: str) -> None:
    assert not torch_index.answers(f"{server}/whl/cpu", {"cert": "/nowhere.pem"})


def test_the_index_alone_goes_to_stdout() -> None:
    for wanted in ("https://mirror.example/cpu", ""):
        ran = subprocess.run(
            [sys.executable, str(TOOL)],
            env={**os.environ, "TORCH_INDEX": wanted},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert ran.stdout.strip() == wanted
        assert "TORCH_INDEX" in ran.stderr


# -------------------------------------------------------------------------------------------------- the Makefile

# In place of .venv/bin/python: writes down how it is called. $TOOL is what it does as tools/torch_index.py.
PYTHON = """#!/bin/sh
case "$1" in *torch_index.py) eval "$TOOL" ;; *) echo "$@" >> calls ;; esac
"""


def make(folder: Path, tool: str, *arguments: str) -> tuple[int, list[str]]:
    """Run `make` in a folder with the project's Makefile and a made-up .venv: its exit status, and pip's calls."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    ran = subprocess.run(["make", *arguments], cwd=folder, env={"PATH": os.environ["PATH"], "TOOL": tool}, check=False)
    calls = folder / "calls"
    return ran.returncode, calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.advisory("CVE-2026-54232")
def test_torch_alone_comes_from_the_index(tmp_path: Path) -> None:
    status, calls = make(tmp_path, "echo https://index.example/cpu", "install")
    assert status == 0
    assert [("--index-url https://index.example/cpu torch" in call, call.endswith("-e .")) for call in calls] == [
        (True, False),
        (False, True),
    ]
    assert "--no-deps" in calls[0]
    assert all("-c constraints.txt" in call for call in calls)


def test_without_an_index_pip_decides(tmp_path: Path) -> None:
    status, calls = make(tmp_path, "true", "install")
    assert status == 0
    assert ["--index-url" in call for call in calls] == [False]


def test_the_variable_of_make_reaches_the_tool(tmp_path: Path) -> None:
    _, calls = make(tmp_path, 'echo "$TORCH_INDEX"', "TORCH_INDEX=https://mine.example/simple", "install")
    assert "--index-url https://mine.example/simple torch" in calls[0]


def test_make_stops_if_the_choice_fails(tmp_path: Path) -> None:
    status, calls = make(tmp_path, "exit 1", "install")
    assert status != 0
    assert not calls

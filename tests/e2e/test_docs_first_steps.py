"""The first steps of README and quick start, as they are written, against the embedded model."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ferrule_testkit import server as servers
from tools import ROOT

PAGES = (ROOT / "README.md", ROOT / "docs" / "quickstart.md")
BASE = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def url(tiny_server: servers.Server) -> str:
    return tiny_server.url


def blocks(language: str) -> list[tuple[str, str]]:
    """Name of the page and text of each of its blocks in the language."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [(page.stem, body) for page in PAGES for body in pattern.findall(page.read_text(encoding="utf-8"))]


def run(words: list[str], variables: dict[str, str] | None = None) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **(variables or {})}
    done = subprocess.run(
        words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl(url: str) -> None:
    found = [(page, body) for page, body in blocks("bash") if body.startswith("curl ")]
    assert [page for page, _ in found] == ["README", "README", "quickstart"]
    for _, body in found:
        out = run(["/bin/sh", "-c", body.replace(BASE, url)])
        assert ("Paris" if "France" in body else "data: [DONE]") in out


def test_programs(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run each in this process, which has imported what they import."""
    found = [(page, body) for page, body in blocks("python") if "OpenAI" in body]
    assert [page for page, _ in found] == ["README", "README", "quickstart"]
    for _, body in found:
        assert BASE in body
        (tmp_path / "program.py").write_text(body.replace(BASE, url), encoding="utf-8")
        runpy.run_path(str(tmp_path / "program.py"), run_name="__main__")
        out = capsys.readouterr().out
        if "BaseModel" in body:
            *thoughts, capital, required, named = out.splitlines()
            assert thoughts
            assert (capital, required, named) == ("Paris", '{"city": "Lisbon"}', '{"city": "Lisbon"}')
        else:
            assert "I am Tiny" in out, out


def test_offline(tmp_path: Path) -> None:
    """Run the example with the embedded model instead of the reader's folder."""
    from ferrule_contrib import tiny

    (body,) = (body for _, body in blocks("python") if "LLM" in body)
    model = Path(tiny.__file__).parent / "checkpoint"
    assert run([sys.executable, "-c", body.replace("path/to/a/hugging-face/folder", str(model))]).strip()


def test_in_a_terminal(url: str) -> None:
    lines = [line for page, body in blocks("bash") if page == "quickstart" for line in body.splitlines()]
    asked = [line.partition("  #")[0].strip() for line in lines if re.match(r"ferrule (chat|complete) -q", line)]
    assert len(asked) == 2
    for line in asked:
        words = re.findall(r'"([^"]*)"|(\S+)', line.removeprefix("ferrule "))
        argv = [quoted or plain for quoted, plain in words]
        assert run([sys.executable, "-m", "ferrule", *argv, "--url", f"{url}/v1", "--temperature", "0"]).strip()

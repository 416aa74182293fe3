"""`ferrule serve --dry-run`: the resolved configuration with origins, and the processes; nothing starts."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ferrule.launch import cli


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(["serve", *argv]) == 0
    return capsys.readouterr().out


def rows(text: str) -> dict[str, list[str]]:
    """First column → the others."""
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith("  ")}


def test_what_is_not_the_default_is_shown_with_its_origin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-num-seqs: 3\nhost: 127.0.0.1\nport: 1\n")
    monkeypatch.setenv("FERRULE_PORT", "9001")
    monkeypatch.setenv("FERRULE_CPU_KVCACHE_SPACE", "0.5")
    out = run(capsys, "org/name", "--dry-run", "--config", str(file), "--api-key", "hunter2", "--swap-space", "9")
    found = rows(out)
    assert found["--max-num-seqs"] == ["3", f"{file}:1"]
    assert found["--port"] == ["9001", "environment"]
    assert found["--model"] == ["org/name", "command", "line"]
    assert found["--served-model-name"] == ["org/name", "resolved"]
    assert found["--max-num-batched-tokens"] == ["2048", "resolved"]
    assert found["--swap-space"] == ["9.0", "command", "line"]
    assert found["--api-key"] == ["(hidden)", "command", "line"]
    assert found["FERRULE_CPU_KVCACHE_SPACE"] == ["0.5", "environment"]
    assert "hunter2" not in out
    assert "--dtype" not in found


def test_the_process_table(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(run(capsys, "--dry-run", "--api-server-count", "3", "--host", "127.0.0.1"))
    assert [name for name in found if not name.startswith("-")] == ["launcher", "engine-0", "api-0", "api-1", "api-2"]
    assert " ".join(found["api-2"]) == "api HTTP on 127.0.0.1, port 8000 (python -m ferrule.launch.child api)"
    found = rows(run(capsys, "--dry-run", "--disable-frontend-multiprocessing"))
    assert [name for name in found if not name.startswith("-")] == ["launcher"]


def test_all_values(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(run(capsys, "--dry-run=all"))
    assert found["--dtype"] == ["auto", "default"]
    assert found["--api-key"] == ["(none)", "default"]
    assert found["--tensor-parallel-size"] == ["1", "default"]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "--dry-run=json", "--port", "7"))
    assert found["configuration"]["port"] == {"value": 7, "origin": "command line"}
    assert found["configuration"]["dtype"] == {"value": "auto", "origin": "default"}
    assert [process["role"] for process in found["processes"]] == ["supervisor", "engine", "api"]


def test_the_word_behind_it_is_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert rows(run(capsys, "--dry-run", "org/name"))["--model"][0] == "org/name"
    assert cli.main(["serve", "--dry-run=some"]) == 2
    assert "expected one of: changed, all, json" in capsys.readouterr().err


def test_contradictions_and_names_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--dry-run", "--device", "gpu"]) == 2
    assert "no platform plugin 'gpu'" in capsys.readouterr().err
    assert cli.main(["serve", "--dry-run", "--max-num-seqs", "8", "--max-num-batched-tokens", "7"]) == 2


def test_nothing_is_bound_or_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code = (
            "import sys\nfrom ferrule.launch.cli import main\n"
            f"status = main(['serve', '--dry-run', '--host', '127.0.0.1', '--port', '{taken.getsockname()[1]}'])\n"
            "sys.exit(status or ('torch' in sys.modules) or ('uvicorn' in sys.modules))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr

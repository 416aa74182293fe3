"""What each process imports before its first request. Modules are counted, not seconds: a machine may be slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

LAUNCHER = """
import ferrule.launch.supervisor
ferrule.launch.supervisor.Supervisor.run = lambda self: 0
from ferrule.launch.cli import main
main(["serve", "--port", "0"])
"""
API = """
import ferrule.launch.child, ferrule.launch.api_main, uvloop
from ferrule.plugin import discover
plugins = discover()
for kind, name in (("router", "openai"), ("router", "health"), ("stat_logger", "prometheus"), ("tokenizer", "auto")):
    plugins.load(kind, name)
"""
ENGINE = """
import ferrule.launch.child, ferrule.launch.engine_main
from ferrule.plugin import discover
plugins = discover()
for kind, name in (("executor", "uni"), ("model", "LlamaForCausalLM"), ("attention", "cpu"), ("platform", "cpu")):
    plugins.load(kind, name)
"""


def imported(code: str) -> set[str]:
    """Names of all modules, in a process that ran `code`."""
    code = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}  # has modules, too
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("code", "most", "never"),
    [
        (
            LAUNCHER,
            280,
            ("torch", "numpy", "transformers", "tokenizers", "zmq", "uvicorn", "starlette", "uvloop", "ssl", "fastapi"),
        ),
        (
            API,
            710,  # FastAPI and pydantic are 110 of them
            ("torch", "numpy", "transformers", "aiohttp", "huggingface_hub", "prompt_toolkit", "ferrule.runner"),
        ),
        (ENGINE, 1350, ("transformers", "tokenizers", "uvicorn", "starlette", "aiohttp", "huggingface_hub", "triton")),
    ],
    ids=["launcher", "api", "engine"],
)
def test_a_process_imports_what_it_needs(code: str, most: int, never: tuple[str, ...]) -> None:
    modules = imported(code)
    assert modules.isdisjoint(never)
    assert len(modules) <= most

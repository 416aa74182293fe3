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

# The engine's process as it is put together, with an executor that runs no model.
SIMULATED = """
import ferrule.launch.child, ferrule.launch.engine_main
from ferrule.assembly.engine import build_engine, open_executor
from ferrule.config import Config, ModelConfig, ParallelConfig
from ferrule.config.resolve import resolve
from ferrule.plugin import discover
from ferrule.wire.queues import QueueChannel
from ferrule_contrib import tiny
plugins = discover()
parallel = ParallelConfig(distributed_executor_backend="simulated")
config = resolve(Config(model=ModelConfig(model=str(tiny.path())), parallel=parallel))
build_engine(config, plugins, QueueChannel(print), open_executor(config, plugins), cache_root=b"root")
"""


def imported(code: str) -> set[str]:
    """Return the names of all modules, in a process that ran `code`."""
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
            285,
            ("torch", "numpy", "transformers", "tokenizers", "zmq", "uvicorn", "starlette", "asyncio", "fastapi"),
        ),
        (
            API,
            795,  # FastAPI and pydantic are 110 of them
            ("torch", "numpy", "transformers", "aiohttp", "huggingface_hub", "prompt_toolkit", "ferrule.runner"),
        ),
        (ENGINE, 1405, ("transformers", "tokenizers", "uvicorn", "starlette", "aiohttp", "huggingface_hub", "triton")),
        (SIMULATED, 450, ("torch", "numpy", "transformers", "tokenizers", "uvicorn", "starlette")),
    ],
    ids=["launcher", "api", "engine", "engine-without-model"],
)
def test_a_process_imports_what_it_needs(code: str, most: int, never: tuple[str, ...]) -> None:
    modules = imported(code)
    assert modules.isdisjoint(never)
    assert len(modules) <= most

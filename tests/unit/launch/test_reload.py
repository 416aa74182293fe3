"""What SIGHUP takes of a changed configuration, and how each process gets its part."""

from __future__ import annotations

import asyncio
import logging
import os
import pty
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from ferrule.api.reload import Reloads
from ferrule.config import Config, FrontendConfig, LimitsConfig, ModelConfig, ObservabilityConfig
from ferrule.config.resolve import resolve
from ferrule.errors import ConfigError
from ferrule.launch.reload import RELOADED, merge, tell, told

GIVEN = Config(model=ModelConfig(model="m"), frontend=FrontendConfig(port=1, api_key=("a",)))
RUNNING = replace(resolve(GIVEN), model=replace(resolve(GIVEN).model, model="/folder"))  # what became of it


def test_what_can_be_reloaded_is_taken_and_the_rest_is_named() -> None:
    new = Config(
        model=ModelConfig(model="other"),
        frontend=FrontendConfig(port=2, api_key=("b",)),
        observability=ObservabilityConfig(log_level="debug", disable_log_stats=True),
        limits=LimitsConfig(max_n=5, max_connections=9),
    )
    config, stale = merge(RUNNING, GIVEN, new)
    assert sorted(stale) == ["--disable-log-stats", "--max-connections", "--model", "--port"]
    assert (config.frontend.api_key, config.observability.log_level, config.limits.max_n) == (("b",), "debug", 5)
    assert (config.model.model, config.frontend.port, config.limits.max_connections) == ("/folder", 1, 4096)
    assert merge(config, GIVEN, GIVEN) == (RUNNING, [])  # and back


def test_the_list_names_options() -> None:
    for section, names in RELOADED.items():
        assert names <= {field.name for field in fields(getattr(Config(), section))}


def test_values_that_contradict_each_other_are_not_taken() -> None:
    with pytest.raises(ConfigError, match="is empty"):
        merge(RUNNING, GIVEN, Config(frontend=FrontendConfig(api_key=(" ",))))


def test_the_configuration_travels_by_a_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="config.json"):
        told(tmp_path)
    tell(tmp_path, RUNNING)
    assert told(tmp_path) == RUNNING


async def test_one_part_that_fails_keeps_no_other_from_its_own(caplog: pytest.LogCaptureFixture) -> None:
    reloads, seen = Reloads(), list[Config]()

    def fail(config: Config) -> None:
        raise OSError("keys.txt: permission denied")

    reloads.add("keys", fail)
    reloads.add("limits", seen.append)
    configs = [RUNNING]
    with caplog.at_level(logging.INFO), reloads.on_hangup(configs.pop):
        os.kill(os.getpid(), signal.SIGHUP)
        while not seen:
            await asyncio.sleep(0.01)
    assert seen == [RUNNING]
    assert "keys stay as they were: keys.txt: permission denied" in caplog.text
    assert caplog.messages[-1].startswith("SIGHUP: reloaded limits")


HANGUP = """
import os, signal, sys, time
os.close(os.open(sys.argv[1], os.O_RDWR))  # of a session's first terminal it becomes its own
from ferrule.launch.reload import Terminal
if len(sys.argv) > 2: signal.signal(signal.SIGHUP, signal.SIG_IGN)
terminal = Terminal()
gone = []
signal.signal(signal.SIGHUP, lambda *given: gone.append(terminal.is_gone()))
print(terminal.is_gone(), flush=True)
while not gone: time.sleep(0.01)
sys.exit(10 + gone[0])
"""


@pytest.mark.parametrize("nohup", [False, True])
def test_a_terminal_that_is_closed_asks_to_stop(nohup: bool) -> None:
    """Stop by the SIGHUP that the kernel then sends; not so under nohup."""
    ours, terminal = pty.openpty()
    words = [sys.executable, "-c", HANGUP, os.ttyname(terminal), *(["nohup"] if nohup else [])]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"False\n"
        os.close(terminal)
        os.close(ours)
        assert process.wait(240) == (10 if nohup else 11)

"""The library that fails the Nth call, the loop around it, and a fault that it found."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ferrule_testkit.server import WITHOUT_MODEL
from tools.campaign import nth_failure, nth_shim
from tools.campaign.nth_failure import Campaign
from tools.campaign.nth_shim import Cell, Shim

pytestmark = pytest.mark.skipif(
    nth_shim.compiler() is None or not sys.platform.startswith("linux"), reason="needs a C compiler, and LD_PRELOAD"
)

_OPENS = """
import os
print("begun", flush=True)
input()
for _ in range(4):
    try:
        os.close(os.open("/dev/null", os.O_RDONLY))
        print("opened")
    except OSError as error:
        print(error.errno)
"""

_SENDS = """
import sys
import threading
from pathlib import Path
from ferrule.wire.engine_socket import ClientSocket, EngineSocket
from ferrule.wire.messages import Call

path = Path(sys.argv[3])
engine, client = EngineSocket(path), ClientSocket(path, b"api-0")

def received(name):
    client.send(Call(0, name))
    return any(message.name == name for _ in range(20) for _, message in engine.receive(0.5))

print("begun" if received("one") else "nothing", flush=True)
input()
print("received" if received("two") and received("three") else "lost")
client.close()
engine.close()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nth_shim.build(tmp_path_factory.mktemp("shim"))


def _played(text: str, shim: Shim, cell: Cell, nth: int, error: int, *words: str) -> list[str]:
    """Return the output of a script that looks like an API process, and that says when the calls begin to count."""
    process = subprocess.Popen(
        [sys.executable, "-c", text, "ferrule.launch.child", "api", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **shim.env},
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        shim.arm(cell, nth, error)
        return process.communicate("\n", timeout=60)[0].split()


def test_only_the_nth_call_fails_and_all_are_counted(library: Path, tmp_path: Path) -> None:
    shim, cell = Shim(library, tmp_path), Cell("api", "open")
    assert _played(_OPENS, shim, cell, 3, errno.EMFILE) == ["opened", "opened", str(errno.EMFILE), "opened"]
    assert shim.failed
    assert shim.hits[cell] == 4
    assert shim.where.startswith("open")


def test_calls_of_another_role_do_not_fail(library: Path, tmp_path: Path) -> None:
    shim = Shim(library, tmp_path)
    assert _played(_OPENS, shim, Cell("engine", "open"), 3, errno.EMFILE) == ["opened"] * 4
    assert not shim.failed


@pytest.mark.parametrize("error", [errno.ENOBUFS, errno.EPIPE])
def test_a_message_to_the_engine_arrives_though_its_write_has_failed(library: Path, tmp_path: Path, error: int) -> None:
    shim = Shim(library, tmp_path)
    assert _played(_SENDS, shim, Cell("api", "send"), 1, error, str(tmp_path / "socket")) == ["received"]
    assert shim.failed


def test_a_server_is_right_after_a_call_that_failed(library: Path) -> None:
    (row,) = Campaign(library, [Cell("api", "send")], (0, 1)).serve(WITHOUT_MODEL)
    assert row.hits > 20
    assert not row.failures, row.notes
    assert sum(row.outcomes.values()) == 1


def test_numbers_are_spread_over_the_hits() -> None:
    assert nth_failure.spread(10, 4) == [2, 4, 7, 9]
    assert nth_failure.spread(3, 4) == [1, 2, 3]
    assert nth_failure.spread(0, 4) == []

"""What signals do, and the exit status of each end. docs/http.md has the table."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ferrule_testkit import server as servers

ARGS = ["--served-model-name", "tiny", *servers.WITHOUT_MODEL, *servers.FEW_ROUTES]
SLEEPS = "time.sleep(3600)"
IS_STUCK = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); time.sleep(3600)"
BROKEN = "raise RuntimeError('broken')"


def policy(folder: Path, name: str, code: str) -> list[str]:
    """Return options with which the engine runs `code` while it loads. A file NAME.begun tells that it has come so
    far.
    """
    file = folder / f"{name}.py"
    head = "import signal, time\nfrom pathlib import Path\nfrom ferrule_plugins.policy.fcfs import FcfsPolicy\n"
    begun = "Path(__file__).with_suffix('.begun').touch()"
    lines = ["class Policy(FcfsPolicy):", "    def __init__(self):", f"        {begun}", f"        {code}"]
    file.write_text(head + "\n".join(lines), encoding="utf-8")
    return ["--plugin", f"policy={file}", "--scheduling-policy", name]


def full_pipe() -> tuple[int, int]:
    """Return both ends of a pipe into which nothing more fits."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 512)
    os.set_blocking(write, True)
    return read, write


def post(url: str, key: str, **body: Any) -> int:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    data = json.dumps({"model": "tiny", "prompt": [5, 6], "max_tokens": 2, **body}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", data, headers)) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_exit_status_of_a_stop_before_the_server_is_ready(tiny_llama: Path, tmp_path: Path) -> None:
    """Exit with the status of the signal, whatever the engine is doing. All run at once, because each has to start."""

    @contextmanager
    def start(name: str, *args: str) -> Iterator[servers.Server]:
        with servers.started([str(tiny_llama), *ARGS, *args], tmp_path / f"{name}.log", env) as server:
            yield server

    env = {"OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        began = stack.enter_context(start("began"))
        began.process.send_signal(signal.SIGTERM)
        imports = stack.enter_context(start("imports", *policy(tmp_path, "imports", SLEEPS)))
        sleeps = stack.enter_context(start("sleeps", *policy(tmp_path, "sleeps", SLEEPS)))
        stuck = stack.enter_context(start("stuck", *policy(tmp_path, "stuck", IS_STUCK)))
        broken = stack.enter_context(start("broken", *policy(tmp_path, "broken", BROKEN)))
        assert servers.until(lambda: "engine" in imports.children())
        imports.process.send_signal(signal.SIGINT)
        assert servers.until((tmp_path / "sleeps.begun").exists)
        sleeps.process.send_signal(signal.SIGTERM)
        assert servers.until((tmp_path / "stuck.begun").exists)
        stuck.process.send_signal(signal.SIGQUIT)
        statuses = {server.log.stem: server.process.wait(240) for server in (began, imports, sleeps, stuck, broken)}
    assert statuses == {
        "began": -signal.SIGTERM,  # before Ferrule knows of signals
        "imports": 128 + signal.SIGINT,
        "sleeps": 128 + signal.SIGTERM,
        "stuck": 128 + signal.SIGQUIT,
        "broken": 1,
    }
    assert "does not stop, killing it name=engine-0" in stuck.text()
    assert "killing it name=engine-0" not in sleeps.text()
    assert "Traceback" not in sleeps.text()


# Takes standard input as its terminal, which stops what logs from the background (`stty tostop`), and starts a server.
ON_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
mode = termios.tcgetattr(0)
mode[3] |= termios.TOSTOP
termios.tcsetattr(0, termios.TCSANOW, mode)
os.execv(sys.executable, [sys.executable, "-m", "ferrule", "serve", *sys.argv[1:]])
"""


def test_a_terminal(tiny_llama: Path, tmp_path: Path) -> None:
    """Put all processes into one session, so that Linux shares processors among them alike; Ctrl-C is the
    launcher's.
    """
    ours, theirs = os.openpty()
    output: list[bytes] = []

    def shown() -> None:
        with contextlib.suppress(OSError):  # nobody has the other end any more
            while piece := os.read(ours, 1 << 12):
                output.append(piece)

    reader = threading.Thread(target=shown)
    with servers.own_port() as port:
        args = [str(tiny_llama), *ARGS, "--host", "127.0.0.1", "--port", str(port)]
        command = [sys.executable, "-c", ON_A_TERMINAL, *args]
        with subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, **servers.LIMITS},
        ) as process:
            os.close(theirs)
            reader.start()
            server = servers.Server(process, port, tmp_path / "none")
            try:
                assert servers.until(lambda: server.health() == 200), b"".join(output).decode()
                children = server.children()
                assert {role: os.getsid(pid) for role, pid in children.items()} == dict.fromkeys(children, process.pid)
                assert {role: os.getpgid(pid) for role, pid in children.items()} == children
                os.write(ours, b"\x03")
                assert process.wait(240) == 0
            finally:
                process.kill()
    reader.join()
    os.close(ours)
    assert b"Traceback" not in b"".join(output)


@pytest.mark.parametrize("broken", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_pipe_that_nobody_reads_holds_up_no_exit(broken: bool, tiny_llama: Path, tmp_path: Path) -> None:
    read, write = full_pipe()
    args = [*ARGS, "--host", "127.0.0.1", *(policy(tmp_path, "broken", BROKEN) if broken else ())]
    with servers.own_port() as port:
        command = [sys.executable, "-m", "ferrule", "serve", str(tiny_llama), *args, "--port", str(port)]
        with subprocess.Popen(command, stdout=write, stderr=write, env={**os.environ, **servers.LIMITS}) as process:
            os.close(write)
            server = servers.Server(process, port, tmp_path / "none")
            if not broken:
                assert servers.until(lambda: server.health() == 200)
                process.send_signal(signal.SIGQUIT)  # drains, as SIGTERM does
            try:
                assert process.wait(240) == broken
            finally:
                process.kill()
                os.close(read)


def reload(server: servers.Server, change: Callable[[], object], word: str) -> None:
    """Change a file, send SIGHUP, and wait for what the log says."""
    before = server.text().count(word)
    change()
    server.process.send_signal(signal.SIGHUP)
    assert servers.until(lambda: server.text().count(word) > before), server.text()


def test_sighup_takes_what_needs_no_restart(tiny_llama: Path, tmp_path: Path) -> None:
    options = tmp_path / "serve.yaml"
    options.write_text("api-key: [first]\nmax-n: 3\nlog-level: info\nmax-model-len: 64\n")
    args = [str(tiny_llama), *ARGS, "--config", str(options)]
    with servers.running(args, tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as server:
        assert [post(server.url, key, n=3) for key in ("first", "second")] == [200, 401]
        assert post(server.url, "first", n=4) == 400
        new = "api-key: [second]\nmax-n: 4\nmax-model-len: 32\nmax-body-bytes: 100\nlog-level: debug\n"
        reload(
            server, lambda: options.write_text(new), "SIGHUP: reloaded keys, limits of bodies, log levels of HTTP, log"
        )
        assert [post(server.url, key, n=4) for key in ("first", "second")] == [401, 200]
        assert post(server.url, "second", n=5) == 400
        assert post(server.url, "second", user="x" * 200) == 413
        assert "need a restart, which stay as they were: --max-model-len\n" in server.text()
        reload(server, lambda: options.write_text("max-n: many\n"), "SIGHUP: nothing is reloaded")
        assert post(server.url, "second", n=4) == 200
        assert server.stop() == 0

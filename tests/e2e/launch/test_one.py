"""A Unix socket instead of a port, one process instead of two, and an engine that stands still."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from ferrule_testkit import server as servers

ARGS = ["--dtype", "float32", "--served-model-name", "tiny", *servers.WITHOUT_MODEL, *servers.FEW_ROUTES]
BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "temperature": 0}


# ------------------------------------------------------------------------------------------------ Unix socket


class UnixServer:
    """A process of `ferrule serve ARGS --uds PATH`."""

    def __init__(self, path: Path, args: Sequence[str], log: Path, umask: int = 0o077) -> None:
        command = [sys.executable, "-m", "ferrule", "serve", *args, "--uds", str(path)]
        self.log = log
        self.path = path
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                umask=umask,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.http = httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=240)

    def healthy(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.http.get("/health").status_code == 200
        return self.process.poll() is not None

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(240)


@contextlib.contextmanager
def unix(path: Path, *args: str, umask: int = 0o077) -> Iterator[UnixServer]:
    server = UnixServer(path, args, path.with_suffix(".log"), umask)
    try:
        assert servers.until(server.healthy), server.log.read_text()
        assert server.process.poll() is None, server.log.read_text()
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


@pytest.mark.parametrize(
    "processes",
    [["-asc", "2"], pytest.param(["--disable-frontend-multiprocessing"], marks=pytest.mark.slow)],
    ids=["two", "one"],
)
def test_unix_socket(tiny_llama: Path, tmp_path: Path, processes: list[str]) -> None:
    path = tmp_path / "f.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # as a server leaves it that was killed
    with unix(path, str(tiny_llama), *ARGS, *processes, umask=0o017) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o760
        for _ in range(4):
            assert server.http.post("/v1/completions", json=BODY).status_code == 200
        assert "vllm:request_success_total" in server.http.get("/metrics").text
        for said in (
            f"ready at http+unix://{str(path).replace('/', '%2F')}/v1",
            '- - "POST /v1/completions',  # no client's address
        ):
            assert servers.until(lambda said=said: said in server.log.read_text()), said
        for url in (f"unix:{path}", f"http+unix://{str(path).replace('/', '%2F')}/v1"):
            asked = subprocess.run(
                [sys.executable, "-m", "ferrule", "complete", "--url", url, "-q", "hello", "--max-tokens", "4"],
                capture_output=True,
                text=True,
                timeout=240,
                check=False,
            )
            assert (asked.returncode, bool(asked.stdout)) == (0, True), asked.stderr
        second = subprocess.run(
            [sys.executable, "-m", "ferrule", "serve", str(tiny_llama), "--uds", str(path)],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert second.returncode == 1
        assert f"Cannot listen on {path}: a server is listening there" in second.stderr
        assert "Traceback" not in second.stderr
        assert server.http.get("/health").status_code == 200
        assert server.stop() == 0
    assert not path.exists()


# ------------------------------------------------------------------------------------------------ one process


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    key, crt = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(crt)),
        ],
        check=True,
        capture_output=True,
    )
    return key, crt


def test_one_process_has_everything(tiny_llama: Path, tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    """Serve with TLS, figures and a drain, in one process."""
    key, crt = certificate
    gate = servers.Gate(tmp_path)
    args = [str(tiny_llama), *ARGS, "--disable-frontend-multiprocessing", *gate.args]
    args += ["--ssl-keyfile", str(key), "--ssl-certfile", str(crt)]
    context = ssl.create_default_context(cafile=crt)
    with (
        servers.started(args, tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as server,
        httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=context, timeout=30) as http,
        ThreadPoolExecutor() as pool,
    ):

        def health() -> int:
            with contextlib.suppress(httpx.TransportError):
                return http.get("/health").status_code
            return 0

        assert servers.until(lambda: server.process.poll() is not None or health() == 200), server.text()
        assert server.children() == {}
        assert server.says(f"ready at https://127.0.0.1:{server.port}/v1")
        assert http.post("/v1/completions", json=BODY).status_code == 200
        text = http.get("/metrics").text
        assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 1.0' in text
        assert "\nprocess_resident_memory_bytes " in text
        with gate.shut(after=20):
            body = {**BODY, "max_tokens": 200}
            answer = pool.submit(http.post, "/v1/completions", json=body, timeout=240)
            assert servers.until(lambda: server.taken() == 2)
            server.process.send_signal(signal.SIGTERM)
            assert servers.until(lambda: health() == 503)
        assert server.process.wait(240) == 0
        assert answer.result().json()["usage"]["completion_tokens"] == 200


def test_one_process_is_not_several(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ferrule", "serve", "--disable-frontend-multiprocessing", "-asc", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    assert "--api-server-count" in done.stderr


# ------------------------------------------------------------------------------------------------ stalled


def test_an_engine_that_is_stopped_is_noticed_and_comes_back(tiny_llama: Path, tmp_path: Path) -> None:
    with servers.running([str(tiny_llama), *ARGS], tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as server:
        engine = server.children()["engine"]
        with httpx.Client(base_url=server.url, timeout=240) as http:
            answers: list[httpx.Response] = []
            asking = threading.Thread(
                target=lambda: answers.append(http.post("/v1/completions", json={**BODY, "max_tokens": 240}))
            )
            os.kill(engine, signal.SIGSTOP)
            asking.start()
            assert servers.until(lambda: server.health() == 503)
            assert "stalled" in http.get("/health").json()["error"]["message"]
            refused = http.post("/v1/completions", json=BODY)
            assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
            os.kill(engine, signal.SIGCONT)
            assert servers.until(lambda: server.health() == 200), server.text()
            asking.join()
            assert answers[0].json()["usage"]["completion_tokens"] == 240
        assert server.children()["engine"] == engine
        assert server.stop() == 0


def test_an_engine_that_stays_stopped_ends_the_server(tiny_llama: Path, tmp_path: Path) -> None:
    """End the server by the watchdog, which has time enough for what is slow only because the machine is busy."""
    args = [str(tiny_llama), *ARGS, "--watchdog-timeout", "6"]
    with servers.running(args, tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as server:
        pids = servers.descendants(server.process.pid)
        os.kill(server.children()["engine"], signal.SIGSTOP)
        assert server.process.wait(240) != 0
        assert server.says("does not respond")
        assert servers.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))

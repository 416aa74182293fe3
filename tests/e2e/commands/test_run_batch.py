"""`ferrule run-batch`: killed, stopped, out of disk, with URLs, and compared with a run in peace.

What a signal or a limit of the system ends is a process; the other runs are in this one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from ferrule import log
from ferrule.launch.cli import main
from ferrule_plugins.command.run_batch import run as run_module
from ferrule_testkit.server import WITHOUT_MODEL, own_port

ROWS = 120
QUIET = ("--disable-log-requests", "--disable-log-stats", "--dtype", "float32", "--max-model-len", "512")


def request(number: int) -> bytes:
    """Return one of mixed rows: chats, completions with a seed, and every eighth one bad in its own way."""
    custom_id, url, method = f"row-{number}", "/v1/chat/completions", "POST"
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"What is {10 + number % 80} plus 12?"}],
        "temperature": 0,
        "seed": number,
        "max_tokens": 16,
    }
    if number % 3 == 0:
        url = "/v1/completions"
        body = {"prompt": f"Count to {number}:", "max_tokens": 12, "temperature": 1.0, "seed": number}
    match number % 40:
        case 7:
            return b'{"custom_id": "torn'
        case 15:
            body["max_tokens"] = -1
        case 23:
            custom_id = "row-1"
        case 31:
            url = "/v1/nothing"
        case 39:
            body["stream"] = True
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body}).encode()


def write_rows(path: Path, count: int = ROWS) -> Path:
    path.write_bytes(b"\n".join(request(number) for number in range(count)) + b"\n")
    return path


def arguments(source: object, target: object, *more: object) -> list[str]:
    return ["run-batch", "-i", str(source), "-o", str(target), *QUIET, *WITHOUT_MODEL, *map(str, more)]


def run(*argv: Any, timeout: float = 240, **options: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "ferrule", *arguments(*argv)]
    options.setdefault("env", {**os.environ, "OMP_NUM_THREADS": "1"})
    return subprocess.run(line, capture_output=True, text=True, timeout=timeout, check=False, **options)


class Here:
    """Runs the command in this process. `status`, and what it wrote to both outputs, are those of the last run."""

    def __init__(self) -> None:
        self.status, self.out, self.err = -1, "", ""

    def __call__(self, *argv: Any) -> int:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            self.status = main(arguments(*argv))
            log.flush(240)
        self.out, self.err = out.getvalue(), err.getvalue()
        return self.status


@pytest.fixture(scope="module")
def here() -> Here:
    return Here()


_HOLDING = """
import time
from pathlib import Path

from ferrule_plugins.policy.fcfs import FcfsPolicy

class Holding(FcfsPolicy):
    def key(self, view, now):
        while view.sequence > MOST and not Path(__file__).with_name("go").exists():
            time.sleep(0.002)
        return super().key(view, now)
"""


def holding(folder: Path, most: int) -> tuple[str, ...]:
    """Return options that stop the engine once more than `most` rows have come to it, until a file `go` exists.

    As eight may be in flight, all but eight of those rows get their results, and no row after them.
    """
    (folder / "holding.py").write_text(_HOLDING.replace("MOST", str(most)))
    policy = ("--plugin", f"policy={folder / 'holding.py'}", "--scheduling-policy", "holding")
    return (*policy, "--max-inflight", "8", "--watchdog-timeout", "900")


@contextmanager
def started(*argv: Any) -> Iterator[subprocess.Popen[str]]:
    line = [sys.executable, "-m", "ferrule", *arguments(*argv)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], condition: Callable[[], bool], seconds: float = 240) -> bool:
    """Return True when the condition came to hold; False when the process ended first."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            return condition()
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)
    return True


def num_journalled(journal: Path) -> int:
    return max(journal.read_bytes().count(b"\n") - 1, 0) if journal.exists() else 0


def results(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def gist(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what two runs have in common: everything but ids and times."""
    body = row["response"]["body"]
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in body.get("choices", ())]
    return row["custom_id"], row["response"]["status_code"], json.dumps(row["error"]), *texts, str(body.get("usage"))


def gists(rows: Iterable[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [gist(row) for row in rows]


@pytest.fixture(scope="module")
def peaceful(here: Here, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """Return the results of an undisturbed run."""
    folder = tmp_path_factory.mktemp("peaceful")
    assert here(write_rows(folder / "in.jsonl"), folder / "out.jsonl") == 0, here.err
    assert f"{ROWS} rows: 105 answered, 15 with errors." in here.out
    assert sorted(path.name for path in folder.iterdir()) == ["in.jsonl", "out.jsonl"]
    return gists(results(folder / "out.jsonl"))


def test_each_line_has_its_result_in_the_order_of_the_input(peaceful: list[tuple[Any, ...]]) -> None:
    codes = {15: "BadRequestError", 23: "duplicate_custom_id", 31: "invalid_url", 39: "stream_unsupported"}
    assert len(peaceful) == ROWS
    for number, (custom_id, status, error, *_) in enumerate(peaceful):
        kind = number % 40
        if kind == 7:
            assert (custom_id, status) == (None, 400)
            assert json.loads(error) | {"message": ""} == {
                "code": "invalid_json_line",
                "message": "",
                "param": None,
                "line": number + 1,
            }
        elif kind in codes:
            assert custom_id == ("row-1" if kind == 23 else f"row-{number}")
            assert (status, json.loads(error)["code"], json.loads(error)["line"]) == (400, codes[kind], number + 1)
        else:
            assert (custom_id, status, error) == (f"row-{number}", 200, "null")


def test_killed_and_out_of_disk_it_loses_and_doubles_nothing(
    here: Here, tmp_path: Path, peaceful: list[tuple[Any, ...]]
) -> None:
    """Kill it, limit the size of its files, which stands for a full disk since both make a write fail in the middle,
    and let it finish. In between, a run of another model or with another input does not go on.
    """
    source, target = write_rows(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    journal = tmp_path / "out.jsonl.journal"
    moment = random.Random(5).randrange(1, 30)
    with started(source, target, *holding(tmp_path, 40)) as process:
        assert wait_for(process, lambda: num_journalled(journal) >= moment)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(240)
    assert not target.exists()
    with journal.open("ab") as torn:  # what a power cut may leave behind the last fsync
        torn.write(b'9999 200 {"id":"batch_req_')
    killed = num_journalled(journal)
    assert moment <= killed < ROWS

    before = journal.read_bytes()
    assert here(source, target, "--seed", "3") == 1
    assert "seed was None, is 3" in here.err
    other = write_rows(tmp_path / "other.jsonl", ROWS + 1)
    assert here(other, target) == 1
    assert "input_sha256 was" in here.err
    assert journal.read_bytes() == before
    assert not target.exists()

    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (40_000, 40_000))
    # The process could not write its coverage either.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = run(source, target, preexec_fn=limit, env=environment)
    assert done.returncode == 1
    assert f"resuming: {killed} of {ROWS} rows are done" in done.stderr
    assert "Cannot write" in done.stderr
    assert "file too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert not target.exists()
    full = num_journalled(journal)
    assert killed < full < ROWS

    assert here(source, target) == 0, here.err
    assert f"{ROWS - full} of them in" in here.out
    assert gists(results(target)) == peaceful
    assert not journal.exists()


@pytest.mark.parametrize(
    ("number", "again"),
    [(signal.SIGTERM, False), pytest.param(signal.SIGINT, True, marks=pytest.mark.slow)],
)
def test_a_signal_lets_what_runs_finish(
    here: Here, tmp_path: Path, number: int, again: bool, peaceful: list[tuple[Any, ...]]
) -> None:
    """Ask for figures while it runs, and for nothing else; then send it the signal."""
    source, target = write_rows(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    journal = tmp_path / "out.jsonl.journal"
    argv = (source, target, *holding(tmp_path, 40), "--enable-metrics", "--port")
    with own_port() as port, started(*argv, port) as process:
        assert wait_for(process, lambda: num_journalled(journal) >= 32)
        check_figures(f"http://127.0.0.1:{port}")
        process.send_signal(number)
        assert process.stderr is not None
        assert any("stopping: what runs is finished first" in line for line in process.stderr)
        (tmp_path / "go").touch()
        out, _ = process.communicate(timeout=240)
    assert process.returncode == 130
    kept = num_journalled(journal)
    assert f"{kept} of {ROWS} rows are done; run the same command again to continue." in out
    assert not target.exists()
    if again:
        assert here(source, target) == 0
        assert gists(results(target)) == peaceful


def check_figures(base: str) -> None:
    """Check that a run has figures and probes, and takes no work."""
    with urllib.request.urlopen(f"{base}/metrics", timeout=240) as response:
        text = response.read().decode()
    assert "http_requests_total" in text
    assert '/v1/chat/completions"' in text
    with urllib.request.urlopen(f"{base}/health", timeout=240) as response:
        assert response.status == 200
    ask = urllib.request.Request(f"{base}/v1/completions", b"{}", {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(ask, timeout=240)
    assert refused.value.code == 404


_DYING = """
import time
from pathlib import Path

from ferrule_plugins.policy.fcfs import FcfsPolicy

JOURNAL = Path(__file__).with_name("out.jsonl.journal")

class Dying(FcfsPolicy):
    def budget(self, running, waiting, limit):
        if JOURNAL.exists() and JOURNAL.read_bytes().count(b"\\n") > 5:
            FAULT
        return super().budget(running, waiting, limit)
"""


@pytest.mark.parametrize(
    ("fault", "said", "again"),
    [
        ('raise RuntimeError("planted")', "The engine has stopped", False),
        pytest.param("time.sleep(600)", "no progress for 5 s", True, marks=pytest.mark.slow),
    ],
)
def test_an_engine_that_dies_or_stalls_ends_it_and_the_next_run_goes_on(
    fault: str, said: str, again: bool, here: Here, tmp_path: Path, peaceful: list[tuple[Any, ...]]
) -> None:
    source, target = write_rows(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    (tmp_path / "dying.py").write_text(_DYING.replace("FAULT", fault))
    plugin = ("--plugin", f"policy={tmp_path / 'dying.py'}", "--scheduling-policy", "dying", "--max-inflight", "8")
    done = run(source, target, *plugin, "--watchdog-timeout", "5")
    assert done.returncode == 1, done.stderr
    assert said in done.stderr
    assert 0 < num_journalled(tmp_path / "out.jsonl.journal") < ROWS
    if again:
        assert here(source, target) == 0
        assert gists(results(target)) == peaceful


class Store(BaseHTTPRequestHandler):
    """One object to GET, and what was PUT. `failures` answers 503 that often first; `forbidden` refuses a PUT."""

    source = b""
    failures = 0
    forbidden = False
    puts: list[tuple[str, str | None, bytes]] = []  # set anew by the fixture

    def do_GET(self) -> None:
        if type(self).failures > 0:
            type(self).failures -= 1
            self.send_error(503)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.source)))
        self.end_headers()
        self.wfile.write(self.source)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = 403 if self.forbidden else 201
        type(self).puts.append((self.path, self.headers["Content-Type"], body))
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def store() -> Iterator[tuple[str, type[Store]]]:
    handler = type("Mine", (Store,), {"puts": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_urls_are_fetched_and_put_and_a_refused_upload_keeps_the_results(
    here: Here, tmp_path: Path, store: tuple[str, type[Store]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upload what a first try had to keep, without the model, when the same command is run again."""
    base, handler = store
    handler.source, handler.failures = write_rows(tmp_path / "in.jsonl", 20).read_bytes(), 1
    folder = tmp_path / "work"
    folder.mkdir()
    argv = (f"{base}/in.jsonl?sig=secret", f"{base}/out.jsonl?sig=secret", "--output-tmp-dir", folder)
    handler.forbidden = True
    assert here(*argv) == 1
    said = here.out + here.err
    assert f"PUT {base}/out.jsonl was answered 403." in said.replace("?…", "")
    [journal] = folder.iterdir()
    assert num_journalled(journal) == 20

    handler.puts.clear()
    handler.forbidden = False
    monkeypatch.setattr(run_module, "_work", lambda *_: pytest.fail("the model was loaded again"))
    assert here(*argv) == 0, here.err
    assert "secret" not in said + here.out + here.err
    [(path, kind, body)] = handler.puts
    assert (path, kind) == ("/out.jsonl?sig=secret", "application/jsonl")
    assert len(body.splitlines()) == 20
    assert list(folder.iterdir()) == []

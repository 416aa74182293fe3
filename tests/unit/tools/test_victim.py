"""The campaign's victim: a server that stalls, breaks a stream or answers 5xx beside an attack is found."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ferrule_testkit import server as servers
from tools.campaign import running
from tools.campaign.__main__ import Proof, prove, table
from tools.campaign.goals import Goal
from tools.campaign.running import Figures, Target, attacked
from tools.campaign.victim import BOUND, SAID, Seen, Streams, beside, longest_gap

Write = Callable[[bytes], None]
WORDS = ("one ", "two ", "three ")


def event(text: str, finish: str | None = None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text, "finish_reason": finish}]}).encode() + b"\n\n"


def whole(write: Write) -> None:
    for word in WORDS:
        write(event(word))
    write(event("", "length"))
    write(b"data: [DONE]\n\n")


class Scripted:
    """A server whose streams are written by `script`, by its number; after the last one it goes on with `whole`."""

    def __init__(self) -> None:
        self.scripts: list[Callable[[Write], None] | int] = []  # or the status of an answer
        self.keys: set[str | None] = set()
        self.bodies: list[dict[str, object]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                self._whole(200, {"data": [{"id": "tiny", "max_model_len": 100}]})

            def do_POST(self) -> None:
                outer.keys.add(self.headers["authorization"])
                outer.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                script = outer.scripts.pop(0) if outer.scripts else whole
                if isinstance(script, int):
                    self._whole(script, {"error": "planted"})
                    return
                self.send_response(200)
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                with contextlib.suppress(EOFError):
                    script(self._piece)
                    self.wfile.write(b"0\r\n\r\n")
                    return
                self.close_connection = True  # in the middle

            def _piece(self, data: bytes) -> None:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

            def _whole(self, status: int, body: object) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self.server.server_address[1])

    def plays(self, script: Callable[[Write], None] | int) -> None:
        """Wait until a stream has begun that is written by it."""
        self.scripts.append(script)
        assert servers.until(lambda: not self.scripts)


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    made = Scripted()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def streams(scripted: Scripted, *scripts: Callable[[Write], None] | int, key: str = "") -> Seen:
    """Return what a victim sees of these streams, after a first one that is whole."""
    made, seen = Streams(scripted.port, key), Seen()
    made.prepare()
    made.one(Seen())
    scripted.scripts += scripts
    for _ in scripts:
        made.one(seen)
    made.close()
    return seen


def test_whole_streams_are_no_problem_and_are_as_long_as_the_model_allows(scripted: Scripted) -> None:
    seen = streams(scripted, whole, whole, key="sk-1")
    assert (seen.streams, seen.refused, seen.problems) == (2, 0, [])
    assert scripted.keys == {"Bearer sk-1"}
    assert {body["max_tokens"] for body in scripted.bodies} == {44}


def test_a_server_that_stalls_is_found(scripted: Scripted) -> None:
    def stalls(write: Write) -> None:
        write(event("one two "))
        threading.Event().wait(2 * BOUND)
        write(event("three ", "length"))
        write(b"data: [DONE]\n\n")

    seen = streams(scripted, stalls)
    assert seen.gap > BOUND
    assert (seen.streams, seen.problems) == (1, [])
    assert "over 0.25" in seen.line()


def cut(write: Write) -> None:
    write(event("one "))
    raise EOFError


def ends(write: Write) -> None:
    write(event("one "))


def no_reason(write: Write) -> None:
    write(event("one two three "))
    write(b"data: [DONE]\n\n")


def fails(write: Write) -> None:
    write(event("one "))
    write(b'data: {"error": {"code": 500}}\n\n')


def other(write: Write) -> None:
    write(event("one two four ", "length"))
    write(b"data: [DONE]\n\n")


@pytest.mark.parametrize("script", [cut, ends, no_reason, fails, other, 500, 503, 400])
def test_a_broken_stream_is_a_problem_and_the_next_one_is_not(
    scripted: Scripted, script: Callable[[Write], None] | int
) -> None:
    seen = streams(scripted, script, whole)
    assert len(seen.problems) == 1
    assert seen.streams == (2 if script is other else 1)


def test_a_refusal_for_now_is_counted_and_is_no_problem(scripted: Scripted) -> None:
    seen = streams(scripted, 429, whole)
    assert (seen.streams, seen.refused, seen.problems) == (1, 1, [])


def test_the_process_says_what_it_saw_since_the_last_pause(
    scripted: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    with beside(scripted.port) as victim:
        scripted.plays(500)
        first = victim.pause()
        asked = len(scripted.bodies)
        assert asked >= 2
        assert len(scripted.bodies) == asked  # it rests
        victim.go_on()
        second = victim.pause()
        victim.go_on()
    assert (len(first.problems), second.problems) == (1, [])
    assert second.streams > 0
    assert victim.seen.problems == first.problems
    assert longest_gap(capsys.readouterr().out.splitlines()) == pytest.approx(victim.seen.gap, abs=0.001)


def test_a_server_that_has_gone_is_a_problem(scripted: Scripted) -> None:
    scripted.scripts += [503] * 2
    with beside(scripted.port) as victim:
        pass
    assert victim.seen.problems


def test_an_attack_fails_by_its_victim(scripted: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail also where the attacker found nothing wrong; and by a traceback."""
    log = tmp_path / "log"

    class Server:
        process, port, log = None, scripted.port, tmp_path / "log"

        def text(self) -> str:
            return log.read_text()

    @contextlib.contextmanager
    def serves(args: Sequence[str], log: Path, env: object) -> Iterator[Server]:
        yield Server()

    async def attack(target: Target) -> Figures:
        scripted.plays(cut)
        target.victim.pause()
        target.victim.go_on()
        return "all well", []

    monkeypatch.setattr(running.servers, "running", serves)
    log.write_text("")
    figures, problems = attacked(attack, (), log, {})
    assert figures == "all well"
    assert len(problems) == 1
    assert problems[0].startswith("victim: ")
    log.write_text("Traceback\n")
    assert len(attacked(attack, (), log, {})[1]) == 2


def test_the_table_has_the_longest_gap_of_a_goals_commands() -> None:
    said = [("timeit", "-n", "1", "-r", "1", f"print('{SAID}{gap} s; 3 streams')") for gap in (0.1, 0.31, 0.2)]
    proof = prove(Goal("a", "", "", tuple(said)), quick=True)
    assert proof.holds  # a gap is shown, and is the machine's where that is busy
    assert proof.gap == 0.31
    page = table({"G-H1": proof, "G-H2": Proof(True, "x", 1.0, gap=0.1), "G-H3": Proof(True, "x", 1.0)})
    assert "a victim stream unchanged | **0.31** | holds" in page
    assert "without a change for others | 0.10 | holds" in page
    assert "400 before any copy |  | holds" in page

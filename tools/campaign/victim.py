"""A client that does nothing wrong while a server is attacked: ``python -m tools.campaign.victim PORT [KEY]``.

It streams one long greedy answer after another, and measures the longest gap between two pieces of an answer. Each
answer must end whole and be what the first one was. It is a process of its own, so that what an attacker computes does
not count. It says what it has seen, as a line of JSON, and waits: once it has had a first answer, and then each time
that a byte comes on its standard input. Another byte lets it go on; the end of the input ends it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tools import ROOT

BOUND = 0.25  # seconds of a gap; longer ones are shown
SAID = "victim: longest gap "
_COMPLETIONS = "/v1/completions"
_PROMPT = "one two three"
_TOKENS = 400  # of an answer, where the model has room for so many
_ROOM = 56  # tokens of the model that are left for the prompt
_PATIENCE = 120.0  # seconds between two pieces, and for the first
_COLLECTED = 2 * _PATIENCE  # seconds in which the process says what it has seen
_AGAIN = 0.1  # seconds after a refusal


class Seen(msgspec.Struct):
    """Observations of a victim. `refused` counts answers 429: a victim waits as anyone does. `gap` in seconds."""

    streams: int = 0
    refused: int = 0
    gap: float = 0.0
    problems: list[str] = msgspec.field(default_factory=list)

    def add(self, other: Seen) -> None:
        self.streams += other.streams
        self.refused += other.refused
        self.gap = max(self.gap, other.gap)
        self.problems += other.problems

    def line(self) -> str:
        over = f", over {BOUND:g}" if self.gap > BOUND else ""
        return f"{SAID}{self.gap:.3f} s{over}; {self.streams} streams whole, {self.refused} refused for now"


def longest_gap(lines: Sequence[str]) -> float | None:
    """Return the longest gap in seconds of all victims that a program's output tells of; None without a victim."""
    gaps = [float(line.removeprefix(SAID).partition(" ")[0]) for line in lines if line.startswith(SAID)]
    return max(gaps, default=None)


class BrokenStream(Exception):
    """A stream that did not come to its end, with the reason."""


class Streams:
    """The streams of one victim, on a connection that it keeps as clients do. Their text is that of the first."""

    def __init__(self, port: int, key: str = "") -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self._expected: str | None = None
        self._body = b""

    def prepare(self) -> None:
        """Ask how long an answer may be."""
        self._connection.request("GET", "/v1/models", headers=self._headers)
        (model,) = json.loads(self._connection.getresponse().read())["data"]
        count = min(_TOKENS, model["max_model_len"] - _ROOM)
        settings = {"max_tokens": count, "ignore_eos": True, "temperature": 0, "seed": 7, "stream": True}
        self._body = json.dumps({"prompt": _PROMPT, **settings}).encode()

    def one(self, seen: Seen) -> None:
        """Read a stream to its end, and note what came of it."""
        try:
            text = self._read(seen)
        except (OSError, http.client.HTTPException, BrokenStream) as error:
            seen.problems.append(f"victim: {error!r}")
            self.close()
            time.sleep(_AGAIN)
            return
        if text is None:
            seen.refused += 1
            time.sleep(_AGAIN)
            return
        seen.streams += 1
        self._expected = text if self._expected is None else self._expected
        if text != self._expected:
            seen.problems.append(f"victim: {text[:80]!r}, alone {self._expected[:80]!r}")

    def close(self) -> None:
        """Close the connection; the next stream gets a new one."""
        self._connection.close()

    def _read(self, seen: Seen) -> str | None:
        """Return the text of a stream; None where it is refused because there is no room now."""
        self._connection.request("POST", _COMPLETIONS, self._body, self._headers)
        answer = self._connection.getresponse()
        if answer.status != 200:
            error = answer.read()
            if answer.status == 429:
                return None
            raise BrokenStream(f"answered {answer.status}: {error[:200]!r}")
        text, finish, last = "", None, 0.0
        while (line := answer.readline()) and not line.startswith(b"data: [DONE]"):
            if line.startswith(b"data: "):
                now = time.monotonic()
                seen.gap, last = max(seen.gap, now - (last or now)), now
                choice = _choice(json.loads(line[6:]), len(text))
                text, finish = text + choice["text"], choice["finish_reason"] or finish
        if not line or finish != "length":
            raise BrokenStream(f"ended after {len(text)} characters, finish reason {finish!r}")
        answer.read()
        return text


def _choice(event: Mapping[str, Any], length: int) -> Mapping[str, Any]:
    if "error" in event:
        raise BrokenStream(f"after {length} characters: {event['error']}")
    (choice,) = event["choices"]
    return choice  # type: ignore[no-any-return]


class Victim:
    """The process, as an attacker has it. `seen`: all that the victim has said so far."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.seen = Seen()

    def hear(self) -> Seen:
        """Wait for what the victim says next."""
        out = self._process.stdout
        assert out is not None
        line = out.readline() if select.select([out], [], [], _COLLECTED)[0] else b""
        said = msgspec.json.decode(line, type=Seen) if line else Seen(problems=["victim: it does not answer"])
        self.seen.add(said)
        return said

    def pause(self) -> Seen:
        """Let the victim's stream end, and no other begin; what was seen since the last pause."""
        self._write()
        return self.hear()

    def go_on(self) -> None:
        self._write()

    @contextlib.contextmanager
    def resting(self) -> Iterator[Seen]:
        """Let the victim ask for nothing during the block."""
        said = self.pause()
        try:
            yield said
        finally:
            self.go_on()

    def _write(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # then it does not answer either
            pipe.write(b".")
            pipe.flush()


@contextlib.contextmanager
def beside(port: int, key: str = "") -> Iterator[Victim]:
    """Run a victim of the server on a port for the length of a block; print what it saw. It has had one answer before.
    Its problems are complete after the block.
    """
    command = [sys.executable, "-m", "tools.campaign.victim", str(port), *([key] if key else [])]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        victim = Victim(process)
        try:
            victim.hear()
            victim.go_on()
            yield victim
            victim.pause()
        finally:
            process.kill()
    print(victim.seen.line(), flush=True)


def main(argv: Sequence[str]) -> int:
    streams, seen = Streams(int(argv[0]), "".join(argv[1:2])), Seen()
    streams.prepare()
    streams.one(seen)
    while True:
        streams.close()  # the server may close what is idle while the victim waits
        print(msgspec.json.encode(seen).decode(), flush=True)
        if not os.read(0, 1):
            return 0
        seen = Seen()
        streams.one(seen)
        while not select.select([0], [], [], 0)[0]:
            streams.one(seen)
        if not os.read(0, 1):
            return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Single requests that are known to have hurt servers of this kind: ``python -m tools.campaign.crafted [WORD ...]``.

Of all cases whose names have one of the words: constraints that explode, for every backend and many choices at once,
logprobs of everything, and trailers that would be headers. Each is sent alone, beside a victim. It is answered with
what it must be, or at least with no 5xx, within a time; the longest gap of the victim is shown behind it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tools.campaign.liveness import COMPLETIONS, request
from tools.campaign.running import QUIET, Figures, Target, attacked, exchange, strict_limits, verdict
from tools.campaign.victim import BOUND

_KEY = "sk-crafted-91c4"
_AUTHORISED = b"authorization: Bearer " + _KEY.encode() + b"\r\n"
_PATIENCE = 60.0  # seconds for an answer, after which the client leaves
_CACHE = {"FERRULE_CPU_KVCACHE_SPACE": "0.5"}  # GiB: with less, a victim would be preempted by 128 long answers
_CHOICES = (1, 16, 128)
_NESTED = 60  # levels


@dataclass(frozen=True)
class Case:
    """A crafted request. `statuses`: those that its answer may have; any but 5xx if empty. `never`: bytes that no
    answer may have.
    """

    name: str
    message: bytes
    statuses: tuple[int, ...] = ()
    never: bytes = b'"code":5'


def post(body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a request with the key."""
    return request(COMPLETIONS, json.dumps(body).encode()).replace(b"host:", _AUTHORISED + b"host:", 1)


def chunked(trailers: bytes, authorised: bool) -> bytes:
    """Return the bytes of a request in chunks, with trailers, to be sent at once."""
    body = b'{"prompt": "a", "max_tokens": 2}'
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n".encode()
    head += b"connection: close\r\ntransfer-encoding: chunked\r\n" + (_AUTHORISED if authorised else b"")
    return b"%s\r\n%x\r\n%s\r\n0\r\n%s\r\n" % (head, len(body), body, trailers)


def nested(levels: int) -> Mapping[str, Any]:
    """Return a schema of lists in lists: as deep as JSON of a request may be."""
    schema: Mapping[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


CONSTRAINTS: Mapping[str, Mapping[str, Any]] = {
    "counted regex": {"guided_regex": "(((a{1,99}){1,99}){1,99}){1,99}"},
    "starred regex": {"guided_regex": "((((a*)*)*)*)*"},
    "pattern": {"guided_json": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"}},
    "nested schema": {"guided_json": nested(_NESTED)},
}
BACKENDS = ("guidance", "xgrammar", "outlines", "lm-format-enforcer")


def constraints() -> Iterator[Case]:
    """Yield each constraint for each library alone, whole and as a stream."""
    asked = {"prompt": "a", "max_tokens": 64, "temperature": 1, "seed": 7}
    for name, constraint in CONSTRAINTS.items():
        for backend in BACKENDS:
            for count in _CHOICES:
                more = {"guided_decoding_backend": f"{backend}:no-fallback", "n": count, "stream": count == _CHOICES[1]}
                yield Case(f"constraint: {name}, {backend}, n={count}", post({**asked, **constraint, **more}))


def logprobs() -> Iterator[Case]:
    """Yield requests for so many logprobs that memory or time would run out."""
    prompts = {"prompt": [[65] * 2040] * 98, "max_tokens": 1, "n": 10, "prompt_logprobs": 20, "logprobs": 20}
    answers = {"prompt": "a", "n": 128, "best_of": 128, "logprobs": 20, "max_tokens": 1500, "temperature": 1}
    for name, body in {"prompts": prompts, "answers": answers}.items():
        yield Case(f"logprobs: {name}", post(body))
        yield Case(f"logprobs: {name}, stream", post({**body, "stream": True}))
        yield Case(f"logprobs: {name}, as many as may be", post({**body, "logprobs": 5, "prompt_logprobs": None}))


def trailers() -> Iterator[Case]:
    """Yield requests with trailers in one packet with the head. The trailers must have no effect."""
    yield Case("trailers: authorization", chunked(_AUTHORISED, authorised=False), (401,))
    for line in (b"content-type: text/plain", b"content-encoding: gzip", b"x-request-id: from-a-trailer"):
        name = f"trailers: {line.decode().partition(':')[0]}"
        yield Case(name, chunked(line + b"\r\n", authorised=True), (200,), b"from-a-trailer")


CASES = (*constraints(), *logprobs(), *trailers())


def problem_of(case: Case, answer: bytes) -> str:
    """Return what is wrong with the answer to a case; empty where nothing is."""
    status = int(answer[9:12]) if answer[9:12].isdigit() else 0
    if not status:
        return "no answer"
    if status >= 500 or (case.statuses and status not in case.statuses):
        _, _, body = answer.partition(b"\r\n\r\n")
        return f"answered {status}: {body[:160]!r}"
    return f"the answer has {case.never!r}" if case.never in answer.replace(b'": ', b'":') else ""


async def measure(target: Target, cases: Sequence[Case]) -> Figures:
    """Send one case after the other."""
    problems, slowest = [], 0.0
    for case in cases:
        began = time.monotonic()
        answer = await exchange(target.port, case.message, _PATIENCE)
        seconds = time.monotonic() - began
        slowest = max(slowest, seconds)
        seen = await asyncio.to_thread(target.victim.pause)
        target.victim.go_on()
        problem = problem_of(case, answer)
        problems += [f"{case.name}: {problem}"] if problem else []
        problems += [f"{case.name}: {each}" for each in seen.problems]
        gap = f", victim's gap {seen.gap:.2f} s{' (long)' if seen.gap > BOUND else ''}"
        status = answer[9:12].decode("ascii", "replace")
        print(f"{'FAILED' if problem else 'ok    '} {seconds:6.1f} s  {case.name}: {status}{gap}", flush=True)
    return f"{len(cases)} crafted requests, the slowest answered after {slowest:.1f} s", problems


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.campaign.crafted", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="of the names of cases; default: all")
    words = parser.parse_args(argv).words
    chosen = [case for case in CASES if not words or any(word in case.name for word in words)]
    if not chosen:
        parser.error(f"no case has a name with {' or '.join(words)}")
    args = [*QUIET, "--api-key", _KEY, "--enable-request-id-headers", "--public-metrics"]
    with tempfile.TemporaryDirectory(prefix="crafted-") as folder:
        work = partial(measure, cases=chosen)
        return verdict(*attacked(work, args, Path(folder) / "log", {**strict_limits(), **_CACHE}, _KEY))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

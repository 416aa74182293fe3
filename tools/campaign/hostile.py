"""Hostile requests, 100,000 of them: ``python -m tools.campaign.hostile [--quick]``.

They are made by a small grammar over the routes of /openapi.json: wrong types, borders, unknown fields, deep
and broken JSON, bad UTF-8, wrong methods, large heads, and bytes that are not HTTP. None is answered 5xx or not at
all, a victim's streams are what they were, and no process grows by more than 5 % + 64 MiB.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tools.campaign.liveness import request
from tools.campaign.running import (
    QUIET,
    Figures,
    Target,
    attacked,
    growths,
    options,
    quiet,
    say,
    sizes,
    strict_limits,
    verdict,
)

_CLIENTS = 16
_SECONDS = 540.0  # after which a run stops, however many there were
_PATIENCE = 20.0  # seconds for an answer
_METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "BREW", "post", "")
_VALID: dict[str, Any] = {"prompt": "a", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "a", "\ud800", "\0", "é" * 300, "x" * 20_000, [], {}, [[]], [None], [{}], {"a": {}}),
    *(-1, 0, 1, 1.5, -0.0, 128, 129, 1025, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**40, 1e308, float("nan")),
    *(float("inf"), float("-inf"), [-1], [2**63], list(range(300)), ["a"] * 300, {"-1": 1}, {"999999999": 100}),
    *({"type": "object"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}),
    *("(a+)+$", "root ::= root", [{"role": "tool"}], [{"role": "user", "content": [{"type": "image_url"}]}]),
)


@dataclass(frozen=True)
class Route:
    """A route of the server. `fields`: the names of its body's fields, by the document."""

    method: str
    path: str
    fields: tuple[str, ...]


def routes_of(document: Mapping[str, Any]) -> tuple[Route, ...]:
    """Return the routes of an OpenAPI document."""
    found = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema", {})
            names = {name for part in _parts(schema, document) for name in part.get("properties", ())}
            found.append(Route(method.upper(), path, tuple(sorted(names))))
    return tuple(found)


def _parts(schema: Mapping[str, Any], document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a schema without references, as its alternatives."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return _parts(document["components"]["schemas"][name], document)
    inner = [part for word in ("anyOf", "oneOf", "allOf") for part in schema.get(word, ())]
    return [schema, *(found for part in inner for found in _parts(part, document))]


class Grammar:
    """A generator of requests; the same seed makes the same ones."""

    def __init__(self, routes: Sequence[Route], seed: int) -> None:
        self._routes = routes
        self._bodies = [route for route in routes if route.fields]
        self._rng = random.Random(seed)
        self._kinds: tuple[Callable[[], bytes], ...] = (
            *(self._field, self._field, self._field, self._field, self._two_fields, self._unknown, self._deep),
            *(self._broken, self._utf8, self._method, self._head, self._garbage, self._path, self._lengths),
        )

    def one(self) -> tuple[str, bytes]:
        """Return a request's kind, and its bytes."""
        kind = self._rng.choice(self._kinds)
        return kind.__name__.strip("_"), kind()

    def _body(self) -> tuple[Route, dict[str, Any]]:
        route = self._rng.choice(self._bodies)
        return route, {name: value for name, value in _VALID.items() if name in route.fields}

    def _post(self, route: Route, body: bytes) -> bytes:
        return request(route.path, body).replace(b"POST", route.method.encode(), 1)

    def _field(self, count: int = 1) -> bytes:
        route, body = self._body()
        body |= {self._rng.choice(route.fields): self._rng.choice(VALUES) for _ in range(count)}
        return self._post(route, json.dumps(body).encode())

    def _two_fields(self) -> bytes:
        return self._field(2)

    def _unknown(self) -> bytes:
        route, body = self._body()
        name = "".join(chr(self._rng.randrange(1, 0x2FFF)) for _ in range(self._rng.randrange(60)))
        return self._post(route, json.dumps({**body, name: self._rng.choice(VALUES)}).encode())

    def _deep(self) -> bytes:
        route, body = self._body()
        depth, name = self._rng.choice((60, 65, 5000)), json.dumps(self._rng.choice(route.fields)).encode()
        opened, closed = self._rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
        value = opened * depth + b"1" + closed * self._rng.choice((0, depth))
        return self._post(route, json.dumps(body).encode()[:-1] + b"," + name + b":" + value + b"}")

    def _broken(self) -> bytes:
        route, body = self._body()
        text = bytearray(json.dumps(body).encode())
        for _ in range(self._rng.randrange(1, 4)):
            place = self._rng.randrange(len(text) + 1)
            text[place : place + self._rng.randrange(3)] = self._rng.randbytes(self._rng.randrange(3))
        return self._post(route, bytes(text))

    def _utf8(self) -> bytes:
        route, body = self._body()
        wrong = self._rng.choice((b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xe2\x28\xa1"))
        return self._post(route, json.dumps(body).encode().replace(b'"a"', b'"a' + wrong + b'"'))

    def _method(self) -> bytes:
        route = self._rng.choice(self._routes)
        return request(route.path).replace(b"GET", self._rng.choice(_METHODS).encode(), 1)

    def _head(self) -> bytes:
        route = self._rng.choice(self._routes)
        more = self._rng.choice(
            (
                b"x: " + b"y" * 70_000,
                b"\r\n".join(b"x-%d: y" % number for number in range(200)),
                *(b"content-length: -1", b"transfer-encoding: chunked", b"transfer-encoding: gzip", b"x y: z"),
                *(b"expect: 200-ok", b"content-encoding: gzip", b"cookie: " + b"\xff" * 99, b"host: a\r\nhost: b"),
            )
        )
        return request(route.path).replace(b"host:", more + b"\r\nhost:", 1)

    def _garbage(self) -> bytes:
        line = self._rng.randbytes(self._rng.randrange(1, 400)).replace(b"\n", b"")
        start = self._rng.choice(
            (b"", b"GET /health HTTP/1.1\r\n", b"POST / HTTP/9.9\r\n", b"PRI * HTTP/2.0\r\n", b"\x16\3\1")
        )
        return start + line + b"\r\n\r\n\r\n"

    def _path(self) -> bytes:
        paths = (
            "/v1/../v1/models",
            "//health",
            "/%00",
            "/%ff",
            "/v1/completions/",
            "*",
            "http://a/",
            "/é",
            "/" + "a" * 9000,
        )
        return request(self._rng.choice(paths), self._rng.choice((None, b"{}")))

    def _lengths(self) -> bytes:
        route, body = self._body()
        message = self._post(route, json.dumps(body).encode())
        length = f"content-length: {len(json.dumps(body))}".encode()
        number = self._rng.choice((b"1", b"0", b"99999999999999", b"+3", b"0x10", b"1e3", b"3, 3"))
        return message.replace(length, b"content-length: " + number)


@dataclass
class Seen:
    """The answers of the server: `statuses` by kind of request."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def bad(self) -> int:
        return sum(count for (_, status), count in self.statuses.items() if status >= 500 and status not in {501, 505})


async def attack(port: int, grammar: Grammar, count: int, seen: Seen) -> None:
    """Send `count` requests, or as many as the time of a run allows. 501 and 505 are refusals of codings and
    versions.
    """
    left, end = iter(range(count)), time.monotonic() + _SECONDS

    async def client() -> None:
        for _ in left:
            if time.monotonic() > end:
                return
            kind, message = grammar.one()
            began = time.monotonic()
            status, body = await say(port, message, _PATIENCE)
            seen.statuses[kind, status] += 1
            if status >= 500 and status not in {501, 505}:
                seen.problems.append(f"{kind}: {status} {body[:160]!r} to {message[:2000]!r}")
            elif not status and time.monotonic() - began > _PATIENCE - 1 and kind not in {"lengths", "head"}:
                seen.problems.append(f"{kind}: neither answered nor closed: {message[:300]!r}")

    await asyncio.gather(*(client() for _ in range(_CLIENTS)))


async def measure(target: Target, count: int) -> Figures:
    _, document = await say(target.port, request("/openapi.json"))
    routes = routes_of(json.loads(document))
    await attack(target.port, Grammar(routes, 1), max(500, count // 50), Seen())  # to warm up
    before, seen, began = sizes(target), Seen(), time.monotonic()
    await attack(target.port, Grammar(routes, 2), count, seen)
    seconds = time.monotonic() - began
    _, left = await quiet(target)
    await asyncio.sleep(6.0)  # connections that are kept for a while
    grown, wrong = growths(before, sizes(target))
    by_status = Counter({status: 0 for _, status in seen.statuses})
    for (_, status), number in seen.statuses.items():
        by_status[status] += number
    print(f"{len(routes)} routes, {seconds:.0f} s; by status {dict(by_status)}")
    problems = [*seen.problems, *wrong, *([f"left behind: {left}"] if left else [])]
    return f"{seen.statuses.total()} hostile requests: {seen.bad} x 5xx; {grown} (bound 5 % + 64 MiB)", problems


def main(argv: Sequence[str]) -> int:
    count = 2_000 if options("hostile", __doc__, argv) else 100_000
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        args = [*QUIET, "--max-model-len", "256"]
        return verdict(*attacked(partial(measure, count=count), args, Path(folder) / "log", strict_limits()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

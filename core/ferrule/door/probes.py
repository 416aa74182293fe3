"""What the door answers itself: reading a probe's head, and the answers, the same as an API process gives.

Only what is understood in full is answered here: a complete head of a probe without a body, without a query and without
anything that asks for more than the plain answer. Whatever else it is, errors included, is an API process's to answer.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path

import httptools

from ferrule.api.origin import Hosts, host_of
from ferrule.config import Resolved
from ferrule.errors import PluginError, RequestError, UnavailableError
from ferrule.frontend.metrics import Loggers
from ferrule.frontend.stat_loggers import open_followers
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.service import Health
from ferrule.types import ModelInfo
from ferrule.wire.board import STATE, STATES, Board
from ferrule.wire.doorway import Offer, Probe

Answer = tuple[int, list[tuple[str, str]], bytes]  # status, headers and body

ALONE = Offer({"GET /health": Probe("health"), "GET /ping": Probe("health"), "POST /ping": Probe("health")})
_MAX_HEADERS = 128
_RETRY = 5  # seconds
_ELSEWHERE = frozenset({b"origin", b"transfer-encoding", b"expect", b"upgrade"})  # headers that ask for more
_DETAILS = {
    "starting": "The model is being loaded.",
    "draining": "The server is shutting down.",
    "dead": "The engine has stopped.",
}


@dataclass
class Call:
    """A probe's head; what `httptools` finds is written to it."""

    length: int  # bytes of the head
    method: str = ""
    target: bytes = b""
    path: str = ""  # below --root-path
    keep_alive: bool = False
    probe: Probe = field(default_factory=lambda: Probe(""))
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    complete: bool = False
    key: str = ""  # the name of the API key, where one was needed

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_message_complete(self) -> None:
        self.complete = True


class ProbeReader:
    """Tells probes from other requests by what an API process offers."""

    def __init__(self, config: Resolved, offer: Offer) -> None:
        root = config.frontend.root_path.strip("/")
        self._root = f"/{root}" if root else ""
        self._probes, self._keys = offer.probes, offer.keys
        self._elsewhere = _ELSEWHERE | ({b"x-request-id"} if config.frontend.enable_request_id_headers else set())
        self._hosts = Hosts((*config.frontend.allowed_hosts, config.frontend.host or ""))
        calls = [
            *offer.probes,
            *(f"HEAD {call.removeprefix('GET ')}" for call in offer.probes if call.startswith("GET ")),
        ]
        self._starts = tuple(
            f"{method} {root}{path} HTTP/1.1\r\n".encode()
            for method, _, path in (call.partition(" ") for call in calls)
            for root in {"", self._root}
        )

    def read(self, head: bytes) -> Call | None:
        """The probe that these first bytes of a request are; None when they are anything else."""
        if not head.startswith(self._starts):
            return None
        length = head.find(b"\r\n\r\n") + 4
        if length < 4:
            return None
        call = Call(length)
        parser = httptools.HttpRequestParser(call)
        try:
            parser.feed_data(head[:length])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return None
        call.method = parser.get_method().decode()
        call.keep_alive = not any(name == b"connection" and b"close" in value.lower() for name, value in call.headers)
        return call if call.complete and self._understood(call) else None

    def _understood(self, call: Call) -> bool:
        target = call.target.decode("latin-1")
        call.path = target.removeprefix(self._root) if target.startswith(f"{self._root}/") else target
        probe = self._probes.get(f"{'GET' if call.method == 'HEAD' else call.method} {call.path}")
        names = [name for name, _ in call.headers]
        if probe is None or len(names) > _MAX_HEADERS or not self._elsewhere.isdisjoint(names):
            return False
        call.probe = probe
        lengths = [value for name, value in call.headers if name == b"content-length"]
        return all(each == b"0" for each in lengths) and (not probe.keyed or self._allowed(call))

    def _allowed(self, call: Call) -> bool:
        """The rules of `ferrule.api.app`: a key where there are any, else a host that may be that of this server."""
        if not self._keys:
            try:
                self._hosts.check(host_of([value for name, value in call.headers if name == b"host"]))
            except RequestError:
                return False
            return True
        given = [value.partition(b" ") for name, value in call.headers if name == b"authorization"]
        scheme, _, key = given[0] if len(given) == 1 else (b"", b"", b"")
        presented = hashlib.sha256(key.strip()).digest()
        matches = [name for name, digest in self._keys.items() if hmac.compare_digest(presented, digest)]
        call.key = matches[0] if matches and scheme.lower() == b"bearer" else ""
        return bool(call.key)


def health(config: Resolved, board: Board, draining: bool) -> Health:
    """The server's state by the board: the first of these that is true of an API process, or of the engine."""
    rows = range(1, board.rows)
    states = {STATES[int(board.get(STATE, row))] for row in rows}
    for state in ("dead", "draining", "starting"):
        if state in states or (draining and state == "draining"):
            return Health(state=state, detail=_DETAILS[state])
    watchdog = config.parallel.watchdog_timeout
    if waits := board.stalled(watchdog):
        return Health(state="stalled", detail=f"The engine has made no progress for {waits:.0f} s.")
    if silent := max(board.silent(row, watchdog) for row in rows):
        return Health(state="stalled", detail=f"An API process has made no progress for {silent:.0f} s.")
    return Health(state="ready" if board.ready else "starting")


def health_answer(now: Health) -> Answer:
    if now.state == "ready":
        return 200, [("content-type", "application/json")], _json({"status": now.state})
    return unavailable(f"The server is {now.state}. {now.detail}".strip())


def unavailable(message: str) -> Answer:
    """503 with an error."""
    error = {"message": message, "type": UnavailableError.kind, "param": None, "code": UnavailableError.status}
    headers = [("content-type", "application/json"), ("retry-after", str(_RETRY))]
    return UnavailableError.status, headers, _json({"error": error})


def answer_bytes(call: Call, answer: Answer, config: Resolved) -> bytes:
    """The answer as it is sent."""
    status, headers, body = answer
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"date: {formatdate(usegmt=True)}"]
    lines += [f"{name}: {value}" for name, value in headers]
    lines.append(f"content-length: {len(body)}")
    if config.frontend.allowed_origins:
        lines.append("vary: Origin")  # CORS: a probe with an origin is not answered here
    if config.frontend.enable_request_id_headers:
        lines.append(f"x-request-id: {secrets.token_hex(16)}")
    if not call.keep_alive:
        lines.append("connection: close")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (b"" if call.method == "HEAD" else body)


class Figures:
    """`/metrics` of the API processes, from what they write to `folder`."""

    def __init__(self, config: Resolved, plugins: Plugins, folder: Path) -> None:
        self._config, self._plugins, self._folder = config, plugins, folder
        self._loggers: Loggers | None = None

    @property
    def open(self) -> bool:
        """Whether they can be shown here."""
        return self._loggers is not None

    def load(self, info: ModelInfo) -> None:
        """Open the loggers, once the model is known. A plugin that cannot be opened here is left to API processes."""
        try:
            self._loggers = open_followers(self._config, self._plugins, info, self._folder)
        except PluginError:
            self._loggers = None

    def answer(self) -> Answer:
        media_type, text = self._loggers.exposition() if self._loggers else ("text/plain", "")
        return 200, [("content-type", media_type)], text.encode()


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()

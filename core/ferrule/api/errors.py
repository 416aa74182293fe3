"""From an exception to OpenAI's error object. No other exception's text ever reaches a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from msgspec import Struct
from starlette.exceptions import HTTPException

from ferrule import errors, log
from ferrule.errors import (
    EngineDead,
    FerruleError,
    MethodError,
    OverloadedError,
    RequestError,
    RequestFailed,
    UnavailableError,
)
from ferrule.schema import refusal_of

_logger = log.get("api")
_KINDS: Mapping[int, str] = {
    cls.status: cls.kind for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, RequestError)
}
_DEAD_RETRY = 5  # seconds after which a client may try a server whose engine has died


class Failure(Struct, frozen=True):
    """What a client is told. `headers` are sent when the status line has not gone out yet."""

    status: int
    kind: str
    message: str
    param: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}


def log_unexpected(doing: str) -> None:
    """Log the exception that is being handled."""
    _logger.exception("unexpected error in %s", doing)


def failure_of(
    exc: BaseException, log_fault: Callable[[str], None] = log_unexpected, doing: str = "a request"
) -> Failure:
    """Describe an exception that is being handled to a client. One that is not ours is logged by `log_fault`, with what
    was going on (`doing`), and becomes a 500 without its text."""
    if isinstance(exc, HTTPException) and isinstance(exc.__cause__, FerruleError):
        exc = exc.__cause__  # FastAPI words whatever goes wrong while it reads a body as "an error parsing the body"
    match exc:
        case RequestValidationError():
            problems = exc.errors()
            return failure_of(refusal_of(problems, given=exc.body if problems[0]["loc"][0] == "body" else None))
        case HTTPException():
            kind = _KINDS.get(exc.status_code, RequestError.kind if exc.status_code < 500 else RequestFailed.kind)
            return Failure(exc.status_code, kind, str(exc.detail), headers=tuple((exc.headers or {}).items()))
        case MethodError():
            return Failure(exc.status, exc.kind, exc.message, headers=(("allow", ", ".join(exc.allow)),))
        case OverloadedError():
            return Failure(exc.status, exc.kind, exc.message, exc.param, (("retry-after", str(exc.retry_after)),))
        case RequestError():
            headers = (("www-authenticate", "Bearer"),) if exc.status == 401 else ()
            return Failure(exc.status, exc.kind, exc.message, exc.param, headers)
        case UnavailableError():
            return Failure(exc.status, exc.kind, exc.message, headers=(("retry-after", str(exc.retry_after)),))
        case EngineDead():
            message = "The engine has stopped; this request cannot be finished."
            return Failure(503, UnavailableError.kind, message, headers=(("retry-after", str(_DEAD_RETRY)),))
        case RequestFailed():
            return Failure(exc.status, exc.kind, exc.message)
    log_fault(doing)
    return Failure(500, RequestFailed.kind, "The server failed while serving this request; its log says why.")

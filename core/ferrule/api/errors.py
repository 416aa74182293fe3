"""Translates exceptions into what a client is told. The text of an unexpected exception never reaches a client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from fastapi.exceptions import RequestValidationError
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
from ferrule.interfaces.dialect import Failure
from ferrule.schema import refusal_of

_logger = log.get("api")
_KINDS: Mapping[int, str] = {
    cls.status: cls.kind for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, RequestError)
}
_DEAD_RETRY = 5  # seconds after which a client may try a server whose engine has died


def log_unexpected(doing: str) -> None:
    """Log the exception that is being handled."""
    _logger.exception("unexpected error in %s", doing)


def failure_of(
    exc: BaseException, log_fault: Callable[[str], None] = log_unexpected, doing: str = "a request"
) -> Failure:
    """Describe to a client an exception that is being handled.

    An exception that is not Ferrule's own is logged by `log_fault` with what was going on (`doing`), and becomes a 500
    without its text.
    """
    if isinstance(exc, HTTPException) and isinstance(exc.__cause__, FerruleError):
        exc = exc.__cause__  # FastAPI words whatever goes wrong while it reads a body as "an error parsing the body"
    match exc:
        case RequestValidationError():
            problems = exc.errors()
            return failure_of(refusal_of(problems, given=exc.body if problems[0]["loc"][0] == "body" else None))
        case HTTPException():
            kind = _KINDS.get(exc.status_code, RequestError.kind if exc.status_code < 500 else RequestFailed.kind)
            headers = tuple((exc.headers or {}).items())
            return Failure(status=exc.status_code, kind=kind, message=str(exc.detail), headers=headers)
        case RequestError():
            return _failure(exc, exc.message, exc.param, *_headers(exc))
        case UnavailableError():
            return _failure(exc, exc.message, None, ("retry-after", str(exc.retry_after)))
        case EngineDead():
            message = "The engine has stopped; this request cannot be finished."
            return _failure(UnavailableError, message, None, ("retry-after", str(_DEAD_RETRY)))
        case RequestFailed():
            return _failure(exc, exc.message)
    log_fault(doing)
    return _failure(RequestFailed, "The server failed while serving this request; its log says why.")


_Named = RequestError | UnavailableError | RequestFailed


def _failure(
    error: _Named | type[_Named], message: str, param: str | None = None, *headers: tuple[str, str]
) -> Failure:
    return Failure(status=error.status, kind=error.kind, message=message, param=param, headers=headers)


def _headers(error: RequestError) -> Iterator[tuple[str, str]]:
    """Yield the headers that HTTP requires beside the status."""
    if isinstance(error, MethodError):
        yield "allow", ", ".join(error.allow)
    elif isinstance(error, OverloadedError):
        yield "retry-after", str(error.retry_after)
    elif error.status == 401:
        yield "www-authenticate", "Bearer"

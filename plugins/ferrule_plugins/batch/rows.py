"""The lines of a batch: requests, faults in them, and results.

The form is that of OpenAI's Batch API (https://platform.openai.com/docs/guides/batch): the input has `custom_id`,
`method`, `url` and `body`, the output `id`, `custom_id`, `response` and `error`. `response` is always filled; `error`
is null exactly when the status is 200, so that a reader may look at either.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec

_BAD_REQUEST = 400
_SHOWN = 64  # characters of a wrong value that a message repeats
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SUCCESS = b',"error":null}\n'  # the end of a result's line: the error is its last field
_NO_VALUE = msgspec.Raw(b"null")
_UNSUPPORTED = {"stream": "streamed", "background": "answered in the background"}  # fields that leave no answer


@dataclass(frozen=True)
class Row:
    """A request. `number` is the number of its line, from 1."""

    number: int
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True)
class Bad:
    """A line that cannot be sent. `code` is OpenAI's word for the fault where there is one."""

    number: int
    custom_id: str | None
    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True)
class AppResponse:
    """A response of the application. `body` is JSON on one line."""

    status: int
    request_id: str
    body: bytes
    retry_after: float = 1.0  # seconds


def custom_id_of(line: bytes) -> str | None:
    """Return the custom_id on a line, or None for a line without a valid one."""
    try:
        return _custom_id(_FIELDS.decode(line))
    except (ValueError, RecursionError):
        return None


def read_row(number: int, line: bytes, urls: Collection[str]) -> Row | Bad:
    """Check one line. `urls` are the routes that answer requests."""
    try:
        fields = _FIELDS.decode(line)
    except (ValueError, RecursionError):
        return Bad(number, None, "invalid_json_line", f"Line {number} is not a JSON object.")
    custom_id = _custom_id(fields)

    def bad(code: str, message: str, param: str) -> Bad:
        return Bad(number, custom_id, code, f"Line {number}: {message}", param)

    if custom_id is None:
        return bad("missing_required_parameter", "custom_id must be a non-empty string.", "custom_id")
    method, url = _text(fields, "method"), _text(fields, "url")
    if method != "POST":
        return bad("invalid_method", f'method must be "POST"{_instead(method)}.', "method")
    if url is None or url not in urls:
        return bad("invalid_url", f"url must be one of {', '.join(sorted(urls))}{_instead(url)}.", "url")
    body = fields.get("body")
    try:
        asked = _FIELDS.decode(body) if body is not None else None
    except (ValueError, RecursionError):
        asked = None
    if body is None or asked is None:
        return bad("missing_required_parameter", "body must be a JSON object.", "body")
    for name, done in _UNSUPPORTED.items():
        if bytes(asked.get(name, _NO_VALUE)).strip() not in (b"null", b"false"):
            message = f"requests of a batch cannot be {done}: remove body.{name}."
            return bad(f"{name}_unsupported", message, f"body.{name}")
    return Row(number, custom_id, url, bytes(body))


def duplicate(row: Row | Bad, first: int) -> Bad:
    """Return the rejection of a second line with the same custom_id."""
    message = f"Line {row.number}: the custom_id is already used in line {first}; each must be unique."
    return Bad(row.number, row.custom_id, "duplicate_custom_id", message, "custom_id")


def too_long(number: int, most: int) -> Bad:
    return Bad(number, None, "line_too_long", f"Line {number} is longer than {most} bytes (--max-body-bytes).")


def answered(row: Row, answer: AppResponse) -> bytes:
    """Return the result of a request: one line without its end."""
    body = _one_line(answer.body)
    return _result(row.custom_id, answer.status, answer.request_id, msgspec.Raw(body), _error_of(row, answer, body))


def refused(bad: Bad) -> bytes:
    """Return the result of a line that was not sent: one line without its end."""
    error = {"message": bad.message, "type": "BadRequestError", "param": bad.param, "code": _BAD_REQUEST}
    said = {"code": bad.code, "message": bad.message, "param": bad.param, "line": bad.number}
    return _result(bad.custom_id, _BAD_REQUEST, secrets.token_hex(16), {"error": error}, said)


def not_run(row: Row, code: str, message: str) -> bytes:
    """Return the result of a row that was not sent before its batch ended: one line without its end."""
    said = {"code": code, "message": message, "param": None, "line": row.number}
    return _line(row.custom_id, None, said)


def succeeded(result: bytes) -> bool:
    """Return whether a result, with its line end, is that of a request which was answered with status 200."""
    return result.endswith(_SUCCESS)


def _result(custom_id: str | None, status: int, request_id: str, body: Any, error: Any) -> bytes:
    return _line(custom_id, {"status_code": status, "request_id": request_id, "body": body}, error)


def _line(custom_id: str | None, response: Any, error: Any) -> bytes:
    fields = {"id": f"batch_req_{secrets.token_hex(16)}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(fields)


def _error_of(row: Row, answer: AppResponse, body: bytes) -> dict[str, Any] | None:
    """Return the error of an answer in OpenAI's batch form, taken from the answer's error object; None for a
    success.
    """
    if answer.status == 200:
        return None
    found = msgspec.json.decode(body)
    error = found.get("error") if isinstance(found, dict) else None
    error = error if isinstance(error, dict) else {}
    message = error.get("message") or f"The request was answered {answer.status}."
    return {
        "code": error.get("type") or str(answer.status),
        "message": message,
        "param": error.get("param"),
        "line": row.number,
    }


def _one_line(body: bytes) -> bytes:
    """Return JSON without line ends; a body that is not JSON becomes a JSON string."""
    try:
        value = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return msgspec.json.encode(body.decode("utf-8", "replace"))
    return msgspec.json.encode(value) if b"\n" in body else body


def _custom_id(fields: dict[str, msgspec.Raw]) -> str | None:
    return _text(fields, "custom_id") or None


def _text(fields: dict[str, msgspec.Raw], name: str) -> str | None:
    try:
        return msgspec.json.decode(fields.get(name, _NO_VALUE), type=str)
    except ValueError:
        return None


def _instead(value: str | None) -> str:
    return "" if value is None else f", not {value[:_SHOWN]!r}"

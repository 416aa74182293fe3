"""What differs between protocols outside their routes: the form of errors and of streams, and headers with the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import BaseModel


def encode(content: Any) -> bytes:
    """Encode as JSON: a pydantic model by its own rules, anything else by msgspec."""
    if isinstance(content, BaseModel):
        return content.model_dump_json(by_alias=True).encode()
    return msgspec.json.encode(content)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failed request as the client is told of it. Every field is fit for clients."""

    status: int  # of HTTP; within a stream it is only told
    kind: str  # the error's name in OpenAI's API, such as "BadRequestError"
    message: str
    param: str | None = None  # the field at fault
    headers: tuple[tuple[str, str], ...] = ()  # sent by the frame, when the status line has not gone out yet
    request_id: str = ""  # as in the dialect's `id_header`; empty without that header, and before there is a request


class Dialect:
    r"""The dialect of OpenAI's API. A protocol that differs derives from it and says in what::

        class LinesOfJson(Dialect):
            paths = ("/api/",)
            media_type = "application/x-ndjson"
            ping = last = b""

            def error(self, failure: Failure) -> Any:
                return {"error": failure.message}

            def event(self, content: Any) -> bytes:
                return encode(content) + b"\n"

    The frame finds it by the path alone, before it looks at the key. So every error has its form, also those that no
    route has seen: 401, 403, 404, 405, 408, 413, 429, 503, and a body that is not JSON. Only what fails before there
    is a path, such as headers that do not end, has OpenAI's form.
    """

    paths: Sequence[str] = ()
    """Paths that speak it beside those of the router's routes. One that ends in ``/`` stands for itself without it, and
    for all below; where several fit, the longest counts."""

    key_headers: Sequence[str] = ()
    """Headers that hold the bare key, in lower case. The first one that a request has counts; without any of them, it
    is ``Authorization: Bearer KEY``, which every protocol takes."""

    id_header: str = ""
    """A header, in lower case, that every answer has with the request's id (`RequestInfo.id`); empty: none."""

    body_types: Sequence[str] = ()
    """Media types of bodies, in lower case, that are read as JSON beside those of JSON itself: those that the
    protocol's clients send, whatever they mean elsewhere. Pages of other origins cannot use them to call the server
    without their browser asking first."""

    media_type: str = "text/event-stream; charset=utf-8"
    """Of an `EventStream`."""

    ping: bytes = b": ping\n\n"
    """What a stream sends while nothing happens, so that no proxy takes it for dead; empty: nothing."""

    last: bytes = b"data: [DONE]\n\n"
    """What ends a stream that has not failed; empty: nothing."""

    error_schema: Mapping[str, Any] = {
        "description": "Every error, whatever its status, has this form.",
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string", "description": "What is wrong, and what would be right."},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"], "description": "The field at fault."},
                    "code": {"type": "integer", "description": "The HTTP status."},
                },
            }
        },
    }
    """JSON Schema of what `error` returns, for the OpenAPI document."""

    def error(self, failure: Failure) -> Any:
        """Return the body of an answer that is an error, and the event that ends a stream which fails. It is sent as
        JSON."""
        said = {"message": failure.message, "type": failure.kind, "param": failure.param, "code": failure.status}
        return {"error": said}

    def event(self, content: Any) -> bytes:
        """Return one event of a stream as it is sent."""
        return b"data: " + encode(content) + b"\n\n"


OPENAI = Dialect()

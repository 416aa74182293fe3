"""An upload: a form of the type multipart/form-data, of which the file goes to the disk piece by piece.

https://www.rfc-editor.org/rfc/rfc7578; the fields are those of OpenAI's `POST /v1/files`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from typing import Any, BinaryIO

from ferrule.errors import RequestError, StartupError, TooLargeError
from ferrule.schema import printable
from ferrule_plugins.router.batches.store import FileRecord, Store, disk_errors

try:
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser, parse_options_header
except ImportError:
    raise StartupError(
        "The router batches reads uploads with python-multipart, which is not installed.",
        "Install it: pip install 'ferrule[batches]'",
    ) from None

FORM_BYTES = 64 << 10  # of a form, beside the file
_BLOCK = 1 << 20  # bytes that are written at a time
_FIELD_BYTES = 1 << 10
_PARTS = 16
_HEADER_BYTES = 8 << 10  # of the headers of all parts
_PLAIN_ENCODINGS = (b"7bit", b"8bit", b"binary")  # those that change nothing
_NAME = 255  # characters of a file's name
_YEAR = 365 * 86_400
_HOUR, _MONTH = 3600, 30 * 86_400
_DIGITS = re.compile("[0-9]{1,9}")


async def receive(
    pieces: AsyncIterator[bytes], headers: Mapping[str, str], store: Store, key: str, most: int
) -> FileRecord:
    """Store the file of a form that arrives in pieces; it belongs to `key` and has at most `most` bytes.

    Raises RequestError, UnavailableError.
    """
    length = headers.get("content-length", "")
    expected = min(int(length), most) if length.isdigit() else most
    with ExitStack() as stack:
        path, file = await asyncio.to_thread(stack.enter_context, store.receiving(expected))
        form = _Form(headers, most)
        async for piece in pieces:
            form.feed(piece)
            if len(form.waiting) >= _BLOCK:
                await asyncio.to_thread(_write, file, form.take())
        await asyncio.to_thread(_write, file, form.take())
        purpose, seconds = form.settings()
        record = store.new_file(key, form.filename, purpose, seconds)
        return await asyncio.to_thread(store.keep, path, file, record)


def _write(file: BinaryIO, data: bytes) -> None:
    with disk_errors():
        file.write(data)


class _Form:
    """A form while it arrives. `waiting` are bytes of the file that nobody has taken yet."""

    def __init__(self, headers: Mapping[str, str], most: int) -> None:
        kind, options = parse_options_header(headers.get("content-type"))
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise RequestError("Send a form: Content-Type: multipart/form-data with a boundary.", "Content-Type")
        self.waiting = bytearray()
        self.filename = ""
        self._most = most
        self._received = 0
        self._has_file = self._ended = False
        self._fields: dict[str, bytearray] = {}
        self._name = ""
        self._parts = self._header_bytes = 0
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._headers: dict[str, bytes] = {}
        self._parser = _parser(boundary, self)

    def feed(self, piece: bytes) -> None:
        """Read the next piece. Raises RequestError."""
        try:
            self._parser.write(piece)
        except FormParserError:
            raise RequestError("The body is not a form as its Content-Type says.") from None

    def take(self) -> bytes:
        """Return the bytes of the file that have come, and forget them."""
        taken = bytes(self.waiting)
        self.waiting.clear()
        return taken

    def settings(self) -> tuple[str, int | None]:
        """Return purpose and lifetime of a form that has ended. Raises RequestError."""
        if not self._ended:
            raise RequestError("The form is cut off: its last boundary is missing.")
        if not self._has_file:
            raise RequestError("The form needs a part 'file' with a file name.", "file")
        fields = {name: bytes(value).decode("utf-8", "replace") for name, value in self._fields.items()}
        purpose = fields.pop("purpose", None)
        if purpose is None:
            raise RequestError("The form needs a field 'purpose'.", "purpose")
        if purpose != "batch":
            raise RequestError(
                "purpose must be batch: nothing on this server reads files of another purpose.", "purpose"
            )
        anchor, seconds = fields.pop("expires_after[anchor]", None), fields.pop("expires_after[seconds]", None)
        if fields:
            raise RequestError(f"The form has an unknown field {printable(next(iter(fields)), 64)}.")
        return purpose, lifetime(anchor, int(seconds) if seconds and _DIGITS.fullmatch(seconds) else seconds)

    # ---- what the parser tells

    def begin_part(self) -> None:
        self._parts += 1
        if self._parts > _PARTS:
            raise RequestError(f"The form has more than {_PARTS} parts.")
        self._headers = {}

    def header_name(self, data: bytes, start: int, end: int) -> None:
        self._more(0, data[start:end])

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._more(1, data[start:end])

    def end_header(self) -> None:
        name, value = self._header
        self._headers[name.decode("latin-1").lower()] = bytes(value)
        self._header = (bytearray(), bytearray())

    def end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get("content-disposition"))
        if not options.get(b"name"):
            raise RequestError("The form has a part without a name (Content-Disposition).")
        if self._headers.get("content-transfer-encoding", b"binary").lower() not in _PLAIN_ENCODINGS:
            raise RequestError("The form has a part with a Content-Transfer-Encoding: send it as it is.")
        self._name = options[b"name"].decode("utf-8", "replace")
        if self._name == "file":
            if self._has_file or b"filename" not in options:
                raise RequestError("The form needs one part 'file' with a file name.", "file")
            self._has_file = True
            self.filename = _plain(options[b"filename"])
        elif self._name in self._fields:
            raise RequestError(f"The form has the field {printable(self._name, 64)} twice.")
        else:
            self._fields[self._name] = bytearray()

    def data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._received += end - start
            if self._received > self._most:
                raise TooLargeError(f"A file may have {self._most} bytes.", "file")
            self.waiting += data[start:end]
        else:
            field = self._fields[self._name]
            field += data[start:end]
            if len(field) > _FIELD_BYTES:
                raise RequestError(f"The field {printable(self._name, 64)} is longer than {_FIELD_BYTES} bytes.")

    def end(self) -> None:
        self._ended = True

    def _more(self, which: int, data: bytes) -> None:
        self._header_bytes += len(data)
        if self._header_bytes > _HEADER_BYTES:
            raise RequestError("The headers of the form's parts are too long.")
        self._header[which].extend(data)


def lifetime(anchor: Any, seconds: Any) -> int | None:
    """Return the seconds of an `expires_after`; None where there is none. Raises RequestError."""
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise RequestError("expires_after.anchor must be created_at.", "expires_after.anchor")
    if not isinstance(seconds, int) or not _HOUR <= seconds <= _MONTH:
        raise RequestError(f"expires_after.seconds must be from {_HOUR} to {_MONTH}.", "expires_after.seconds")
    return seconds


def _parser(boundary: bytes, form: _Form) -> MultipartParser:
    calls: dict[str, Callable[..., None]] = {
        "on_part_begin": form.begin_part,
        "on_header_field": form.header_name,
        "on_header_value": form.header_value,
        "on_header_end": form.end_header,
        "on_headers_finished": form.end_headers,
        "on_part_data": form.data,
        "on_end": form.end,
    }
    try:
        return MultipartParser(boundary, calls, max_header_size=1 << 20)  # type: ignore[arg-type]  # a TypedDict of the same functions
    except FormParserError:
        raise RequestError("The boundary of the form is not valid.", "Content-Type") from None


def _plain(name: bytes) -> str:
    """Return a file's name without folders and without characters that cannot be printed."""
    last = re.split(r"[/\\]", name.decode("utf-8", "replace"))[-1]
    return "".join(char for char in last if char.isprintable())[:_NAME] or "file"

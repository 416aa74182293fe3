"""Structured logging on the standard library: `INFO 11-21 00:12:03 [engine] message key=value`.

One record is one line: control characters, line breaks and other characters that are not printable are written as
escapes, so that nothing a client sends can forge a line. Lines are formatted by the caller and written by a thread,
one `write` per line, from a bounded queue: when a pipe is not read, lines are dropped and counted, and the caller
never waits.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import re
import select
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TextIO

from ferrule.errors import ConfigError

_ROOT = "ferrule"
_QUEUE_LINES = 8192
_FLUSH_SECONDS = 2.0
_STUCK_SECONDS = 0.25  # without a line written: nobody reads the pipe, and to wait on would only hold up the exit
_FIELDS = "ferrule_fields"


class Log:
    """The logger of one area. `args` fill %-places of the message; `fields` follow it as key=value."""

    def __init__(self, area: str) -> None:
        self._logger = logging.getLogger(f"{_ROOT}.{area}")

    def enabled(self, level: int) -> bool:
        return self._logger.isEnabledFor(level)

    def debug(self, message: str, *args: object, **fields: object) -> None:
        self._write(logging.DEBUG, message, args, fields)

    def info(self, message: str, *args: object, **fields: object) -> None:
        self._write(logging.INFO, message, args, fields)

    def warning(self, message: str, *args: object, **fields: object) -> None:
        self._write(logging.WARNING, message, args, fields)

    def error(self, message: str, *args: object, **fields: object) -> None:
        self._write(logging.ERROR, message, args, fields)

    def exception(self, message: str, *args: object, **fields: object) -> None:
        """Log an error with the traceback of the exception that is being handled."""
        self._write(logging.ERROR, message, args, fields, with_traceback=True)

    def _write(
        self,
        level: int,
        message: str,
        args: tuple[object, ...],
        fields: dict[str, object],
        with_traceback: bool = False,
    ) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, message, *args, exc_info=with_traceback, extra={_FIELDS: fields})


def get(area: str) -> Log:
    """Return the logger of an area such as "engine". Before `setup`, warnings reach stderr by the standard library's
    rule.
    """
    return Log(area)


def setup(level: str, process: str = "", stream: TextIO | None = None, prefix: str = "") -> None:
    """Send all records of this process to `stream` (stderr) as lines; `process` stands before the area.

    Each line begins with `prefix`. Ferrule's own records from `level` up, other libraries' from WARNING up. A second
    call replaces the first.
    """
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _Sink)]:
        root.removeHandler(old)
        old.close()
    sink = _Sink(sys.stderr if stream is None else stream)
    sink.setFormatter(_Lines(process, prefix))
    root.addHandler(sink)
    set_level(level)
    atexit.register(sink.close)


def set_level(level: str) -> None:
    """Set the level of Ferrule's own records, from now on."""
    logging.getLogger(_ROOT).setLevel(level.upper())


def setup_from(path: str) -> None:
    """Hand all records to the handlers of a file in JSON, in the form of `logging.config.dictConfig`.

    Settings for loggers named ``vllm`` apply to those named ``ferrule``, unless the file names these too. Its handlers
    write when they are called: a pipe that is not read then does block. Raises ConfigError that names the line.
    """
    import json
    import logging.config  # not needed otherwise

    try:
        text = Path(path).read_text(encoding="utf-8")
        wanted = json.loads(text)
        if not isinstance(wanted, dict):
            raise TypeError("a JSON object is expected")
        named = wanted.get("loggers", {})
        ours = {name.replace("vllm", _ROOT, 1): value for name, value in named.items() if name.startswith("vllm")}
        logging.config.dictConfig({"disable_existing_loggers": False, **wanted, "loggers": {**ours, **named}})
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}, column {error.colno}: {error.msg}.") from None
    except OSError as error:
        raise ConfigError(f"Cannot read the logging configuration: {path}: {error.strerror}.") from None
    except Exception as error:  # of whatever the file names
        reason = (f"{error}: {error.__cause__}" if error.__cause__ else f"{error}").rstrip(".")
        culprit = re.search(r"'([^']+)'", reason)
        rows = [number for number, row in enumerate(text.splitlines(), 1) if culprit and f'"{culprit[1]}"' in row]
        raise ConfigError(f"{path}{f', line {rows[0]}' if rows else ''}: {reason}.") from None
    logging.setLogRecordFactory(_Record)


def flush(timeout: float = _FLUSH_SECONDS) -> None:
    """Wait until all lines so far are written, or `timeout` seconds have passed."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Sink):
            handler.drain(timeout)


def last_words(text: str, timeout: float = 1.0) -> None:
    """Write to stderr what a process says before it exits. A pipe that nobody reads takes `timeout` seconds of it.

    Where no thread can be started, that is as much as a pipe takes at once.
    """

    def write(most: int | None = None) -> None:
        data = text.encode("utf-8", "backslashreplace")[:most]
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(descriptor, data) :]

    flush()
    try:
        descriptor = sys.stderr.fileno()
    except ValueError:  # not a file
        sys.stderr.write(text)
        return
    thread = threading.Thread(target=write, name="last-words", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        if select.select((), (descriptor,), (), timeout)[1]:
            write(select.PIPE_BUF)
    else:
        thread.join(timeout)


def escape(text: str) -> str:
    r"""Return `text` as one line: a character that is not printable becomes an escape such as ``\n`` or ``\u202e``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def field_text(value: object) -> str:
    """Return a value as it is written behind `key=`: quoted where it holds spaces, quotes or equal signs."""
    text = escape(str(value))
    if text and not any(c in ' "=' for c in text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _tail(record: logging.LogRecord) -> str:
    fields: dict[str, object] = getattr(record, _FIELDS, {})
    return "".join(f" {key}={field_text(value)}" for key, value in fields.items())


class _Record(logging.LogRecord):
    """A record for formatters other than ours: its message is one line, with its fields."""

    def getMessage(self) -> str:
        return escape(super().getMessage()) + _tail(self)


class _Lines(logging.Formatter):
    """One line per record; the lines of a traceback follow, each marked with a bar."""

    def __init__(self, process: str, prefix: str) -> None:
        super().__init__()
        self._process = process
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        area = record.name.removeprefix(_ROOT + ".")
        place = area if not self._process or self._process == area else f"{self._process} {area}"
        when = time.strftime("%m-%d %H:%M:%S", time.localtime(record.created))
        line = f"{self._prefix}{record.levelname} {when} [{escape(place)}] {escape(record.getMessage())}{_tail(record)}"
        if record.exc_info and record.exc_info[0] is not None:
            stack = "".join(traceback.format_exception(*record.exc_info)).splitlines()
            line = "\n".join([line, *("    | " + escape(row) for row in stack)])
        return line


class _Sink(logging.Handler):
    """A bounded queue and the thread that writes from it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._descriptor = _descriptor(stream)
        self._lines: queue.Queue[str | None] = queue.Queue(_QUEUE_LINES)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record) + "\n")
        except queue.Full:
            self._dropped += 1
        except Exception:  # a value whose __str__ raises must not end the caller
            self.handleError(record)

    def drain(self, timeout: float) -> bool:
        """Wait until all lines are written. False when they are not after `timeout` seconds, or the stream is stuck."""
        deadline, moved = time.monotonic() + timeout, time.monotonic()
        with self._lines.all_tasks_done:
            while left := self._lines.unfinished_tasks:
                self._lines.all_tasks_done.wait(_STUCK_SECONDS / 4)
                now = time.monotonic()
                if self._lines.unfinished_tasks < left:
                    moved = now
                if now > deadline or now - moved > _STUCK_SECONDS:
                    return False
        return True

    def close(self) -> None:
        """Write what is left, within a bound, and end the thread. Idempotent."""
        if self._thread.is_alive():
            if not self.drain(_FLUSH_SECONDS):  # the thread ends with the process
                return
            self._lines.put_nowait(None)
            self._thread.join(_FLUSH_SECONDS)
            if self._descriptor is not None:
                os.close(self._descriptor)
        atexit.unregister(self.close)
        super().close()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._put(line)
            if self._dropped:
                count, self._dropped = self._dropped, 0
                self._put(f"WARNING {time.strftime('%m-%d %H:%M:%S')} [log] lines dropped count={count}\n")
            self._lines.task_done()
        self._lines.task_done()

    def _put(self, line: str) -> None:
        try:
            if self._descriptor is None:
                self._stream.write(line)
                return
            data = line.encode("utf-8")
            while data:
                data = data[os.write(self._descriptor, data) :]
        except (OSError, ValueError):  # the reader is gone or the stream was closed
            self._dropped += 1


def _descriptor(stream: TextIO) -> int | None:
    """Duplicate the stream's file descriptor; None for a stream that is not a file.

    The stream's own buffer is not used: its lock would be held while a full pipe blocks, and Python aborts at exit when
    it cannot take that lock.
    """
    try:
        return os.dup(stream.fileno())
    except (OSError, ValueError):
        return None

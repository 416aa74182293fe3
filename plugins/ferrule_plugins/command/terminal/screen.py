"""The output to the terminal. No text from a server reaches it without `clean`."""

from __future__ import annotations

import termios
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import TextIO

from ferrule_plugins.command.terminal.chunks import Fragment

# Every control character but line feed and tab becomes its escape: no sequence can begin (ECMA-48 needs ESC or one of
# 0x80-0x9f). A carriage return is dropped: it could only overwrite.
_CONTROLS = MappingProxyType(
    {
        **{code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"},
        ord("\r"): "",
        **dict.fromkeys(range(0xD800, 0xE000), "\ufffd"),  # lone halves of pairs cannot be encoded
    }
)
_DIM, _RED, _CYAN, _PLAIN = "\x1b[2m", "\x1b[31m", "\x1b[36m", "\x1b[0m"
_LINE = 500  # the most characters of a note or an error


def clean(text: str) -> str:
    """Return the text without characters that can control a terminal."""
    return text.translate(_CONTROLS)


def one_line(text: str) -> str:
    """Return the text as one clean line of bounded length."""
    line = clean(" ".join(text.split()))
    return line if len(line) <= _LINE else line[: _LINE - 1] + "…"


class Screen:
    """The terminal's output: answers are written to `out`, notes and errors about them to `err`. `styled` tells of each
    of the two whether escape codes may be used.
    """

    def __init__(self, out: TextIO, err: TextIO, *, styled: tuple[bool, bool], thinking: bool) -> None:
        self._out = out
        self._err = err
        self._styled, self._err_styled = styled
        self._thinking = thinking
        self._part: str = ""  # which kind of fragment came last in this answer
        self._number = 0
        self._fresh = True  # the cursor is at the start of a line

    def show(self, fragment: Fragment) -> None:
        """Write a fragment of an answer at once."""
        if fragment.kind == "thought" and not self._thinking:
            return
        text = clean(fragment.text)
        if self._styled and fragment.kind == "text" and self._part != "text":
            text = text.lstrip("\n")  # many models leave empty lines behind their thinking
            if not text:
                return
        follows = fragment.kind == self._part or (fragment.kind == "arguments" and self._part == "call")
        if not follows or fragment.number != self._number or fragment.kind == "call":
            self._close()
            self._begin(fragment)
            self._number = fragment.number
        self._part = fragment.kind
        self._write(text + "(" if fragment.kind == "call" else text)
        self._out.flush()

    def end(self) -> None:
        """End an answer, whole or not: the next line is free, in the normal style."""
        self._close()
        self._part = ""
        self._out.flush()

    def note(self, text: str) -> None:
        """Write a line about an answer, or from a command."""
        self._say(text, _DIM)

    def error(self, text: str) -> None:
        self._say(f"error: {text}", _RED)

    def _say(self, text: str, style: str) -> None:
        line = clean(text)
        self._err.write(f"{style}{line}{_PLAIN}\n" if self._err_styled else f"{line}\n")
        self._err.flush()

    def _begin(self, fragment: Fragment) -> None:
        if fragment.kind == "thought":
            self._style(_DIM, "<think>\n")
        elif fragment.kind in {"call", "arguments"}:
            self._style(_CYAN, "")
            self._write("→ " if fragment.kind == "call" else "→ … ")

    def _close(self) -> None:
        """End the open fragment and its line: close a call's bracket, and mark the end of thinking by words where
        styles are off.
        """
        if self._part == "thought":
            self._line()
            self._style(_PLAIN, "</think>")
            self._write("\n")
        elif self._part in {"call", "arguments"}:
            self._write(")")
            self._style(_PLAIN, "")
            self._line()
        elif self._part:
            self._line()

    def _line(self) -> None:
        if not self._fresh:
            self._write("\n")

    def _style(self, code: str, words: str) -> None:
        if self._styled:
            self._out.write(code)
        else:
            self._write(words)

    def _write(self, text: str) -> None:
        if text:
            self._out.write(text)
            self._fresh = text.endswith("\n")


@contextmanager
def unechoed(stream: TextIO) -> Iterator[None]:
    """Hide the keys that are pressed during an answer, and keep them for the next prompt."""
    try:
        before = termios.tcgetattr(stream.fileno())
    except (termios.error, OSError):  # no terminal
        yield
        return
    silent = [*before]
    silent[3] &= ~(termios.ECHO | termios.ECHOCTL)
    termios.tcsetattr(stream.fileno(), termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(stream.fileno(), termios.TCSANOW, before)

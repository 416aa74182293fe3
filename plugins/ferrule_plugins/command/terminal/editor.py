"""The sources of messages: a line editor on a terminal, plain lines from anything else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings

PROMPT = "> "
_MORE = "… "
_KEPT_BYTES = 1 << 20  # of the history file; the older half of a longer one is dropped at start


class Reader(Protocol):
    def read(self) -> str:
        """Return the next message, which may have several lines. Raises EOFError, and KeyboardInterrupt for Ctrl-C."""
        ...


class Lines:
    """A reader of plain lines, each of which is a message; a backslash at its end joins the next line.

    The prompt is written to `prompts`, if that is not None.
    """

    def __init__(self, source: TextIO, prompts: TextIO | None) -> None:
        self._source = source
        self._prompts = prompts

    def read(self) -> str:
        text = self._line(PROMPT)
        while text.endswith("\\"):
            try:
                text = f"{text[:-1]}\n{self._line(_MORE)}"
            except EOFError:
                return text
        return text

    def _line(self, prompt: str) -> str:
        if self._prompts is not None:
            self._prompts.write(prompt)
            self._prompts.flush()
        line = self._source.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")


class Editor:
    """A line editor with the usual keys, history, completion of commands, and pasted text that is not sent line by
    line.

    Enter sends; Alt-Enter, or Enter behind a backslash, begins a new line; Ctrl-C empties the line, and leaves at an
    empty one; Ctrl-D leaves.
    """

    def __init__(self, history: Path | None, commands: Mapping[str, str], *, styled: bool) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.output import ColorDepth
        from prompt_toolkit.styles import Style

        words = WordCompleter(list(commands), meta_dict=dict(commands), sentence=True)
        self._session: PromptSession[str] = PromptSession(
            [("", "\n"), ("class:prompt", PROMPT)],
            multiline=True,
            prompt_continuation=_MORE,
            key_bindings=_keys(),
            history=InMemoryHistory() if history is None else FileHistory(str(history)),
            completer=words,
            complete_while_typing=False,
            style=Style.from_dict({"prompt": "ansicyan bold"}),
            color_depth=ColorDepth.from_env() if styled else ColorDepth.DEPTH_1_BIT,
            include_default_pygments_style=False,
        )

    def read(self) -> str:
        return self._session.prompt()


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c")
    def _leave(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return keys


def history_file(folder: Path) -> Path:
    """Return the history file of `chat`, created if need be, readable by its owner alone. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / "chat_history"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "rb+") as file:
        os.fchmod(file.fileno(), 0o600)
        if os.fstat(file.fileno()).st_size > _KEPT_BYTES:
            _shorten(path)
    return path


def _shorten(path: Path) -> None:
    """Keep the newer half of a history file, from the start of an entry; an entry begins with a line `# time`."""
    newer = path.read_bytes()[-_KEPT_BYTES // 2 :]
    start = newer.find(b"\n# ")
    shorter = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(shorter, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(newer[start:] if start >= 0 else b"")
    shorter.replace(path)

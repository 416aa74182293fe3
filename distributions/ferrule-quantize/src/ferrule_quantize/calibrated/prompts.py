"""The calibration texts, as token ids."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ferrule.config import Resolved
from ferrule.errors import CheckpointError, ConfigError, RequestError
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.service import ChatPrompt
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule_files.offline import Texts

_CHARACTERS = 16  # of a text that are read for each token
_LONGEST_ROW = 16 << 20  # characters
_USUAL = 512  # tokens of a text
_LEAST = 2  # tokens of a text
_ROWS = (".jsonl", ".ndjson")


class Prompts:
    """A source of texts: `named` is a file, or "builtin". Opened early, so that a fault is found before long work."""

    def __init__(self, named: str, most: int, length: int | None = None) -> None:
        """Prepare at most `most` texts of `length` tokens; None: the usual length, if the model takes that many.

        Raises ConfigError for a file that cannot be read or is empty.
        """
        self.named, self.most, self.length = named, most, length or _USUAL
        self._strict = length is not None
        path = Path(named).expanduser()
        if named != "builtin" and path.exists() and not path.is_file():  # a device or a pipe might have no end
            self._fail("is not a file")
        self._rows = path if named != "builtin" and path.suffix.lower() in _ROWS else None
        if self._rows is not None:
            self._text = ""
            next(_rows(self._rows), None) or self._fail("is empty")
        elif named == "builtin":
            self._text = _builtin()[: most * self.length * _CHARACTERS]
        else:
            self._text = self._read(path)

    def samples(self, config: Resolved, plugins: Plugins, longest: int) -> list[list[int]]:
        """Return the ids of at most `most` texts of at most `length` tokens each. Raises StartupError.

        `longest`: tokens that the model takes.
        """
        if self.length > longest and not self._strict:
            self.length = longest
        if self.length > longest:
            raise ConfigError(f"--calibration-length {self.length} is more than the model's context of {longest}.")
        try:
            texts = Texts(config, plugins, longest)
        except CheckpointError as error:
            raise CheckpointError(f"Calibration texts need the model's tokenizer: {error.message}") from None
        if self._rows is None:
            found = self._windows(texts.tokenizer)
        else:
            found = asyncio.run(self._conversations(self._rows, texts))
        found = [ids[: self.length] for ids in found if len(ids) >= _LEAST]
        if not found:
            self._fail("has no text of two tokens of the model's tokenizer")
        return found

    def _windows(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Cut a long text into windows, each with the token that begins a text, if there is one."""
        ids = tokenizer.encode(self._text)
        begin = ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []
        width, ids = self.length - len(begin), ids[len(begin) :]
        starts = range(0, len(ids), max(1, width))
        return [begin + ids[start : start + width] for start in itertools.islice(starts, self.most)]

    async def _conversations(self, rows: Path, texts: Texts) -> list[list[int]]:
        tokenizer = texts.tokenizer
        found: list[list[int]] = []
        try:
            for number, row in itertools.islice(_rows(rows), self.most):
                text, messages = row.get("text"), row.get("messages")
                if isinstance(text, str):
                    found.append(tokenizer.encode(text[: self.length * _CHARACTERS]))
                elif isinstance(messages, list):
                    chat = ChatPrompt(messages=tuple(messages), add_generation_prompt=False)
                    found.append(tokenizer.encode(await texts.render(chat), add_special_tokens=False))
                else:
                    self._fail(f'line {number} has neither "text" nor "messages"')
        except RequestError as error:
            self._fail(f"line {number}: {error.message}")
        finally:
            await texts.close()
        return found

    def _read(self, path: Path) -> str:
        try:
            with path.open(encoding="utf-8") as stream:
                text = stream.read(self.most * self.length * _CHARACTERS)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--calibration {self.named} cannot be read: {error}.") from None
        return text if text.strip() else self._fail("is empty")

    def _fail(self, what: str) -> Any:
        raise ConfigError(f"--calibration {self.named} {what}.")


def _rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the numbers of a file's lines and the objects on them. Raises ConfigError with the line's number."""
    number = 0
    try:
        with file.open(encoding="utf-8") as stream:
            while line := stream.readline(_LONGEST_ROW):
                number += 1
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("it is not an object")
                yield number, row
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--calibration {file} cannot be read: {error}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--calibration {file}, line {number}: not a JSON object: {error}.") from None


def _builtin() -> str:
    """Return the documentation of the Python language that comes with Python: prose and code in English."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError("This Python comes without its documentation.", "--calibration FILE names texts.") from None
    return "\n\n".join(topics[name] for name in sorted(topics))


def count(samples: Sequence[Sequence[int]]) -> int:
    return sum(map(len, samples))

"""Folders with a ``tiktoken.model`` alone: Kimi's tokenizer, by tiktoken.

The file has tokens and their ranks, and not the pattern that cuts a text. That is in Python code of the checkpoint,
``tokenization_kimi.py`` (https://huggingface.co/moonshotai/Kimi-K2-Instruct), which is not run: the pattern stands
here, for checkpoints whose ``tokenizer_config.json`` names the class.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ferrule.errors import CheckpointError
from ferrule.frontend.text.detokenize import decode
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule_plugins.tokenizer.files import added_tokens, chat_templates, read_settings, special_tokens, token_content

FILE = "tiktoken.model"
_CLASS, _MODULES = "TikTokenTokenizer", ("tokenization_kimi", "tokenization_moonshot")
_LETTERS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LETTERS}*{_SMALL}+{_ENDINGS}",
        f"{_LETTERS}+{_SMALL}*{_ENDINGS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_RESERVED = 256  # special tokens, behind all others
_MAX_BYTES = 16 << 20  # Kimi's has 3
# A text is cut where so many characters have come, and where a run with or without white space is so long.
_LONGEST_TEXT, _LONGEST_RUN = 400_000, 25_000
_RUNS = re.compile(rf"\s{{1,{_LONGEST_RUN}}}|\S{{1,{_LONGEST_RUN}}}")
_ROLES = {"bos_token": "[BOS]", "eos_token": "[EOS]"}


class KimiTokenizer(Tokenizer):
    """Kimi's tokenizer. `inner` is a `tiktoken.Encoding`."""

    def __init__(self, inner: Any, specials: dict[str, int], settings: Mapping[str, Any], folder: Path) -> None:
        self._inner = inner
        self._names = {token: name for name, token in specials.items()}
        self.vocab_size = int(inner.n_vocab)
        self.special_tokens = {role: text for role, text in _ROLES.items() if text in specials}
        self.special_tokens |= special_tokens(settings)
        self.bos_token_id = specials.get(self.special_tokens.get("bos_token", ""))
        self.eos_token_id = specials.get(self.special_tokens.get("eos_token", ""))
        shown = {key for key, value in added_tokens(settings).items() if value.get("special") is False}
        self.all_special_ids = frozenset(self._names.keys() - shown)
        self.chat_template = chat_templates(folder, settings)
        self.settings = settings

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. As in the published tokenizer, no token is added in front of a text or behind
        it.
        """
        found: list[int] = []
        for part in _cut(text):
            found += self._inner.encode(part, allowed_special="all")
        return found

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return decode(self, ids, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocab_size:
            return None
        return self._names.get(token_id) or self.piece(token_id, False).decode("latin-1")

    def piece(self, token_id: int, first: bool) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            return b""
        made: bytes = self._inner.decode_single_token_bytes(token_id)
        return made


def open_folder(folder: Path) -> KimiTokenizer:
    """Open the tokenizer of a folder. Raises CheckpointError, also for another family's file, which would be cut
    wrongly.
    """
    settings = read_settings(folder)
    known = [f"{module}.{_CLASS}" for module in _MODULES]
    if settings.get("tokenizer_class") != _CLASS or _code(settings) not in known:
        raise CheckpointError(
            f"{folder / FILE} does not say how texts are cut, and tokenizer_config.json does not name Kimi's "
            f"{_CLASS}, whose pattern is known here.",
            "Put a tokenizer.json beside it, or name another tokenizer with --tokenizer.",
        )
    try:
        import tiktoken
    except ImportError:
        raise CheckpointError(
            f"{folder / FILE} is opened by tiktoken.", "Install it: pip install 'ferrule[tiktoken]'"
        ) from None
    ranks = _ranks(folder / FILE)
    names = {key: token_content(value) for key, value in added_tokens(settings).items()}
    ids = range(len(ranks), len(ranks) + _RESERVED)
    specials = {names.get(token) or f"<|reserved_token_{token}|>": token for token in ids}
    if len(specials) < _RESERVED or sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{folder} has a tokenizer in which two tokens have one number or one name.")
    if not all(bytes([byte]) in ranks for byte in range(256)):  # tiktoken panics at a text that has such a byte
        raise CheckpointError(f"{folder / FILE} does not have a token for each byte.")
    inner = tiktoken.Encoding("kimi", pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens=specials)
    return KimiTokenizer(inner, specials, settings, folder)


def _code(settings: Mapping[str, Any]) -> Any:
    """Return the class that a checkpoint names, or the known one where it names none."""
    stated = settings.get("auto_map") or {}
    code = stated.get("AutoTokenizer") if isinstance(stated, Mapping) else stated
    return (code[0] if isinstance(code, list) and code else code) or f"{_MODULES[0]}.{_CLASS}"


def _ranks(file: Path) -> dict[bytes, int]:
    """Read a file whose lines have a token in base64 and its rank. Raises CheckpointError."""
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{file} is larger than {_MAX_BYTES} bytes.")
        lines = [line.split() for line in file.read_bytes().splitlines() if line]
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, binascii.Error):
        raise CheckpointError(f"{file} has a line that is not a token in base64 and its rank.") from None


def _cut(text: str) -> Sequence[str]:
    """Cut a text into parts that tiktoken takes in linear time, as the published tokenizer cuts them."""
    if len(text) <= _LONGEST_RUN:
        return (text,) if text else ()
    parts = []
    for start in range(0, len(text), _LONGEST_TEXT):
        parts += _by_runs(text[start : start + _LONGEST_TEXT])
    return parts


def _by_runs(text: str) -> list[str]:
    """Cut a text in front of a character that continues a run which already has the greatest length."""
    parts, start, before = [], 0, None
    for run in _RUNS.finditer(text):
        blank = run[0][0].isspace()
        if before is not None and before == (blank, run.start()):
            parts.append(text[start : run.start()])
            start = run.start()
        before = blank, run.end()
    return [*parts, text[start:]]

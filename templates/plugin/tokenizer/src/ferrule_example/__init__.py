"""Bytes as tokens: ids 0 to 255, and 256 for the token that ends an answer, named in ``bytes.json``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ferrule.errors import CheckpointError
from ferrule.interfaces.tokenizer import Tokenizer, TokenizerSource

FILE = "bytes.json"
END = 256


class ByteTokenizer(Tokenizer):
    vocab_size = END + 1
    bos_token_id = None
    eos_token_id = END
    all_special_ids = frozenset({END})

    def __init__(self, end: str, chat_template: str | None) -> None:
        self.special_tokens = {"eos_token": end}
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for place, part in enumerate(text.split(self.special_tokens["eos_token"])):
            ids += [END] * (place > 0) + list(part.encode())
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        shown = [token for token in ids if not (skip_special_tokens and token == END)]
        return b"".join(self.piece(token, False) for token in shown).decode(errors="replace")

    def token(self, token_id: int) -> str | None:
        if token_id == END:
            return self.special_tokens["eos_token"]
        return chr(token_id) if 0 <= token_id < END else None

    def piece(self, token_id: int, first: bool) -> bytes:
        if token_id == END:
            return self.special_tokens["eos_token"].encode()
        return bytes([token_id]) if 0 <= token_id < END else b""


class ExampleTokenizers(TokenizerSource):
    conformance = "ferrule_example.conformance:SETTINGS"

    def open(self, folder: Path, options: dict[str, Any]) -> Tokenizer:
        file = folder / FILE
        try:
            values = json.loads(file.read_bytes())
            return ByteTokenizer(str(values["eos_token"]), values.get("chat_template"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file} cannot be used: {type(error).__name__}: {error}") from error

"""`slow`: the tokenizer as transformers opens it, for folders that only transformers can read.

transformers is imported here and nowhere else in the frontend. Python code of the checkpoint runs only with
--trust-remote-code.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ferrule.errors import CheckpointError
from ferrule.interfaces.tokenizer import Tokenizer, TokenizerSource
from ferrule_plugins.tokenizer.files import chat_templates, read_settings


class TransformersTokenizer(Tokenizer):
    """A tokenizer of transformers, `inner`; a lock keeps its Python side from running twice at once."""

    def __init__(self, inner: Any, chat_template: str | dict[str, str] | None) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self.vocab_size = max(len(inner), 1 + max(inner.get_vocab().values(), default=-1))
        self.bos_token_id = inner.bos_token_id
        self.eos_token_id = inner.eos_token_id
        self.special_tokens = {role: str(token) for role, token in inner.special_tokens_map.items() if _is_token(token)}
        self.all_special_ids = frozenset(inner.all_special_ids)
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        with self._lock:
            return list(self._inner.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        shown = [token for token in ids if 0 <= token < self.vocab_size]
        with self._lock:
            text: str = self._inner.decode(
                shown, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        return text

    def token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocab_size:
            return None
        with self._lock:
            found = self._inner.convert_ids_to_tokens(token_id)
        return None if found is None else str(found)


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or hasattr(value, "content")


class SlowTokenizers(TokenizerSource):
    """Tokenizers of transformers. Options: `trust_remote_code`."""

    def open(self, folder: Path, options: dict[str, Any]) -> Tokenizer:
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder.")
        from transformers import AutoTokenizer

        trusted = options.get("trust_remote_code") is True
        try:
            inner = AutoTokenizer.from_pretrained(
                str(folder), use_fast=False, trust_remote_code=trusted, local_files_only=True
            )
        except Exception as error:  # transformers raises many kinds for a folder that it cannot use
            raise CheckpointError(
                f"{folder} has no tokenizer that can be opened ({type(error).__name__}: {error}).",
                "Name another one with --tokenizer, or start with --skip-tokenizer-init.",
            ) from None
        settings = read_settings(folder)
        tokenizer = TransformersTokenizer(inner, chat_templates(folder, settings) or inner.chat_template)
        tokenizer.settings = settings
        return tokenizer

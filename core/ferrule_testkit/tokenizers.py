"""Small tokenizers: a byte tokenizer without files, and a folder with a common ``tokenizer.json``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ferrule.interfaces.tokenizer import Tokenizer, TokenizerSource

CORPUS = (
    "The quick brown fox jumps over the lazy dog, isn't it? Yes! Two  spaces,\ttabs\nand lines.",
    "Grüße aus Köln: naïve café 你好，世界 こんにちは 🙂🙃 e\u0301 \u200d end",
    "def f(x):\n    return x ** 2  # comment\n",
)


class ByteTokenizer(Tokenizer):
    """A tokenizer of bytes: ids 0 to 255 are bytes; 256 is ``<s>``, 257 is ``</s>``, 258 is ``<|tag|>``."""

    names = ("<s>", "</s>", "<|tag|>")

    def __init__(self, chat_template: str | dict[str, str] | None = None) -> None:
        self.vocab_size = 256 + len(self.names)
        self.bos_token_id = 256
        self.eos_token_id = 257
        self.special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
        self.all_special_ids = frozenset(range(256, self.vocab_size))
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [256] if add_special_tokens else []
        at = 0
        while at < len(text):
            special = next((i for i, name in enumerate(self.names) if text.startswith(name, at)), None)
            if special is None:
                ids += text[at].encode()
                at += 1
            else:
                ids.append(256 + special)
                at += len(self.names[special])
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        shown = (token for token in ids if not (skip_special_tokens and token in self.all_special_ids))
        return b"".join(self.piece(token, False) for token in shown).decode("utf-8", "replace")

    def token(self, token_id: int) -> str | None:
        if 256 <= token_id < self.vocab_size:
            return self.names[token_id - 256]
        return f"<0x{token_id:02X}>" if 0 <= token_id < 256 else None

    def piece(self, token_id: int, first: bool) -> bytes:
        if 0 <= token_id < 256:
            return bytes([token_id])
        return (self.token(token_id) or "").encode()


class ByteTokenizers(TokenizerSource):
    def open(self, folder: Path, options: dict[str, Any]) -> Tokenizer:
        return ByteTokenizer(options.get("chat_template"))


def byte_level() -> Any:
    """Train a BPE tokenizer over bytes, as GPT-2, Llama 3 and Qwen have it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet))
    core.add_special_tokens(["<|end|>", "<｜begin｜>"])
    core.add_tokens([AddedToken("<think>"), AddedToken("añadido")])
    return core


def write_tokenizer(folder: Path, core: Any, **settings: Any) -> Path:
    """Write a folder with ``tokenizer.json`` and, with settings, ``tokenizer_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return folder

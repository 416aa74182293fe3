"""`ModelTokens`: texts to ids and back, for the model or for an adapter with limits of its own."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ferrule.config import LimitsConfig
from ferrule.frontend.adapters.table import Served
from ferrule.frontend.admission.admit import PromptReader
from ferrule.frontend.output.parse import Parsers
from ferrule.frontend.output.reading import OutputReader
from ferrule.frontend.text.detokenize import offsets
from ferrule.interfaces.service import ChatPrompt, Prompt, ReadPrompt, Tokens


class ModelTokens(Tokens):
    """The readers of prompts and of outputs, under the rules of one adapter or of none."""

    def __init__(self, reader: PromptReader, parsers: Parsers) -> None:
        self.reader, self.tokenizer = reader, reader.tokenizer
        self.output = OutputReader(parsers, reader.tokenizer)

    @property
    def max_model_len(self) -> int:
        return self.reader.rules.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.reader.rules.vocab_size

    async def tokenize(self, prompt: Prompt | ChatPrompt) -> list[int]:
        return list((await self.read(prompt)).ids)

    async def read(self, prompt: Prompt | ChatPrompt) -> ReadPrompt:
        return await self.reader.read(prompt)

    async def detokenize(self, ids: Sequence[int]) -> str:
        return await self.reader.detokenize(ids)

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if self.tokenizer is None:
            return f"token_id:{token_id}".encode()
        piece = self.tokenizer.piece(token_id, False)
        return self.tokenizer.decode([token_id], skip_special_tokens=False).encode() if piece is None else piece

    def text_offsets(self, ids: Sequence[int], text: str) -> list[int]:
        return [0] * len(ids) if self.tokenizer is None else offsets(self.tokenizer, ids, text)


class AllTokens:
    """The `ModelTokens` of a server: `own` without an adapter, and those of adapters.

    `reader` has the rules of the longest texts; `own_len` tokens are the most of a text without an adapter, 0 as many.
    """

    def __init__(self, reader: PromptReader, parsers: Parsers, own_len: int) -> None:
        self.reader, self._parsers, self._own_len = reader, parsers, own_len
        self.own = ModelTokens(reader.under(reader.rules.within(own_len)), parsers)
        self._long: dict[int, ModelTokens] = {}  # by the length of adapters' texts, of which there are few

    def of(self, served: Served | None) -> ModelTokens:
        """Return those of an adapter."""
        longest = 0 if served is None else served.info.max_len
        if not longest:
            return self.own
        if longest not in self._long:
            self._long[longest] = ModelTokens(self.reader.under(self.reader.rules.within(longest)), self._parsers)
        return self._long[longest]

    def use(self, reader: PromptReader) -> AllTokens:
        """Return the same with another reader."""
        return AllTokens(reader, self._parsers, self._own_len)

    def take_limits(self, limits: LimitsConfig) -> None:
        """Apply other limits from now on."""
        for reader in (self.reader, *(each.reader for each in (self.own, *self._long.values()))):
            reader.rules = replace(reader.rules, limits=limits)

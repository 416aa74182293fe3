"""`ModelTokens`: texts to ids and back, for the model or for an adapter with limits of its own."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakValueDictionary

from msgspec.structs import replace

from ferrule.config import LimitsConfig
from ferrule.frontend.adapters.table import Served
from ferrule.frontend.adapters.tokenizers import OpenAdded
from ferrule.frontend.admission.admit import PromptReader
from ferrule.frontend.output.parse import Parsers
from ferrule.frontend.output.reading import OutputReader
from ferrule.frontend.text.detokenize import offsets
from ferrule.interfaces.service import ChatPrompt, Prompt, ReadPrompt, Tokens
from ferrule.types import Adapter, AdapterInfo

_KEPT = 16  # tokenizers of adapters, each some megabytes


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
    """The `ModelTokens` of a server: `own` without an adapter, and those of adapters that differ in limits or tokens.

    `reader` has the rules of the longest texts; `own_len` tokens are the most of a text without an adapter, 0 as many.
    `open_added` opens the tokenizer of an adapter, and blocks. `keep` of those are kept.
    """

    def __init__(
        self, reader: PromptReader, parsers: Parsers, own_len: int, open_added: OpenAdded, keep: int = _KEPT
    ) -> None:
        self.reader, self._parsers, self._own_len = reader, parsers, own_len
        self._open_added, self._keep = open_added, max(keep, _KEPT)
        self.own = ModelTokens(reader.under(reader.rules.within(own_len)), parsers)
        self._others: OrderedDict[Adapter | None, ModelTokens] = OrderedDict()  # the one used last at the end
        self._opening: WeakValueDictionary[Adapter | None, asyncio.Lock] = WeakValueDictionary()

    async def of(self, served: Served | None) -> ModelTokens:
        """Return those of an adapter. Raises RequestError for a tokenizer that cannot be used."""
        if served is None or served.info == AdapterInfo():
            return self.own
        if served.adapter not in self._others:
            async with self._opening.setdefault(served.adapter, asyncio.Lock()):  # a folder may not answer
                if served.adapter not in self._others:
                    return self._kept(served, await asyncio.to_thread(self._made, served))
        return self._kept(served, self._others[served.adapter])

    def check(self, served: Served) -> None:
        """Open the tokenizer of an adapter before there is an event loop. Raises RequestError."""
        if served.info != AdapterInfo():
            self._kept(served, self._made(served))

    def use(self, reader: PromptReader) -> AllTokens:
        """Return the same with another reader."""
        return AllTokens(reader, self._parsers, self._own_len, self._open_added, self._keep)

    def take_limits(self, limits: LimitsConfig) -> None:
        """Apply other limits from now on."""
        for reader in (self.reader, *(each.reader for each in (self.own, *self._others.values()))):
            reader.rules = replace(reader.rules, limits=limits)

    def _made(self, served: Served) -> ModelTokens:
        base, info, tokenizer = self.reader, served.info, None
        rules = base.rules.within(info.max_len or self._own_len)
        if info.num_added:
            tokenizer = None if base.tokenizer is None else self._open_added(served, base.tokenizer)
            rules = rules.with_added(info.num_added, tokenizer)
        return ModelTokens(base.under(rules, tokenizer), self._parsers)

    def _kept(self, served: Served, tokens: ModelTokens) -> ModelTokens:
        self._others[served.adapter] = tokens
        self._others.move_to_end(served.adapter)
        while len(self._others) > self._keep:
            self._others.popitem(last=False)
        return tokens

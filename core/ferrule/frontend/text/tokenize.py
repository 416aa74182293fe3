"""`Encoder`: texts to ids on a few threads, so that a long text does not hold up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ferrule.interfaces.tokenizer import Tokenizer

T = TypeVar("T")

_INLINE = 512  # characters that are encoded sooner than a thread would wake up: about 0.1 ms
_THREADS = 2


class Encoder:
    """A tokenizer that encodes long texts on threads. The gate bounds how many texts wait: it counts requests before
    they come here.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) <= _INLINE:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await self.offload(lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the id sequences of each word, at the start of a text and after a space."""
        if not words:
            return ()
        return await self.offload(lambda: self._bad_words(words))

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        forms = (form for word in words for form in (word.lstrip() or word, " " + word.lstrip()))
        found = (tuple(self.tokenizer.encode(form, add_special_tokens=False)) for form in forms)
        return tuple(dict.fromkeys(ids for ids in found if ids))

    async def offload(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

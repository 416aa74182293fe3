"""Changes that requests make to their logits before the choice: masks, biases, banned words, processors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ferrule.interfaces.plugins import Plugins, log_fault
from ferrule.interfaces.sampler import LogitsProcessor, SampleRow
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.types import TokenSampling
from ferrule_plugins.sampler.plan import Parcel, Sent

_NEVER = float("-inf")

Ids = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
OpenTokenizer = Callable[[], Tokenizer | None]


@dataclass(frozen=True)
class Prepared:
    """A request's parameters as arrays, made when it first samples. `sampling` identifies the request.

    Ids outside of the vocabulary are left out.
    """

    sampling: TokenSampling
    allowed: Bytes | None  # a bitmask over the vocabulary
    bias_ids: Ids
    bias: Floats
    stops: Ids  # banned until min_tokens are there
    bad_words: tuple[tuple[int, ...], ...]
    processors: tuple[tuple[str, LogitsProcessor], ...]  # each with its title


class Failed(Exception):
    """The failure of a logits processor, which is logged. The message is fit for the client."""


def prepare(sampling: TokenSampling, plugins: Plugins, vocab_size: int, tokenizer: OpenTokenizer) -> Prepared:
    """Prepare a request's changes to logits.

    Raises Failed for a processor that is unknown, refuses its arguments, or raises.
    """

    def ids(values: Sequence[int]) -> Ids:
        return np.array([value for value in values if 0 <= value < vocab_size], dtype=np.int64)

    allowed = None
    if sampling.allowed_token_ids:
        bits = np.zeros(vocab_size, dtype=np.uint8)
        bits[ids(sampling.allowed_token_ids)] = 1
        allowed = np.packbits(bits, bitorder="little")
    bias = [(token, value) for token, value in sampling.logit_bias if 0 <= token < vocab_size]
    return Prepared(
        sampling=sampling,
        allowed=allowed,
        bias_ids=ids([token for token, _ in bias]),
        bias=np.array([value for _, value in bias], dtype=np.float32),
        stops=ids(sampling.stop_token_ids if sampling.min_tokens else ()),
        bad_words=tuple(word for word in sampling.bad_words if word and 0 <= word[-1] < vocab_size),
        processors=tuple(_begun(name, kwargs, plugins, tokenizer) for name, kwargs in sampling.processors),
    )


@dataclass
class Masks:
    """Bitmasks over the vocabulary, of grammars and of allowed ids. A row may have both."""

    rows: list[int] = field(default_factory=list)
    bits: list[Bytes] = field(default_factory=list)

    def add(self, row: int, bits: Bytes) -> None:
        self.rows.append(row)
        self.bits.append(bits)

    def put(self, vocab_size: int, parcel: Parcel) -> tuple[Sent, Sent]:
        """Send rows [masks] int64 and words [masks, vocab / 32] int32."""
        words = np.zeros((len(self.rows), -(-vocab_size // 32) * 4), dtype=np.uint8)
        for mask, bits in zip(words, self.bits, strict=True):
            mask[: len(bits)] = bits[: len(mask)]
        return parcel.put(np.array(self.rows, dtype=np.int64)), parcel.put(words.view(np.int32))


@dataclass
class Edits:
    """Numbers to add to single logits; minus infinity is a ban."""

    places: list[Ids] = field(default_factory=list)  # row * vocab + id
    values: list[Floats] = field(default_factory=list)

    def add(self, row: int, prepared: Prepared, vocab_size: int, stops: bool) -> None:
        """Add a row's biases and, if it must not end yet (`stops`), bans on the tokens that would end it."""
        if len(prepared.bias_ids):
            self.places.append(prepared.bias_ids + row * vocab_size)
            self.values.append(prepared.bias)
        if stops and len(prepared.stops):
            self.places.append(prepared.stops + row * vocab_size)
            self.values.append(np.full(len(prepared.stops), _NEVER, dtype=np.float32))

    def put(self, parcel: Parcel) -> tuple[Sent, Sent]:
        """Send places [edits] int64 and values [edits] float32."""
        return parcel.put(np.concatenate(self.places)), parcel.put(np.concatenate(self.values))


@dataclass
class BadWords:
    """Sequences that must not be completed.

    They are compared with the history on its device: the host may not know its end.
    """

    words: list[tuple[int, int, int, tuple[int, ...]]] = field(default_factory=list)

    def add(self, row: int, sample: SampleRow, prepared: Prepared, sizes: tuple[int, int]) -> None:
        """Add a row's banned words. `sizes` are those of the vocabulary and of a slot in the history."""
        vocab_size, stride = sizes
        end, first = sample.slot * stride + sample.position, sample.slot * stride + sample.num_prompt
        for word in prepared.bad_words:
            self.words.append((row * vocab_size + word[-1], end, first, word[:-1]))

    def put(self, parcel: Parcel) -> Sent:
        """Send words [words, 3 + longest] int64.

        A word is the banned place, the output's end and start, and the ids before it, -1 for none.
        """
        longest = max(len(before) for _, _, _, before in self.words)
        table = np.full((len(self.words), 3 + longest), -1, dtype=np.int64)
        for line, (place, end, first, before) in zip(table, self.words, strict=True):
            line[:3] = place, end, first
            if before:
                line[-len(before) :] = before
        return parcel.put(table)


def add(logits: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    """Add `Edits` to logits [rows, vocab], in place. A place that comes twice is banned at least once."""
    logits.view(-1).index_add_(0, places, values.to(logits.dtype))


def ban_words(logits: torch.Tensor, history: torch.Tensor, table: torch.Tensor) -> None:
    """Ban, in place, the last token of each word of `BadWords.put` whose other tokens end the output."""
    place, end, first, before = table[:, 0], table[:, 1:2], table[:, 2:3], table[:, 3:]
    at = end - torch.arange(before.shape[1], 0, -1, device=table.device)  # [words, longest]
    ids = history.view(-1)[at.clamp(min=0)]
    found = ((before < 0) | ((ids == before) & (at >= first))).all(1)
    values = torch.zeros(len(table), device=logits.device, dtype=logits.dtype).masked_fill_(found, _NEVER)
    logits.view(-1).index_add_(0, place, values)


def process(logits: torch.Tensor, row: SampleRow, prepared: Prepared, history: torch.Tensor) -> torch.Tensor:
    """Put one row through its processors: [vocab] → [vocab]. `history` holds its known ids. Waits for the device.

    Raises Failed for a processor that raises, or returns something other than logits.
    """
    for title, processor in prepared.processors:
        known = history[row.num_embedded :].tolist()
        with _failing(title, "apply"):
            changed = processor.apply(known, row.num_prompt - row.num_embedded, logits.clone())
            if not isinstance(changed, torch.Tensor) or changed.shape != logits.shape:
                raise TypeError("apply did not return logits")
            logits = changed.to(logits)
    return logits


def _begun(
    name: str, arguments: dict[str, Any], plugins: Plugins, tokenizer: OpenTokenizer
) -> tuple[str, LogitsProcessor]:
    """Make a processor, and return it with its title. The tokenizer is opened only for processors that use it."""
    title = plugins.title("logits_processor", name)
    with _failing(title, "begin"):
        processor: LogitsProcessor = plugins.make("logits_processor", name, **arguments)
        if type(processor).begin is not LogitsProcessor.begin:
            processor.begin(tokenizer())
    return title, processor


@contextmanager
def _failing(title: str, doing: str) -> Iterator[None]:
    """Turn whatever a processor raises into `Failed`, the fault of its row alone."""
    try:
        yield
    except Exception as error:
        log_fault(title, doing)
        raise Failed("A logits processor failed.") from error

"""What changes logits before the choice: masks, biases, processors, penalties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.sampler import LogitsProcessor, SampleBatch, SampleRow
from ferrule.log import Log
from ferrule.types import TokenSampling

_log = Log("sampler")
_NEVER = float("-inf")


@dataclass(frozen=True)
class Prepared:
    """A request's parameters as tensors, made when it first samples. `sampling` tells whose they are."""

    sampling: TokenSampling
    allowed: torch.Tensor | None  # int64
    bias_ids: torch.Tensor | None  # int64
    bias: torch.Tensor | None  # float32
    stops: torch.Tensor | None  # int64, banned until min_tokens are there
    bad_words: tuple[tuple[int, ...], ...]
    processors: tuple[tuple[str, LogitsProcessor], ...]


def prepare(sampling: TokenSampling, plugins: Plugins, vocab_size: int, device: torch.device) -> Prepared:
    """Raises ValueError or PluginError for a processor that is unknown or refuses its arguments."""

    def ids(values: Sequence[int]) -> torch.Tensor | None:
        inside = [value for value in values if 0 <= value < vocab_size]
        return torch.tensor(inside, dtype=torch.long, device=device) if values else None

    bias = [(token, value) for token, value in sampling.logit_bias if 0 <= token < vocab_size]
    made = tuple((name, plugins.load("logits_processor", name)(**kwargs)) for name, kwargs in sampling.processors)
    return Prepared(
        sampling=sampling,
        allowed=ids(sampling.allowed_token_ids),
        bias_ids=ids([token for token, _ in bias]),
        bias=torch.tensor([value for _, value in bias], dtype=torch.float32, device=device) if bias else None,
        stops=ids(sampling.stop_token_ids) if sampling.min_tokens else None,
        bad_words=tuple(word for word in sampling.bad_words if word and 0 <= word[-1] < vocab_size),
        processors=made,
    )


def mask_grammar(logits: torch.Tensor, mask: bytes) -> None:
    """Ban, in place, every token of one row whose bit is 0 or missing."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=logits.shape[0], bitorder="little")
    logits.masked_fill_(torch.from_numpy(bits == 0).to(logits.device), _NEVER)


def adjust_row(logits: torch.Tensor, row: SampleRow, prepared: Prepared, history: torch.Tensor) -> torch.Tensor:
    """One row's masks, bias and processors: [vocab] → [vocab]. `history` holds its known ids.

    Raises whatever a processor raises, and ValueError for one that returns something else than logits.
    """
    generated = row.position - row.num_prompt
    if prepared.allowed is not None:
        permitted = torch.full_like(logits, _NEVER)
        permitted[prepared.allowed] = logits[prepared.allowed]
        logits = permitted
    if prepared.bad_words:
        output = history[row.num_prompt :].tolist()
        banned = [word[-1] for word in prepared.bad_words if _ends_with(output, word[:-1])]
        logits[banned] = _NEVER
    if prepared.stops is not None and generated < row.sampling.min_tokens:
        logits[prepared.stops] = _NEVER
    if prepared.bias_ids is not None and prepared.bias is not None:
        logits.index_add_(0, prepared.bias_ids, prepared.bias)
    for name, processor in prepared.processors:
        changed = processor.apply(history.tolist(), row.num_prompt, logits.clone())
        if not isinstance(changed, torch.Tensor) or changed.shape != logits.shape:
            raise ValueError(f"logits processor {name!r} did not return logits")
        logits = changed.to(logits)
    return logits


def _ends_with(ids: Sequence[int], suffix: Sequence[int]) -> bool:
    return not suffix or tuple(ids[-len(suffix) :]) == tuple(suffix)


class Penalties:
    """Repetition, presence and frequency penalties for all rows that have them, in time linear in their ids.

    Keeps a buffer of counts, all zero between calls.
    """

    def __init__(self) -> None:
        self._counts = torch.zeros(0, dtype=torch.int32)

    def apply(self, logits: torch.Tensor, batch: SampleBatch, rows: Sequence[int]) -> None:
        """Change `logits` [all rows, vocab] in place at the ids that each of `rows` has seen.

        Repetition looks at the prompt and the output, the other two at the output. Each touched logit is computed from
        its first value, so that an id that occurs often is written often, with the same number.
        """
        chosen = [batch.rows[row] for row in rows]
        vocab, device = logits.shape[1], logits.device
        lengths = np.array([row.position for row in chosen], dtype=np.int64)
        owner = np.repeat(np.arange(len(chosen)), lengths)  # index into `chosen` of each id
        position = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        slots = np.array([row.slot for row in chosen], dtype=np.int64)
        prompts = np.array([row.num_prompt for row in chosen], dtype=np.int64)
        flat = torch.from_numpy(slots[owner] * batch.history.shape[1] + position).to(device)
        ids = batch.history.view(-1).index_select(0, flat).long()
        whose = torch.from_numpy(owner).to(device)
        is_output = torch.from_numpy(position >= prompts[owner]).to(device)
        keys = torch.tensor(rows, device=device)[whose] * vocab + ids
        counts = self._count(whose * vocab + ids, is_output, len(chosen) * vocab)
        table = torch.tensor(
            [
                (row.sampling.repetition_penalty, row.sampling.frequency_penalty, row.sampling.presence_penalty)
                for row in chosen
            ],
            dtype=torch.float32,
            device=device,
        )
        repetition, frequency, presence = table[whose].unbind(1)
        view = logits.view(-1)
        values = view[keys]
        values = torch.where(values > 0, values / repetition, values * repetition)
        view[keys] = values - frequency * counts - presence * (counts > 0)

    def _count(self, keys: torch.Tensor, counted: torch.Tensor, size: int) -> torch.Tensor:
        """How often each key occurs among the counted ones, [keys] int32."""
        if self._counts.numel() < size:
            self._counts = torch.zeros(size, dtype=torch.int32, device=keys.device)
        self._counts.index_add_(0, keys, counted.to(torch.int32))
        found = self._counts[keys]
        self._counts[keys] = 0
        return found


def describe_failure(name: str, error: Exception) -> str:
    """What the client is told of a processor's failure; the log has the whole story."""
    _log.exception("logits processing failed", parameters=name, error=type(error).__name__)
    return "A logits processor failed."


def needs_penalty(sampling: TokenSampling) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)


def needs_row(sampling: TokenSampling) -> bool:
    """True when `adjust_row` would change something."""
    return bool(
        sampling.allowed_token_ids
        or sampling.bad_words
        or sampling.min_tokens
        or sampling.logit_bias
        or sampling.processors
    )

"""`sampler` and `logits_processor`: from logits to tokens, vectorised over the rows of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from ferrule.interfaces.platform import Transfers
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.types import TokenSampling

if TYPE_CHECKING:
    import torch

    from ferrule.interfaces.plugins import Plugins


class LogprobsMode(Enum):
    """What clients are told as the logprobs of tokens (`--logprobs-mode`).

    Raw numbers are the model's. Processed ones are what the token was drawn from, after everything that the request
    asks for: masks, bans, biases, processors and penalties; and unless the row is greedy divided by the temperature,
    with minus infinity for what min_p, top_k and top_p leave out. Logprobs are the log-softmax of such logits.
    """

    RAW_LOGPROBS = "raw_logprobs"
    RAW_LOGITS = "raw_logits"
    PROCESSED_LOGPROBS = "processed_logprobs"
    PROCESSED_LOGITS = "processed_logits"

    @property
    def processed(self) -> bool:
        return self in {LogprobsMode.PROCESSED_LOGPROBS, LogprobsMode.PROCESSED_LOGITS}

    @property
    def normalised(self) -> bool:
        """True for log-probabilities, False for logits."""
        return self in {LogprobsMode.RAW_LOGPROBS, LogprobsMode.PROCESSED_LOGPROBS}


@dataclass(slots=True, unsafe_hash=True)  # frozen, it would take three times as long to make
class SampleRow:
    """One row to sample. `position` is that of the token to be drawn; (seed, position, draw) determines its noise.

    Nobody changes it.
    """

    slot: int
    sampling: TokenSampling
    num_prompt: int
    position: int
    mask: bytes | None = None  # grammar bitmask over the vocabulary
    num_embedded: int = 0  # first positions that came as embeddings: their ids in the history mean nothing
    draw: int = 0  # which one at this position, for whoever needs several there; a request's output is made of draw 0


@dataclass(frozen=True)
class SampleBatch:
    """`history[slot, :position]` holds a row's known ids (prompt and output), int32 on the device.

    `transfers.stage` brings parameters there without waiting for the step's launches, as `torch.tensor` would.
    `tokenizer` opens the model's tokenizer, once; None where there is none. It is for `LogitsProcessor.begin`.
    """

    rows: Sequence[SampleRow]
    history: torch.Tensor  # [slots, at least max_model_len]
    transfers: Transfers = field(default_factory=Transfers)
    tokenizer: Callable[[], Tokenizer | None] = lambda: None
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS  # what rows that ask are told; one of the sampler's


@dataclass(frozen=True)
class Sampled:
    """`finite[r]` is False for a row whose logits held NaN or had no finite maximum; its token is meaningless, as is
    that of a row in `errors`, whose value is fit for the client. Meaningless tokens are ids of the vocabulary too."""

    tokens: torch.Tensor  # [rows] int64
    finite: torch.Tensor  # [rows] bool
    logprobs: torch.Tensor | None = None  # [rows, vocab] float32 of the rows that ask, in order, by the batch's mode
    errors: Mapping[int, str] = field(default_factory=dict)  # by row
    ranked: Sequence[torch.Tensor] | None = None  # in the place of logprobs: what `runner.logprobs.rank` makes of them
    barred: torch.Tensor | None = None  # [rows] bool: not finite because the request's own wishes leave no token


class Sampler(ABC):
    logprobs_modes: frozenset[LogprobsMode] = frozenset({LogprobsMode.RAW_LOGPROBS})  # that it knows

    def __init__(self, plugins: Plugins) -> None:
        """`plugins` is where logits processors that requests name are loaded from."""
        self.plugins = plugins

    @abstractmethod
    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        """Draw one token per row of `logits` [rows, vocab] float32, which it may overwrite.

        A row's token depends on its own logits, history, parameters and (seed, position, draw) only, never on its
        neighbours or its place in the batch.
        """

    def verify(self, logits: torch.Tensor, batch: SampleBatch, guesses: torch.Tensor) -> Sampled:
        """Draw as `sample` does, where requests have several rows, one for each guess and one behind them.

        `guesses` [rows] int64 is the guess for the token that a row draws, -1 for none. It stands in the history of the
        rows behind it, and these count if the drawn token is equal to it. The default draws what it would draw without
        guesses, so these change no output. Another sampler may draw a guess more often than that, as long as tokens
        come as often as the parameters say.
        """
        return self.sample(logits, batch)


class LogitsProcessor(ABC):
    """Named by a request, within `--logits-processor-pattern`. One object serves one choice of one request.

    Another is made, and dropped, when the request is admitted: its constructor shows whether the arguments are right.
    """

    @abstractmethod
    def __init__(self, **kwargs: Any) -> None:
        """Validate `kwargs`; ValueError becomes a 400."""

    def begin(self, tokenizer: Tokenizer | None) -> None:
        """Called once, before the first `apply`, and when the request is admitted, where ValueError becomes a 400.

        `tokenizer` is the model's; None with `--skip-tokenizer-init`.
        """

    @abstractmethod
    def apply(self, known_ids: Sequence[int], num_prompt: int, logits: torch.Tensor) -> torch.Tensor:
        """Return the row's logits [vocab], changed. Positions of a prompt that came as embeddings are left out."""

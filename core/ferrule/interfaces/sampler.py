"""`sampler` and `logits_processor`: from logits to tokens, vectorised over the rows of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.platform import Transfers
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.types import TokenSampling

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ferrule.interfaces.plugins import Plugins


class LogprobsMode(Enum):
    """The numbers that clients get as the logprobs of tokens (`--logprobs-mode`).

    Raw numbers are the model's. Processed ones are those that the token was drawn from, after everything that the
    request asks for: masks, bans, biases, processors and penalties; and unless the row is greedy divided by the
    temperature, with minus infinity for what min_p, top_k and top_p leave out. Logprobs are the log-softmax of such
    logits.
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


@dataclass(frozen=True, kw_only=True)
class TypicalAcceptance:
    """The numbers of typical acceptance: a guess holds if it is likelier than the smaller of `threshold` and
    `alpha` x exp(-entropy) of what the token is drawn from.
    """

    threshold: float
    alpha: float


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
    kernels: Kernels = Kernels()  # the device's
    typical: TypicalAcceptance | None = None  # of guesses (`Sampler.verify`); None: they change no output


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


class Best(NamedTuple):
    """The likeliest token of each row [rows].

    A row is finite when it has no NaN and a finite maximum. A row that is not has any token.
    """

    tokens: torch.Tensor  # int64: of the likeliest ones the first
    most: torch.Tensor  # float32
    finite: torch.Tensor  # bool


class Reading(NamedTuple):
    """The form in which logits are told: as their log-softmax, or as they are. `kept` promises that nobody changes
    them.
    """

    normalised: bool
    kept: bool


@dataclass(frozen=True)
class Draws:
    """Rows to draw: their numbers on the host and, once sent, on the device. `filtered`: some has a top_k or a top_p.

    A row of the table [draws, 6] float64: row, top_k (0: all), noise in [0, 1), top_p, temperature, min_p.
    """

    table: np.ndarray[Any, np.dtype[np.float64]]
    filtered: bool
    there: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Penalised:
    """Rows with penalties. `longest` is the most ids that one of them has seen.

    A row of the table [rows, 8] float64: row, slot, first position that counts, prompt's length, position, and the
    penalties for repetition, frequency and presence.
    """

    table: np.ndarray[Any, np.dtype[np.float64]]
    longest: int
    there: Callable[[], torch.Tensor]


class Chooser(ABC):
    """The parts of sampling that a device may have kernels for. Logits are [rows, vocab] float32, row after row."""

    @abstractmethod
    def warm(self, logits: torch.Tensor, history: torch.Tensor) -> None:
        """Make now what would else be made when a request first asks for it. Called with the first rows of all."""

    @abstractmethod
    def best(self, logits: torch.Tensor) -> Best:
        """Find the likeliest token of each row. May put zeros in the place of logits of rows that are not finite."""

    @abstractmethod
    def draw(self, logits: torch.Tensor, best: Best, draws: Draws) -> torch.Tensor:
        """Choose tokens [rows], by inversion of the noise where a draw says so, else the best. May overwrite logits."""

    @abstractmethod
    def mask(self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
        """Ban, in place, each token of `rows` [n] int64 whose bit in `words` [n, any] int32 is 0 or missing."""

    @abstractmethod
    def penalise(self, logits: torch.Tensor, history: torch.Tensor, penalised: Penalised) -> None:
        """Apply penalties, in place."""

    @abstractmethod
    def rank(
        self, logits: torch.Tensor, rows: torch.Tensor | None, tops: Sequence[int], read: Reading
    ) -> Callable[[torch.Tensor], list[torch.Tensor]]:
        """Return `runner.logprobs.rank` of these rows' logits as they are now, for tokens [rows] that are chosen later.

        `rows` None: all rows.
        """


@dataclass(frozen=True)
class SamplerKernels:
    """The part of a platform's `Kernels` that samplers and draft models ask for.

    `chooser` makes the `Chooser` of one sampler. `surest` maps logits [rows, vocab] float32 to each row's likeliest
    token and the logarithm of its probability, [rows, 2] float32; a recorded step may call it. None: by torch.
    """

    chooser: Callable[[], Chooser]
    surest: Callable[[torch.Tensor], torch.Tensor] | None = None


class Sampler(ABC):
    logprobs_modes: frozenset[LogprobsMode] = frozenset({LogprobsMode.RAW_LOGPROBS})  # that it knows
    accepts_typical: bool = False  # whether `verify` knows typical acceptance

    def __init__(self, plugins: Plugins) -> None:
        """Keep `plugins`, from which logits processors that requests name are loaded."""
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
        come as often as the parameters say; with `SampleBatch.typical`, the user has asked for guesses to hold more
        often than that.
        """
        return self.sample(logits, batch)


class LogitsProcessor(ABC):
    """Named by a request, within `--logits-processor-pattern`. One object serves one choice of one request.

    Another is made, and dropped, when the request is admitted: its constructor shows whether the arguments are right.

    A plugin with `wraps_functions` makes a processor of the argument `function`, a function or its import path, and of
    `args` and `kwargs` where the function makes the processor. The server calls it for the functions that requests
    name; requests cannot name the plugin. It is a literal of the class itself, because it is read without an import.
    """

    wraps_functions: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, **kwargs: Any) -> None:
        """Validate `kwargs`; ValueError becomes a 400."""

    def begin(self, tokenizer: Tokenizer | None) -> None:
        """Prepare for the first `apply`. Called once, and also when the request is admitted, where ValueError becomes a
        400.

        `tokenizer` is the model's; None with `--skip-tokenizer-init`.
        """

    @abstractmethod
    def apply(self, known_ids: Sequence[int], num_prompt: int, logits: torch.Tensor) -> torch.Tensor:
        """Return the row's logits [vocab], changed. Positions of a prompt that came as embeddings are left out."""

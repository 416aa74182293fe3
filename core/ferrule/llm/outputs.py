"""What the calls of `LLM` take and return, with the documented names."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from ferrule.sampling_params import LengthPenalty
from ferrule.schema import Arguments, Count, Number


class BeamSearchParams(Arguments):
    """Parameters of `LLM.beam_search`. Public: ``from ferrule import BeamSearchParams``.

    A beam's score is its cumulative log-probability divided by its length to the power of `length_penalty`.
    """

    beam_width: Count
    max_tokens: Count
    ignore_eos: bool = False
    temperature: Number = 0.0
    length_penalty: LengthPenalty = 1.0
    include_stop_str_in_output: bool = False


class Logprob(Struct, frozen=True):
    """One token's log-probability at a position; `rank` 1 is the most likely. None: not among the ranked ones."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]  # token id → its log-probability


class CompletionOutput(Struct, frozen=True, kw_only=True):
    """One choice."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class RequestMetrics(Struct, frozen=True, kw_only=True):
    """The times of a request, in seconds since 1970 (None for what it did not reach), and the guesses of its tokens.

    `spec_token_acceptance_counts`: how many rows had guesses, how many first guesses were right, how many second, …
    """

    arrival_time: float
    last_token_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    time_in_queue: float | None = None
    finished_time: float | None = None
    spec_token_acceptance_counts: list[int] | None = None
    num_draft_tokens: int = 0


class RequestOutput(Struct, frozen=True, kw_only=True):
    """One prompt with its choices. `prompt` is None when ids or embeddings were given; those have zeros for ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finished: bool = True
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None  # once it is finished


class PoolingParams(Arguments):
    """Parameters of `LLM.embed`. Public: ``from ferrule import PoolingParams``."""

    normalize: bool | None = None  # to a length of 1; None: as the checkpoint says, which is yes where it does not


class EmbeddingOutput(Struct, frozen=True, kw_only=True):
    """The vector of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The length of the embedding."""
        return len(self.embedding)


class EmbeddingRequestOutput(Struct, frozen=True, kw_only=True):
    """One prompt with its vector."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class BeamSearchSequence(Struct, frozen=True, kw_only=True):
    """One beam. `tokens` and `text` begin with the prompt; `logprobs` are those of the tokens behind it."""

    tokens: list[int]
    text: str
    cum_logprob: float
    logprobs: list[PositionLogprobs]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class BeamSearchOutput(Struct, frozen=True):
    """One prompt's beams, the best one first."""

    sequences: list[BeamSearchSequence]


def beam_output(found: RequestOutput, prompt_text: str) -> BeamSearchOutput:
    """Return the choices of a beam search as beams."""
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                tokens=[*found.prompt_token_ids, *beam.token_ids],
                text=prompt_text + beam.text,
                cum_logprob=beam.cumulative_logprob or 0.0,
                logprobs=beam.logprobs or [],
                finish_reason=beam.finish_reason,
                stop_reason=beam.stop_reason,
            )
            for beam in found.outputs
        ]
    )

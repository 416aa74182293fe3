"""What the calls of `LLM` take and return, with the documented names."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from ferrule.frontend.output.choice import Answer
from ferrule.interfaces.service import Service
from ferrule.sampling_params import LengthPenalty
from ferrule.schema import Arguments, Count, Number
from ferrule.types import TokenLogprobs


class BeamSearchParams(Arguments):
    """How `LLM.beam_search` searches. Public: ``from ferrule import BeamSearchParams``.

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


class RequestOutput(Struct, frozen=True, kw_only=True):
    """One prompt with its choices. `prompt` is None when ids or embeddings were given; those have zeros for ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finished: bool = True
    num_cached_tokens: int = 0


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


def request_output(request_id: str, answers: Sequence[Answer], service: Service) -> RequestOutput:
    """The answers to one prompt, in the order of their index."""
    first = answers[0]
    logprobs = first.prompt_logprobs
    return RequestOutput(
        request_id=request_id,
        prompt=first.prompt_text,
        prompt_token_ids=list(first.prompt_ids or ()),
        outputs=[
            CompletionOutput(
                index=number,
                text=answer.text,
                token_ids=list(answer.token_ids),
                cumulative_logprob=sum(p.logprob for p in answer.logprobs) if answer.logprobs else None,
                logprobs=[_position(p, service) for p in answer.logprobs] if answer.logprobs else None,
                finish_reason=None if answer.finish is None else str(answer.finish),
                stop_reason=answer.stop_reason,
            )
            for number, answer in enumerate(answers)
        ],
        prompt_logprobs=None if logprobs is None else [None if p is None else _position(p, service) for p in logprobs],
        num_cached_tokens=first.usage.cached_tokens,
    )


def beam_output(found: RequestOutput, prompt_text: str) -> BeamSearchOutput:
    """A beam search's choices as beams."""
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


def _position(position: TokenLogprobs, service: Service) -> PositionLogprobs:
    found = {
        token_id: Logprob(logprob, rank, service.token_text(token_id))
        for rank, (token_id, logprob) in enumerate(position.top, 1)
    }
    own = Logprob(position.logprob, position.rank, service.token_text(position.token_id))
    found.setdefault(position.token_id, own)
    return found

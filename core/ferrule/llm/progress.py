"""From the service's outputs to `RequestOutput`s: `whole` makes one of an answer, `Progress` one of each part."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import zip_longest

from ferrule.interfaces.service import Answer, Output, ReadPrompt, Tokens, add_up
from ferrule.llm.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestMetrics, RequestOutput
from ferrule.sampling_params import RequestOutputKind
from ferrule.types import FinishReason, TokenLogprobs


def whole(request_id: str, answer: Answer, tokens: Tokens, prompt: ReadPrompt, text: str | None) -> RequestOutput:
    """Return the answer to a request of one prompt. `text` is shown as the prompt's where the service was given ids."""
    return RequestOutput(
        request_id=request_id,
        prompt=text if prompt.text is None else prompt.text,
        prompt_token_ids=list(prompt.ids),
        outputs=[_completion(one, _positions(one.logprobs, tokens), _total(one.logprobs)) for one in answer.choices],
        prompt_logprobs=_prompt_positions(answer.choices[0], tokens),
        num_cached_tokens=answer.usage.cached_tokens,
        metrics=metrics(answer.choices),
    )


def metrics(choices: Sequence[Output]) -> RequestMetrics | None:
    """Return the figures of a finished request; None where a choice has none, as one that its caller has ended."""
    times = [one.times for one in choices if one.times is not None]
    if len(times) < len(choices):
        return None
    guesses = [one.guesses for one in choices if one.guesses is not None]
    since = time.time() - time.monotonic()  # the engine's clock is this machine's
    scheduled, first = (
        min((at for at in found if at), default=None)
        for found in ([one.scheduled for one in times], [one.first_token for one in times])
    )
    arrival, finished = min(one.arrival for one in times), max(one.finished for one in times)
    places = map(sum, zip_longest(*(one.accepted_by_place for one in guesses), fillvalue=0))
    return RequestMetrics(
        arrival_time=since + arrival,
        last_token_time=since + finished,
        first_scheduled_time=None if scheduled is None else since + scheduled,
        first_token_time=None if first is None else since + first,
        time_in_queue=None if scheduled is None else scheduled - arrival,
        finished_time=since + finished,
        spec_token_acceptance_counts=[sum(one.drafts for one in guesses), *places] if guesses else None,
        num_draft_tokens=sum(one.draft_tokens for one in guesses),
    )


class Progress:
    """The output of a request so far. `text` is shown as the prompt's where the service was given ids."""

    def __init__(
        self,
        request_id: str,
        num_choices: int,
        kind: RequestOutputKind,
        tokens: Tokens,
        prompt: ReadPrompt,
        text: str | None = None,
    ) -> None:
        self._id = request_id
        self._kind = kind
        self._tokens = tokens
        self._choices = [_ChoiceSoFar(index) for index in range(num_choices)]
        self._prompt = text if prompt.text is None else prompt.text
        self._prompt_ids = list(prompt.ids)
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._cached = 0

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self._choices)

    def take(self, output: Output) -> RequestOutput | None:
        """Add news and return the output to report now; None before the end with FINAL_ONLY. Raises the error of a
        failed choice.
        """
        if output.finish is FinishReason.ERROR:
            raise output.failure()
        if output.prompt_logprobs is not None and self._prompt_logprobs is None:
            self._prompt_logprobs = _prompt_positions(output, self._tokens)
        if output.index == 0:
            self._cached = output.usage.cached_tokens
        news = self._choices[output.index].add(output, self._tokens)
        if self._kind is RequestOutputKind.DELTA:
            return self._told([news])
        if self._kind is RequestOutputKind.FINAL_ONLY and not self.finished:
            return None
        return self._told([choice.whole() for choice in self._choices])

    def abort(self) -> RequestOutput:
        """Return the last output of a request that its caller ends."""
        running = [choice for choice in self._choices if not choice.finished]
        news = [choice.add(Output(index=choice.index, finish=FinishReason.ABORT), self._tokens) for choice in running]
        if self._kind is RequestOutputKind.DELTA:
            return self._told(news)
        return self._told([choice.whole() for choice in self._choices])

    def _told(self, outputs: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            request_id=self._id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_ids,
            outputs=outputs,
            prompt_logprobs=self._prompt_logprobs,
            finished=self.finished,
            num_cached_tokens=self._cached,
            metrics=metrics([choice.last for choice in self._choices]) if self.finished else None,
        )


class _ChoiceSoFar:
    """The outputs of one choice, and its logprobs in the form in which they are told."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.finished = False
        self.last = Output(index=index)
        self._outputs = [Output(index=index)]
        self._logprobs: list[PositionLogprobs] = []
        self._cumulative: float | None = None

    def add(self, output: Output, tokens: Tokens) -> CompletionOutput:
        """Take in an output, and return what is new in it."""
        new = _positions(output.logprobs, tokens)
        self._outputs.append(output)
        self.last = output
        self._logprobs += new
        self._cumulative = _total(output.logprobs, self._cumulative)
        self.finished = output.finish is not None
        return _completion(output, new, self._cumulative)

    def whole(self) -> CompletionOutput:
        self._outputs = [add_up(self._outputs)]
        return _completion(self._outputs[0], list(self._logprobs), self._cumulative)


def _completion(output: Output, logprobs: list[PositionLogprobs], cumulative: float | None) -> CompletionOutput:
    """Return an output in the form of the offline API. Logprobs are None where none were asked for."""
    return CompletionOutput(
        index=output.index,
        text=output.text,
        token_ids=list(output.token_ids),
        cumulative_logprob=cumulative,
        logprobs=logprobs or None,
        finish_reason=None if output.finish is None else str(output.finish),
        stop_reason=output.stop_reason,
    )


def _total(logprobs: Sequence[TokenLogprobs], before: float | None = None) -> float | None:
    return sum((entry.logprob for entry in logprobs), before or 0.0) if logprobs else before


def _positions(logprobs: Sequence[TokenLogprobs], tokens: Tokens) -> list[PositionLogprobs]:
    return [_position(position, tokens) for position in logprobs]


def _prompt_positions(output: Output, tokens: Tokens) -> list[PositionLogprobs | None] | None:
    found = output.prompt_logprobs
    return None if found is None else [None if one is None else _position(one, tokens) for one in found]


def _position(position: TokenLogprobs, tokens: Tokens) -> PositionLogprobs:
    found = {
        token_id: Logprob(logprob, rank, tokens.token_text(token_id))
        for rank, (token_id, logprob) in enumerate(position.top, 1)
    }
    own = Logprob(position.logprob, position.rank, tokens.token_text(position.token_id))
    found.setdefault(position.token_id, own)
    return found

"""From the service's outputs to `RequestOutput`s, whole or in parts: one `Progress` for each prompt."""

from __future__ import annotations

from ferrule.interfaces.parsers import Content
from ferrule.interfaces.service import Output, ReadPrompt, Tokens
from ferrule.llm.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from ferrule.sampling_params import RequestOutputKind
from ferrule.types import FinishReason, TokenLogprobs


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
        return all(choice.finish_reason is not None for choice in self._choices)

    def take(self, output: Output) -> RequestOutput | None:
        """Add news and return the output to report now; None before the end with FINAL_ONLY. Raises the error of a
        failed choice.
        """
        if output.finish is FinishReason.ERROR:
            raise output.failure()
        if output.prompt_logprobs is not None and self._prompt_logprobs is None:
            found = output.prompt_logprobs
            self._prompt_logprobs = [None if one is None else _position(one, self._tokens) for one in found]
        choice = self._choices[output.index]
        if output.index == 0:
            self._cached = output.usage.cached_tokens
        news = choice.add(output, self._tokens)
        if self._kind is RequestOutputKind.DELTA:
            return self._told([news])
        if self._kind is RequestOutputKind.FINAL_ONLY and not self.finished:
            return None
        return self._told([choice.whole() for choice in self._choices])

    def abort(self) -> RequestOutput:
        """Return the last output of a request that its caller ends."""
        running = [choice for choice in self._choices if choice.finish_reason is None]
        for choice in running:
            choice.finish_reason = str(FinishReason.ABORT)
        if self._kind is RequestOutputKind.DELTA:
            return self._told([choice.nothing() for choice in running])
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
        )


class _ChoiceSoFar:
    """One choice. Its logprobs stay None where none were asked for."""

    def __init__(self, index: int) -> None:
        self.finish_reason: str | None = None
        self._index = index
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: list[PositionLogprobs] | None = None
        self._cumulative: float | None = None
        self._stop_reason: int | str | None = None

    def add(self, output: Output, tokens: Tokens) -> CompletionOutput:
        """Take in an output, and return what is new in it."""
        text = "".join(event.text for event in output.events if isinstance(event, Content))
        logprobs = [_position(position, tokens) for position in output.logprobs] or None
        self._text += text
        self._ids += output.token_ids
        if logprobs is not None:
            self._logprobs = (self._logprobs or []) + logprobs
            self._cumulative = sum((p.logprob for p in output.logprobs), self._cumulative or 0.0)
        self.finish_reason = None if output.finish is None else str(output.finish)
        self._stop_reason = output.stop_reason
        return self._made(text, list(output.token_ids), logprobs)

    def whole(self) -> CompletionOutput:
        logprobs = None if self._logprobs is None else list(self._logprobs)
        return self._made(self._text, list(self._ids), logprobs)

    def nothing(self) -> CompletionOutput:
        """Return an output with the choice's state and no new text."""
        return self._made("", [], None)

    def _made(self, text: str, ids: list[int], logprobs: list[PositionLogprobs] | None) -> CompletionOutput:
        return CompletionOutput(
            index=self._index,
            text=text,
            token_ids=ids,
            cumulative_logprob=self._cumulative,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )


def _position(position: TokenLogprobs, tokens: Tokens) -> PositionLogprobs:
    found = {
        token_id: Logprob(logprob, rank, tokens.token_text(token_id))
        for rank, (token_id, logprob) in enumerate(position.top, 1)
    }
    own = Logprob(position.logprob, position.rank, tokens.token_text(position.token_id))
    found.setdefault(position.token_id, own)
    return found

"""The form of an answer: `events` writes an output as events of a stream, `whole` an answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from ferrule.interfaces.service import Answer, Output, ReadPrompt, Tokens
from ferrule.types import FinishReason, TokenLogprobs
from ferrule_protocol import Extension, finite
from ferrule_tgi.answers import Finish, Generated, PromptToken, Sequence, StreamDetails, Token, TokenEvent
from ferrule_tgi.schema import Parameters


@dataclass(frozen=True)
class TokenForm:
    """The form of tokens. `special` are the ids of those that are not part of a text."""

    tokens: Tokens
    special: frozenset[int]

    @classmethod
    def of(cls, tokens: Tokens) -> TokenForm:
        return cls(tokens, frozenset() if tokens.tokenizer is None else tokens.tokenizer.all_special_ids)

    def token(self, token_id: int, logprob: float, text: str | None = None) -> Token:
        """Return a token with its share of the text; with its own text where it has none."""
        special = token_id in self.special
        shown = self.tokens.token_text(token_id) if text is None or special else text
        return {"id": token_id, "text": shown, "logprob": finite(logprob), "special": special}

    def top(self, entry: TokenLogprobs) -> list[Token]:
        return [self.token(token_id, logprob) for token_id, logprob in entry.top]

    def prefill(self, ids: tuple[int, ...], entries: tuple[TokenLogprobs | None, ...]) -> list[PromptToken]:
        return [
            {
                "id": token_id,
                "text": self.tokens.token_text(token_id),
                "logprob": None if entry is None else finite(entry.logprob),
            }
            for token_id, entry in zip(ids, entries, strict=True)
        ]


class Form:
    """The form of the answer to one request. `events` is called with the outputs in their order: it knows the text so
    far.
    """

    def __init__(
        self, asked: Parameters, inputs: str, prompt: ReadPrompt, tokens: TokenForm, extension: Extension | None
    ) -> None:
        self._asked, self._prompt, self._tokens = asked, prompt, tokens
        self._text = self._before = inputs if asked.return_full_text else ""
        self._index = 0
        self._head: dict[str, Any] = {} if extension is None else {"ferrule": extension}

    def events(self, output: Output) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream that carry an output: one for each token.

        An end that comes without a token has an event with an empty, special token, or the rest of the text.
        """
        tokens = self._with_texts(output, len(self._text) - len(self._before))
        self._text += output.text
        if output.finish is not None and not tokens:
            tokens = [{"id": 0, "text": output.text, "logprob": 0.0, "special": not output.text}]
        for number, token in enumerate(tokens):
            self._index += 1
            event: TokenEvent = {"index": self._index, "token": token, "generated_text": None, "details": None}
            if self._asked.top_n_tokens and number < len(output.logprobs):
                event["top_tokens"] = self._tokens.top(output.logprobs[number])
            if output.finish is not None and number == len(tokens) - 1:
                event["generated_text"] = self._text
                event["details"] = self._end(output) if self._asked.details else None
            yield {**event, **self._head}
            self._head = {}

    def whole(self, answer: Answer) -> Generated:
        """Return the whole answer: the likeliest of its texts."""
        best, *others = sorted(answer.choices, key=_likelihood, reverse=True)
        found: Generated = {"generated_text": self._before + best.text}
        if self._asked.details:
            details = self._sequence(best)
            if others:
                details["best_of_sequences"] = [
                    {"generated_text": self._before + one.text, **self._sequence(one)} for one in others
                ]
            found["details"] = details
        return {**found, **self._head}  # type: ignore[typeddict-item]

    def _sequence(self, output: Output) -> Sequence:
        prompt = output.prompt_logprobs if self._asked.decoder_input_details else None
        found: Sequence = {
            "finish_reason": _finish(output),
            "generated_tokens": output.usage.completion_tokens,
            "seed": self._asked.seed,
            "prefill": [] if prompt is None else self._tokens.prefill(self._prompt.ids, prompt),
            "tokens": self._with_texts(output, 0),
        }
        if self._asked.top_n_tokens:
            found["top_tokens"] = [self._tokens.top(entry) for entry in output.logprobs]
        return found

    def _with_texts(self, output: Output, before: int) -> list[Token]:
        """Return the new tokens, each with its share of the new text, of which `before` characters were sent earlier.

        The text may come later than its tokens, so the last token has what is left.
        """
        text, offsets = output.text, output.token_offsets
        ends = [min(max(0, offset - before), len(text)) for offset in offsets[1:]] + [len(text)]
        if len(ends) != len(output.logprobs):  # without a tokenizer there are no offsets
            ends = [0] * (len(output.logprobs) - 1) + [len(text)]
        found, begin = [], 0
        for entry, end in zip(output.logprobs, ends, strict=False):
            found.append(self._tokens.token(entry.token_id, entry.logprob, text[begin:end]))
            begin = max(begin, end)
        return found

    def _end(self, output: Output) -> StreamDetails:
        return {
            "finish_reason": _finish(output),
            "generated_tokens": output.usage.completion_tokens,
            "input_length": output.usage.prompt_tokens,
            "seed": self._asked.seed,
        }


async def events(form: Form, outputs: AsyncIterator[Output]) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a stream."""
    async for output in outputs:
        if output.finish is FinishReason.ERROR:
            raise output.failure()
        for event in form.events(output):
            yield event


def _likelihood(output: Output) -> float:
    return sum(entry.logprob for entry in output.logprobs)


def _finish(output: Output) -> Finish:
    if output.finish is not FinishReason.STOP:
        return "length"
    return "stop_sequence" if isinstance(output.stop_reason, str) else "eos_token"

"""The tokens of a batch: the sum of what its answers say, in whatever protocol they are."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Tokens(msgspec.Struct, kw_only=True):
    """Tokens of prompts, `cached` of them known before, and of answers, `reasoning` of them thoughts."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    """The fields of Completions, which also those of vectors have, of Responses, and of Anthropic's Messages.

    Anthropic's `input_tokens` are without those that were cached.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None
    cache_read_input_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    body: _Body


class _Result(msgspec.Struct):
    response: _Response


_RESULT = msgspec.json.Decoder(_Result)
_NONE = _Details()


def tokens_of(results: Iterable[bytes]) -> Tokens:
    """Return the sum of the results of requests that were answered with status 200.

    An answer whose usage has another form, as a plugin's route may give it, does not count.
    """
    total = Tokens()
    for result in results:
        try:
            usage = _RESULT.decode(result).response.body.usage
        except msgspec.ValidationError:
            continue
        if usage is None:
            continue
        asked = usage.prompt_tokens_details or usage.input_tokens_details or _NONE
        said = usage.completion_tokens_details or usage.output_tokens_details or _NONE
        total.input += usage.prompt_tokens + usage.input_tokens + usage.cache_read_input_tokens
        total.cached += asked.cached_tokens + usage.cache_read_input_tokens
        total.output += usage.completion_tokens + usage.output_tokens
        total.reasoning += said.reasoning_tokens
    return total

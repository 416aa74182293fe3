"""The semantic half of the admission gate: what a request may ask of this model. HTTP and offline use both pass here.

Types and fixed bounds are declared by the fields of `SamplingParams`, and hold already. Here is what depends on the
model, on the server's options, or on more than one field. Each refusal names the field and says what would be valid.
Limits are those of `LimitsConfig`; ids are checked against the width of the logits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from pydantic import TypeAdapter

from ferrule.api_keys import Visit
from ferrule.config import LimitsConfig
from ferrule.errors import RequestError
from ferrule.frontend.text.stops import StopStrings
from ferrule.interfaces.service import Generate
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.sampling_params import Beam, SamplingParams
from ferrule.schema import CacheSalt, Priority
from ferrule.schema import checked as checked_as
from ferrule.types import MediaItem, ModelInfo, TokenSampling

MAX_STOP_TOKEN_IDS = 256
_INT64 = 1 << 63
_BIAS = 100.0
_PRIORITY: TypeAdapter[int] = TypeAdapter(Priority)
_SALT: TypeAdapter[str] = TypeAdapter(CacheSalt)
_NEUTRAL: dict[str, tuple[float, ...]] = {  # values, 0 and none apart, that leave probabilities as they are
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (-1,),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": (),
    "allowed_token_ids": (),
    "bad_words": (),
}


class AdmissionRules(Struct, frozen=True, kw_only=True):
    """The rules that requests are checked against. `context` is the most tokens, prompt and output, that model and
    cache hold.
    """

    limits: LimitsConfig
    vocab_size: int  # width of the logits
    max_model_len: int
    context: int
    max_logprobs: int  # -1: no cap
    logits_mode: str | None = None  # the --logprobs-mode where logprobs are logits, by which no answers can be ranked
    eos_ids: tuple[int, ...]
    has_tokenizer: bool
    max_new_tokens: int | None = None  # of the generation config: a cap on every request
    defaults: dict[str, Any] = {}  # sampling values of the generation config
    processor_pattern: str | None = None
    processors: dict[str, Callable[[Mapping[str, Any]], None]] = {}  # that clients may name: each tries arguments
    # The name of the plugin that makes one of a function, and the same for it; None where it may not be used.
    function_processor: tuple[str, Callable[[Mapping[str, Any]], None]] | None = None
    prompt_embeds: bool = False  # whether prompts may be embeddings
    hidden_size: int = 0  # width of an embedding; 0: the model takes none
    parts_thoughts: bool = False  # whether a reasoning parser runs

    def within(self, longest: int) -> AdmissionRules:
        """Return the rules of requests that may have `longest` tokens; 0: as many as any."""
        longest = min(longest or self.max_model_len, self.max_model_len)
        return replace(self, max_model_len=longest, context=min(self.context, longest))

    def with_added(self, count: int, tokenizer: Tokenizer | None) -> AdmissionRules:
        """Return the rules of requests with `count` more tokens, which may end at that of another `tokenizer`."""
        end = None if tokenizer is None else tokenizer.eos_token_id
        ends = self.eos_ids if end is None else tuple(dict.fromkeys((*self.eos_ids, end)))
        return replace(self, vocab_size=self.vocab_size + count, eos_ids=ends)


class Checked(Struct, frozen=True, kw_only=True):
    """The valid parameters of a request, before its prompts are known.

    `base` lacks max_tokens and the seed. Its logprobs are on when answers are ranked by them; `logprobs` is the number
    that the client sees.
    """

    base: TokenSampling
    n: int
    best_of: int  # choices to generate for each prompt
    width: int  # sequences that run at once for each prompt: these choices, or beams
    logprobs: int | None
    seed: int | None
    max_tokens: int | None
    truncate: int | None
    truncate_right: bool
    stops: StopStrings | None
    named_stop_ids: frozenset[int]  # the request's own, as opposed to end-of-sequence ids
    include_stop: bool
    detokenize: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    bad_words: tuple[str, ...]
    priority: int = 0
    cache_salt: str | None = None
    virtual: MediaItem | None = None  # tokens of a prompt adapter, before each prompt

    @property
    def num_virtual(self) -> int:
        return 0 if self.virtual is None else self.virtual.count

    def kept(self, length: int) -> slice:
        """Return the slice of a prompt that truncation to `length` leaves: the first items, or the last ones."""
        return slice(length) if self.truncate_right else slice(-length, None)


class Seeds:
    """A source of seeds for requests that bring none: a repeatable sequence with `seed`, unpredictable ones without."""

    def __init__(self, seed: int | None) -> None:
        self._source = random.SystemRandom() if seed is None else random.Random(seed)

    def draw(self, checked: Checked) -> list[int]:
        """Return a seed for each choice of a prompt: the first choice's plus the choice's number, within int64."""
        first = self._source.getrandbits(63) if checked.seed is None else checked.seed
        return [(first + number + _INT64) % (2 * _INT64) - _INT64 for number in range(checked.best_of)]


# ------------------------------------------------------------------------------------------- parameters


def check_params(params: SamplingParams, rules: AdmissionRules) -> Checked:
    """Run all checks that need no prompt. Raises RequestError."""
    if not isinstance(params, SamplingParams):
        raise RequestError("sampling_params must be SamplingParams.", "sampling_params")
    stop = _stop_strings(params, rules) if params.stop else ()
    named = check_ids(params.stop_token_ids or (), rules, "stop_token_ids", MAX_STOP_TOKEN_IDS)
    eos = () if params.ignore_eos else rules.eos_ids
    most = rules.limits.max_n
    n = _within(params.n, "n", 1, most)
    best_of = n if params.best_of is None else _within(params.best_of, "best_of", n, most)
    if best_of > n:
        _check_ranking("best_of", rules)
    logprobs = _logprobs(params.logprobs, "logprobs", rules)
    allowed, truncate = params.allowed_token_ids or (), params.truncate_prompt_tokens
    base = TokenSampling(
        seed=0,
        max_tokens=1,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(0, _within(params.top_k, "top_k", -1, rules.vocab_size)),
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(dict.fromkeys((*named, *eos))),
        logprobs=0 if logprobs is None and best_of > n else logprobs,
        prompt_logprobs=_logprobs(params.prompt_logprobs, "prompt_logprobs", rules),
        logit_bias=_bias(params.logit_bias, rules) if params.logit_bias else (),
        allowed_token_ids=tuple(dict.fromkeys(check_ids(allowed, rules, "allowed_token_ids", rules.vocab_size))),
        extra_args=params.extra_args or {},
    )
    return Checked(
        base=base,
        n=n,
        best_of=best_of,
        width=best_of,
        logprobs=logprobs,
        seed=None if params.seed == -1 else params.seed,
        max_tokens=params.max_tokens,
        truncate=None if truncate is None else _truncation(truncate, rules),
        truncate_right=params.truncation_side == "right",
        stops=StopStrings(stop) if stop else None,
        named_stop_ids=frozenset(named),
        include_stop=params.include_stop_str_in_output,
        detokenize=params.detokenize and rules.has_tokenizer,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        bad_words=_texts(params.bad_words, "bad_words", rules.limits.max_bad_words, rules) if params.bad_words else (),
    )


def check_beam(beam: Beam, request: Generate, checked: Checked, rules: AdmissionRules) -> Checked:
    """Return `checked` for a beam search, which has one choice for each of the n answers. Raises RequestError.

    Parameters that shape probabilities cannot be combined with a beam search, unless they are the server's defaults.
    """
    if not isinstance(beam, Beam):
        raise RequestError("beam must be a Beam.", "beam")
    _check_ranking("use_beam_search", rules)
    width = beam.width
    if not checked.n <= width <= rules.limits.max_n:
        raise RequestError(f"The beams (n, best_of) must be {checked.n} to {rules.limits.max_n}.", "n")
    if width > rules.vocab_size - len(checked.base.stop_token_ids):
        raise RequestError("There are more beams than tokens to go on with.", "n")
    if request.logits_processors or request.params.logits_processors:
        raise RequestError("logits_processors have no place in a beam search.", "logits_processors")
    for name, neutral in _NEUTRAL.items():
        value = getattr(request.params, name)
        if value and value not in (*neutral, rules.defaults.get(name)):
            allowed = "left out" if neutral == () else f"{neutral[0]:g}"
            raise RequestError(f"{name} must be {allowed}: beam search takes the model's own probabilities.", name)
    if checked.stops is not None and rules.parts_thoughts and not (request.raw or request.stop_in_reasoning):
        raise RequestError(  # a beam is watched for stop strings before anybody knows which of its text is thoughts
            "stop needs stop_in_reasoning to be true in a beam search: stop strings are looked for in thoughts too.",
            "stop",
        )
    return replace(checked, best_of=checked.n, width=width, base=replace(checked.base, logprobs=checked.logprobs))


def check_count(num_prompts: int, n: int, most: int) -> None:
    if not 1 <= num_prompts <= most:
        raise RequestError(f"There must be 1 to {most} prompts in a request, not {num_prompts}.", "prompt")
    if num_prompts * n > most:
        raise RequestError(f"{num_prompts} prompts with n = {n} are more than {most} answers.", "n")


def check_output_cells(num_prompts: int, checked: Checked, rules: AdmissionRules, streamed: bool) -> None:
    """Check the number of logprobs that are kept until an answer is whole; a stream keeps them only where answers are
    ranked.

    Without max_tokens the length of an answer is not known; its logprobs are then counted as they come. Raises
    RequestError.
    """
    alternatives, count = checked.base.logprobs, num_prompts * checked.width
    if checked.max_tokens is None or alternatives is None or (streamed and checked.best_of == checked.n):
        return
    tokens = min(checked.max_tokens, rules.max_new_tokens or checked.max_tokens)
    cells, most = count * tokens * (alternatives + 1), rules.limits.max_logprob_cells
    if cells > most:
        raise RequestError(
            f"{count} answers of up to {tokens} tokens with {alternatives + 1} logprobs each would "
            f"be {cells} values; at most {most} are kept (--max-logprob-cells). Ask for fewer, or for a stream.",
            "best_of" if checked.logprobs is None else "logprobs",
        )


def check_prompt_cells(num_tokens: int, checked: Checked, limits: LimitsConfig) -> None:
    """Check the number of logprobs of prompts with `num_tokens` in all, once for each choice, echoes included.

    Raises RequestError.
    """
    alternatives, most = checked.base.prompt_logprobs, limits.max_prompt_logprob_cells
    if alternatives is None:
        return
    cells = num_tokens * checked.width * max(1, alternatives)
    if cells > most:
        raise RequestError(
            f"prompt_logprobs for {num_tokens} tokens and {checked.width} answers to each prompt would be at least "
            f"{cells} values; at most {most} are given (--max-prompt-logprob-cells).",
            "prompt_logprobs",
        )


def check_task(task: str, model: ModelInfo) -> None:
    """Raise RequestError where the model is for other tasks."""
    if task not in model.tasks:
        raise RequestError(f"{model.architecture} is for {' and '.join(model.tasks)}, and not for {task}.", "model")


def check_pooled(ids: tuple[int, ...], rules: AdmissionRules, param: str) -> None:
    """Raise RequestError for a prompt that is empty, or too long to compute one vector of it."""
    if not ids:
        raise RequestError("The prompt has no tokens; at least one is needed.", param)
    most = rules.max_model_len if rules.context >= rules.max_model_len else rules.context - 1
    if len(ids) > most:
        raise RequestError(f"The prompt has {len(ids)} tokens; a vector can be computed of at most {most}.", param)


def check_labels(priority: Any, salt: Any) -> tuple[int, str | None]:
    """Return priority and cache salt of a request. Raises RequestError."""
    priority = int(checked_as(_PRIORITY, priority, "priority"))
    return priority, None if salt is None else str(checked_as(_SALT, salt, "cache_salt"))


def scoped(salt: str | None, caller: Visit | None, scope: str) -> str | None:
    """Return the salt of a prompt's cache blocks under `--cache-scope`.

    A client's own salt is printable, so it cannot equal that of another key.
    """
    if caller is None or scope == "global" or (scope == "auto" and not caller.has_others):
        return salt
    return f"{caller.name}\0{salt or ''}"


def check_ids(ids: Any, rules: AdmissionRules, param: str, most: int | None = None) -> tuple[int, ...]:
    """Check token ids from a client, each of which must be within the model's vocabulary. Raises RequestError, also
    for more than `most`.
    """
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        raise RequestError(f"{param} must be a list of token ids.", param)
    if not set(map(type, ids)) <= {int}:
        place = next(place for place, token in enumerate(ids) if type(token) is not int)
        raise RequestError(f"{param}[{place}] must be an integer.", f"{param}[{place}]")
    if ids and (min(ids) < 0 or max(ids) >= rules.vocab_size):
        raise RequestError(f"{param} holds a token id that is not in [0, {rules.vocab_size}).", param)
    if most is not None and len(ids) > most:
        raise RequestError(f"{param} may have at most {most} entries.", param)
    return tuple(ids)


def check_text(text: Any, max_characters: int, param: str) -> str:
    """Check a text from a client: it must be valid Unicode, and short enough to be tokenized. Raises RequestError."""
    if not isinstance(text, str):
        raise RequestError(f"{param} must be a text.", param)
    if len(text) > max_characters:
        raise RequestError(f"{param} has {len(text)} characters; at most {max_characters} can fit the context.", param)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{param} holds a surrogate without its partner: that is no Unicode.", param) from None
    return text


# ------------------------------------------------------------------------------------------- with the prompt


def fit(
    checked: Checked, ids: tuple[int, ...], rules: AdmissionRules, param: str
) -> tuple[tuple[int, ...], TokenSampling]:
    """Return the prompt, truncated as asked, and the sampling with max_tokens resolved. Raises RequestError."""
    if not ids:
        raise RequestError("The prompt has no tokens; at least one is needed.", param)
    wanted, cap = checked.max_tokens, rules.max_new_tokens or rules.context
    if wanted is not None and rules.max_new_tokens is not None and wanted >= cap:
        wanted = None  # the server's cap
    if checked.truncate is not None:
        keep = checked.truncate if checked.truncate > 0 else rules.context - (wanted or 1) - checked.num_virtual
        ids = ids[checked.kept(max(1, keep))]
    length = len(ids) + checked.num_virtual
    told = f"The prompt has {len(ids)} tokens" + (f" and its adapter {checked.num_virtual}" if checked.virtual else "")
    if length >= rules.max_model_len:
        raise RequestError(
            f"{told}; the context of {rules.max_model_len} tokens must hold it and at least one token of output.",
            param,
        )
    if wanted is not None and length + wanted > rules.max_model_len:
        raise RequestError(
            f"{told}, and max_tokens is {wanted}, together {length + wanted}: more than the "
            f"context of {rules.max_model_len} tokens.",
            "max_tokens",
        )
    total = length + (1 if wanted is None else wanted)
    if total > rules.context:
        raise RequestError(
            f"The request needs a cache for {total} tokens; the server's whole cache holds {rules.context}.",
            param if wanted is None else "max_tokens",
        )
    max_tokens = min(cap, rules.context - length) if wanted is None else wanted
    if checked.base.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {checked.base.min_tokens}, but at most {max_tokens} tokens can be generated.", "min_tokens"
        )
    return ids, replace(checked.base, max_tokens=max_tokens)


# ------------------------------------------------------------------------------------------- single values


def _within(value: int, name: str, low: int, high: int) -> int:
    """Check a value against bounds that the server's options or the model set. Raises RequestError."""
    if not low <= value <= high:
        raise RequestError(f"{name} must be an integer from {low} to {high}.", name)
    return value


def _texts(values: Sequence[str], name: str, most: int, rules: AdmissionRules) -> tuple[str, ...]:
    if len(values) > most:
        raise RequestError(f"{name} may have at most {most} entries.", name)
    for value in values:
        if len(value) > rules.limits.max_stop_length:
            raise RequestError(f"{name}: a text may have at most {rules.limits.max_stop_length} characters.", name)
        check_text(value, rules.limits.max_stop_length, name)
    if values and not rules.has_tokenizer:
        raise RequestError(f"{name} cannot be used: this server runs without a tokenizer.", name)
    return tuple(values)


def _stop_strings(params: SamplingParams, rules: AdmissionRules) -> tuple[str, ...]:
    values = [params.stop] if isinstance(params.stop, str) else params.stop or ()
    strings = _texts(values, "stop", rules.limits.max_stop_strings, rules)
    if strings and not params.detokenize:
        raise RequestError("stop needs text, so detokenize must be true.", "stop")
    return strings


def _check_ranking(param: str, rules: AdmissionRules) -> None:
    if rules.logits_mode is not None:
        raise RequestError(
            f"{param} ranks answers by their log-probabilities, and this server computes logits in their place "
            f"(--logprobs-mode {rules.logits_mode}).",
            param,
        )


def _logprobs(value: int | None, name: str, rules: AdmissionRules) -> int | None:
    if value is None:
        return None
    if rules.max_logprobs >= 0:
        return _within(value, name, 0, min(rules.max_logprobs, rules.vocab_size))
    count = _within(value, name, -1, rules.vocab_size)
    return rules.vocab_size if count == -1 else count


def _bias(values: Mapping[int, float], rules: AdmissionRules) -> tuple[tuple[int, float], ...]:
    check_ids(list(values), rules, "logit_bias")
    return tuple((token, min(_BIAS, max(-_BIAS, bias))) for token, bias in values.items())


def _truncation(value: int, rules: AdmissionRules) -> int:
    if value == 0:
        raise RequestError("truncate_prompt_tokens must be -1 (what fits) or at least 1.", "truncate_prompt_tokens")
    return _within(value, "truncate_prompt_tokens", -1, rules.max_model_len)

"""The semantic gate: every sampling field at its borders and beyond, of every type, offline and over HTTP alike."""

from __future__ import annotations

import math
import re
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule.config import LimitsConfig
from ferrule.engine.cache import capacity, footprint
from ferrule.errors import RequestError
from ferrule.frontend.admission.admit import check_request
from ferrule.frontend.admission.validate import (
    AdmissionRules,
    Checked,
    Seeds,
    check_beam,
    check_ids,
    check_output_cells,
    check_params,
    check_prompt_cells,
    check_text,
    fit,
)
from ferrule.interfaces.scheduler import SchedulerLimits
from ferrule.interfaces.service import Generate, Prompt
from ferrule.sampling_params import Beam, RequestOutputKind, SamplingParams
from ferrule.structured_outputs import GuidedDecodingParams, StructuredOutputsParams
from ferrule.types import CacheGroup

VOCAB = 1000
RULES = AdmissionRules(
    limits=LimitsConfig(
        max_n=8,
        max_stop_strings=4,
        max_stop_length=16,
        max_bad_words=3,
        max_prompt_logprob_cells=100,
        max_logprob_cells=100,
    ),
    vocab_size=VOCAB,
    max_model_len=100,
    context=90,
    max_logprobs=20,
    eos_ids=(2, 7),
    has_tokenizer=True,
)
INF, NAN = math.inf, math.nan
FLOATS = [NAN, INF, -INF, "1", None, True, [], 10**400, -(10**400)]
INTEGERS = [0.5, 1e300, NAN, "1", True, [], 1 << 63, -(1 << 63) - 1, 10**30]

WRONG: dict[str, list[Any]] = {
    "temperature": [-0.1, -1e-300, 1e7, *FLOATS],
    "top_p": [0, 0.0, -0.1, 1.0001, *FLOATS],
    "min_p": [-0.1, 1.1, *FLOATS],
    "presence_penalty": [-2.01, 2.01, *FLOATS],
    "frequency_penalty": [-2.01, 2.01, *FLOATS],
    "repetition_penalty": [0, 0.0, -1.0, 5e-324, 1e300, *FLOATS],
    "top_k": [-2, VOCAB + 1, None, *INTEGERS],
    "n": [0, -1, 9, None, *INTEGERS],
    "best_of": [0, -1, 9, *INTEGERS],
    "max_tokens": [0, -1, *INTEGERS],
    "min_tokens": [-1, None, *INTEGERS],
    "thinking_token_budget": [-2, *INTEGERS],
    "logprobs": [-1, 21, *INTEGERS],
    "prompt_logprobs": [-1, 21, *INTEGERS],
    "seed": INTEGERS,
    "truncate_prompt_tokens": [0, -2, 101, *INTEGERS],
    "truncation_side": [None, "", "Left", "middle", 1, ["left"]],
    "stop": [5, [""], "x" * 17, ["a"] * 5, [5], [None], ["\ud800"], {"a": 1}],
    "stop_token_ids": [5, "12", [-1], [VOCAB], [1 << 63], ["1"], [1.0], [True], [1] * 257],
    "bad_words": [5, "abc", [""], [5], ["a"] * 4, ["x" * 17]],
    "logit_bias": [5, [1], {-1: 1.0}, {VOCAB: 1.0}, {"1": 1.0}, {1: NAN}, {1: INF}, {1: "1"}, {1: None}, {True: 1.0}],
    "allowed_token_ids": [5, [], [-1], [VOCAB], ["1"], [1.5]],
    "ignore_eos": [None, 1, "true"],
    "detokenize": [None, 1],
    "skip_special_tokens": [None, 0],
    "spaces_between_special_tokens": [None, 0],
    "include_stop_str_in_output": [None, 0],
    "output_kind": [None, 0, "DELTA"],
    "logits_processors": [5, "json.dumps", ["json.dumps"], [None], max],
    "extra_args": [5, "x", [1]],
    "structured_outputs": [5, "x", {"regex": "a"}, GuidedDecodingParams(regex="a")],
    "guided_decoding": [5, "x", {"regex": "a"}, StructuredOutputsParams(regex="a")],
}

RIGHT: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 1e-9, 1, 2.0, 1e6],
    "top_p": [1e-9, 1, 1.0],
    "min_p": [0, 1.0],
    "presence_penalty": [-2, 2.0],
    "frequency_penalty": [-2.0, 2],
    "repetition_penalty": [1e-6, 5],
    "top_k": [-1, 0, 1, VOCAB],
    "n": [1, 8],
    "best_of": [None, 1, 8],
    "max_tokens": [None, 1, (1 << 63) - 1],
    "min_tokens": [0, 5],
    "thinking_token_budget": [None, -1, 0, 5],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20],
    "seed": [None, 0, -1, (1 << 63) - 1, -(1 << 63)],
    "truncate_prompt_tokens": [None, -1, 1, 100],
    "truncation_side": ["left", "right"],
    "stop": [None, [], "x", ["a", "b"], ("x" * 16,), ["\0"]],
    "stop_token_ids": [None, [], [0, VOCAB - 1], (5,)],
    "bad_words": [None, [], ["a", "b", "c"]],
    "logit_bias": [None, {}, {0: -1000, VOCAB - 1: 1e6, 5: 0.5}],
    "allowed_token_ids": [None, [0], [VOCAB - 1, 1, 1]],
    "output_kind": list(RequestOutputKind),
    "logits_processors": [None, [], [max], (max,)],
    "extra_args": [None, {}, {"a": [1, {"b": None}]}],
    "structured_outputs": [None, StructuredOutputsParams(regex="a")],
    "guided_decoding": [None, GuidedDecodingParams(json={"type": "object"})],
}


@pytest.mark.advisory("vllm-issue-54195", "CVE-2024-8939", "CVE-2026-54235")
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        check_params(SamplingParams(**{name: value}), RULES)
    assert caught.value.status == 400
    assert re.sub(r"\[\d+\]\Z", "", caught.value.param or "") == name  # an item is named by its place
    assert name in caught.value.message


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in RIGHT.items() for value in values])
def test_a_right_value_passes(name: str, value: Any) -> None:
    check_params(SamplingParams(**{name: value}), RULES)


@pytest.mark.parametrize("name", ["n", "best_of", "top_k", "seed", "max_tokens", "min_tokens", "logprobs"])
def test_a_whole_number_may_come_as_a_float(name: str) -> None:
    value = getattr(SamplingParams(**{name: 5.0}), name)
    assert (value, type(value)) == (5, int)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(RequestError, match="There is no temprature. Did you mean 'temperature'?") as caught:
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    assert caught.value.param == "temprature"


def test_parameters_do_not_change_and_copies_are_checked() -> None:
    params = SamplingParams(temperature=0.5, stop=["x"])
    with pytest.raises(ValueError, match="frozen"):
        params.temperature = 1.0  # type: ignore[misc]
    changed = params.model_copy(update={"n": 3})
    assert (changed.n, changed.temperature, changed.stop) == (3, 0.5, ["x"])
    with pytest.raises(RequestError, match="temperature"):
        params.model_copy(update={"temperature": -1.0})


def test_every_field_is_in_both_tables() -> None:
    flags = {name for name in WRONG if name not in RIGHT}
    assert WRONG.keys() == set(SamplingParams.model_fields)
    assert all(isinstance(getattr(SamplingParams(), name), bool) for name in flags)


@settings(max_examples=300, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: st.one_of(
                st.none(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=3)
            )
            for name in SamplingParams.model_fields
        },
    )
)
def test_anything_is_either_valid_or_refused(fields: dict[str, Any]) -> None:
    try:
        checked = check_params(SamplingParams(**fields), RULES)
        ids, sampling = fit(checked, (1, 2, 3), RULES, "prompt")
    except RequestError as error:
        refused = error.param
    else:
        refused = None
    assert refused is None or refused.partition("[")[0] in {*fields, "prompt"}
    if refused is not None:
        return
    assert len(ids) + sampling.max_tokens <= RULES.context
    assert sampling.min_tokens <= sampling.max_tokens
    assert all(0 <= token < VOCAB for token in (*sampling.stop_token_ids, *sampling.allowed_token_ids))
    numbers = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
    assert all(math.isfinite(number) for number in numbers)


def test_values_are_resolved() -> None:
    checked = check_params(
        SamplingParams(
            top_k=-1,
            logit_bias={3: 250.0, 4: -250},
            stop_token_ids=[9, 2, 9],
            allowed_token_ids=[5, 5, 6],
            seed=-1,
            stop="x",
            max_tokens=None,
            temperature=1,
        ),
        RULES,
    )
    assert checked.base.top_k == 0
    assert checked.base.logit_bias == ((3, 100.0), (4, -100.0))
    assert checked.base.stop_token_ids == (9, 2, 7)
    assert checked.named_stop_ids == {9, 2}
    assert checked.base.allowed_token_ids == (5, 6)
    assert checked.seed is None
    assert checked.stops is not None
    assert checked.stops.strings == ("x",)
    assert type(checked.base.temperature) is float
    assert check_params(SamplingParams(ignore_eos=True, stop_token_ids=[9]), RULES).base.stop_token_ids == (9,)


def test_logprobs_without_a_cap() -> None:
    free = AdmissionRules(**{name: getattr(RULES, name) for name in RULES.__struct_fields__} | {"max_logprobs": -1})
    assert check_params(SamplingParams(logprobs=-1), free).base.logprobs == VOCAB
    assert check_params(SamplingParams(logprobs=500), free).base.logprobs == 500
    with pytest.raises(RequestError):
        check_params(SamplingParams(logprobs=VOCAB + 1), free)


def test_what_is_ranked_by_logprobs_is_refused_where_they_are_logits() -> None:
    logits = msgspec.structs.replace(RULES, logits_mode="raw_logits")
    assert check_params(SamplingParams(n=2, best_of=2, logprobs=1), logits).logprobs == 1
    with pytest.raises(RequestError, match="--logprobs-mode raw_logits") as caught:
        check_params(SamplingParams(n=2, best_of=3), logits)
    assert caught.value.param == "best_of"
    params = SamplingParams(temperature=0)
    request, checked = Generate(prompts=(), params=params), check_params(params, logits)
    with pytest.raises(RequestError, match="--logprobs-mode raw_logits") as caught:
        check_beam(Beam(width=2), request, checked, logits)
    assert caught.value.param == "use_beam_search"


def test_without_a_tokenizer_text_options_are_refused() -> None:
    blind = AdmissionRules(
        **{name: getattr(RULES, name) for name in RULES.__struct_fields__} | {"has_tokenizer": False}
    )
    for name, value in (("stop", "x"), ("bad_words", ["x"])):
        with pytest.raises(RequestError, match="without a tokenizer"):
            check_params(SamplingParams(**{name: value}), blind)
    assert not check_params(SamplingParams(), blind).detokenize
    with pytest.raises(RequestError, match="detokenize"):
        check_params(SamplingParams(stop="x", detokenize=False), RULES)


# ------------------------------------------------------------------------------------------- with the prompt


def fitted(length: int, **fields: Any) -> tuple[int, int]:
    ids, sampling = fit(check_params(SamplingParams(**fields), RULES), tuple(range(length)), RULES, "prompt")
    return len(ids), sampling.max_tokens


def test_the_context_holds_prompt_and_output() -> None:
    assert fitted(10, max_tokens=None) == (10, 80)
    assert fitted(89, max_tokens=None) == (89, 1)
    assert fitted(10, max_tokens=80) == (10, 80)
    assert fitted(95, truncate_prompt_tokens=20, max_tokens=70) == (20, 70)
    assert fitted(150, truncate_prompt_tokens=-1, max_tokens=30) == (60, 30)
    assert fitted(150, truncate_prompt_tokens=-1, max_tokens=None) == (89, 1)
    ids, _ = fit(check_params(SamplingParams(truncate_prompt_tokens=2), RULES), (1, 2, 3), RULES, "prompt")
    assert ids == (2, 3)
    right = SamplingParams(truncate_prompt_tokens=2, truncation_side="right")
    assert fit(check_params(right, RULES), (1, 2, 3), RULES, "prompt")[0] == (1, 2)
    assert fit(check_params(right, RULES), (1,), RULES, "prompt")[0] == (1,)


@pytest.mark.advisory("CVE-2026-114051")
@pytest.mark.parametrize(
    ("length", "fields", "param", "numbers"),
    [
        (0, {}, "prompt", []),
        (100, {}, "prompt", [100]),
        (99, {"max_tokens": 2}, "max_tokens", [99, 2, 101, 100]),
        (10, {"max_tokens": 1 << 62}, "max_tokens", [10, 100]),
        (50, {"max_tokens": 45}, "max_tokens", [95, 90]),  # the model could, its cache could not
        (95, {"max_tokens": None}, "prompt", [96, 90]),
        (10, {"min_tokens": 17}, "min_tokens", [17, 16]),
        (10, {"min_tokens": 81, "max_tokens": None}, "min_tokens", [81, 80]),
    ],
)
def test_what_does_not_fit_is_refused_with_its_numbers(
    length: int, fields: dict[str, Any], param: str, numbers: list[int]
) -> None:
    with pytest.raises(RequestError) as caught:
        fitted(length, **fields)
    assert caught.value.param == param
    assert {str(number) for number in numbers} <= set(re.findall(r"\d+", caught.value.message))


@pytest.mark.parametrize(
    ("num_prompts", "streamed", "fields", "refused"),
    [
        (1, False, {"prompt_logprobs": 5}, ["prompt_logprobs", "150", "100"]),
        (1, True, {"prompt_logprobs": 5}, ["prompt_logprobs"]),
        (1, False, {"prompt_logprobs": 3}, None),
        (2, False, {"prompt_logprobs": 3}, ["prompt_logprobs"]),
        (1, False, {"prompt_logprobs": 3, "n": 2}, ["prompt_logprobs"]),
        (1, False, {"prompt_logprobs": 0, "n": 4}, ["prompt_logprobs"]),
        (1, False, {"logprobs": 4, "max_tokens": 21}, ["logprobs", "105", "100"]),
        (1, False, {"logprobs": 4, "max_tokens": 20}, None),
        (2, False, {"logprobs": 4, "max_tokens": 20}, ["logprobs"]),
        (1, False, {"logprobs": 4, "max_tokens": 20, "n": 2}, ["logprobs"]),
        (1, True, {"logprobs": 4, "max_tokens": 20, "n": 2}, None),  # each goes to the client at once
        (1, True, {"logprobs": 4, "max_tokens": 20, "best_of": 2}, ["logprobs"]),
        (1, True, {"max_tokens": 60, "best_of": 2}, ["best_of", "120", "100"]),
        (1, False, {"logprobs": 20, "max_tokens": None, "n": 8}, None),  # nobody knows how many there will be
        (8, False, {"max_tokens": 80, "n": 8}, None),
    ],
)
def test_logprobs_are_limited_over_all_prompts_answers_and_tokens(
    num_prompts: int, streamed: bool, fields: dict[str, Any], refused: list[str] | None
) -> None:
    checked = check_params(SamplingParams(**fields), RULES)

    def check() -> None:
        check_output_cells(num_prompts, checked, RULES, streamed)
        check_prompt_cells(30 * num_prompts, checked, RULES.limits)

    if refused is None:
        check()
        return
    with pytest.raises(RequestError) as caught:
        check()
    assert caught.value.param == refused[0]
    assert set(refused[1:]) <= set(re.findall(r"\d+", caught.value.message))


@pytest.mark.parametrize("window", [0, 24])
@pytest.mark.parametrize("num_blocks", [2, 5, 9, 1000])
def test_capacity_is_the_longest_request_that_the_pool_holds(window: int, num_blocks: int) -> None:
    limits = SchedulerLimits(
        groups=(CacheGroup("full", 4), CacheGroup("sliding", 4, window)) if window else (CacheGroup("full", 4),),
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        max_model_len=100,
    )
    longest = capacity(limits)
    assert longest == 0 or footprint(limits, longest - 1) <= num_blocks - 1
    assert longest == 100 or footprint(limits, longest) > num_blocks - 1


# ------------------------------------------------------------------------------------------- the rest


def test_ids_texts_and_labels() -> None:
    assert check_ids([0, VOCAB - 1], RULES, "prompt") == (0, VOCAB - 1)
    for wrong in ([-1], [VOCAB], [1.0], [True], ["1"], "12", b"12", 5, None, [1 << 64]):
        with pytest.raises(RequestError) as caught:
            check_ids(wrong, RULES, "prompt")
        assert (caught.value.param or "").startswith("prompt")
    assert check_text("a\0é", 10, "prompt") == "a\0é"
    for text in ("x" * 11, "\ud800", "a\udfff", 5, None):
        with pytest.raises(RequestError):
            check_text(text, 10, "prompt")


async def test_labels_are_checked() -> None:
    def check(**labels: Any) -> Coroutine[Any, Any, Checked]:
        request = Generate(prompts=(Prompt(text="x"),), params=SamplingParams(), **labels)
        return check_request(request, RULES, remote=False)

    assert (await check()).cache_salt is None
    assert (await check(cache_salt="a b~")).cache_salt == "a b~"
    assert (await check(priority=-5)).priority == -5
    for salt in ("", "x" * 257, "é", "a\n", 5):
        with pytest.raises(RequestError, match="cache_salt"):
            await check(cache_salt=salt)
    for priority in (1 << 31, 1.5, "1", True, None):
        with pytest.raises(RequestError, match="priority"):
            await check(priority=priority)


def test_seeds() -> None:
    def draw(seeds: Seeds, **params: Any) -> list[int]:
        return seeds.draw(check_params(SamplingParams(**params), RULES))

    seeds = Seeds(5)
    assert draw(seeds) == draw(Seeds(5))
    assert draw(seeds) != draw(Seeds(5))
    assert draw(Seeds(None)) != draw(Seeds(None))
    assert draw(seeds, seed=(1 << 63) - 1, n=2) == [(1 << 63) - 1, -(1 << 63)]
    assert draw(seeds, seed=3, n=3) == [3, 4, 5]

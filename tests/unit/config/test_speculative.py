"""--speculative-config and all of its older spellings: one object, one method, and typos that are told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ferrule.config import Config, ModelConfig, Resolved, ResolvedSpeculative, WorkerSettings
from ferrule.config.parse import parse
from ferrule.config.resolve import remarks, resolve, with_speculator
from ferrule.config.schema import Schema
from ferrule.config.sections import SpeculativeConfig
from ferrule.config.unsupported import engine_sections
from ferrule.env import Environment
from ferrule.errors import ConfigError
from ferrule.locate.localise import localise
from ferrule.plugin import discover

SCHEMA = Schema(engine_sections())
PLUGINS = discover()


def resolved(*argv: str) -> ResolvedSpeculative:
    config = resolve(parse(argv, SCHEMA, env=Environment()).config)
    return with_speculator(config, PLUGINS).speculative


def given(**keys: Any) -> ResolvedSpeculative:
    return resolved("--speculative-config", json.dumps(keys))


def refusal(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        given(**keys)
    return str(caught.value)


def test_nothing_is_guessed_by_default() -> None:
    assert resolved() == ResolvedSpeculative()
    assert not resolved().method


def test_older_options_are_keys_of_the_object() -> None:
    old = resolved(
        *("--speculative-model", "[ngram]", "--num-speculative-tokens", "6", "--ngram-prompt-lookup-max", "4"),
        *("--ngram-prompt-lookup-min", "2", "--speculative-disable-by-batch-size", "9", "--speculative-max-model-len"),
        *("500", "--spec-decoding-acceptance-method", "typical_acceptance_sampler"),
        *("--typical-acceptance-sampler-posterior-threshold", "0.2"),
        *("--typical-acceptance-sampler-posterior-alpha", "0.4"),
    )
    new = given(
        method="ngram",
        num_speculative_tokens=6,
        prompt_lookup_max=4,
        prompt_lookup_min=2,
        disable_by_batch_size=9,
        max_model_len=500,
        acceptance_method="typical_acceptance_sampler",
        posterior_threshold=0.2,
        posterior_alpha=0.4,
    )
    assert replace(old, speculative_config={}) == replace(new, speculative_config={})
    assert (new.method, new.num_tokens, new.max_model_len, new.disable_by_batch_size) == ("ngram", 6, 500, 9)
    assert new.settings == {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    assert new.typical == (0.2, 0.4)


def test_shortcuts_and_what_means_the_default() -> None:
    short = resolved("--spec-method", "suffix", "--spec-tokens", "3")
    assert (short.method, short.num_tokens, short.typical) == ("suffix", 3, None)
    assert resolved("-sc", "None") == ResolvedSpeculative()
    drafts = resolved("--spec-model", "/x", "-spec-draft-tp", "1", "--speculative-model-quantization", "fp8")
    assert drafts.settings == {"model": "/x", "quantization": "fp8"}


@pytest.mark.parametrize("turned", [False, True])
def test_a_shortcut_that_contradicts_the_object_stops_the_start(turned: bool) -> None:
    short, whole = ["--spec-method", "suffix"], ["--speculative-config", '{"method": "ngram"}']
    with pytest.raises(ConfigError) as caught:
        resolved(*((*whole, *short) if turned else (*short, *whole)))
    for part in (
        "--spec-method",
        "--speculative-config.method different values",
        "'suffix'",
        "'ngram'",
        "leave one out",
    ):
        assert part in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    same = resolved("--spec-method", "ngram", *whole, "--spec-tokens", "3")
    assert (same.method, same.num_tokens) == ("ngram", 3)


def test_a_later_source_still_wins(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("speculative-config: {method: ngram}")
    assert resolved("--config", str(file), "--spec-method", "suffix").method == "suffix"


def test_a_method_has_a_usual_number_of_guesses() -> None:
    usual = {name: PLUGINS.load("speculator", name).usual_tokens for name in ("ngram", "suffix")}
    assert {name: given(method=name).num_tokens for name in usual} == usual


def test_the_method_that_keys_belong_to() -> None:
    assert given(prompt_lookup_max=3).method == "ngram"


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens: 0 is not valid; expected a whole"),
        (
            {"method": "ngram", "num_speculative_tokens": 1000},
            "1000 is not valid; expected a whole number from 1 to 64",
        ),
        ({"method": "ngram", "num_speculative_tokens": True}, "True is not valid"),
        ({"method": "ngramm"}, "no speculator plugin 'ngramm'; available: "),
        ({"method": "ngramm"}, "Did you mean 'ngram'?"),
        (
            {"method": "ngram", "promt_lookup_max": 3},
            "the method ngram has no 'promt_lookup_max'; it has prompt_lookup",
        ),
        ({"method": "ngram", "promt_lookup_max": 3}, "Did you mean 'prompt_lookup_max'?"),
        ({"method": "suffix", "model": "[ngram]"}, "method is 'suffix', and model '[ngram]' names another one"),
        ({"method": "suffix", "model": "/x"}, "the method suffix has no 'model'"),
        ({"num_speculative_tokens": 4}, "names neither a method nor a model"),
        ({"methud": "ngram"}, "Did you mean 'method'?"),
        ({"method": "ngram", "acceptance_method": "lucky"}, "expected one of: rejection_sampler, typical_acceptance"),
        ({"method": "ngram", "posterior_alpha": -1}, "posterior_alpha: -1 is not valid; expected a number from 0 to 1"),
        ({"method": "ngram", "draft_tensor_parallel_size": 2}, "expected 1: there is one worker"),
        ({"model": 7}, "model: 7 is not valid; expected a text"),
        ({"method": "ngram", "disable_by_batch_size": 0}, "disable_by_batch_size: 0 is not valid"),
    ],
)
def test_bad_input_is_one_clear_error(keys: dict[str, Any], part: str) -> None:
    text = refusal(**keys)
    assert part in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("described", "method"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "draft_model"),
        ({"model_type": "medusa"}, "medusa"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}, "mlp_speculator"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"model_type": "eagle", "architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({}, "draft_model"),
    ],
)
def test_the_method_that_a_model_is_for(
    tmp_path: Path, tiny_llama: Path, described: dict[str, Any], method: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(described))
    found = localised(tiny_llama, model=str(tmp_path)).speculative
    assert found.method == method
    assert found.settings["model"] == str(tmp_path)


def localised(target: Path, **keys: Any) -> Resolved:
    config = Config(model=ModelConfig(model=str(target)), speculative=SpeculativeConfig(speculative_config=keys))
    return localise(with_speculator(resolve(config), PLUGINS), PLUGINS)


def test_workers_are_told(tiny_llama: Path) -> None:
    config = WorkerSettings.of(localised(tiny_llama, method="ngram", num_speculative_tokens=3))
    assert (config.speculative.method, config.speculative.num_tokens) == ("ngram", 3)


def test_names_of_published_heads_are_methods() -> None:
    assert given(method="deepseek_mtp").method == "mtp"


def test_keys_without_effect_are_told() -> None:
    keys = {"method": "ngram", "disable_logprobs": True, "disable_mqa_scorer": True}
    config = resolve(parse(["-sc", json.dumps(keys)], SCHEMA, env=Environment()).config)
    assert [each.partition(" is accepted")[0] for each in remarks(config, PLUGINS)] == [
        "--speculative-config.disable_logprobs",
        "--speculative-config.disable_mqa_scorer",
    ]

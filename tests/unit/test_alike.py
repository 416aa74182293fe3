"""Names that are suggested in place of a misspelt one, and absurd ones that are not."""

from __future__ import annotations

import pytest

from ferrule.alike import alike
from ferrule.config.schema import Schema
from ferrule.config.unsupported import engine_sections
from ferrule.errors import nearest
from ferrule_plugins.router.openai.schema import ChatBody

_SCHEMA = Schema(engine_sections())
_FIELDS = sorted(ChatBody.model_fields)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("temprature", "temperature"),
        ("top_kk", "top_k"),
        ("frequence_penalty", "frequency_penalty"),
        ("steam", "stream"),
        ("temp", "temperature"),
    ],
)
def test_a_misspelt_field_is_recognised(written: str, meant: str) -> None:
    assert nearest(written, _FIELDS) == f" Did you mean '{meant}'?"


@pytest.mark.parametrize("written", ["description", "enable_foo", "foo", "system", "thinking", "", "_", "x" * 5000])
def test_a_field_that_merely_shares_letters_is_not_suggested(written: str) -> None:
    assert nearest(written, _FIELDS) == ""


def test_moderation_is_not_description() -> None:
    assert alike("moderation", ["description", "code_revision", "iteration"]) == []


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("--tensor-paralel-size", "--tensor-parallel-size"),
        ("--tensor-paralel", "--tensor-parallel-size"),
        ("--tensor_paralel_size", "--tensor-parallel-size"),
        ("--gpu-memory", "--gpu-memory-utilization"),
        ("--no-enable-prefix-cachin", "--no-enable-prefix-caching"),
        ("--quantisation", "--quantization"),
        ("--prt", "--port"),
    ],
)
def test_a_misspelt_option_is_recognised(written: str, meant: str) -> None:
    assert _SCHEMA.suggest(written) == f" Did you mean '{meant}'?"


@pytest.mark.parametrize("written", ["--enable-foo", "--disable-foo", "--no-foo", "--foo", "--moderation"])
def test_an_option_that_merely_shares_words_is_not_suggested(written: str) -> None:
    assert _SCHEMA.suggest(written) == ""


def test_words_of_other_spellings() -> None:
    models = ["GemmaForCausalLM", "LlamaForCausalLM", "OPTForCausalLM"]
    assert alike("LlamaForCausalML", models) == ["LlamaForCausalLM"]
    assert alike("FooForCausalLM", models) == []
    assert alike("FERRULE_APIKEY", ["FERRULE_API_KEY", "FERRULE_LOG"]) == ["FERRULE_API_KEY"]
    assert alike("FERRULE_FOO", ["FERRULE_API_KEY", "FERRULE_LOG"]) == []

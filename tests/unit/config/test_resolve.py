"""Values left open are filled in one place, and contradictions are named."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import get_args, get_type_hints

import msgspec
import pytest

from ferrule.config import Resolved, ResolvedModel, ResolvedScheduler
from ferrule.config.parse import parse
from ferrule.config.resolve import check_names, resolve, step_tokens
from ferrule.config.sections import Config
from ferrule.env import Environment
from ferrule.errors import ConfigError
from ferrule.plugin import Plugins, discover


def config(*argv: str) -> Config:
    return parse(argv, env=Environment()).config


def refusal(*argv: str, max_model_len: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        limits(*argv, max_model_len=max_model_len)
    return str(caught.value)


def limits(*argv: str, max_model_len: int = 1) -> tuple[int, int]:
    """Return the limits for a model that has loaded."""
    section = resolve(config(*argv)).scheduler
    return section.max_num_seqs, step_tokens(section, max_model_len)


def test_defaults() -> None:
    resolved = resolve(config("org/name"))
    assert resolved.cache.block_size == 16
    assert resolved.model.served_model_name == ("org/name",)
    assert (resolved.model.tokenizer, resolved.model.hf_config_path) == ("org/name", "org/name")
    assert limits() == (256, 2048)


def test_what_was_said_stays() -> None:
    assert limits("--max-num-seqs", "3", "--max-num-batched-tokens", "7") == (3, 7)
    assert resolve(config("--block-size", "8")).cache.block_size == 8
    assert resolve(config("m", "--served-model-name", "a", "b")).model.served_model_name == ("a", "b")
    assert resolve(config()).model.served_model_name == ()


def test_one_limit_follows_the_other() -> None:
    assert limits("--max-num-seqs", "5000") == (5000, 5000)
    assert limits("--max-num-batched-tokens", "10") == (10, 10)


def test_whole_prompts_must_fit_a_step() -> None:
    assert limits("--no-enable-chunked-prefill", max_model_len=9000) == (256, 9000)
    assert limits("--no-enable-chunked-prefill", "--max-model-len", "9000") == (256, 9000)
    assert limits("--no-enable-chunked-prefill", max_model_len=100) == (256, 2048)
    assert limits(max_model_len=9000) == (256, 2048)
    message = refusal("--no-enable-chunked-prefill", "--max-num-batched-tokens", "100", max_model_len=200)
    assert "--max-num-batched-tokens (100) must be at least --max-model-len (200)" in message


@pytest.mark.advisory("CVE-2026-47155")
def test_the_tokenizer_follows_the_model() -> None:
    def tokenizer(*argv: str) -> tuple[str, str | None]:
        section = resolve(config("org/name", *argv)).model
        return section.tokenizer, section.tokenizer_revision

    assert tokenizer("--revision", "r") == ("org/name", "r")
    assert tokenizer("--revision", "r", "--tokenizer", "org/name") == ("org/name", "r")
    assert tokenizer("--revision", "r", "--tokenizer", "other") == ("other", None)
    assert tokenizer("--revision", "r", "--tokenizer-revision", "t") == ("org/name", "t")


def test_nothing_is_open_that_has_a_default() -> None:
    """Check the types: a field of a resolved section may be None only if None means something."""
    hints = get_type_hints(ResolvedScheduler) | get_type_hints(ResolvedModel)
    optional = {name for name, hint in hints.items() if NoneType in get_args(hint)}
    assert optional == {
        *("seed", "revision", "code_revision", "tokenizer_revision", "hf_token", "max_model_len", "quantization"),
        *("logits_processor_pattern", "pipeline_depth", "quantization_param_path"),
        *("target_first_token_ms", "target_inter_token_ms"),
    }
    with pytest.raises(TypeError):
        ResolvedScheduler()  # type: ignore[call-arg]


def test_a_resolved_configuration_survives_a_message() -> None:
    resolved = resolve(config("org/name", "--no-enable-chunked-prefill", "--cuda-graph-sizes", "1", "2"))
    assert msgspec.json.decode(msgspec.json.encode(resolved), type=Resolved) == resolved


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--max-num-seqs", "8", "--max-num-batched-tokens", "7"], "(7) must be at least --max-num-seqs (8)"),
        (["m", "--served-model-name", "a", "a"], "same name twice"),
        (["m", "--served-model-name", ""], "empty name"),
        (["--api-key", ""], "--api-key (or FERRULE_API_KEY, VLLM_API_KEY) is empty"),
        (["--logits-processor-pattern", "("], "not a regular expression"),
        (["--root-path", "api"], "must begin with '/'"),
    ],
)
def test_contradictions(argv: list[str], part: str) -> None:
    assert part in refusal(*argv)


class _Plugins(Plugins):
    def names(self, kind: str) -> Sequence[str]:
        return {"policy": ("fcfs", "priority"), "platform": ("cpu",), "hub": ("huggingface",)}.get(
            kind, ("default", "uni")
        )

    def origin(self, kind: str, name: str) -> str:
        return "someone 1.0" if name in ("denied", *self.names(kind)) else ""


def test_names_of_plugins() -> None:
    check_names(config(), _Plugins())
    check_names(config("--scheduling-policy", "denied", "--device", "cpu"), _Plugins())
    with pytest.raises(ConfigError) as caught:
        check_names(config("--scheduling-policy", "priorty", "--routers", "default", "x"), _Plugins())
    assert str(caught.value) == (
        "--scheduling-policy: no policy plugin 'priorty'; available: fcfs, priority. Did you mean 'priority'?\n"
        "--routers: no router plugin 'x'; available: default, uni."
    )


# ------------------------------------------------------------------------------------- guided decoding

OBJECT = "--structured-outputs-config"


def decoding(*argv: str) -> tuple[str | bool, ...]:
    found = resolve(parse(argv, env=Environment()).config).decoding
    return (
        found.backend,
        found.fallback,
        found.any_whitespace,
        found.additional_properties,
        found.bounded_whitespace,
    )


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], ("auto", True, True, True)),
        (["--guided-decoding-backend", "guidance"], ("guidance", True, True, True)),
        (
            ["--guided-decoding-backend", "xgrammar:no-fallback,disable-any-whitespace"],
            ("xgrammar", False, False, True),
        ),
        (["--guided-decoding-disable-fallback"], ("auto", False, True, True)),
        (["--guided-decoding-disable-any-whitespace"], ("auto", True, False, True)),
        (["--guided-decoding-disable-additional-properties"], ("auto", True, True, False)),
        (["--guided-decoding-backend", "auto:unbounded-whitespace"], ("auto", True, True, True, False)),
        (["--guided-decoding-unbounded-whitespace"], ("auto", True, True, True, False)),
        ([OBJECT, '{"unbounded_whitespace": true}'], ("auto", True, True, True, False)),
        (["--no-guided-decoding-disable-fallback"], ("auto", True, True, True)),
        ([OBJECT, '{"backend": "outlines:no-fallback"}'], ("outlines", False, True, True)),
        (
            [OBJECT, '{"disable_fallback": true, "disable_any_whitespace": true, "backend": "auto"}'],
            ("auto", False, False, True),
        ),
        ([f"{OBJECT}.disable_additional_properties", "true"], ("auto", True, True, False)),
        ([f"{OBJECT}.backend", "guidance", "--guided-decoding-backend", "guidance"], ("guidance", True, True, True)),
        ([OBJECT, '{"backend": "auto"}', "--guided-decoding-backend", "outlines"], ("outlines", True, True, True)),
        ([OBJECT, '{"disable_fallback": false}', "--guided-decoding-disable-fallback"], ("auto", False, True, True)),
    ],
)
def test_guided_decoding_in_all_its_spellings(argv: list[str], expected: tuple[str | bool, ...]) -> None:
    assert decoding(*argv) == (*expected, True)[:5]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([OBJECT, '{"bakend": "x"}'], f"{OBJECT} has no 'bakend'; it has backend, disable_fallback"),
        ([OBJECT, '{"backend": 3}'], f"{OBJECT}.backend: 3 is not valid"),
        ([OBJECT, '{"backend": "xgrammar:fast"}'], "'fast' behind the colon is none of no-fallback"),
        ([OBJECT, '{"disable_fallback": "yes"}'], f"{OBJECT}.disable_fallback: 'yes' is not valid"),
        (
            [f"{OBJECT}.backend", "guidance", "--guided-decoding-backend", "outlines"],
            f"--guided-decoding-backend (outlines) and {OBJECT}.backend (guidance) differ",
        ),
    ],
)
def test_refusals_of_guided_decoding(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decoding(*argv)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "argv", [["--guided-decoding-backend", "xgramar:no-fallback"], [f"{OBJECT}.backend", "xgramar"]]
)
def test_a_backend_must_exist(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="no guided_decoding plugin 'xgramar'.* Did you mean 'xgrammar'?"):
        check_names(resolve(config(*argv)), discover())


@pytest.mark.parametrize("value", ["cuda 0", '{"cuda:1": "cuda:0"'])
def test_a_map_location_that_is_none_is_one_error(value: str) -> None:
    with pytest.raises(ConfigError, match="--pt-load-map-location"):
        resolve(config("--pt-load-map-location", value))
    assert resolve(config("--pt-load-map-location", '{"cuda:1": "cuda:0"}'))

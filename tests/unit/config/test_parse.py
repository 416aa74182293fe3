"""The command line: what is understood, what is refused, and what the refusal says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule.config import Config
from ferrule.config.help import size_text
from ferrule.config.option import opt
from ferrule.config.parse import Parsed, config_sections, parse, parse_kwargs
from ferrule.config.schema import Schema
from ferrule.config.values import human_size
from ferrule.env import Environment
from ferrule.env import read as read_environment
from ferrule.errors import ConfigError

_ENV = Environment()


def read(*argv: str) -> Parsed:
    return parse(argv, env=_ENV)


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*argv)
    return str(caught.value)


def test_nothing_given_is_the_defaults() -> None:
    parsed = read()
    assert parsed.config == Config(env=_ENV)
    assert parsed.origins == {}
    assert parsed.notices == ()


def test_one_field_one_flag() -> None:
    schema = Schema(config_sections())
    for spec in schema.specs:
        match = schema.find("--" + spec.name)
        assert match is not None
        assert match.spec is spec
        assert spec.option.doc.endswith((".", ")"))


def test_forms_of_a_value() -> None:
    for argv in (["--port", "9"], ["--port=9"]):
        parsed = read(*argv)
        assert parsed.config.frontend.port == 9
        assert parsed.origins == {"port": "command line"}
    assert read("--max_num_seqs", "3").config.scheduler.max_num_seqs == 3
    assert read("--root-path=").config.frontend.root_path == ""
    assert read("--max-logprobs", "-1").config.model.max_logprobs == -1
    assert read("--seed", "None").config.model.seed is None
    assert read("--watchdog-timeout", "1.5e1").config.parallel.watchdog_timeout == 15.0


def test_the_model_is_positional_or_an_option() -> None:
    assert read("a/b").config.model.model == "a/b"
    assert read("--model", "a/b").config.model.model == "a/b"
    assert read("--port", "1", "a/b").config.model.model == "a/b"
    assert read("--port", "1", "--", "-strange").config.model.model == "-strange"
    assert refusal("a", "b") == "Unexpected argument 'b': model is already 'a'."


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--enable-chunked-prefill"], True),
        (["--no-enable-chunked-prefill"], False),
        (["--disable-chunked-prefill"], False),
        (["--enable-chunked-prefill", "false"], False),
        (["--enable-chunked-prefill", "True", "m"], True),
        (["--enable-chunked-prefill=0"], False),
        (["--no-enable-chunked-prefill=false"], True),
        (["--enable-chunked-prefill", "some/model"], True),
    ],
)
def test_booleans(argv: list[str], value: bool) -> None:
    assert read(*argv).config.scheduler.enable_chunked_prefill is value


def test_a_word_that_is_true_or_false_is_the_value_of_any_boolean() -> None:
    for words, value in ((["true"], True), (["False"], False), ([], True)):
        parsed = read("--strict-requests", *words)
        assert (parsed.config.frontend.strict_requests, parsed.config.model.model) == (value, "")
    assert read("--strict-requests", "1").config.model.model == "1"  # a folder may have that name


def test_an_opposite_never_hides_an_option() -> None:
    assert read("--enable-log-stats").config.observability.disable_log_stats is False
    assert read("--disable-log-stats").config.observability.disable_log_stats is True
    assert "true or false" in refusal("--enforce-eager=maybe")


def test_several_values_and_repetition() -> None:
    parsed = read("m", "--served-model-name", "a", "b", "--port", "1", "--port", "2")
    assert parsed.config.model.served_model_name == ("a", "b")
    assert parsed.config.frontend.port == 2
    assert parsed.notices == ("--port: given more than once; the last one counts.",)
    parsed = read("m", "--plugin", "a=b.py", "--plugin", "c=d.py", "e=f.py")
    assert parsed.config.plugins.plugin == ("a=b.py", "c=d.py", "e=f.py")
    assert parsed.notices == ()


def test_a_model_behind_a_list_is_noted() -> None:
    parsed = read("--served-model-name", "a", "org/model")
    assert parsed.config.model.model == ""
    (notice,) = parsed.notices
    assert notice.startswith("No MODEL is given, and --served-model-name takes all 2 words behind it.")
    assert read("--api-key", "a").notices == read("m", "--api-key", "a", "b").notices == ()
    assert read("--model", "m", "--api-key", "a", "b").notices == ()


def test_a_bare_option() -> None:
    assert read("--hf-token").config.model.hf_token == ""
    assert read("--hf-token", "--port", "1").config.model.hf_token == ""
    assert read("--hf-token", "abc").config.model.hf_token == "abc"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1k", 1000), ("1K", 1024), ("25.6k", 25_600), ("2m", 2_000_000), ("1M", 1 << 20), ("1g", 10**9), ("1G", 1 << 30)]
    + [("1t", 10**12), ("2T", 2 << 40), ("0.5k", 500), ("12", 12), ("-1", -1)],
)
def test_sizes(text: str, value: int) -> None:
    assert human_size(text) == value


def test_sizes_are_written_as_they_are_read() -> None:
    sizes = (0, 7, 1000, 2048, 200_000, 8_000_000, 32 << 20)
    assert [size_text(size) for size in sizes] == ["0", "7", "1k", "2K", "200k", "8m", "32M"]


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.5K", "1.0001k", "1kk", "1 k", "0x10", "1e3", "9" * 30, "٣"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(ValueError):
        human_size(text)


def test_size_options() -> None:
    assert read("--max-model-len", "25.6k").config.model.max_model_len == 25_600
    assert "suffix k (powers of 1000)" in refusal("--max-model-len", "25.6K")
    assert "too large" in refusal("--max-model-len", "9999999999999T")


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--hf-overrides", '{"a":1,"b":{"c":2}}'], {"a": 1, "b": {"c": 2}}),
        (["--hf-overrides.a", "1", "--hf-overrides.b.c", "2"], {"a": 1, "b": {"c": 2}}),
        (["--hf_overrides.a_b=x", "--hf-overrides.c-d=80g"], {"a_b": "x", "c-d": 80 * 10**9}),
        (["--hf-overrides.a", "true", "--hf-overrides.b", "null"], {"a": True, "b": None}),
        (["--hf-overrides.a", '{"b":1}', "--hf-overrides.a.c", "2"], {"a": {"b": 1, "c": 2}}),
        (["--hf-overrides.l+", "1", "--hf-overrides.l+=x,2", "--hf-overrides.l+", "[3]"], {"l": [1, "x", 2, 3]}),
        (["--hf-overrides", '{"a":{"b":1}}', "--hf-overrides.a.c", "2"], {"a": {"b": 1, "c": 2}}),
        (["--hf-overrides.a", "NaN"], {"a": "NaN"}),
        (["--hf-overrides.a", "-1"], {"a": -1}),
    ],
)
def test_json_options(argv: list[str], value: dict[str, Any]) -> None:
    assert read(*argv).config.model.hf_overrides == value


def test_duplicate_keys_are_noted() -> None:
    parsed = read("--hf-overrides", '{"a":1,"a":2}', "--hf-overrides.a", "3")
    assert parsed.config.model.hf_overrides == {"a": 3}
    assert parsed.notices == (
        "--hf-overrides: key a is given twice; the last one counts.",
        "--hf-overrides.a: key a is given twice; the last one counts.",
    )


def test_json_lists() -> None:
    assert read("--allowed-origins", '["https://a"]').config.frontend.allowed_origins == ("https://a",)
    for wrong in ("https://a", "[1]", "{}", "[" * 100_000):
        assert refusal("--allowed-origins", wrong).endswith('expected a JSON list such as ["a", "b"].')


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--max-num-seq", "4"], ["Unknown option --max-num-seq.", "Did you mean '--max-num-seqs'?"]),
        (["--max-num-seqs"], ["--max-num-seqs needs a value", "a whole number >= 1"]),
        (["--max-num-seqs", "0"], ["--max-num-seqs: '0' is not valid", "a whole number >= 1"]),
        (["--max-num-seqs", "1.0"], ["'1.0' is not valid"]),
        (["--max-num-seqs", "9" * 5000], ["…"]),
        (["--gpu-memory-utilization", "nan"], ["a number > 0 and <= 1"]),
        (["--gpu-memory-utilization", "1e999"], ["a number > 0 and <= 1"]),
        (["--dtype", "bfloat"], ["one of: auto, half", "Did you mean"]),
        (["--block-size", "7"], ["one of: 1, 2, 4, 8, 16, 32, 64, 128"]),
        (["--hf-overrides", "{'a':1}"], ["not JSON", "a JSON object"]),
        (["--hf-overrides", "[1]"], ["a JSON object"]),
        (["--hf-overrides", '{"a":NaN}'], ["NaN is not JSON"]),
        (["--hf-overrides.a", "1", "--hf-overrides.a.b", "2"], ["a is 1, not an object"]),
        (["--hf-overrides.a", "1", "--hf-overrides.a+", "2"], ["a is 1, not a list"]),
        (["--hf-overrides.", "1"], ["Write --hf-overrides.KEY VALUE."]),
        (["--port.a", "1"], ["--port takes no keys."]),
        (["-zz"], ["Unknown option -zz."]),
        (["--enable-chunked-prefil"], ["Did you mean '--enable-chunked-prefill'?"]),
        (["--ENABLE-CHUNKED-PREFILL"], ["Unknown option"]),
    ],
)
def test_refusals(argv: list[str], parts: list[str]) -> None:
    message = refusal(*argv)
    assert all(part in message for part in parts), message
    assert len(message) < 400


def test_all_problems_in_one_block() -> None:
    assert [line.split(":")[0] for line in refusal("--port", "x", "--qqqq", "1", "--dtype", "y").splitlines()] == [
        "Unknown option --qqqq.",
        "--port",
        "--dtype",
    ]


def test_a_secret_is_not_repeated() -> None:
    schema = Schema({"secrets": _Secrets})
    with pytest.raises(ConfigError) as caught:
        parse(["--pin", "hunter2"], schema, env=_ENV, positional=None)
    assert "hunter2" not in str(caught.value)
    assert "--pin: the value is not valid" in str(caught.value)


def test_environment_is_below_the_command_line() -> None:
    env = Environment(api_key="k", logging_level="debug", attention_backend="cpu")
    parsed = parse([], env=env)
    assert parsed.config.frontend.api_key == ("k",)
    assert parsed.config.observability.log_level == "debug"
    assert parsed.origins == {"api_key": "environment", "log_level": "environment", "attention_backend": "environment"}
    parsed = parse(["--api-key", "mine", "--log-level", "error"], env=env)
    assert parsed.config.frontend.api_key == ("mine",)
    assert parsed.config.observability.log_level == "error"
    assert parsed.origins["api_key"] == "command line"
    assert parsed.notices == ()


@dataclass(frozen=True, kw_only=True)
class _Secrets:
    """A section with secrets."""

    pin: int = opt(0, "A number that nobody may see.", secret=True)
    tensor_size: int = opt(1, "With short names.", aliases=("-ts", "-t"))
    compile_config: dict[str, Any] = opt({}, "JSON with a short name.", json=True, aliases=("-oc",))


def test_sections_of_a_command_and_short_names() -> None:
    schema = Schema({**config_sections(), "own": _Secrets})
    parsed = parse(["-ts", "2", "--port", "1", "-oc.mode=3", "m"], schema, env=_ENV)
    assert parsed.extra["own"] == _Secrets(tensor_size=2, compile_config={"mode": 3})
    assert parsed.config.frontend.port == 1
    with pytest.raises(TypeError, match="two options claim"):
        Schema({"a": _Secrets, "b": _Secrets})


def test_keyword_arguments() -> None:
    config = parse_kwargs(_ENV, model="m", max_num_seqs=4, hf_overrides={"a": {"b": 1}}, served_model_name="x").config
    assert config.model.model == "m"
    assert config.scheduler.max_num_seqs == 4
    assert config.model.hf_overrides == {"a": {"b": 1}}
    assert config.model.served_model_name == ("x",)
    assert parse_kwargs(_ENV, tokenizer=None).config.model.tokenizer is None
    assert parse_kwargs(_ENV, max_model_len="1k").config.model.max_model_len == 1000


@pytest.mark.parametrize(
    ("kwargs", "part"),
    [
        ({"max_num_seq": 1}, "Unexpected keyword argument 'max_num_seq'. Did you mean 'max_num_seqs'?"),
        ({"port": 1}, "Unexpected keyword argument 'port'."),
        ({"max_num_seqs": True}, "max_num_seqs: True is not valid"),
        ({"max_num_seqs": 1.0}, "max_num_seqs: 1.0 is not valid"),
        ({"enforce_eager": 1}, "enforce_eager: 1 is not valid"),
        ({"dtype": None}, "dtype: None is not valid"),
        ({"hf_overrides": {"a": object()}}, "a value that JSON does not have"),
        ({"gpu_memory_utilization": float("nan")}, "a number > 0 and <= 1"),
        ({"model": 3}, "model: 3 is not valid"),
    ],
)
def test_wrong_keyword_arguments(kwargs: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_kwargs(_ENV, **kwargs)
    assert part in str(caught.value)


def test_the_configuration_crosses_processes() -> None:
    config = parse(
        ["m", "--served-model-name", "a", "b", "--hf-overrides.a.b", "1.5", "--allowed-origins", "[]", "--port", "0"],
        env=Environment(plugins=("a", "b"), cpu_kvcache_space=1.5),
    ).config
    for codec in (msgspec.json, msgspec.msgpack):
        assert codec.decode(codec.encode(config), type=Config) == config


@pytest.mark.parametrize(
    "argv",
    [
        ["m\udcff"],
        ["--served-model-name", "a", "\ud800"],
        ["--hf-overrides", '{"a":"\\ud800"}'],
        ["--hf-overrides", '{"a":1e999}'],
        ["--hf-overrides", '{"a":99999999999999999999999}'],
        ["--hf-overrides.a", "99999999999999999999999"],
        ["--hf-overrides." + "a." * 2000 + "a", "1"],
        ["--hf-overrides.a+", "\udcff"],
    ],
)
def test_what_no_message_can_carry_is_refused_at_once(argv: list[str]) -> None:
    assert "is not valid" in refusal(*argv)


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize(
    "argv",
    [
        ["--hf-overrides", nested(64)],
        ["--hf-overrides", nested(64), "--hf-overrides.b", "1", "--hf-overrides", nested(64)],
        ["--hf-overrides", '{"a":' + "[" * 63 + "]" * 63 + "}"],
        ["--hf-overrides." + "a." * 63 + "a", "1"],
    ],
)
def test_the_deepest_nesting_that_is_allowed(argv: list[str]) -> None:
    assert parse(["m", *argv]).config.model.hf_overrides


@pytest.mark.parametrize("levels", [65, 1200, 5000, 100_000])  # Python's own limit is another in each release
def test_what_is_nested_too_deeply_is_refused(levels: int) -> None:
    deep, path = nested(levels), "--hf-overrides." + "a." * (levels - 1) + "a"
    many = '{"a":' + "[" * (levels - 1) + "]" * (levels - 1) + "}"
    for argv in (["--hf-overrides", deep], ["--hf-overrides", deep] * 2, ["--hf-overrides", many], [path, "1"]):
        assert "nested too deeply" in refusal(*argv)


_WORDS = st.one_of(
    st.sampled_from([flag for spec in Schema(config_sections()).specs for flag in spec.flags]),
    st.sampled_from(
        ["--hf-overrides.a", "--hf-overrides.a.b", "--hf-overrides.a+", "--", "-", "--x", "-1", "1k", "true"]
    ),
    st.sampled_from(
        ['{"a":1}', '{"a":[1,{"b":null}]}', "[]", "None", "auto", "0", "", "=", "--=", "--hf-overrides..", "."]
    ),
    st.text(max_size=8),
    st.builds("{}={}".format, st.sampled_from(["--port", "--hf-overrides.l+", "--api-key"]), st.text(max_size=4)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_WORDS, max_size=8))
def test_any_command_line_is_understood_or_refused(argv: list[str]) -> None:
    """Raise nothing but ConfigError; an accepted configuration can cross a process and says where it came from."""
    try:
        parsed = read(*argv)
    except ConfigError:
        return
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(parsed.config), type=Config) == parsed.config
    assert set(parsed.origins.values()) <= {"command line"}


def test_the_attention_backend_comes_from_its_variable_and_in_any_case() -> None:
    env = read_environment({"VLLM_ATTENTION_BACKEND": "TORCH_SDPA"})
    assert parse([], env=env).config.device.attention_backend == "torch_sdpa"
    assert parse(["--attention-backend", "CPU"], env=env).config.device.attention_backend == "cpu"

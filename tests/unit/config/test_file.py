"""`--config FILE.yaml`: keys, values, precedence, and errors that name file, line and key."""

from __future__ import annotations

import textwrap
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ferrule.config import Config
from ferrule.config.parse import Parsed, parse, parse_kwargs
from ferrule.env import Environment
from ferrule.errors import ConfigError


def write(folder: Path, text: str, name: str = "serve.yaml") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return str(path)


def read(path: str, *argv: str, env: Environment | None = None) -> Parsed:
    return parse(["--config", path, *argv], env=env or Environment())


def refusal(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(path)
    return str(caught.value)


def test_every_form(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
        model: a/b
        max-model-len: 25.6k
        max_num_seqs: 4
        served-model-name: [x, "y"]
        api-key: single
        enable-prefix-caching: false
        no-enable-chunked-prefill: true
        skip-tokenizer-init: True
        long-prefill-token-threshold: 0x1F
        hf-token: true
        revision: 0123
        seed:
        gpu-memory-utilization: 5e-1
        hf-overrides:
          rope_theta: 1.0
          text_config: {layers: [1, 2], released: 2020-01-01, scale: 1e-6, 8: 0512, at: 12:30, said: no}
        override-generation-config.top_k: 3
        allowed-origins: ["https://a"]
        """,
    )
    parsed = read(path)
    config = parsed.config
    assert config.model.model == "a/b"
    assert config.model.max_model_len == 25_600
    assert config.scheduler.max_num_seqs == 4
    assert config.model.served_model_name == ("x", "y")
    assert config.frontend.api_key == ("single",)
    assert config.cache.enable_prefix_caching is False
    assert config.scheduler.enable_chunked_prefill is False
    assert config.model.skip_tokenizer_init is True
    assert config.model.hf_token == ""
    assert config.model.revision == "0123"  # as written
    assert config.model.seed is None
    assert config.cache.gpu_memory_utilization == 0.5
    assert config.scheduler.long_prefill_token_threshold == 31
    text = {"layers": [1, 2], "released": "2020-01-01", "scale": 1e-6, "8": 512, "at": "12:30", "said": "no"}
    assert config.model.hf_overrides == {"rope_theta": 1.0, "text_config": text}
    assert config.model.override_generation_config == {"top_k": 3}
    assert config.frontend.allowed_origins == ("https://a",)
    assert parsed.origins["max_num_seqs"] == f"{path}:3"
    assert parsed.origins["config"] == "command line"
    assert parsed.notices == ()


def test_precedence(tmp_path: Path) -> None:
    path = write(
        tmp_path, "model: a\nport: 1\napi-key: file\nhf-overrides: {a: 1, b: 2}\noverride-generation-config: {a: 1}\n"
    )
    env = Environment(api_key="environment", logging_level="debug")
    parsed = read(path, "b", "--port=2", "--hf-overrides.b", "3", "--override-generation-config", '{"c":1}', env=env)
    assert parsed.config.model.model == "b"
    assert parsed.config.frontend.port == 2
    assert parsed.config.frontend.api_key == ("environment",)
    assert parsed.config.observability.log_level == "debug"
    assert parsed.config.model.hf_overrides == {"a": 1, "b": 3}
    assert parsed.config.model.override_generation_config == {"c": 1}
    assert parsed.origins["api_key"] == "environment"
    assert parsed.origins["hf_overrides"] == f"{path}:4, command line"
    assert parsed.origins["override_generation_config"] == "command line"
    assert parsed.origins["log_level"] == "environment"


def test_a_key_of_the_file_changed_by_the_command_line_is_no_accident(tmp_path: Path) -> None:
    assert read(write(tmp_path, "port: 1\nhf-overrides: {a: 1}"), "--port", "2", "--hf-overrides.a", "2").notices == ()


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    parsed = read(write(tmp_path, "# nothing\n"))
    assert parsed.origins == {"config": "command line"}


def test_keyword_arguments_take_a_file_too(tmp_path: Path) -> None:
    path = write(tmp_path, "max-num-seqs: 3\nseed: 1\n")
    config = parse_kwargs(Environment(), config=path, seed=2).config
    assert (config.scheduler.max_num_seqs, config.model.seed) == (3, 2)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("--port: 1\n", ":1: unknown option '--port'. Keys have no dashes in front."),
        ("port: 1\nmax-num-seq: 3\n", ":2: unknown option 'max-num-seq'. Did you mean '--max-num-seqs'?"),
        ("port: abc\n", ":1: port: 'abc' is not valid; expected a whole number >= 0 and <= 65535."),
        ("port: [1, 2]\n", ":1: port: [1, 2] is not valid"),
        ("port: {a: 1}\n", ":1: port: {'a': 1} is not valid"),
        ("enforce-eager: yes\n", ":1: enforce-eager: 'yes' is not valid; expected true or false."),
        ("no-enforce-eager: off\n", ":1: no-enforce-eager: 'off' is not valid; expected true or false."),
        ("dtype:\n", ":1: dtype: None is not valid"),
        ("enforce-eager: maybe\n", ":1: enforce-eager: 'maybe' is not valid; expected true or false."),
        ("port: 1\n\nport: 2\n", ":3: a key is given twice, first in line 1: 'port'."),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", ":2: max_num_seqs is given twice, first in line 1."),
        ("config: other.yaml\n", ":1: a configuration file cannot name another."),
        ("- a\n- b\n", ":1: expected option names with values."),
        ("a: [\n", ": not YAML:"),
        ("a: b: c\n", ":1: not YAML:"),
        ("a: 1\n---\nb: 2\n", "not YAML"),
        ("x: \x07\n", "not YAML"),
        ("[" * 5000, "nested too deeply"),
        ("api-key: &a [*a]\n", "recursive"),
        (
            "hf-overrides: {day: !!timestamp 2020-01-01}\n",
            ":1: a tag that is not in YAML 1.2's core schema: !!time",
        ),
        ("hf-overrides: {day: !!int soon}\n", ":1: the value is not what its YAML tag says."),
        (
            "hf-overrides: {a: .nan}\n",
            ":1: hf-overrides: {'a': nan} is not valid: it holds a value that JSON",
        ),
        ("hf-overrides:\n  a: {b: 1,\n    b: 2}\n", ":3: a key is given twice, first in line 2: 'b'."),
        ("hf-overrides: [1]\n", "expected a JSON object"),
        ("hf-overrides: !!python/object/apply:os.system [ls]\n", ":1: a tag that is not in YAML 1.2's core schema"),
    ],
)
def test_errors_name_the_place(tmp_path: Path, text: str, part: str) -> None:
    path = write(tmp_path, text)
    message = refusal(path)
    assert path in message
    assert part in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "is not a .yaml or .yml file" in refusal(write(tmp_path, "{}", "serve.json"))
    assert "No such file" in refusal(str(tmp_path / "missing.yaml"))
    (tmp_path / "latin.yml").write_bytes(b"model: \xe9\n")
    assert "not UTF-8" in refusal(str(tmp_path / "latin.yml"))


def test_problems_of_file_and_command_line_come_together(tmp_path: Path) -> None:
    path = write(tmp_path, "port: abc\n")
    with pytest.raises(ConfigError) as caught:
        read(path, "--max-num-seqs", "0")
    assert len(str(caught.value).splitlines()) == 2


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.one_of(
        st.text(max_size=40),
        st.lists(
            st.tuples(
                st.sampled_from(["port", "hf-overrides", "api_key", "enforce-eager", "hf-overrides.a", "nope", "seed"]),
                st.sampled_from(
                    ["1", "true", "~", "[1, a]", "{a: {1: 2}}", "x: y", "&a [*a]", "2020-01-01", "!!set {a}", "|"]
                ),
            ),
            max_size=4,
        ).map(lambda rows: "\n".join(f"{key}: {value}" for key, value in rows)),
    )
)
def test_any_file_is_understood_or_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "any.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    try:
        parsed = read(str(path))
    except ConfigError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert str(path) in refused
        return
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(parsed.config), type=Config) == parsed.config

"""The documented default of any option passes; keys that are empty do not."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from ferrule.config import Resolved
from ferrule.config.parse import Parsed, parse
from ferrule.config.resolve import check_names, one_worker, remarks, resolve
from ferrule.config.schema import Schema
from ferrule.config.unsupported import engine_sections
from ferrule.env import Environment
from ferrule.env import read as read_environment
from ferrule.errors import ConfigError
from ferrule.plugin import discover

_SCHEMA = Schema(engine_sections())
_PLUGINS = discover()
_DATA = Path(__file__).parent / "data" / "documented_defaults.txt"
_DEFAULTS = [line for line in _DATA.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]


def read(*argv: str) -> Parsed:
    return parse(argv, _SCHEMA, env=Environment())


def started(parsed: Parsed) -> Resolved:
    """Resolve as `prepare` does: check everything that needs no look at a model."""
    config = one_worker(resolve(parsed.config), _PLUGINS)
    check_names(config, _PLUGINS)
    return config


@pytest.mark.parametrize("line", _DEFAULTS)
def test_a_documented_default_passes(line: str) -> None:
    flag, _, text = line.partition(" ")
    value = [] if not text else [text] if text[0] in "[{" else shlex.split(text)
    started(read("org/name", flag, *value))
    if value:
        started(read("org/name", f"{flag}={value[0]}"))


def test_the_list_names_every_documented_option_with_a_value() -> None:
    listed = {line.split()[0] for line in _DEFAULTS}
    rows = (_DATA.parent / "documented_options.txt").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in row.split("|")] for row in rows if not row.startswith("#")]
    assert {row[0] for row in cells if row[3] != "-"} - listed == {
        *("--model", "--middleware"),  # no default that one could write
        "--max-context-len-to-capture",  # the older name of another
    }


def test_none_is_the_default_and_not_a_text() -> None:
    config = read("m", "--api-key", "None", "--tool-call-parser", "None", "--served-model-name", "None").config
    assert (config.frontend.api_key, config.frontend.tool_call_parser) == ((), "")
    assert resolve(config).model.served_model_name == ("m",)


def test_a_server_that_is_open_on_purpose_says_so() -> None:
    assert read("--api-key", "None").notices == ("--api-key: no key is set, every client may use the server.",)
    assert read().notices == ()


def test_an_empty_key_in_a_file_means_none(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("api-key:\n")
    parsed = read("--config", str(file))
    assert resolve(parsed.config).frontend.api_key == ()
    assert parsed.notices == (f"{file}:1: api-key: no key is set, every client may use the server.",)


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("VLLM_API_KEY", "--api-key"),
        ("FERRULE_API_KEY", "--api-key"),
        ("FERRULE_ADMIN_KEY", "--admin-key"),
    ],
)
@pytest.mark.parametrize("text", ["", " "])
def test_a_variable_with_an_empty_key_stops_the_start(name: str, flag: str, text: str) -> None:
    parsed = parse([], _SCHEMA, env=read_environment({name: text}))
    with pytest.raises(ConfigError) as caught:
        resolve(parsed.config)
    assert f"{flag} (or FERRULE_" in str(caught.value)
    assert f"{name.partition('_')[2]}) is empty" in str(caught.value)
    given = parse([flag, "k"], _SCHEMA, env=read_environment({name: text}))
    resolve(given.config)


def test_what_is_accepted_and_means_something_else_is_said() -> None:
    def said(*argv: str) -> list[str]:
        parsed = read("m", *argv)
        return [*parsed.notices, *remarks(resolve(parsed.config), _PLUGINS)]

    assert said() == []
    for argv, part in (
        (("--distributed-executor-backend", "mp"), "uni is used"),
        (("--calculate-kv-scales",), "changes nothing without --kv-cache-dtype fp8"),
        (("--scheduler-cls", "vllm.core.scheduler.Scheduler"), "'default' is used"),
        (("--tokenizer-pool-type", "ray"), "accepted without effect"),
        (("--code-revision", "v2"), "changes nothing without --trust-remote-code"),
    ):
        (sentence,) = said(*argv)
        assert sentence.startswith(argv[0])
        assert part in sentence
    assert said("--calculate-kv-scales", "--kv-cache-dtype", "fp8_e4m3") == []
    assert said("--trust-remote-code", "--revision", "v2", "--code-revision", "v2") == []


def test_mp_with_one_worker_is_uni() -> None:
    assert started(read("m", "--distributed-executor-backend", "mp")).parallel.distributed_executor_backend == "uni"


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--scheduler-cls", "my/scheduler.py"], "Name a file with --plugin scheduler=my/scheduler.py."),
        (["--prefix-caching-hash-algo", "md5"], "sha256_cbor"),
        (["--trust-remote-code", "--code-revision", "v2"], "--revision is not given. Give both the same revision."),
        (["--trust-remote-code", "--revision", "v1", "--code-revision", "v2"], "of which --revision is v1."),
        (["--compilation-config", '{"level": 7}'], "--compilation-config: level 7 does not exist; use 0, 1, 2 or 3."),
        (["--compilation-config", '{"levle": 2}'], "--compilation-config has no key 'levle'. Did you mean 'level'?"),
        (["--compilation-config.mode", "high"], "--compilation-config: level 'high' does not exist"),
    ],
)
def test_refused_before_a_start(argv: list[str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        started(read("m", *argv))
    assert part in str(caught.value)


@pytest.mark.parametrize("flag", ["--top-k", "--temperature", "--foo"])
def test_nothing_is_suggested_where_nothing_is_near(flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(flag, "1")
    assert str(caught.value) == f"Unknown option {flag}."

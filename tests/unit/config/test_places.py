"""Errors of values that a configuration file gave begin with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from ferrule.config import Config
from ferrule.config.parse import parse
from ferrule.config.places import placed
from ferrule.config.resolve import resolve
from ferrule.env import Environment
from ferrule.errors import ConfigError, StartupError

PLACES = {
    "port": "s.yaml:1",
    "max_num_seqs": "s.yaml:2",
    "enable_chunked_prefill": "s.yaml:3",
    "plugin_config": "s.yaml:4",
    "plugin_config.policy:one": "s.yaml:5",
    "plugin_config.policy:one.width": "s.yaml:6",
    "plugin_config.policy:two": "s.yaml:7",
    "plugin_config.policy:two.width": "s.yaml:8",
}


def config(folder: Path, text: str, *argv: str, env: Environment | None = None) -> Config:
    file = folder / "s.yaml"
    file.write_text(text, encoding="utf-8")
    return parse(["--config", str(file), *argv], env=env or Environment()).config


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("--port is bad.", "s.yaml:1: --port is bad."),
        ("--ports is bad.", "--ports is bad."),
        ("--max-num-seqs and --port.", "s.yaml:2, s.yaml:1: --max-num-seqs and --port."),
        ("One.\n--port.\nThree.", "One.\ns.yaml:1: --port.\nThree."),
        ("--no-enable-chunked-prefill: no.", "s.yaml:3: --no-enable-chunked-prefill: no."),
        ("--plugin-config is bad.", "s.yaml:4: --plugin-config is bad."),
        ("--plugin-config policy:two is bad.", "s.yaml:7: --plugin-config policy:two is bad."),
        ("--plugin-config policy:two: width is bad.", "s.yaml:8: --plugin-config policy:two: width is bad."),
        ("s.yaml:1: --port is bad.", "s.yaml:1: --port is bad."),
        ("The --seed.", "The --seed."),
    ],
)
def test_lines_of_a_message(message: str, expected: str) -> None:
    with pytest.raises(StartupError) as caught, placed(Config(places=PLACES)):
        raise StartupError(message, "Change --port.")
    assert caught.value.message == expected
    assert str(caught.value) == f"{expected}\nChange --port."


def test_places_of_nested_keys_and_of_what_the_file_still_says(tmp_path: Path) -> None:
    text = "port: 1\nseed: 2\nhf-overrides:\n  a: {b: 1}\n  c: 1\noverride-generation-config.top_k: 3\n"
    file = tmp_path / "s.yaml"
    assert config(tmp_path, text, "--port", "3", "--hf-overrides.a", "1").places == {
        "seed": f"{file}:2",
        "hf_overrides": f"{file}:3",
        "hf_overrides.c": f"{file}:5",
        "override_generation_config.top_k": f"{file}:6",
    }
    assert config(tmp_path, text, "--hf-overrides", "{}", env=Environment(api_key="x")).places.keys() == {
        "port",
        "seed",
        "override_generation_config.top_k",
    }


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ('api-key: ""\n', 1, "--api-key (or FERRULE_API_KEY, VLLM_API_KEY) is empty"),
        ('port: 1\nserved-model-name: [a, ""]\n', 2, "--served-model-name has an empty name"),
        ('uds: ""\n', 1, "--uds is empty"),
        ("compilation-config:\n  level: 3\n  lovel: 3\n", 3, "--compilation-config has no key 'lovel'"),
        ("structured-outputs-config:\n  backend: 3\n", 2, "--structured-outputs-config.backend: 3 is not valid"),
    ],
)
def test_contradictions(tmp_path: Path, text: str, line: int, part: str) -> None:
    given = config(tmp_path, text)
    with pytest.raises(ConfigError) as caught, placed(given):
        resolve(given)
    assert str(caught.value).startswith(f"{tmp_path}/s.yaml:{line}: {part}")

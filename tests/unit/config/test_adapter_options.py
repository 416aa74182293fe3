"""Options of adapters: both forms of --lora-modules, contradictions, and where their values come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ferrule.config import LoRAModule
from ferrule.config.adapters import first_adapters, name_problem, read_module
from ferrule.config.parse import parse
from ferrule.config.resolve import remarks, resolve
from ferrule.env import Environment, read
from ferrule.errors import ConfigError
from ferrule.plugin import Plugins


def test_both_forms_of_a_module() -> None:
    assert read_module("a=/x=y") == LoRAModule(name="a", path="/x=y")
    for key in ("path", "local_path"):
        text = json.dumps({"name": "a", key: "org/name", "base_model_name": "m"})
        assert read_module(text) == LoRAModule(name="a", path="org/name", base_model_name="m")
    assert read_module('{"name": "a", "path": "x", "base_model_name": null}').base_model_name is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a", "expected name=path"),
        ("=x", "must be printable"),
        ("a=", "has no path"),
        ("a\nb=x", "must be printable"),
        ("a,b=x", "may not have commas"),
        ("{", "not JSON"),
        ("{" * 100_000, "not JSON"),
        ('{"name": "a"}', "has no path"),
        ('{"path": "x"}', "must be printable"),
        ('{"name": 1, "path": "x"}', "name must be a text"),
        ('{"name": "a", "path": "x", "local_path": "y"}', "are both there"),
        ('{"name": "a", "path": "x", "base_model": "y"}', "Did you mean 'base_model_name'?"),
        ("x" * 257 + "=x", "at most 256"),
    ],
)
def test_modules_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_module(text)


def test_modules_of_a_command_line_and_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("enable-lora: true\nmax-loras: 2\nlora-modules:\n  - {name: a, path: b}\n  - c=d\n")
    for argv in (["--config", str(file)], ["--enable-lora", "--max-loras", "2", "--lora-modules", "a=b", "c=d"]):
        section = resolve(parse(["model", *argv], env=Environment()).config).lora
        assert section.modules == (LoRAModule(name="a", path="b"), LoRAModule(name="c", path="d"))
        assert (section.max_loras, section.max_cpu_loras) == (2, 2)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--lora-modules a=b", "needs --enable-lora"),
        ("--enable-lora --lora-modules m=b", "'m' is the name of the model"),
        ("--enable-lora --lora-modules a=b a=c", "'a' twice"),
        ("--enable-lora --max-loras 3 --max-cpu-loras 2", "--max-cpu-loras (2) must be at least --max-loras (3)"),
    ],
)
def test_contradictions(argv: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(parse(["m", *argv.split()], env=Environment()).config)
    assert said in str(caught.value)


def test_a_base_model_must_be_served() -> None:
    module = json.dumps({"name": "a", "path": "b", "base_model_name": "else"})
    for names, fine in ((["else"], True), (["m"], False)):
        argv = ["x", "--served-model-name", *names, "--enable-lora", "--lora-modules", module]
        if fine:
            (adapter,) = first_adapters(resolve(parse(argv, env=Environment()).config).lora)
            assert (adapter.served, adapter.path) == ("a", "b")
        else:
            with pytest.raises(ConfigError, match="the base model of 'a' is 'else'; served is m"):
                resolve(parse(argv, env=Environment()).config)


def test_options_without_adapters_are_told() -> None:
    config = resolve(parse(["m", "--max-lora-rank", "8", "--lora-dtype", "float32"], env=Environment()).config)
    told = [line for line in remarks(config, Plugins()) if "--enable-lora" in line]
    assert [line.split()[0] for line in told] == ["--max-lora-rank", "--lora-dtype"]
    assert not [line for line in remarks(resolve(parse(["m"], env=Environment()).config), Plugins()) if "lora" in line]


def test_variables_of_resolvers() -> None:
    env = read({"VLLM_LORA_RESOLVER_CACHE_DIR": "/x", "VLLM_LORA_RESOLVER_HF_REPO_LIST": "a/b,c/d"})
    section = resolve(parse(["m", "--enable-lora"], env=env).config).lora
    assert (section.lora_resolver_cache_dir, section.lora_resolver_hf_repo_list) == ("/x", ("a/b", "c/d"))
    assert read({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}).allow_runtime_lora_updating


def test_names() -> None:
    assert [bool(name_problem(name)) for name in ("a b", "ü/x", "", " a", "a\n", "\u202e", "a\0")] == [False] * 2 + [
        True
    ] * 5

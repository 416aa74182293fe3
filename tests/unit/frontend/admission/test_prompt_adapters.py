"""Files of prompt adapters: what is read, and a clear error for whatever else is in a folder."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.numpy import save_file

from ferrule.config import Config, LoRAConfig, ModelConfig, PromptAdapter, PromptAdapterConfig, ResolvedPromptAdapters
from ferrule.config.resolve import remarks, resolve
from ferrule.errors import CheckpointError, ConfigError, ForbiddenError, NotFoundError, RequestError, RequestFailed
from ferrule.frontend.adapters.registry import Adapters
from ferrule.frontend.admission.prompt_adapters import PromptAdapters, open_prompt_adapters, read_adapter
from ferrule.plugin import discover
from tests.fakes.engine import FakeEngine, fake_info

SIZE, COUNT = 8, 3
GOOD = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": COUNT, "token_dim": SIZE}
VALUES = np.arange(COUNT * SIZE, dtype=np.float32).reshape(COUNT, SIZE)


def adapter(folder: Path, values: Any = VALUES, name: str = "prompt_embeddings", **config: Any) -> PromptAdapter:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(GOOD | config))
    if values is not None:
        save_file({name: values}, folder / "adapter_model.safetensors")
    return PromptAdapter(name=folder.name, path=str(folder))


def read(given: PromptAdapter, most: int = 16) -> Any:
    return read_adapter(given, most, SIZE)


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "P_TUNING"])
def test_an_adapter_is_read(tmp_path: Path, kind: str) -> None:
    item = read(adapter(tmp_path / "a", peft_type=kind))
    assert (item.kind, item.start, item.count) == ("embeds", 0, COUNT)
    assert item.data["embeds"].data == VALUES.tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_pickle_is_read_without_running_it(tmp_path: Path, dtype: torch.dtype) -> None:
    given = adapter(tmp_path / "a", None)
    table = torch.from_numpy(VALUES).to(dtype)
    torch.save({"prompt_embeddings": table}, tmp_path / "a" / "adapter_model.bin")
    found = read(given).data["embeds"]
    assert found.data == table.view(torch.uint8).numpy().tobytes()
    assert found.dtype == str(dtype).removeprefix("torch.")


class Bomb:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


def test_no_other_pickle_is_read(tmp_path: Path) -> None:
    given, canary = adapter(tmp_path / "a", None), tmp_path / "canary"
    table = torch.from_numpy(VALUES)
    for content in (
        Bomb(canary),
        {"prompt_embeddings": Bomb(canary)},
        {"prompt_embeddings": table, "more": Bomb(canary)},
        {"prompt_embeddings": table, "more": table},
        {"other": table},
        {"prompt_embeddings": table.to_sparse()},
        {"prompt_embeddings": table.T},
        table,
        [table],
        {},
    ):
        torch.save(content, tmp_path / "a" / "adapter_model.bin")
        with pytest.raises(CheckpointError, match="adapter_model.bin: prompt_embeddings must be"):
            read(given)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("config", "values", "told"),
    [
        ({"peft_type": "PREFIX_TUNING"}, VALUES, "it has keys and values for each layer, which are not tokens"),
        ({"peft_type": "LORA"}, VALUES, "--lora-modules"),
        ({"peft_type": None}, VALUES, "PROMPT_TUNING or P_TUNING"),
        ({"peft_type": ["x"]}, VALUES, "PROMPT_TUNING or P_TUNING"),
        ({"peft_type": "x" * 10_000}, VALUES, "PROMPT_TUNING or P_TUNING"),
        ({"num_virtual_tokens": 0}, VALUES, "num_virtual_tokens must be a positive integer"),
        ({"num_virtual_tokens": True}, VALUES, "num_virtual_tokens must be a positive integer"),
        ({"num_virtual_tokens": 1 << 70}, VALUES, "--max-prompt-adapter-token is 16"),
        ({"num_virtual_tokens": 17}, VALUES, "--max-prompt-adapter-token is 16"),
        ({"num_virtual_tokens": 4}, VALUES, "has 3 virtual tokens, and adapter_config.json says 4"),
        ({"num_virtual_tokens": 2}, VALUES, "with 1 to 2 tokens, not .3, 8."),
        ({"token_dim": 16}, VALUES, "belongs to another model"),
        ({}, np.zeros((COUNT, 9), np.float32), "prompt_embeddings must be .tokens, 8."),
        ({}, np.zeros((COUNT, 8, 1), np.float32), "prompt_embeddings must be"),
        ({}, np.full((COUNT, 8), np.nan, np.float32), "finite"),
        ({}, np.full((COUNT, 8), np.inf, np.float16), "finite"),
        ({}, np.zeros((COUNT, 8), np.float64), "prompt_embeddings must be"),
        ({}, np.zeros((100_000, 8), np.float32), "no file with 3 virtual tokens of this model is larger"),
        ({}, None, "has neither adapter_model.safetensors nor adapter_model.bin"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, config: dict[str, Any], values: Any, told: str) -> None:
    with pytest.raises(CheckpointError, match=told) as caught:
        read(adapter(tmp_path / "a", values, **config))
    assert len(caught.value.message) < 500


def test_a_tensor_of_another_name_is_not_taken(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="prompt_embeddings must be"):
        read(adapter(tmp_path / "a", name="base_model.embed"))


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, "\udcff"])
def test_a_hostile_configuration(tmp_path: Path, content: str) -> None:
    given = adapter(tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match="adapter_config.json"):
        read(given)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    for path in (tmp_path / "none", Path(__file__)):
        with pytest.raises(CheckpointError, match="is not a folder"):
            read(PromptAdapter(name="a", path=str(path)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="does not exist"):
        read(PromptAdapter(name="a", path=str(tmp_path / "empty")))
    os.mkfifo(tmp_path / "empty" / "adapter_config.json")
    with pytest.raises(CheckpointError, match="is not a file"):
        read(PromptAdapter(name="a", path=str(tmp_path / "empty")))


# ------------------------------------------------------------------------------------------- of a process


def resolved(*modules: str, **options: Any) -> ResolvedPromptAdapters:
    values = {"enable_prompt_adapter": True, "max_prompt_adapter_token": 16, "prompt_adapters": modules, **options}
    model = ModelConfig(model="/m", served_model_name=("base",))
    return resolve(Config(model=model, prompt_adapter=PromptAdapterConfig(**values))).prompt_adapter


async def test_the_last_ones_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [adapter(tmp_path / name) for name in "abc"]
    reads: list[str] = []

    def counted(one: PromptAdapter, *rest: Any) -> Any:
        reads.append(one.name)
        return read_adapter(one, *rest)

    monkeypatch.setattr("ferrule.frontend.admission.prompt_adapters.read_adapter", counted)
    adapters = PromptAdapters(resolved(max_prompt_adapters=2), SIZE)
    await asyncio.gather(*(adapters.get(given[0]) for _ in range(100)))
    assert reads == ["a"]
    for place in (1, 0, 2, 0, 1):
        await adapters.get(given[place])
    assert reads == ["a", "b", "c", "b"]


async def test_errors_blame_whoever_named_the_adapter(tmp_path: Path) -> None:
    adapter(tmp_path / "a")
    adapters = open_prompt_adapters(
        resolved(f"a={tmp_path / 'a'}", f"b={tmp_path / 'a'}/"), replace(fake_info(), hidden_size=SIZE)
    )
    (tmp_path / "a" / "adapter_config.json").unlink()
    with pytest.raises(RequestFailed) as failed:
        await adapters.get(adapters.named["a"])
    assert str(tmp_path) not in failed.value.message
    with pytest.raises(RequestError, match="adapter_config.json does not exist"):
        await adapters.get(PromptAdapter(name="a", path=str(tmp_path / "a"), num_tokens=COUNT))
    off = PromptAdapters(resolved(enable_prompt_adapter=False), SIZE)
    with pytest.raises(ForbiddenError):
        await off.get(PromptAdapter(name="a", path=str(tmp_path / "a")))


def test_faults_of_options_stop_the_start(tmp_path: Path) -> None:
    adapter(tmp_path / "a", np.zeros((COUNT, 9), np.float32))
    with pytest.raises(ConfigError, match="--prompt-adapters a: .*safetensors: prompt_embeddings must be"):
        open_prompt_adapters(resolved(f"a={tmp_path / 'a'}"), replace(fake_info(), hidden_size=SIZE))
    with pytest.raises(ConfigError, match="takes no embeddings"):
        open_prompt_adapters(resolved(), replace(fake_info(), hidden_size=0))
    with pytest.raises(ConfigError, match="does not generate"):
        open_prompt_adapters(resolved(), replace(fake_info(), hidden_size=SIZE, tasks=("embed",)))


@pytest.mark.parametrize(
    ("modules", "told"),
    [
        (("a",), "expected name=path"),
        (("a=",), "expected name=path"),
        (("=/p",), "its name must be printable"),
        (("a,b=/p",), "its name may not have commas"),
        (("base=/p",), "another model or adapter has the name 'base'"),
        (("a=/p", "a=/q"), "another model or adapter has the name 'a'"),
    ],
)
def test_names_are_checked(modules: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        resolved(*modules)


async def test_they_share_a_table_with_adapters_of_weights(tmp_path: Path) -> None:
    given, folder = adapter(tmp_path / "a"), tmp_path / "lora"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (folder / "adapter_model.safetensors").touch()
    section = PromptAdapterConfig(
        enable_prompt_adapter=True, max_prompt_adapter_token=16, prompt_adapters=(f"a={given.path}",)
    )
    lora = LoRAConfig(enable_lora=True, allowed_lora_path=(str(tmp_path),))
    model = ModelConfig(model="/m", served_model_name=("base",))
    adapters = Adapters(resolve(Config(model=model, lora=lora, prompt_adapter=section)), discover(), FakeEngine())
    served = adapters.known("a")
    assert served is not None
    assert (served.prompt, served.adapter, served.path, served.parent) == (given, None, given.path, "base")
    assert [one.name for one in adapters.all()] == ["a"]
    for in_place in (False, True):
        with pytest.raises(RequestError, match="is the name of a prompt adapter"):
            await adapters.load("a", str(folder), in_place)
    with pytest.raises(NotFoundError):
        await adapters.unload("a")
    with pytest.raises(RequestError, match="not for vectors"):
        await adapters.for_vectors("a")
    await adapters.close()


def test_options_that_need_each_other() -> None:
    with pytest.raises(ConfigError, match="--prompt-adapters needs --enable-prompt-adapter"):
        resolved("a=/p", enable_prompt_adapter=False)
    with pytest.raises(ConfigError, match="needs --max-prompt-adapter-token"):
        resolved(max_prompt_adapter_token=0)
    assert resolved("a=/p=q").modules == (PromptAdapter(name="a", path="/p=q"),)
    values = PromptAdapterConfig(max_prompt_adapters=3)
    config = resolve(Config(model=ModelConfig(model="/m"), prompt_adapter=values))
    assert "--max-prompt-adapters changes nothing without --enable-prompt-adapter." in remarks(config, discover())

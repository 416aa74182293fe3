"""Adapters of hubs: those of --lora-modules when the server starts, and those that requests name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ferrule.config.parse import parse
from ferrule.config.resolve import resolve
from ferrule.env import Environment
from ferrule.errors import CheckpointError, PluginError
from ferrule.frontend.adapters.resolving import open_resolvers
from ferrule.interfaces.hub import Choose, ModelHub, Repository
from ferrule.interfaces.lora_resolver import ResolverContext
from ferrule.locate.localise import find_adapter, localise
from ferrule_plugins.lora_resolver.filesystem import FilesystemResolver
from ferrule_plugins.lora_resolver.hf_hub import HubResolver
from tests.fakes.frontend import FakePlugins, model_folder

CONFIG = '{"base_model_name_or_path": "org/base"}'


class Hub(ModelHub):
    """One repository, org/adapters, with two adapters. `fetched` has what was asked for."""

    root: Path
    fetched: list[tuple[str, str | bool | None, tuple[str, ...]]]

    def refuses(self, name: str) -> str | None:
        return None if name.count("/") == 1 else "has names such as org/name"

    def fetch(self, repository: Repository, choose: Choose) -> Path:
        there = [f"{folder}{name}" for folder in ("", "b/") for name in ("adapter_config.json", "adapter_model.bin")]
        chosen = tuple(choose(there))
        self.fetched.append((repository.name, repository.token, chosen))
        if repository.name != "org/adapters":
            raise CheckpointError(f"There is no repository {repository.name!r}.")
        for name in set(chosen) & set(there):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(CONFIG)
        return self.root


@pytest.fixture
def hub(tmp_path: Path) -> type[Hub]:
    return type("Made", (Hub,), {"root": tmp_path / "hub", "fetched": []})


def plugins(hub: type[Hub]) -> FakePlugins:
    return FakePlugins(
        hub={"huggingface": hub}, lora_resolver={"hf_hub": HubResolver, "filesystem": FilesystemResolver}
    )


def test_a_module_of_a_hub_becomes_a_folder(hub: type[Hub], tmp_path: Path) -> None:
    model = model_folder(tmp_path)
    argv = [str(model), "--enable-lora", "--hf-token", "secret", "--lora-modules", "a=org/adapters", f"b={tmp_path}"]
    argv += ["--enable-prompt-adapter", "--max-prompt-adapter-token", "4", "--prompt-adapters", "p=org/adapters"]
    config = resolve(parse(argv, env=Environment()).config)
    local = localise(config, plugins(hub))
    assert [module.path for module in local.lora.modules] == [str(hub.root), str(tmp_path.resolve())]
    assert [(one.name, one.path) for one in local.prompt_adapter.modules] == [("p", str(hub.root))]
    assert [(name, token) for name, token, _ in hub.fetched] == [("org/adapters", "secret")] * 2
    for name, said in (
        ("org/none", "no repository 'org/none'"),
        ("./none", "'./none' is not a folder"),
        ("a", "has names"),
    ):
        with pytest.raises(CheckpointError, match=said):
            find_adapter(config, plugins(hub), name)


async def test_only_named_repositories_are_asked(hub: type[Hub]) -> None:
    argv = ["m", "--served-model-name", "org/base", "--enable-lora", "--lora-resolvers", "hf_hub"]
    config = resolve(parse([*argv, "--lora-resolver-hf-repo-list", "org/adapters,x/y/z"], env=Environment()).config)
    ((_, resolver),) = open_resolvers(config, plugins(hub))
    assert await resolver.resolve("org/adapters") == hub.root
    assert await resolver.resolve("org/adapters/b") == hub.root / "b"
    assert await resolver.resolve("org/adapters/c") is None
    before = len(hub.fetched)
    for name in ("org/other", "org/adapters2", "org/adapters/../b", "org/adapters/", "x/y", "x/y/zz", "org", "a/b/c/d"):
        assert await resolver.resolve(name) is None
    assert len(hub.fetched) == before
    with pytest.raises(CheckpointError):
        await resolver.resolve("x/y/z")
    assert hub.fetched[-1][0] == "x/y"


async def test_an_adapter_of_another_model_is_passed_over(hub: type[Hub]) -> None:
    argv = ["m", "--enable-lora", "--lora-resolvers", "hf_hub", "--lora-resolver-hf-repo-list", "org/adapters"]
    ((_, resolver),) = open_resolvers(resolve(parse(argv, env=Environment()).config), plugins(hub))
    assert await resolver.resolve("org/adapters") is None


def test_a_named_resolver_must_be_configured(hub: type[Hub]) -> None:
    for name, option in (("hf_hub", "--lora-resolver-hf-repo-list"), ("filesystem", "--lora-resolver-cache-dir")):
        config = resolve(parse(["m", "--enable-lora", "--lora-resolvers", name], env=Environment()).config)
        with pytest.raises(PluginError, match=option):
            open_resolvers(config, plugins(hub))


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
async def test_files_of_a_found_folder_are_no_links_out_of_the_resolvers(tmp_path: Path, file: str) -> None:
    root, folder = tmp_path / "cache", tmp_path / "cache" / "a"
    folder.mkdir(parents=True)
    context = ResolverContext(base_models=("org/base",), cache_dir=root, repositories=(), fetch=_none)
    resolver = FilesystemResolver(context)
    for name in ("adapter_config.json", "adapter_model.bin"):
        (folder / name).write_text(CONFIG)
    for place, found in ((root, folder), (tmp_path, None)):
        (place / "elsewhere").write_text(CONFIG)
        (folder / file).unlink(missing_ok=True)
        (folder / file).symlink_to(place / "elsewhere")
        assert await resolver.resolve("a") == found


def _none(name: str, choose: Choose) -> Path:
    raise AssertionError

"""The kit of resolvers of adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from ferrule.errors import CheckpointError
from ferrule.interfaces.hub import Choose
from ferrule.interfaces.lora_resolver import LoRAResolver, ResolverContext
from ferrule_testkit.kits.base import Kit, does_not_apply, promise, shown

World = Callable[[Mapping[str, bytes]], AbstractContextManager[tuple[str, ResolverContext]]]

BASE = "base/model"  # the name of the model in `world`
_FILES = {
    "adapter_config.json": b'{"base_model_name_or_path": "base/model", "peft_type": "LORA", "r": 8}',
    "adapter_model.safetensors": b"weights",
}
_OF_ANOTHER = b'{"base_model_name_or_path": "another/model", "peft_type": "LORA", "r": 8}'
_ODD = (
    *("", ".", "..", "../..", "/", "/etc", "//", "a/../b", "./a", "a/.", "~", "~root", "*", "[a]", "%2e%2e", "-x"),
    *("a\\..\\b", "C:\\x", "file:///etc", "http://127.0.0.1:1/x", "é", "a b", "a" * 256, "/" * 50, "\u202e", "{0}"),
)


def nothing(name: str, choose: Choose) -> Path:
    raise CheckpointError(f"{name} is not to be had.")


class LoraResolverKit(Kit):
    """A resolver gives the folder of an adapter of the served model, and None for every other name.

    Settings: `world`, a function that is given the files of an adapter, puts them where the resolver finds them,
    without any network, and is the context manager of the adapter's name and the resolver's context, in which the
    model is called `base/model`.
    """

    kind = "lora_resolver"
    world: World | None = None

    # ------------------------------------------------------------------------------------ promises

    def test_the_adapter_comes_unchanged(self) -> None:
        """Return the folder with the adapter's files, the same at every call, also when names are asked for at once."""
        with self._world(_FILES) as (name, resolver):
            for folder in self._resolved(resolver, [name, name, name]):
                promise(folder is not None, f"{name!r} is not found")
                for file, content in _FILES.items():
                    found = Path(str(folder), file)
                    promise(found.is_file() and found.read_bytes() == content, f"{file} is not what it was")

    def test_other_names_are_not_found(self) -> None:
        """Return None for anything else that a client may send, and never raise: least of all a path's target."""
        with self._world(_FILES) as (name, resolver):
            odd = [*_ODD, f"{name}-not", f"{name}/../{name}", f"./{name}", f"/{name}", f"{name}/.."]
            for given, folder in zip(odd, self._resolved(resolver, odd), strict=True):
                promise(folder is None, f"{shown(given)} gives {folder}")

    def test_an_adapter_of_another_model_is_not_found(self) -> None:
        """Return None for an adapter whose configuration names another base model, or cannot be read."""
        for config in (_OF_ANOTHER, b"{", b"[]", b'{"base_model_name_or_path": 1}', b"[" * 100_000):
            with self._world({**_FILES, "adapter_config.json": config}) as (name, resolver):
                (folder,) = self._resolved(resolver, [name])
                promise(folder is None, f"a configuration {shown(config)} gives {folder}")

    def test_a_resolver_without_configuration_says_so(self) -> None:
        """Return a sentence or None from `refuses` where nothing is configured, and find nothing then."""
        resolver = self._made(ResolverContext(base_models=(BASE,), cache_dir=None, repositories=(), fetch=nothing))
        reason = resolver.refuses()
        promise(reason is None or bool(reason.strip()), f"refuses() gives {shown(reason)}")
        if reason is not None:
            promise(self._resolved(resolver, ["a", "a/b"]) == [None, None], "it finds adapters where it refuses")

    def test_a_cancelled_call_leaves_it_as_it_was(self) -> None:
        """Find the adapter after a call for it was cancelled, because its client left, and in another instance, too."""

        async def leave(resolver: LoRAResolver, name: str) -> None:
            call = asyncio.ensure_future(resolver.resolve(name))
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

        with self._world(_FILES) as (name, resolver):
            asyncio.run(leave(resolver, name))
            for each in (resolver, self._made(resolver.context)):
                promise(self._resolved(each, [name]) != [None], f"{name!r} is not found after a call was cancelled")

    # ------------------------------------------------------------------------------------ parts

    @contextmanager
    def _world(self, files: Mapping[str, bytes]) -> Iterator[tuple[str, LoRAResolver]]:
        world = type(self).world if "world" not in vars(self) else vars(self)["world"]
        if world is None:
            does_not_apply("there is no adapter to find: give `world`")
            return
        with world(files) as (name, context):
            resolver = self._made(context)
            promise(resolver.refuses() is None, f"it refuses: {shown(resolver.refuses())}")
            yield name, resolver

    def _made(self, context: ResolverContext) -> LoRAResolver:
        resolver: LoRAResolver = self.new(context)
        return resolver

    def _resolved(self, resolver: LoRAResolver, names: Sequence[str]) -> list[Path | None]:
        async def ask() -> list[Path | None]:
            return list(await asyncio.gather(*map(resolver.resolve, names)))

        return asyncio.run(ask())

"""Places where built-in resolvers find an adapter, for their kit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ferrule.errors import CheckpointError
from ferrule.interfaces.hub import Choose
from ferrule.interfaces.lora_resolver import ResolverContext


def not_fetched(name: str, choose: Choose) -> Path:
    raise CheckpointError(f"{name} was asked for.")


@contextmanager
def adapter_in_a_folder(files: Mapping[str, bytes]) -> Iterator[tuple[str, ResolverContext]]:
    """Make a folder with an adapter, one beside it, and links to both."""
    with tempfile.TemporaryDirectory() as place:
        for folder in (Path(place, "root", "mine"), Path(place, "mine-not")):
            folder.mkdir(parents=True)
            for name, content in files.items():
                (folder / name).write_bytes(content)
        Path(place, "root", "mine-not").symlink_to(Path(place, "mine-not"))
        cache_dir = Path(place, "root")
        yield (
            "mine",
            ResolverContext(base_models=("base/model",), cache_dir=cache_dir, repositories=(), fetch=not_fetched),
        )


@contextmanager
def adapter_in_a_repository(files: Mapping[str, bytes]) -> Iterator[tuple[str, ResolverContext]]:
    """Make a repository with an adapter in a folder of it."""
    with tempfile.TemporaryDirectory() as place:

        def fetch(repository: str, choose: Choose) -> Path:
            if repository != "org/adapters":
                raise CheckpointError(f"{repository} was asked for.")
            for name in choose([f"some/mine/{name}" for name in files]):
                content = files.get(name.removeprefix("some/mine/"))
                if content is not None:
                    Path(place, name).parent.mkdir(parents=True, exist_ok=True)
                    Path(place, name).write_bytes(content)
            return Path(place)

        context = ResolverContext(
            base_models=("base/model",), cache_dir=None, repositories=("org/adapters",), fetch=fetch
        )
        yield "org/adapters/some/mine", context

"""A shelf for the conformance kit. No server imports this."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ferrule.errors import CheckpointError
from ferrule.interfaces.hub import Choose
from ferrule.interfaces.lora_resolver import ResolverContext


def _fetch(name: str, choose: Choose) -> Path:
    raise CheckpointError("There is no hub.")


@contextmanager
def world(files: Mapping[str, bytes]) -> Iterator[tuple[str, ResolverContext]]:
    with tempfile.TemporaryDirectory() as shelf:
        folder = Path(shelf, "team", "small")
        folder.mkdir(parents=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        context = ResolverContext(base_models=("base/model",), cache_dir=Path(shelf), repositories=(), fetch=_fetch)
        yield "team:small", context


SETTINGS = {"world": world}

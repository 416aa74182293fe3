"""Safetensors files that stayed in an S3 store: their names, and the content of their headers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ferrule.errors import CheckpointError, FerruleError
from ferrule_files.s3.fetch import Remote, remote
from ferrule_files.s3.store import Store
from ferrule_files.safetensors import remote_shapes
from ferrule_files.shards import check_index, weight_names
from ferrule_plugins.load_format.safetensors import Safetensors


@dataclass(frozen=True)
class RemoteWeights:
    """The safetensors files of a model in a store. `files` are names in the store's folder; `headers` has the number of
    bytes before the data of each file, once its header was read.
    """

    folder: Path  # on this machine: with everything but weights
    place: Remote
    store: Store
    files: tuple[str, ...]
    headers: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path | None, options: Mapping[str, Any]) -> RemoteWeights | None:
        """Return the weights of a model whose folder has none; None for a folder with weights, or one that came from no
        store.

        Raises CheckpointError where the store has no weights either, or not all that an index names.
        """
        if folder is None or any(folder.glob("*.safetensors")):
            return None
        there = remote(folder)
        if there is None:
            return None
        names = sorted(name for name in there.objects if "/" not in name)
        ignore = options.get("ignore_patterns", ())
        files = weight_names(folder, names, ".safetensors", Safetensors.single, ignore)
        if not files:
            raise CheckpointError(f"{there.at} has no .safetensors file.", "--load-format runai_streamer reads those.")
        for name in files:
            if name not in there.objects:
                raise CheckpointError(f"{there.at}/{name} is missing.", "The upload of the model may be incomplete.")
        return cls(folder, there, Store(there.at), tuple(files))

    def address(self, name: str) -> str:
        return f"{self.place.at}/{name}"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {tensor: shape for found in self._read().values() for tensor, (shape, _) in found.items()}

    def sizes(self) -> dict[str, dict[str, int]]:
        """Return bytes by tensor, by file. Raises CheckpointError as the reader of local files does."""
        found = {name: {each: size for each, (_, size) in read.items()} for name, read in self._read().items()}
        check_index(self.folder, Safetensors.single, {self.folder / name: sizes for name, sizes in found.items()})
        return found

    def _read(self) -> dict[str, dict[str, tuple[tuple[int, ...], int]]]:
        found = {}
        for name in self.files:
            size = self.place.objects[name].size
            found[name] = remote_shapes(Path(f"{self.place.at.prefix}/{name}"), size, _Parts(self, name).read)
            self.headers[name] = size - sum(each for _, each in found[name].values())
        return found

    @contextmanager
    def unchanged(self, name: str) -> Iterator[None]:
        """Check that an object does not change during the block that streams it, because a store cannot be asked for a
        version of it. Raises CheckpointError.
        """
        try:
            yield
        except FerruleError:
            raise
        except Exception as error:
            cause = (str(error).strip().splitlines() or [""])[0]
            raise CheckpointError(
                f"{self.address(name)} cannot be streamed: {type(error).__name__}: {cause:.200}",
                "--load-format safetensors downloads it instead.",
            ) from None
        if self.store.object(name) != self.place.objects[name]:
            raise self.store.changed(name)


class _Parts:
    """A reader of the first bytes of an object, with one request for each read."""

    def __init__(self, weights: RemoteWeights, name: str) -> None:
        self._weights, self._name, self._position = weights, name, 0

    def read(self, size: int) -> bytes:
        wanted = self._weights.place.objects[self._name]
        stop = min(self._position + size, wanted.size)
        if stop <= self._position:
            return b""
        content = bytearray()
        with self._weights.store.reading(self._name, wanted, self._position, stop) as stream:
            while len(content) < stop - self._position:
                block = stream.read(stop - self._position - len(content))
                if not block:
                    raise CheckpointError(f"{self._weights.address(self._name)} is truncated.")
                content += block
        self._position = stop
        return bytes(content)

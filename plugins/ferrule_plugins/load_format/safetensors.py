"""`safetensors`: one file, or shards with an index. Headers are checked before anything is mapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ferrule.errors import CheckpointError
from ferrule.interfaces.load_format import WeightSource
from ferrule.interfaces.model import Model
from ferrule_files.safetensors import read_header, read_tensors, shapes
from ferrule_files.shards import check_index, known_options, progress, weight_files

if TYPE_CHECKING:
    import torch


class Safetensors(WeightSource):
    """A reader of safetensors files, which are mapped. A subclass may `read` them in another way, and take `options`.

    `single` is the name of the file of an unsharded checkpoint, `start` the beginning of the file names of another
    layout.
    """

    forms: ClassVar[tuple[str | tuple[str, ...], ...]] = ("*.safetensors",)
    fetch_order = -3
    options: tuple[str, ...] = ()
    single = "model.safetensors"
    start = ""

    @classmethod
    def refuses(cls, folder: Path | None) -> str | None:
        if folder is None:
            return "the model has no folder"
        return None if cls.files(folder) else f"{folder} has no {cls._kind()} file"

    @classmethod
    def _kind(cls) -> str:
        return f"{cls.start}*.safetensors" if cls.start else ".safetensors"

    @classmethod
    def files(cls, folder: Path, ignore: Sequence[str] = ()) -> list[Path]:
        return weight_files(folder, ".safetensors", cls.single, ignore, cls.start)

    def _wanted(self, folder: Path | None, options: Mapping[str, Any]) -> list[Path]:
        known_options(options, *self.options)
        files = [] if folder is None else self.files(folder, options.get("ignore_patterns", ()))
        if not files:
            others = "--load-format pt reads .bin files, mistral consolidated*.safetensors."
            raise CheckpointError(f"{folder} has no {self._kind()} file.", others)
        return files

    def shapes(self, folder: Path | None, options: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]] | None:
        files = self._wanted(folder, options)
        return {name: shape for file in files for name, (shape, _) in shapes(file).items()}

    def tensors(
        self, folder: Path | None, model: Model, options: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        own = known_options(options, *self.options)
        files = self._wanted(folder, options)
        sizes = {file: read_header(file) for file in files}
        check_index(files[0].parent, self.single, sizes)
        with progress(options, sum(sum(tensors.values()) for tensors in sizes.values())) as bar:
            for file, tensors in sizes.items():
                self.place = str(file)
                for name, tensor in self.read(file, tensors, own):
                    yield name, tensor
                    bar.update(tensors[name])
        self.place = str(folder)

    def read(
        self, file: Path, sizes: Mapping[str, int], options: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor of a file whose header is valid; `sizes` has bytes by the tensors' names."""
        return read_tensors(file, sizes)

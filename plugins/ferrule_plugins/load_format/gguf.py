"""`gguf`: llama.cpp's files, one or several shards, which describe the model and its tokenizer too.

Quantized tensors go to layers that take them as integers with scales (the quantization method `gguf`), on CPUs to
embeddings, too, and are widened to floats for all others: routers, norms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ferrule import log
from ferrule.errors import CheckpointError
from ferrule.interfaces.load_format import Description, WeightSource
from ferrule.interfaces.model import Model
from ferrule_files.gguf.reader import find_files, read_model
from ferrule_files.shards import known_options, progress

if TYPE_CHECKING:
    import torch

_logger = log.get("load_format")


class Gguf(WeightSource):
    forms = ("*.gguf",)
    fetch_order = -4
    describes = True

    @classmethod
    def refuses(cls, folder: Path | None) -> str | None:
        if folder is None:
            return "the model has no folder"
        return None if any(folder.glob("*.gguf")) else f"{folder} has no .gguf file"

    @classmethod
    def describe(cls, place: Path) -> Description | None:
        from ferrule_plugins.gguf.describe import describe

        files = find_files(place)
        if not files:
            raise CheckpointError(f"{place} has no .gguf file.")
        return Description(describe(read_model(files)), tuple(files))

    def shapes(self, folder: Path | None, options: Mapping[str, Any]) -> None:
        """Return None: the shapes are known only under the names of other files. Raises where there is no file."""
        _wanted(folder, options)

    def tensors(
        self, folder: Path | None, model: Model, options: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        from ferrule_files.gguf.architectures import find, read_config
        from ferrule_files.gguf.names import Names
        from ferrule_plugins.gguf.tensors import Reader, layers_of

        found = read_model(_wanted(folder, options))
        module = cast("torch.nn.Module", model)
        weights = (getattr(part, "weight", None) for part in module.modules())
        dtype = next(each.dtype for each in weights if each is not None and each.is_floating_point())  # an embedding's
        config = read_config(found)
        layers = layers_of(module)

        def parameters() -> dict[str, torch.Tensor]:  # without those of layers that drop them once they have all
            named = module.named_parameters()
            return {name: each for name, each in named if name.rpartition(".")[0] not in layers and not each.is_meta}

        reader = Reader(Names(find(found), config), layers, dtype, config["tie_word_embeddings"], parameters)
        ends = dict(zip(found.tensors, accumulate(info.num_bytes for info in found.tensors.values()), strict=True))
        total, done = max(ends.values(), default=0), 0  # bytes of the file: tensors that are widened have more
        with progress(options, total) as bar:
            for info, name, tensor in reader.read(found):
                self.place = str(info.file)
                yield name, tensor
                bar.update(ends[info.name] - done)
                done = ends[info.name]
            bar.update(total - done)
        self.place = str(folder)
        if reader.widened:
            kinds = ", ".join(sorted(reader.widened))
            _logger.info("embeddings and other tensors of %s that no kernel multiplies by are %s here", kinds, dtype)


def _wanted(folder: Path | None, options: Mapping[str, Any]) -> list[Path]:
    """Return the files to read. Raises CheckpointError where there are none."""
    known_options(options)
    files = [] if folder is None else find_files(folder, options.get("ignore_patterns", ()))
    if not files:
        raise CheckpointError(f"{folder} has no .gguf file.")
    return files

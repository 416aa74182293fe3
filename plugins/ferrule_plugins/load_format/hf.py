"""`hf`: a checkpoint in the layout of transformers, `safetensors` where there are such files and else `pt`.

`bitsandbytes` reads the same files, floats or a checkpoint of bitsandbytes, for layers that are quantized so.
https://docs.vllm.ai/en/stable/features/quantization/bnb/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrule.interfaces.load_format import WeightSource
from ferrule.interfaces.model import Model
from ferrule_plugins.load_format.pt import PyTorchFiles
from ferrule_plugins.load_format.safetensors import Safetensors

if TYPE_CHECKING:
    import torch


class HuggingFace(WeightSource):
    """A reader like `auto`, without the layouts of other libraries."""

    forms = ("*.safetensors", ("*.bin", "*.pt"))
    conformance = "ferrule_testkit.samples.load_format:EITHER"

    @classmethod
    def refuses(cls, folder: Path | None) -> str | None:
        return "used only when it is asked for by name"

    def shapes(self, folder: Path | None, options: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]] | None:
        return self._source(folder, options).shapes(folder, options)

    def tensors(
        self, folder: Path | None, model: Model, options: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        source = self._source(folder, options)
        for name, tensor in source.tensors(folder, model, options):
            self.place = source.place
            yield name, tensor
        self.place = source.place

    def _source(self, folder: Path | None, options: Mapping[str, Any]) -> WeightSource:
        """Return the reader for the folder; for one with neither kind of files, a reader that reports this."""
        ignored = options.get("ignore_patterns", ())
        pickled = folder is not None and not Safetensors.files(folder, ignored) and PyTorchFiles.files(folder, ignored)
        return PyTorchFiles() if pickled else Safetensors()


class BitsAndBytesFiles(HuggingFace):
    forms = ("*.safetensors", ("*.bin", "*.pt"))
    quantization = "bitsandbytes"

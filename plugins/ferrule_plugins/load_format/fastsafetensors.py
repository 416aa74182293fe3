"""`fastsafetensors`: safetensors files, read in large blocks by several threads (the library of that name, by IBM).

https://github.com/foundation-model-stack/fastsafetensors
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastsafetensors import fastsafe_open

from ferrule_plugins.load_format.safetensors import Safetensors

if TYPE_CHECKING:
    import torch


class FastSafetensors(Safetensors):
    """A reader that loads one file at a time into the host's memory: a file's bytes are in memory beside the
    weights.
    """

    forms = ("*.safetensors",)
    conformance = "ferrule_testkit.samples.load_format:SAFETENSORS"

    @classmethod
    def refuses(cls, folder: Path | None) -> str | None:
        return "used only when it is asked for by name"

    def read(
        self, file: Path, sizes: Mapping[str, int], options: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        with fastsafe_open([str(file)], device="cpu", nogds=True) as opened:
            for name in sizes:
                yield name, opened.get_tensor(name)

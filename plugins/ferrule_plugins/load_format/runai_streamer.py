"""`runai_streamer`: safetensors files, read by many threads at once (Run:ai Model Streamer).

It reads slow disks and networks faster than one thread can. https://github.com/run-ai/runai-model-streamer
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runai_model_streamer import SafetensorsStreamer

from ferrule.env import told_library
from ferrule.errors import ConfigError
from ferrule_plugins.load_format.safetensors import Safetensors

if TYPE_CHECKING:
    import torch

_NUMBERS = ("concurrency", "memory_limit")
_AHEAD = 1 << 30  # bytes read ahead where `memory_limit` is not given; the library's own limit is 40 GB


class RunaiStreamer(Safetensors):
    """Options: `concurrency`, the number of threads; `memory_limit`, bytes that are read ahead, at least a tensor's."""

    options: tuple[str, ...] = _NUMBERS
    conformance = "ferrule_plugins.load_format.samples:SAFETENSORS"

    @classmethod
    def refuses(cls, folder: Path | None) -> str | None:
        return "used only when it is asked for by name"

    def read(
        self, file: Path, sizes: Mapping[str, int], options: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        numbers = {name: _whole(name, options[name]) for name in _NUMBERS if name in options}
        largest = max(0, *sizes.values(), file.stat().st_size - sum(sizes.values()))  # the header is read as one, too
        numbers["memory_limit"] = max(numbers.get("memory_limit", _AHEAD), largest)
        settings = {f"RUNAI_STREAMER_{name.upper()}": str(number) for name, number in numbers.items()}
        with told_library(settings), SafetensorsStreamer() as streamer:
            streamer.stream_file(str(file))
            yield from streamer.get_tensors()


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"--model-loader-extra-config: {name!r} must be a whole number from 1 on, not {value!r}.")
    return value

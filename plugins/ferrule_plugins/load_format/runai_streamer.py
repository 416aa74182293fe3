"""`runai_streamer`: safetensors files, read by many threads at once (Run:ai Model Streamer).

It reads slow disks and networks faster than one thread can, and the weights of an ``s3://`` model from the store.
https://github.com/run-ai/runai-model-streamer
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ferrule.env import object_store, told_library
from ferrule.errors import ConfigError
from ferrule.interfaces.model import Model
from ferrule_files.s3.store import SCHEME
from ferrule_files.shards import known_options, progress
from ferrule_plugins.load_format.remote import RemoteWeights
from ferrule_plugins.load_format.safetensors import Safetensors

if TYPE_CHECKING:
    import torch

_LIBRARY = "runai_model_streamer"  # slow to import, and `auto` asks each format at a start
if find_spec(_LIBRARY) is None:
    raise ModuleNotFoundError(f"No module named {_LIBRARY!r}", name=_LIBRARY)
_NUMBERS = ("concurrency", "memory_limit")
_AHEAD = 1 << 30  # bytes read ahead where `memory_limit` is not given; the library's own limit is 40 GB


class RunaiStreamer(Safetensors):
    """A reader with many threads. Options: `concurrency`, the number of threads; `memory_limit`, the bytes that are
    read ahead, at least those of the largest tensor.
    """

    forms = ("*.safetensors",)
    streams_from: ClassVar[tuple[str, ...]] = ("s3://",)
    options: tuple[str, ...] = _NUMBERS
    conformance = "ferrule_testkit.samples.load_format:SAFETENSORS"

    @classmethod
    def refuses(cls, folder: Path | None) -> str | None:
        return "used only when it is asked for by name"

    def shapes(self, folder: Path | None, options: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]] | None:
        known_options(options, *self.options)
        there = RemoteWeights.of(folder, options)
        return super().shapes(folder, options) if there is None else there.shapes()

    def tensors(
        self, folder: Path | None, model: Model, options: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        own = known_options(options, *self.options)
        there = RemoteWeights.of(folder, options)
        if there is None:
            yield from super().tensors(folder, model, options)
            return
        sizes = there.sizes()
        with progress(options, sum(sum(tensors.values()) for tensors in sizes.values())) as bar:
            for name, tensors in sizes.items():
                self.place = there.address(name)
                with there.unchanged(name):
                    for tensor_name, tensor in self._stream(self.place, there.headers[name], tensors, own):
                        yield tensor_name, tensor
                        bar.update(tensors[tensor_name])
        self.place = str(folder)

    def read(
        self, file: Path, sizes: Mapping[str, int], options: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        return self._stream(str(file), file.stat().st_size - sum(sizes.values()), sizes, options)

    def _stream(
        self, place: str, header: int, sizes: Mapping[str, int], options: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream the tensors of a file or object; `header` is a number of bytes, which are read at once like a
        tensor.
        """
        from runai_model_streamer import SafetensorsStreamer

        numbers = {name: _whole(name, options[name]) for name in _NUMBERS if name in options}
        largest = max(0, header, *sizes.values())
        numbers["memory_limit"] = max(numbers.get("memory_limit", _AHEAD), largest)
        settings = {f"RUNAI_STREAMER_{name.upper()}": str(number) for name, number in numbers.items()}
        endpoint = object_store().endpoint
        if place.startswith(SCHEME) and endpoint:
            settings["AWS_ENDPOINT_URL"] = endpoint
        with told_library(settings), SafetensorsStreamer() as streamer:
            streamer.stream_file(place)
            yield from streamer.get_tensors()


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"--model-loader-extra-config: {name!r} must be a whole number from 1 on, not {value!r}.")
    return value

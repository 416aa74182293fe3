"""One run: each decoder layer in turn is loaded, observed, quantized, run with its new weights, and written."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ferrule.errors import CheckpointError, ConfigError
from ferrule.log import Log
from ferrule_files.folder import copy_others
from ferrule_files.safetensors import read_tensors
from ferrule_nn import Linear
from ferrule_quantize.calibrated.files import Files
from ferrule_quantize.calibrated.gptq import LEAST
from ferrule_quantize.calibrated.methods import Method, check_inputs, linear_paths
from ferrule_quantize.calibrated.numbers import output_error
from ferrule_quantize.calibrated.walk import Inputs, Part, Walk
from ferrule_quantize.config_files import write_config, write_index
from ferrule_quantize.layers import choose
from ferrule_quantize.source import check_finite, file_sizes

_log = Log("quantize")
_WEIGHT = ".weight"


@dataclass
class Report:
    """Errors of the outputs of linear layers, relative and squared, and those of rounding alone."""

    own: float = 0.0
    plain: float = 0.0
    count: int = 0
    rounded: int = 0  # layers that too few tokens reach

    def __str__(self) -> str:
        own, plain = (math.sqrt(total / max(1, self.count)) for total in (self.own, self.plain))
        few = f"; {self.rounded} of {self.count} matrices get fewer than {LEAST} tokens and are rounded alone"
        return f"Error of layers' outputs: {own:.2%}, by rounding alone {plain:.2%}{few if self.rounded else ''}."


class Calibrated:
    """A checkpoint that is quantized with texts. Everything that can be refused early is refused when it is made."""

    def __init__(self, source: Path, walk: Walk, method: Method, ignore: Sequence[str] = ()) -> None:
        """Choose the layers to quantize. Raises CheckpointError, ConfigError."""
        self.source, self.walk, self.method = source, walk, method
        self._sizes = file_sizes(source)
        self._file = {name: file for file, sizes in self._sizes.items() for name in sizes}
        found = {name: torch.empty_like(tensor, device="meta") for name, tensor in self._read(self._file)}
        chosen = choose(found, method.layout, ignore)
        self._parts: list[dict[str, Part]] = []
        quantized = set()
        for index in range(walk.num_layers):
            names = [name for name in found if walk.index_of(name) == index]
            self._parts.append(walk.parts(index, names))
            self._check_whole(index)
            for name, part in self._parts[index].items():
                module = walk.model.layers[index].get_submodule(part.path)
                if chosen.layer(name) is not None and isinstance(module, Linear):
                    quantized.add(name.removesuffix(_WEIGHT))
        if not quantized:
            raise ConfigError("The checkpoint has no linear layer in the model's decoder layers that can be quantized.")
        self._quantized = quantized
        self._ignored = (*chosen.ignored, *sorted(chosen.quantized - quantized))
        self._forms = {file.name: self._forms_of(found, sizes) for file, sizes in self._sizes.items()}

    def _check_whole(self, index: int) -> None:
        """Raise ConfigError where parameters of a layer have no tensors of their own in the checkpoint."""
        layer, found = self.walk.model.layers[index], {(part.path, part.own) for part in self._parts[index].values()}
        needed = {tuple(name.rpartition(".")[::2]) for name, _ in layer.named_parameters()}
        if missing := sorted(needed - found):
            raise ConfigError(
                f"Layer {index} cannot be calibrated: the checkpoint has no tensor of its own for "
                f"{'.'.join(missing[0])}, and experts in one tensor are not quantized."
            )

    def check(self, samples: Sequence[Sequence[int]]) -> None:
        """Read all weights once. Raises CheckpointError for one that is not finite, and ids without an embedding."""
        rows = self.walk.model.embed_tokens.count
        largest = max(max(ids) for ids in samples)
        if largest >= rows:
            raise CheckpointError(f"The tokenizer has the id {largest}, and the model has {rows} embeddings.")
        for name, tensor in self._read(self._file):
            check_finite(self._file[name], name, tensor)

    def write(self, folder: Path, samples: Sequence[Sequence[int]]) -> tuple[int, int, Report]:
        """Fill the folder; bytes of weights before and after, and what was lost. Raises StartupError, OSError."""
        report, walk = Report(), self.walk
        with Files(folder, self._forms) as files:
            copy_others(self.source, folder)
            of_layers = {name for parts in self._parts for name in parts}
            others = [name for name in self._file if name not in of_layers]
            for name, tensor in self._read(others):
                files.write(name, tensor)
            states = walk.embedded(dict(self._read(others)), samples)
            with _told(walk.num_layers) as told:
                for index in range(walk.num_layers):
                    tensors = dict(self._read(self._parts[index]))
                    with walk.layer(index, tensors) as layer:
                        results = self._layer(layer, index, tensors, states, report)
                    for name, tensor in results.items():
                        files.write(name, tensor)
                    told(index + 1, str(report))
        if len(self._forms) > 1:
            write_index(folder, self._forms, files.num_bytes)
        write_config(self.source, folder, self.method.layout.config(self._ignored))
        return sum(sum(sizes.values()) for sizes in self._sizes.values()), files.num_bytes, report

    def _layer(
        self,
        layer: nn.Module,
        index: int,
        tensors: Mapping[str, torch.Tensor],
        states: list[torch.Tensor],
        report: Report,
    ) -> dict[str, torch.Tensor]:
        """Quantize a layer and return its new tensors; `states` are replaced by the hidden states behind the layer."""
        parts, walk, method = self._parts[index], self.walk, self.method
        inputs = walk.observe(layer, index, states, linear_paths(layer))
        check_inputs(inputs)
        chosen: dict[str, dict[str, Part]] = {}
        for name, part in parts.items():
            if name.removesuffix(_WEIGHT) in self._quantized and name.endswith(_WEIGHT):
                chosen.setdefault(part.path, {})[name.removesuffix(_WEIGHT)] = part
        for path in chosen:
            weight = _weight(layer, path)
            report.plain += _lost(weight, method.plain(weight, inputs[path]), inputs[path])
        dtypes = {".".join(filter(None, (part.path, part.own))): tensors[name].dtype for name, part in parts.items()}
        method.prepare(layer, inputs, lambda: walk.run(layer, index, states[0]), dtypes)
        results: dict[str, torch.Tensor] = {}
        for path, own in chosen.items():
            weight = _weight(layer, path)
            numbers = method.quantized(weight, inputs[path])
            restored = numbers.restored
            report.own += _lost(weight, restored, inputs[path])
            report.count, report.rounded = report.count + 1, report.rounded + (inputs[path].count < LEAST)
            for name, part in own.items():
                weight[part.rows] = restored[part.rows]
                written = method.layout.tensors(numbers.of(part.rows))
                results.update((f"{name}.{suffix}", tensor) for suffix, tensor in written.items())
        for at, state in enumerate(states):
            states[at] = walk.run(layer, index, state)
        for name, part in parts.items():
            if name not in {f"{own}{_WEIGHT}" for each in chosen.values() for own in each}:
                results[name] = part.of(layer).to(tensors[name].dtype)
        return results

    def _forms_of(self, found: Mapping[str, torch.Tensor], names: Any) -> dict[str, torch.Tensor]:
        """Return the tensors of a file of the new checkpoint, on the meta device."""
        forms: dict[str, torch.Tensor] = {}
        for name in names:
            layer = name.removesuffix(_WEIGHT)
            if name.endswith(_WEIGHT) and layer in self._quantized:
                made = self.method.layout.forms(*found[name].shape)
                forms.update((f"{layer}.{suffix}", form) for suffix, form in made.items())
            else:
                forms[name] = found[name]
        return forms

    def _read(self, names: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the named tensors of the checkpoint, mapped."""
        wanted = set(names)
        for file, sizes in self._sizes.items():
            yield from read_tensors(file, {name: size for name, size in sizes.items() if name in wanted})


def _weight(layer: nn.Module, path: str) -> torch.Tensor:
    return layer.get_submodule(path).get_parameter("weight").detach()


def _lost(weight: torch.Tensor, restored: torch.Tensor, inputs: Inputs) -> float:
    """Return the relative squared error of the outputs."""
    whole = output_error(weight, inputs.products)
    return output_error(restored - weight, inputs.products) / whole if whole > 0 else 0.0


@contextmanager
def _told(total: int) -> Iterator[Any]:
    """Show progress by layers: a bar on a terminal, otherwise a log line for each layer."""
    from tqdm import tqdm

    if not sys.stderr.isatty():
        yield lambda done, report: _log.info(f"layer {done} of {total} is quantized. {report}")
        return
    with tqdm(total=total, unit="layer", desc="Quantizing") as bar:

        def told(done: int, report: str) -> None:
            bar.update(1)

        yield told

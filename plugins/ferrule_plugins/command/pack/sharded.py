"""`ferrule pack --format sharded_state`: float weights as the workers of vLLM hold them, one set of files per rank.

https://docs.vllm.ai/en/stable/examples/others/save_sharded_state.html
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ferrule import __version__
from ferrule.assembly.choose import ModelChoice, PluginChooser
from ferrule.assembly.headers import check_headers
from ferrule.assembly.model import build, fill
from ferrule.checkpoint import Values
from ferrule.config import Resolved
from ferrule.errors import ConfigError
from ferrule.interfaces.load_format import WeightSource
from ferrule.interfaces.model import Model
from ferrule.interfaces.plugins import Plugins
from ferrule_files.safetensors import metadata
from ferrule_files.safetensors_writer import shards, write_data, write_header
from ferrule_files.workers import CACHE_SCALES, STACKED, WorkerNames, division
from ferrule_nn import UNDIVIDED, Attention, Division, Experts, Naming
from ferrule_plugins.load_format.sharded_state import PATTERN

_MADE_BY = "made_by"


@dataclass(frozen=True)
class Item:
    """One tensor of a worker's state: a parameter, or those of all experts, stacked."""

    name: str
    parameters: Sequence[torch.Tensor]
    division: Division
    stacked: bool = False

    def part(self, rank: int, ranks: int, device: str = "cpu") -> torch.Tensor:
        """Return one rank's part of the tensor; on the device `meta` its shape alone."""
        parts = [self.division.part(each.detach().to(device), rank, ranks) for each in self.parameters]
        return torch.stack(parts) if self.stacked else parts[0]


@dataclass(frozen=True)
class State:
    """The state of the workers, and the choice of the model that it was loaded by."""

    items: Sequence[Item]
    choice: ModelChoice

    def bytes(self, ranks: int) -> int:
        """Return the number of bytes of all ranks together."""
        return ranks * sum(item.part(0, ranks, "meta").nbytes for item in self.items)

    def configuration(self) -> dict[str, Any]:
        """Return the checkpoint's ``config.json``, with --hf-overrides applied."""
        config = self.choice.context.config
        return copy.deepcopy(dict(config.outer if isinstance(config, Values) else config))


def state_of(config: Resolved, plugins: Plugins, ranks: int) -> State:
    """Load the model as `ferrule serve` does, without packing it for kernels. Raises StartupError."""
    chooser = PluginChooser(plugins)
    device = chooser.device(config)
    with device.platform.memory().guard("load"):
        choice = chooser.before_build(config, device)
        if choice.method is not None:
            raise ConfigError(
                f"--format sharded_state: the weights would be quantized ({choice.quantization}), and vLLM lays those "
                "out for its own kernels.",
                "Name a checkpoint of floats, and leave -q out.",
            )
        check_headers(config, chooser, choice)
        model = build(choice)
        naming = getattr(model, "naming", None)
        if not isinstance(model, nn.Module) or not isinstance(naming, Naming):
            raise ConfigError(f"--format sharded_state: {choice.implementation} is not a native implementation.")
        modules = dict(model.named_modules())
        _check_ranks(modules, model, ranks)
        source = _Recorder(chooser.weight_format(config)())
        fill(model, choice, source)
    names = WorkerNames(model, naming, source.names)
    return State([*_items(modules, model, names), *_scales(modules, names, choice)], choice)


class _Recorder(WeightSource):
    """A source that reads from another and remembers the names of its tensors."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.names: list[str] = []

    @classmethod
    def refuses(cls, folder: Path | None) -> str | None:
        return "it stands for another"

    def tensors(
        self, folder: Path | None, model: Model, options: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._source.tensors(folder, model, options):
            self.place = self._source.place
            self.names.append(name)
            yield name, tensor
        self.place = self._source.place


def _check_ranks(modules: Mapping[str, nn.Module], model: nn.Module, ranks: int) -> None:
    """Raise ConfigError that names a parameter which cannot be divided among so many ranks."""
    if ranks == 1:
        return
    for name, parameter in model.named_parameters():
        found = division(modules, name)
        if found is None:
            raise ConfigError(
                f"--tensor-parallel-size {ranks}: how vLLM divides {name} of this architecture is not known here.",
                "--tensor-parallel-size 1 writes the state of one rank.",
            )
        try:
            found.part(parameter.detach().to("meta"), 0, ranks)
        except ConfigError as error:
            raise ConfigError(f"--tensor-parallel-size {ranks}: {name}: {error.message}") from None


def _items(modules: Mapping[str, nn.Module], model: nn.Module, names: WorkerNames) -> Iterator[Item]:
    inside = tuple(f"{path}." for path, module in modules.items() if isinstance(module, Experts))
    for own, parameter in model.named_parameters():
        if own.startswith(inside):
            continue
        found = division(modules, own) or UNDIVIDED
        name = own
        if found.rows and (head := modules.get("lm_head")) is not None and own == _tied_table(modules, head):
            name = "lm_head.weight"  # of two names of the same memory, the first
        yield Item(name if name != own else names.of(own), [parameter], found)
    for path, module in modules.items():
        if isinstance(module, Experts):
            yield from _stacked(modules, path, module, names.of_experts(path))


def _tied_table(modules: Mapping[str, nn.Module], head: nn.Module) -> str | None:
    tied = getattr(head, "tied", None)
    return next((f"{path}.weight" for path, module in modules.items() if tied is not None and module is tied), None)


def _stacked(modules: Mapping[str, nn.Module], path: str, experts: Experts, name: str) -> Iterator[Item]:
    for layer, worker in STACKED.items():
        parts = [modules.get(f"{path}.{index}.{layer}") for index in range(len(experts))]
        if any(part is None for part in parts):
            raise ConfigError(f"--format sharded_state: the experts of {path} have no {layer}.")
        for own in ("weight", "bias"):
            parameters = [each for part in parts if (each := getattr(part, own)) is not None]
            if parameters:
                found = division(modules, f"{path}.0.{layer}.{own}") or UNDIVIDED
                yield Item(f"{name}.{worker}_{own}", parameters, found, stacked=True)


def _scales(modules: Mapping[str, nn.Module], names: WorkerNames, choice: ModelChoice) -> Iterator[Item]:
    """Yield the scales of each layer's cache: the checkpoint's, else one."""
    found = choice.cache_scales.found
    for path, module in modules.items():
        if not isinstance(module, Attention) or f"{path}.qkv_proj" not in modules:  # layers may share one
            continue
        block = names.of(f"{path}.qkv_proj.weight").rsplit(".", 2)[0]
        layer = int(path.split(".")[1]) if path.startswith("layers.") else -1
        for what in CACHE_SCALES:
            number = found.get(what[1], {}).get(layer, 1.0)
            yield Item(f"{block}.attn.{what}", [torch.tensor(number)], UNDIVIDED)


def write_state(folder: Path, state: State, ranks: int) -> int:
    """Write the files of all ranks and ``config.json``. Returns the number of weight files. Raises OSError."""
    count, items = 0, {item.name: item for item in state.items}
    for rank in range(ranks):
        outlines = {name: item.part(rank, ranks, "meta") for name, item in items.items()}
        for number, part in enumerate(shards(outlines)):
            file = folder / PATTERN.format(rank=rank, part=number)
            with file.open("wb") as stream:
                write_header(stream, part, **{_MADE_BY: f"ferrule {__version__}"})
                for name in part:
                    write_data(stream, items[name].part(rank, ranks))
            count += 1
    text = json.dumps(state.configuration(), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    return count


def was_written(folder: Path) -> bool:
    """Return whether `write_state` wrote the files in the folder."""
    file = folder / PATTERN.format(rank=0, part=0)
    return file.is_file() and metadata(file).get(_MADE_BY, "").startswith("ferrule")

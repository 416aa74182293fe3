"""The tensors of GGUF files as our parameters: under their names, rows where they belong, quantized or widened."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from ferrule.errors import CheckpointError
from ferrule_files.gguf.names import Names, Target
from ferrule_files.gguf.reader import FLOATS, GgufModel, TensorInfo
from ferrule_kernels.cpu.blocks import takes
from ferrule_plugins.freed_memory import give_back
from ferrule_plugins.gguf.blocks import decode, map_file, stored, widen

_TRIMMED_BYTES = 64 << 20  # from one request to give memory back to the next, which costs clearing it again
HEAD, TABLE = "lm_head", "embed_tokens"
Pieces = Iterator[tuple[str, torch.Tensor]]


@dataclass
class Reader:
    """A reader of one model's tensors.

    `quantized` has the names of layers that take quantized weights, those of merged projections included, and whether
    they take the file's blocks as they are. All other quantized tensors are widened to `dtype`, and their types added
    to `widened`. `parameters` returns the parameters that the model has by now, into which widened tensors are written.
    """

    names: Names
    quantized: Mapping[str, bool]
    dtype: torch.dtype
    tied: bool
    parameters: Callable[[], Mapping[str, torch.Tensor]] = dict
    widened: set[str] = field(default_factory=set)
    _halves: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    def read(self, model: GgufModel) -> Iterator[tuple[TensorInfo, str, torch.Tensor]]:
        """Yield the tensor of each parameter with the parameter's name and the file's tensor that it is from."""
        data, since = {file: map_file(file) for file in model.files}, 0
        for info in model.tensors.values():
            whole = stored(info, data[info.file])
            for target in self.names.targets(info):
                for name, tensor in self._pieces(info, target, _rows(whole, target)):
                    yield info, name, tensor
            del whole
            data[info.file].madvise(mmap.MADV_DONTNEED)  # pages that were read count as this process's otherwise
            since += info.num_bytes
            if since > _TRIMMED_BYTES:
                give_back()  # what decoding took
                since = 0

    def _pieces(self, info: TensorInfo, target: Target, rows: torch.Tensor) -> Pieces:
        layer, _, suffix = target.name.rpartition(".")
        if info.type.name in FLOATS:
            yield from self._floats(target, rows)
            return
        taker = next((each for each in (layer, f"{layer}.table") if each in self.quantized), None)
        if taker is not None and suffix == "weight" and not target.change:
            yield from self._quantized(info, taker, rows, target)
            return
        if layer == TABLE and self.tied and HEAD in self.quantized:
            held = target.name in self.parameters()
            yield from self._quantized(info, HEAD, rows, Target(HEAD))
            if held and target.name not in self.parameters():  # the head is packed, and the embedding reads rows there
                return
        else:
            self.widened.add(info.type.name)
        wide = widen(info.type.name, rows.flatten(0, -2), self.dtype, self._place(info, target))
        yield from self._floats(target, wide.view(*rows.shape[:-1], -1))

    def _place(self, info: TensorInfo, target: Target) -> torch.Tensor | None:
        """Return the parameter to write into, if it is a whole tensor on the CPU: no large table is there twice."""
        place = self.parameters().get(target.name)
        if place is None or not takes(place) or place.dtype != self.dtype:
            return None
        return place.detach() if target == Target(target.name) and place.shape == info.shape else None

    def _quantized(self, info: TensorInfo, layer: str, rows: torch.Tensor, target: Target) -> Pieces:
        if not self.quantized[layer]:
            yield from self._numbers(info, layer, rows, target)
        else:
            blocks = rows.view(len(rows), -1, info.type.num_bytes) if target.columns else rows
            yield f"{layer}.blocks", ordered(blocks, target.columns, info.type.size).flatten(1)

    def _numbers(self, info: TensorInfo, layer: str, rows: torch.Tensor, target: Target) -> Pieces:
        found = decode(info.type.name, rows)
        numbers, levels = found.numbers, {"scale": found.scales}
        if found.offsets is not None:
            levels["offset"] = found.offsets
        del found  # each tensor is let go when the next is asked for
        inputs, columns = numbers.shape[1], target.columns
        yield f"{layer}.numbers", ordered(numbers, columns)
        del numbers
        for name, own in levels.items():
            block = inputs // own.floats.shape[1]
            if own.steps is not None:
                yield f"{layer}.{name}_steps", ordered(own.steps, columns, inputs // own.steps.shape[1])
            less = target.block(block) if own.steps is not None else block
            floats = own.floats if less == block else own.floats.repeat_interleave(block // less, 1)
            yield f"{layer}.{name}s", ordered(floats, columns, less)

    def _floats(self, target: Target, tensor: torch.Tensor) -> Pieces:
        tensor = ordered(tensor, target.columns)
        match target.change:
            case "less_one":
                tensor = tensor - 1
            case "log":
                tensor = (-tensor).log().view(-1) if tensor.shape[-1] == 1 else (-tensor).log()
            case "conv":
                tensor = tensor.unsqueeze(1)
            case "flat":
                tensor = tensor.flatten()
            case "keys" | "values":
                halves = self._halves.setdefault(target.name, {})
                halves[target.change] = tensor.transpose(1, 2) if target.change == "keys" else tensor
                if len(halves) < 2:
                    return
                tensor = torch.cat((halves["keys"], halves["values"]), 1).flatten(0, 1)
                del self._halves[target.name]
        yield target.name, tensor


def _rows(whole: torch.Tensor, target: Target) -> torch.Tensor:
    """Return the target's share of a tensor [rows, …], or [experts, rows, …]."""
    if target.expert >= 0:
        return whole[target.expert]
    if target.rows:
        return whole[torch.tensor(target.rows)]
    rows = whole[target.start : target.stop] if target.stop else whole
    if not target.heads:
        return rows
    apart = rows.view(target.heads, -1, 2, *rows.shape[1:])
    return apart.transpose(1, 2).reshape(rows.shape)


def ordered(rows: torch.Tensor, columns: tuple[int, ...], group: int = 1) -> torch.Tensor:
    """Return rows with their columns in another order, where `rows` have one number for each `group` of columns.

    Raises CheckpointError where the order takes a group apart.
    """
    if not columns:
        return rows
    order = torch.tensor(columns).view(-1, group)
    if (order.diff(dim=1) != 1).any() or (order[:, 0] % group).any():
        raise CheckpointError(f"Heads of values are not whole groups of {group} numbers, so their order is lost.")
    return rows[:, order[:, 0] // group]


def layers_of(module: torch.nn.Module) -> dict[str, bool]:
    """Return the layers of a model that take quantized weights, and whether each takes blocks as they are in the file.

    Layers are also listed under the names of their projections.
    """
    found: dict[str, bool] = {}
    for path, part in module.named_modules():
        parent, own = path.rpartition(".")[0], _takes_blocks(part)
        for name in getattr(part, "projections", {}):
            taken = _takes_blocks(getattr(part, name, None)) if own is None else own  # a layer within the merged one
            if taken is not None:
                found[f"{parent}.{name}" if parent else name] = taken
        if own is not None:
            found[path] = own
    return found


def _takes_blocks(part: torch.nn.Module | None) -> bool | None:
    """Return whether a layer takes a file's blocks as they are; None for a layer without quantized weights."""
    names = set() if part is None else {name for name, _ in part.named_parameters(recurse=False)}
    return "blocks" in names if names & {"blocks", "numbers"} else None

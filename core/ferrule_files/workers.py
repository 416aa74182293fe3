"""What a worker of vLLM calls the parameters of a model, beside what checkpoints call them.

Projections of one input are one parameter (`qkv_proj`, `gate_up_proj`), and those of all experts are stacked
(`experts.w13_weight`, `experts.w2_weight`). Of two parameters in the same memory the state has the one whose name comes
first: the head's of a tied model. Scales of an attention's cache are there, too (`attn._k_scale`).
https://docs.vllm.ai/en/stable/examples/others/save_sharded_state.html
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from ferrule.errors import CheckpointError
from ferrule_nn import (
    MLP,
    UNDIVIDED,
    Attention,
    Division,
    Embedding,
    GatedMLP,
    Head,
    MergedLinear,
    Naming,
    division_of,
)

CACHE_SCALES = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale")
STACKED = {"gate_up_proj": "w13", "down_proj": "w2"}
_UNSTACKED = {worker: own for own, worker in STACKED.items()}
_EXPERTS = re.compile(r"(?P<block>.*\.experts)\.(?P<layer>w13|w2)_(?P<own>weight|bias)")
_CACHE_SCALE = re.compile(r"(?P<attention>.*\.attn)\._(?P<what>q|k|v|prob)_scale")


def division(modules: Mapping[str, nn.Module], name: str) -> Division | None:
    """Return how the parameter `name` is divided; None where its layer does not say, or vLLM may do it in another way.

    `modules` are those of the model by their names.
    """
    path, _, own = name.rpartition(".")
    layer, block = modules[path], modules.get(path.rpartition(".")[0])
    found = division_of(layer, own)
    usual = isinstance(layer, Embedding | Head) or isinstance(block, Attention | GatedMLP | MLP)
    return found if usual or found == UNDIVIDED else None


class WorkerState:
    """A translation of a worker's parameters into what `Model.load_weights` takes: whole tensors under names of a
    checkpoint.

    `names` are those of all tensors that will come.
    """

    def __init__(self, model: nn.Module, names: Container[str]) -> None:
        naming = getattr(model, "naming", None)
        if not isinstance(naming, Naming):
            raise CheckpointError(
                "The state of a worker is read into models with a native implementation only.",
                "Serve the checkpoint that it was made from.",
            )
        self._naming = naming
        self._modules = dict(model.named_modules())
        self._parameters = dict(model.named_parameters())
        self._names = names

    def tensors(self, name: str, parts: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what the tensor `name`, of which each rank has a part, is in a checkpoint. Raises CheckpointError."""
        scale, experts = _CACHE_SCALE.fullmatch(name), _EXPERTS.fullmatch(name)
        if scale:
            if scale["what"] in "kv" and not (parts[0].numel() == 1 and float(parts[0]) == 1.0):
                yield f"{scale['attention']}.{scale['what']}_scale", parts[0]
        elif experts:
            yield from self._each_expert(name, experts, parts)
        else:
            yield from self._plain(name, parts)

    def _each_expert(
        self, name: str, found: re.Match[str], parts: Sequence[torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        layer = _UNSTACKED[found["layer"]]
        if any(part.dim() < 2 or len(part) != len(parts[0]) for part in parts):
            raise CheckpointError(f"Tensor {name!r} is not a stack of the same number of experts in all ranks.")
        for index, each in enumerate(zip(*parts, strict=True)):
            said = f"{found['block']}.{index}.{layer}.{found['own']}"
            own = self._naming.rename(said)
            if own not in self._parameters:
                raise CheckpointError(f"Tensor {name!r} has {len(parts[0])} experts, and the model has no {own}.")
            yield said, self._division(name, own, len(parts)).whole(name, each)

    def _plain(self, name: str, parts: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        own = self._naming.rename(name)
        head = self._modules.get(own.rpartition(".")[0])
        if isinstance(head, Head) and head.tied is not None and own.endswith(".weight"):
            table = self._name_of(self._table(head.tied))
            if table not in self._names:
                own, name = self._table(head.tied), table
        if own not in self._parameters and len(parts) == 1:
            yield name, parts[0]  # the model takes it under this name, or says that it has no such tensor
            return
        tensor = self._division(name, own, len(parts)).whole(name, parts)
        layer = self._modules.get(own.rpartition(".")[0])
        if isinstance(layer, MergedLinear) and layer.groups > 1:  # a checkpoint has its rows in another order
            path, _, suffix = own.rpartition(".")
            sizes = layer.whole
            if len(tensor) != sum(sizes.values()):
                raise CheckpointError(f"Tensor {name!r} has {len(tensor)} rows, and the model {sum(sizes.values())}.")
            for each, rows in zip(sizes, tensor.split_with_sizes(list(sizes.values())), strict=True):
                yield self._name_of(f"{path.rpartition('.')[0]}.{each}.{suffix}"), rows
            return
        transposed = tensor.dim() == 2 and any(re.search(form, name) for form in self._naming.transposed)
        yield name, tensor.t() if transposed else tensor

    def _division(self, name: str, own: str, ranks: int) -> Division:
        found = division(self._modules, own)
        if found is None and ranks > 1:
            raise CheckpointError(
                f"How {name!r} is divided among {ranks} ranks is not known for this architecture.",
                "Save the state with tensor_parallel_size=1, or serve the checkpoint that it was made from.",
            )
        return found or UNDIVIDED

    def _table(self, embedding: Embedding) -> str:
        path = next(path for path, module in self._modules.items() if module is embedding)
        return f"{path}.weight"

    def _name_of(self, own: str) -> str:
        """Return a checkpoint's name for the model's own: the usual one, else the model's."""
        return _usual_name(self._naming, own)


class WorkerNames:
    """A worker's names for the parameters of a model that was filled from tensors of the names `sources`."""

    def __init__(self, model: nn.Module, naming: Naming, sources: Iterable[str]) -> None:
        self._modules = dict(model.named_modules())
        self._naming = naming
        self._sources: dict[str, str] = {}
        for source in sources:
            self._sources.setdefault(naming.of_expert(source) or naming.rename(source), source)

    def of(self, own: str) -> str:
        """Return the name of one parameter, which is not an expert's."""
        said = self._said(own)
        return said if _is_name_of(self._naming, said, own) else _usual_name(self._naming, own)

    def _said(self, own: str) -> str:
        """Return a parameter's name after the checkpoint's name, or after one of those that are merged."""
        path, _, suffix = own.rpartition(".")
        layer = self._modules[path]
        if own not in self._sources and isinstance(layer, MergedLinear):
            above, _, merged = path.rpartition(".")
            for each in layer.projections:
                source = self._sources.get(f"{above}.{each}.{suffix}")
                if source is not None:
                    return f"{source.rsplit('.', 2)[0]}.{merged}.{suffix}"
        return self._sources.get(own, own)

    def of_experts(self, path: str) -> str:
        """Return the name of the module with all experts of a layer."""
        for own, source in self._sources.items():
            if own.startswith(f"{path}.") and ".experts." in source:
                return source.partition(".experts.")[0] + ".experts"
        return path


def _is_name_of(naming: Naming, said: str, own: str) -> bool:
    return naming.rename(said) == own and naming.of_expert(said) is None


def _usual_name(naming: Naming, own: str) -> str:
    """Return the name that most checkpoints have for the model's own, else the model's. Raises CheckpointError if
    neither is read.
    """
    for said in (f"model.{own}", own):
        if _is_name_of(naming, said, own):
            return said
    raise CheckpointError(f"There is no name of a checkpoint for the parameter {own} of this architecture.")

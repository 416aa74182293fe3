"""Walks through a model with one decoder layer at a time in memory, and records the inputs of its linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from ferrule.errors import CheckpointError, ConfigError
from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.model import AttentionOptions, BuildContext, InputEmbeds, Model, StateRows, StepRow
from ferrule_files.offline import attend_text
from ferrule_nn import Decoder, Linear, MergedLinear, load_into
from ferrule_nn.decoder import CausalLM, building
from ferrule_nn.moe_decoder import MoEDecoder
from ferrule_nn.rope import Rotation

_OTHERS = "--to int8, fp8 and int4 need no calibration."
_OUTER = ("lm_head.", "norm.")  # what comes behind the layers


class Text:
    """The `ForwardContext` of one text that is computed as a whole: nothing is cached."""

    embeds: InputEmbeds | None = None

    def __init__(self, count: int) -> None:
        self.positions = torch.arange(count)
        self.lengths = torch.full((count,), count)
        self.rows: Sequence[StepRow] = (StepRow(0, count, 0),)

    def attend(
        self, layer: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        return attend_text(q, k, v, options)

    def attend_heads(
        self, layer: str, q: torch.Tensor, write: Callable[..., None], options: AttentionOptions
    ) -> torch.Tensor | None:
        return None

    def state(self, name: str) -> StateRows:
        raise RuntimeError("models with states are refused")

    def recall(self, layer: str, row: int) -> torch.Tensor:
        raise RuntimeError("layers that read their cache themselves are refused")

    def keep(self, layer: str, row: int, entries: torch.Tensor) -> None:
        raise RuntimeError("layers that read their cache themselves are refused")


@dataclass(frozen=True)
class Part:
    """The place of a checkpoint's tensor in a layer: rows of `own`, a parameter of the module at `path`."""

    path: str
    own: str
    rows: torch.Tensor | slice

    def of(self, layer: nn.Module) -> torch.Tensor:
        parameter = layer.get_submodule(self.path).get_parameter(self.own)
        return parameter.detach()[self.rows] if parameter.dim() else parameter.detach()


class Inputs:
    """Statistics of a linear layer's inputs x: the sum of x xᵀ [inputs, inputs], that of |x| [inputs], and the
    count.
    """

    def __init__(self, size: int) -> None:
        self.products = torch.zeros(size, size)
        self.sizes = torch.zeros(size)
        self.count = 0

    def add(self, x: torch.Tensor) -> None:
        self.products.addmm_(x.t(), x)
        self.sizes += x.abs().sum(0)
        self.count += len(x)


class Walk:
    """The model's embedding and one layer after the other, in float32 on the CPU.

    Raises ConfigError for a model whose layers cannot be run one by one.
    """

    def __init__(self, model: Model, context: BuildContext, architecture: str) -> None:
        reason = _reason(model)
        if reason is not None or not isinstance(model, Decoder):
            raise ConfigError(f"{architecture} cannot be calibrated: {reason}.", _OTHERS)
        self.model = model
        self._context = replace(
            context, dtype=torch.float32, device=torch.device("cpu"), kernels=Kernels(), config=model.config
        )
        with building(self._context):  # what is on the meta device has no frequencies
            model.rope, model.local_rope = model.make_rope(self._context), model.make_local_rope(self._context)

    @property
    def num_layers(self) -> int:
        return len(self.model.layers)

    def index_of(self, name: str) -> int | None:
        """Return the index of the layer that a checkpoint's tensor belongs to; None for one outside the layers."""
        words = self.model.naming.rename(name).split(".")
        found = int(words[1]) if words[0] == "layers" and len(words) > 2 and words[1].isdigit() else None
        return found if found is not None and found < self.num_layers else None

    def parts(self, index: int, names: Iterable[str]) -> dict[str, Part]:
        """Return the parts of layer `index` by these names of the checkpoint; tensors that are not loaded have none."""
        layer, prefix = self.model.layers[index], f"layers.{index}."
        places = dict(_places(layer))
        renamed = {name: self.model.naming.rename(name).removeprefix(prefix) for name in names}
        return {name: places[own] for name, own in renamed.items() if own in places}

    def embedded(self, tensors: Mapping[str, torch.Tensor], samples: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return the hidden states [tokens, hidden] of each text before the first layer, from mapped tensors."""
        model, own = self.model, {self.model.naming.rename(name): tensor for name, tensor in tensors.items()}
        for name, parameter in model.named_parameters():
            if name.startswith(("layers.", *_OUTER)):
                continue
            if name not in own or own[name].shape != parameter.shape:
                raise CheckpointError(f"The checkpoint lacks {name}, or has it in another shape than the model.")
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, nn.Parameter(own[name], requires_grad=False))
        with torch.no_grad():
            return [model.embed(torch.tensor(ids), Text(len(ids))).float() for ids in samples]

    @contextmanager
    def layer(self, index: int, tensors: Mapping[str, torch.Tensor]) -> Iterator[nn.Module]:
        """Load layer `index` from these tensors of the checkpoint. Raises CheckpointError."""
        model = self.model
        with building(self._context):
            layer = model.make_layer(index)
        naming = replace(model.naming, renames=(*model.naming.renames, (rf"^layers\.{index}\.", "")))
        missing = {name for name, _ in layer.named_parameters()} - load_into(layer, tensors.items(), naming)
        if missing:
            raise CheckpointError(f"The checkpoint lacks {', '.join(sorted(missing)[:3])} of layer {index}.")
        yield layer

    def run(self, layer: nn.Module, index: int, state: torch.Tensor) -> torch.Tensor:
        """Run a layer on the hidden states [tokens, hidden] of one text, and return those behind the layer."""
        text = Text(len(state))
        with torch.no_grad():
            rotation: Rotation | None = self.model.rotations(text, torch.float32)[index]
            out: torch.Tensor = layer(state, text, rotation)
        return out

    def observe(
        self, layer: nn.Module, index: int, states: Iterable[torch.Tensor], paths: Iterable[str]
    ) -> dict[str, Inputs]:
        """Run a layer on all texts, and return the inputs of its linear layers at `paths`."""
        found = {path: Inputs(layer.get_submodule(path).in_features) for path in paths}  # type: ignore[arg-type]
        hooks = [
            layer.get_submodule(path).register_forward_pre_hook(lambda _, args, own=own: own.add(args[0]))
            for path, own in found.items()
        ]
        try:
            for state in states:
                self.run(layer, index, state)
        finally:
            for hook in hooks:
                hook.remove()
        return found


def _reason(model: Model) -> str | None:
    """Return why the layers of a model cannot be run one by one; None when they can."""
    if not isinstance(model, Decoder):
        return "it does not run as one of Ferrule's own decoders"
    kind = type(model)
    if kind.forward is not Decoder.forward or kind.rotations is not Decoder.rotations:
        return "its layers get more from each other than one hidden state"
    if model.state_specs():
        return "its layers keep states"
    if any(spec.value_dim or not spec.attended for spec in model.cache_specs().values()):
        return "its attention is latent, or reads its cache itself"
    if kind.load_weights not in (CausalLM.load_weights, MoEDecoder.load_weights):
        return "its weights are changed while they are loaded"
    return None


def _places(layer: nn.Module) -> Iterator[tuple[str, Part]]:
    """Yield the names under which tensors are looked up in a layer, and the place of each."""
    for path, module in layer.named_modules():
        projections = module.projections if isinstance(module, Linear) else {}
        before, start = path.rpartition(".")[0], 0
        for own, _ in module.named_parameters(recurse=False):
            rows = _order(module) if isinstance(module, MergedLinear) and module.groups > 1 else slice(None)
            yield f"{path}.{own}" if path else own, Part(path, own, rows)
        for projection, count in projections.items():
            for own, _ in module.named_parameters(recurse=False):
                name = f"{before}.{projection}.{own}" if before else f"{projection}.{own}"
                yield name, Part(path, own, slice(start, start + count))
            start += count


def _order(module: MergedLinear) -> torch.Tensor:
    """Return, for each row of one tensor with all projections, the row of the parameter that holds it."""
    with torch.device("cpu"):
        return module.in_order(torch.arange(module.out_features), 0).argsort()

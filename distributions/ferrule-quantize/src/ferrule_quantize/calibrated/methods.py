"""The methods that quantize the linear layers of one decoder layer whose inputs are known: GPTQ and AWQ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ferrule.errors import CheckpointError, ConfigError
from ferrule_nn import Linear, MoE
from ferrule_quantize.calibrated import awq, gptq
from ferrule_quantize.calibrated.numbers import AwqLayout, GptqLayout, Layout, Numbers
from ferrule_quantize.calibrated.walk import Inputs


class Method(ABC):
    """Weights of a decoder layer's linear layers, by their paths in it, become numbers in a layout."""

    layout: Layout

    def problem(self, model: nn.Module) -> str | None:
        """Return why a model cannot be quantized by this method; None when it can."""
        return None

    def prepare(
        self,
        layer: nn.Module,
        inputs: Mapping[str, Inputs],
        run: Callable[[], torch.Tensor],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        """Change the layer's floats, and `inputs` with them, so that it computes the same. Raises ConfigError.

        `run` gives the layer's result for a text; `dtypes` are the checkpoint's of the parameters, by name.
        """
        return

    @abstractmethod
    def plain(self, weight: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """Return the weights that rounding alone gives, with which the method is compared."""

    @abstractmethod
    def quantized(self, weight: torch.Tensor, inputs: Inputs) -> Numbers:
        """Quantize the weights of a layer with these inputs. Raises CheckpointError."""


class Gptq(Method):
    def __init__(self, bits: int, group: int, ordered: bool) -> None:
        self.layout = GptqLayout(bits, group, ordered)
        self._bits, self._group, self._ordered = bits, group, ordered

    def plain(self, weight: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        sizes = inputs.products.diagonal() / max(1, inputs.count)
        return gptq.rounded(weight, sizes, self._bits, self._group).restored

    def quantized(self, weight: torch.Tensor, inputs: Inputs) -> Numbers:
        return gptq.quantize(weight, inputs, self._bits, self._group, self._ordered)


class Awq(Method):
    def __init__(self, group: int) -> None:
        self.layout = AwqLayout(group)
        self._group = group

    def problem(self, model: nn.Module) -> str | None:
        return "AWQ does not quantize experts" if any(isinstance(part, MoE) for part in model.modules()) else None

    def prepare(
        self,
        layer: nn.Module,
        inputs: Mapping[str, Inputs],
        run: Callable[[], torch.Tensor],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        before = run()
        for fold in awq.folds(layer, run, dtypes):
            layers: list[Any] = [layer.get_submodule(path) for path in fold.paths]
            own = [inputs[path] for path in fold.paths]
            awq.apply(layers, own, fold, awq.search(layers, own, self._group, fold))
        awq.check_same(before, run())

    def plain(self, weight: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        return awq.rounded(weight, self._group)

    def quantized(self, weight: torch.Tensor, inputs: Inputs) -> Numbers:
        return awq.quantize(weight, inputs, self._group)


def method_of(name: str, bits: int, group: int, ordered: bool) -> Method:
    return Awq(group) if name == "awq" else Gptq(bits, group, ordered)


def check_inputs(inputs: Mapping[str, Inputs]) -> None:
    """Raise CheckpointError for inputs that are not finite."""
    for path, own in inputs.items():
        if not bool(torch.isfinite(own.products).all()):
            raise CheckpointError(f"The inputs of {path} are not finite with the calibration texts.")


def check_model(method: Method, model: nn.Module, architecture: str) -> None:
    """Raise ConfigError for a model that the method cannot quantize."""
    reason = method.problem(model)
    if reason is not None:
        raise ConfigError(f"{architecture} cannot be quantized: {reason}.", "--to gptq quantizes each expert.")


def linear_paths(layer: nn.Module) -> list[str]:
    return [path for path, module in layer.named_modules() if isinstance(module, Linear)]

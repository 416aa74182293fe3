"""`quantization`: weights in fewer bits. Entry point name = what `--quantization` takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ferrule.interfaces.platform import DeviceCaps


@dataclass(frozen=True)
class LinearLayer:
    """A layer that may be quantized. `name` is its path in the model, as a checkpoint has it after the model's renames.

    `parts` are what a checkpoint calls the projections that the layer merges, such as q_proj; `head` maps to logits.
    """

    name: str
    in_features: int
    out_features: int
    parts: tuple[str, ...] = ()
    head: bool = False


class LinearScheme(ABC):
    """How one linear layer keeps its weights and multiplies by them.

    `layer` is the layer's module: it has `in_features`, `out_features`, and parameters `weight` [out, in] and `bias`
    [out] or None, as a checkpoint without quantization fills them.
    """

    nbytes: int = 0  # of what is held beside the layer's parameters

    def allocate(self, layer: Any) -> None:
        """Replace the parameters of `layer` by those that a quantized checkpoint fills, uninitialised."""

    @abstractmethod
    def pack(self, layer: Any) -> None:
        """Called once, when the weights are there: lay them out for the kernel that will read them, and free them."""

    @abstractmethod
    def matmul(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """Map x [tokens, in] to [tokens, out]. A row's result has the same bits alone and in any batch.

        The result has the type of x; a head's may be float32.
        """


class QuantizationMethod(ABC):
    """Made once for a model. `config` is the checkpoint's ``quantization_config``, empty where it is not quantized."""

    formats: tuple[str, ...] = ()  # values of `quant_method` that it reads

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    @classmethod
    @abstractmethod
    def refuses(cls, config: Mapping[str, Any], caps: DeviceCaps, dtype: torch.dtype) -> str | None:
        """Say why such weights cannot be served here, with activations of `dtype`, or return None.

        An empty `config` is that of float weights, which some methods quantize as they load.
        """

    @abstractmethod
    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        """Make the scheme of one layer; None leaves it as it is, as a checkpoint's list of ignored layers may ask."""

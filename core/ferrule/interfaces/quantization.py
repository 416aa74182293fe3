"""`quantization`: weights in fewer bits. Entry point name = what `--quantization` takes.

`ferrule_quant` has what methods share: schemes for what weights may stand for, and names of layers in configurations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from ferrule.interfaces.platform import DeviceCaps


@dataclass(frozen=True)
class LinearLayer:
    """A layer that may be quantized. `name` is its path in the model, as a checkpoint has it after the model's renames.

    `projections` are the names that a checkpoint has for the projections that the layer merges, such as q_proj; none
    for a layer that merges nothing. `head` is the layer that maps to logits.
    """

    name: str
    in_features: int
    out_features: int
    projections: tuple[str, ...] = ()
    head: bool = False


class LinearScheme(ABC):
    """The weights of one linear layer in some form, and the product with them.

    `layer` is the layer's module, a `torch.nn.Module`. It has `in_features`, `out_features`; `projections`, a mapping
    from the name of each merged projection to its rows, empty for a layer that merges nothing; `head`; the device's
    `kernels`; parameters `weight` [out, in] and `bias` [out] or None, as a checkpoint without quantization fills them;
    and `ignored_tensors`, a tuple of names that a checkpoint may have for this layer and that are dropped, to which
    `allocate` may add.
    """

    row_parameter: str = "weight"  # whose rows `pack_rows` is offered

    def units(self, layer: Any) -> tuple[int, int] | None:
        """Return how many outputs, and how many inputs, belong together: ranks divide `layer` between them.

        `layer` has the sizes of one rank's part. A checkpoint's tensors are cut in proportion to it, so by default, and
        for what indexes inputs or outputs of the whole layer, returns None: the layer cannot be divided.
        """
        return None

    def allocate(self, layer: Any) -> None:
        """Replace the parameters of `layer` by those that a quantized checkpoint fills, uninitialised."""

    def pack_rows(self, layer: Any, first: int, rows: torch.Tensor) -> bool:
        """Lay out rows of the weight straight from a checkpoint's tensor, so that they need not be copied first.

        `rows` are those of `row_parameter`, such as [count, in], for the outputs from `first` on, where the layer or
        one of its projections begins. They may be in a mapped file: read them during the call, and do not write or
        keep them. By default returns False, and they are copied to the parameter for `pack`. The answer is the same
        for all rows of a layer. Raises CheckpointError.
        """
        return False

    @abstractmethod
    def pack(self, layer: Any) -> None:
        """Lay the weights out for the kernel that will read them, and free them. Called once, when the weights are
        there.
        """

    def packed_tensors(self) -> Iterable[torch.Tensor]:
        """Return the tensors that `pack` made, buffers of the layer among them. See `HasPackedTensors`."""
        return ()

    @abstractmethod
    def matmul(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """Map x [tokens, in] to [tokens, out]. A row's result has the same bits alone and in any batch.

        The result has the type of x; a head's may be float32.
        """

    def rows(self, layer: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return a reader of the packed weight's rows: ids [tokens] → [tokens, in], of the model's type. None: there is
        none.

        With a reader, the embedding of a tied model has no table of its own. So None is the default, and right for
        weights that are rounded further than the checkpoint's. An embedding's scheme must return a reader.
        """
        return None


class QuantizationMethod(ABC):
    """A reader of quantized checkpoints, made once for a model.

    `config` is the checkpoint's ``quantization_config``, empty where it is not quantized.

    `settings_elsewhere` maps another key of ``config.json``, or another JSON file beside it, that takes its place to
    the `quant_method` that it stands for, unless the settings there name one. Such names have "quant" or "compress" in
    them. It is a literal of the class itself, because it is read without an import.
    """

    formats: tuple[str, ...] = ()  # values of `quant_method` that it reads
    settings_elsewhere: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    @classmethod
    @abstractmethod
    def refuses(cls, config: Mapping[str, Any], caps: DeviceCaps, dtype: torch.dtype) -> str | None:
        """Say why such weights cannot be served here, with activations of `dtype`, or return None.

        An empty `config` is that of float weights, which some methods quantize as they load.
        """

    @classmethod
    def settings_of(cls, folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Read what other files of a checkpoint's folder say of its weights, as keys of a ``quantization_config``.

        Called for the method that reads the checkpoint. `config` is what the checkpoint's configuration says, and its
        keys come first. Where it is empty, and the user names the method, the returned keys are all there are. Raises
        CheckpointError.
        """
        return {}

    @abstractmethod
    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        """Make the scheme of one layer; None leaves it as it is, as a checkpoint's list of ignored layers may ask."""

    def embedding(self, layer: LinearLayer) -> LinearScheme | None:
        """Make the scheme of an embedding that the checkpoint has quantized; None for one whose table is of floats.

        Its `rows` is called in place of `matmul`, and may not be None once the table is packed. `layer` has an output
        for each row of the table. Not called where a device has no
        kernel that reads rows (`ferrule_nn.LayerKernels.reads_rows`). By default returns None, and `decode_tensors` or
        the load format widens what is quantized.
        """
        return None

    def decode_tensors(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a checkpoint's tensors, with floats in place of quantized ones that belong to no linear layer.

        An example is an embedding. Raises CheckpointError for tensors that do not fit each other.
        """
        return tensors


@runtime_checkable
class Quantizable(Protocol):
    """A submodule of a model that can take a quantization scheme."""

    def quantize(self, name: str, method: QuantizationMethod) -> bool:
        """Take a scheme of the method, if it has one for this layer, and return whether it has.

        Called once the model is built, before its weights are loaded. `name` is the submodule's path in the model.
        """

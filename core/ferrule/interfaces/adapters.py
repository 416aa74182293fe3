"""`adapter_bank`: small weights beside a model's, which some requests use and others do not.

A bank keeps adapters on the device in slots, and more of them in the host's memory. Each layer of the model that an
adapter may change says so in an `AdaptedLayer`, and gets from the bank a function that adds the adapters' part to its
product.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ferrule.interfaces.kernels import Kernels
from ferrule.types import Adapter

if TYPE_CHECKING:
    import torch

Add = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]
"""Of x [rows, in], the layer's product [rows, out], which may be changed in place, and [rows] int64 on the device: each
row's slot times the layer's `parts`, plus its part. Returns the sum. Of a table, x are ids [rows]."""


@dataclass(frozen=True, kw_only=True)
class BankContext:
    """The surroundings that a bank is made in. Sizes are those that the user has set."""

    num_slots: int  # adapters on the device
    max_rank: int
    max_host: int  # adapters in the host's memory
    bias: bool = False  # adapters may have biases
    dtype: torch.dtype  # of the adapters' weights; int8: rounded, with scales
    device: torch.device
    kernels: Kernels = Kernels()
    config: Mapping[str, Any] = field(default_factory=dict)  # config.json of the model


@dataclass(frozen=True, kw_only=True)
class Stacked:
    """A module of the checkpoint whose two matrices are those of all parts of a layer: A [ranks * r, inputs] and
    B [outputs, ranks * r], for r the rank of the parts.

    A module may be this for several layers: those count whose sizes are those of the matrices.
    """

    module: str  # its name in the model
    inputs: int
    outputs: int
    ranks: int
    split: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """Turn A and B into those of each part, [parts, r, in] and [parts, out, r]: of this rank's parts, whole."""


@dataclass(frozen=True, kw_only=True)
class AdaptedLayer:
    """A layer to whose product adapters can add, or several layers of one shape, its `parts`, such as experts.

    Sizes are those of the whole layer; where ranks divide it, `own_inputs` and `own_outputs` are this rank's, and
    `inputs` and `outputs` take a rank's part of a tensor.
    """

    name: str  # path in the model
    in_features: int
    out_features: Mapping[str, int]  # of each projection that it merges, in order; of one without a name ""
    own_inputs: int
    own_outputs: tuple[int, ...]
    parts: int = 1
    table: bool = False  # its input are ids, and the product is one of rows of a table
    modules: Mapping[str, tuple[int, int | None]]
    """Part and projection (None: all of them) that each module of the model's checkpoint stands for, by its name in the
    model."""
    inputs: Callable[[torch.Tensor], torch.Tensor]  # of [rank, in], this rank's part
    outputs: Callable[[torch.Tensor, int | None], torch.Tensor]  # of [out, …] of a projection, this rank's part
    bias: Callable[[torch.Tensor, int | None], torch.Tensor] | None = None  # of [out]; None: as `outputs`
    own_bias: Callable[[int], torch.Tensor | None] | None = None  # a part's bias [own out]; None: it can have none
    stacked: Stacked | None = None
    norms: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """Return the norms of the rows of W + up @ down, float32 [own out], of a part's weights W; down is [rank, own in]
    and up [own out, rank]. Any thread may call it. Raises RequestError when the model sleeps. None: not known."""


class AdapterBank(ABC):
    """The adapters that are loaded, in slots from 1 to `num_slots`. Slot 0 is none.

    Before each forward pass the runner sets `token_slots` to the slot of each token of the step, [tokens] int64 on the
    device, and before logits `row_slots` to that of each of their rows. Afterwards both are empty, and the embedding
    and the head, which speculators call, are the model's own. In a recorded step `token_slots` is always at the same
    address. So what `layer` returns does the same work whatever slots it is called with, and keeps its weights for all
    slots where they are: then recorded steps stay valid when an adapter is loaded.
    """

    num_slots: int
    token_slots: torch.Tensor
    row_slots: torch.Tensor

    def __init__(self, context: BankContext) -> None:
        """Allocate nothing yet: layers come, and say how large they are."""
        self.num_slots = context.num_slots
        self.module_name: Callable[[str], str] = str  # see `NamesModules`: set once the model is built

    @abstractmethod
    def layer(self, layer: AdaptedLayer) -> Add | None:
        """Make what adds an adapter's part to a layer's product; None for a layer that no adapter changes.

        Called once for each layer of each copy of the model, before there are weights. Copies of a model have layers of
        the same names, and share the adapters that are loaded.
        """

    @abstractmethod
    def read(self, adapter: Adapter) -> None:
        """Read an adapter into the host's memory, and check that it fits the model.

        Called like `load`, and raises what it does. The adapters that were not used for longest are dropped.
        """

    @abstractmethod
    def load(self, slot: int, adapter: Adapter) -> None:
        """Load an adapter into a slot, in the place of what is there; read it first if the host does not have it.

        Called on a thread of its own, while steps run that do not use the slot. Raises RequestError for an adapter that
        cannot be read, or does not fit the model; the slot then holds no adapter.
        """


@runtime_checkable
class Adaptable(Protocol):
    """A submodule of a model to whose product adapters can add."""

    def adapt(self, name: str, bank: AdapterBank) -> bool:
        """Take this layer's part of the bank, if the bank has one, and return whether it has.

        Called once the model is built, before its weights are loaded. `name` is the submodule's path in the model.
        """


@runtime_checkable
class NamesModules(Protocol):
    """A model whose modules have other names than in its checkpoint."""

    @classmethod
    def module_name(cls, name: str) -> str:
        """Return the model's name of a module that the checkpoint calls `name`."""

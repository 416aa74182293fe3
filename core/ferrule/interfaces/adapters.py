"""`adapter_bank`: small weights beside a model's, which some requests use and others do not.

A bank keeps adapters on the device in slots, and more of them in the host's memory. Each layer of the model that an
adapter may change says so in an `AdaptedLayer`, and gets from the bank a function that adds the adapters' part to its
product.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from ferrule.interfaces.kernels import Kernels
from ferrule.types import Adapter, AdapterInfo

if TYPE_CHECKING:
    import torch

Add = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]
"""Of x [rows, in], the layer's product [rows, out], which may be changed in place, and [rows] int64 on the device: each
row's slot times the layer's `parts`, plus its part. Returns the sum. Of a table, x are ids [rows]."""


@dataclass(frozen=True, kw_only=True)
class ContextScaling:
    """The factors that rotary positions are divided by (Chen et al. 2023): the model's own, and those of adapters that
    were trained with longer texts.
    """

    original: int  # tokens that the model was made for with the factor 1
    own: float = 1.0  # the model's factor
    factors: tuple[float, ...] = ()  # that adapters may have in its place (--long-lora-scaling-factors)
    longest: int = 0  # tokens that any text may have (--max-model-len); 0: no limit

    def length(self, factor: float) -> int:
        """Return the longest text with a factor, in tokens."""
        return min(int(self.original * factor), self.longest or int(self.original * factor))


@dataclass
class AddedRows:
    """The rows that adapters add to a layer whose rows are those of tokens: a table of embeddings, or a head.

    A slot has its first `counts` [1 + num_slots] int64 of `data` [1 + num_slots, most, in]; both are None until a
    loaded adapter adds some. Row n is the token `first` + n. The rows of an embedding are those before it is scaled.
    """

    first: int
    data: torch.Tensor | None = None
    counts: torch.Tensor | None = None


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
    scaling: ContextScaling | None = None  # None: of no adapter it matters how long its texts were
    max_added: int = 0  # tokens that an adapter may add to the vocabulary
    no_added: str = ""  # why none may add any, whatever the user has set


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
    vocabulary: bool = False  # its outputs, or the rows of its table, are tokens': see `AdapterBank.added`
    tied: str = ""  # of a head whose weights are a table of embeddings: that layer's name
    weights: Callable[[torch.Tensor], tuple[torch.Tensor, bool] | None] | None = None
    """Return rows [ids, in] of a `vocabulary` layer's weights, and whether they are as the checkpoint has them, which
    quantized ones are not. None: they cannot be read. Any thread may call it. Raises RequestError when the model
    sleeps."""
    bias: Callable[[torch.Tensor, int | None], torch.Tensor] | None = None  # of [out]; None: as `outputs`
    own_bias: Callable[[int], torch.Tensor | None] | None = None  # a part's bias [own out]; None: it can have none
    stacked: Stacked | None = None
    norms: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """Return the norms of the rows of W + up @ down, float32 [own out], of a part's weights W; down is [rank, own in]
    and up [own out, rank]. Any thread may call it. Raises AsleepError when the model sleeps. None: not known."""


class AdapterBank(ABC):
    """The adapters that are loaded, in slots from 1 to `num_slots`. Slot 0 is none.

    Before each forward pass the runner sets `token_slots` to the slot of each token of the step, [tokens] int64 on the
    device, and before logits `row_slots` to that of each of their rows. Afterwards both are empty, and the embedding
    and the head, which speculators call, are the model's own. In a recorded step `token_slots` is always at the same
    address. So what `layer` returns does the same work whatever slots it is called with, and keeps its weights for all
    slots where they are: then recorded steps stay valid when an adapter is loaded.
    """

    concurrent: ClassVar[bool] = False
    """Whether several threads may call `read` and `load` at once. Loads into one slot never overlap. If it is false,
    they are called with the `lock`; else they take it where they read the model's weights (`norms` and `own_bias` of
    layers)."""
    num_slots: int
    token_slots: torch.Tensor
    row_slots: torch.Tensor

    def __init__(self, context: BankContext) -> None:
        """Allocate nothing yet: layers come, and say how large they are."""
        self.num_slots = context.num_slots
        self.position_scales: torch.Tensor | None = None
        """[1 + num_slots] float32 on the device: what rotary embeddings multiply the positions of a slot's tokens by.
        None: every adapter has the model's positions."""
        self.scales_positions = False  # set by the rotary embeddings that do it
        self.num_added: list[int] = [0] * (1 + self.num_slots)  # tokens that the adapter in each slot adds
        self.row_added: tuple[int, ...] = ()
        """Slots with added tokens that the rows of logits have, set with `row_slots`. Where there are any, logits are
        wider by as many tokens as one of them adds; those that a row's adapter does not have are minus infinity."""
        self.revision = 0
        """Counted up when layers have to do something else than before, as when `AddedRows` get data. Steps that were
        recorded before are recorded again."""
        self.lock = threading.RLock()  # the model's weights do not change meanwhile
        self.module_name: Callable[[str], str] = str  # see `NamesModules`: set once the model is built

    @abstractmethod
    def layer(self, layer: AdaptedLayer) -> Add | None:
        """Make what adds an adapter's part to a layer's product; None for a layer that no adapter changes.

        Called once for each layer of each copy of the model, before there are weights. Copies of a model have layers of
        the same names, and share the adapters that are loaded.
        """

    def added(self, layer: AdaptedLayer) -> AddedRows | None:
        """Return the rows that adapters add to a `vocabulary` layer, of which `layer` was called; None: there are never
        any.
        """
        return None

    @abstractmethod
    def read(self, adapter: Adapter) -> None:
        """Read an adapter into the host's memory, and check that it fits the model.

        Called like `load`, and raises what it does. The adapters that were not used for longest are dropped.
        """

    def describe(self, adapter: Adapter) -> AdapterInfo:
        """Return the limits of requests for an adapter that was read. It reads no file: no step runs meanwhile."""
        return AdapterInfo()

    @abstractmethod
    def load(self, slot: int, adapter: Adapter) -> None:
        """Load an adapter into a slot, in the place of what is there; read it first if the host does not have it.

        Called on a thread of its own, while steps run that do not use the slot. Raises RequestError for an adapter that
        cannot be read, or does not fit the model; the slot then holds no adapter.
        """

    def follow_model(self) -> None:
        """Compute again what was computed of the model's weights, as these may be others now.

        Called with `lock`, when the model was loaded again, and while no step runs. Raises RequestError.
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

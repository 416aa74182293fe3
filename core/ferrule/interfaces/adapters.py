"""Adapters: small weights beside a model's, which some requests use and others do not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ferrule.types import Adapter

if TYPE_CHECKING:
    import torch


class AdapterBank(ABC):
    """The adapters that are loaded, in slots from 1 to `num_slots`. Slot 0 is none.

    Before each forward pass the runner sets `token_slots` to the slot of each token of the step, [tokens] int64 on the
    device. In a recorded step that tensor is always at the same address. So what `layer` returns reads it when it is
    called, does the same work whatever it contains, and keeps its weights for all slots where they are: then recorded
    steps stay valid when an adapter is loaded.
    """

    num_slots: int
    token_slots: torch.Tensor

    @abstractmethod
    def layer(
        self, name: str, in_features: int, out_features: int, projections: tuple[str, ...]
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
        """Make what adds an adapter's part to a layer's product; None for a layer that no adapter changes.

        `name` is the layer's path in the model, `projections` are a checkpoint's names for what it merges; the sizes
        are those of this rank's part.

        It is called with x [tokens, in] and the layer's product [tokens, out], which it may change in place, and
        returns their sum. Called once for each layer of each copy of the model, before there are weights.
        """

    @abstractmethod
    def load(self, slot: int, adapter: Adapter) -> None:
        """Load an adapter into a slot, in the place of what is there.

        Called on a thread of its own, while steps run that do not use the slot. Raises RequestError for an adapter that
        does not fit the model.
        """


@runtime_checkable
class Adaptable(Protocol):
    """A submodule of a model to whose product adapters can add."""

    def adapt(self, name: str, bank: AdapterBank) -> bool:
        """Take this layer's part of the bank, if the bank has one, and return whether it has.

        Called once the model is built, before its weights are loaded. `name` is the submodule's path in the model.
        """

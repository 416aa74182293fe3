"""`speculator`: guesses of what a request will say next, which its next step computes and verifies all at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ferrule.interfaces.model import BuildContext, ForwardContext, LayerCache, Model
from ferrule.interfaces.quantization import QuantizationMethod
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.types import Admit, Chunk

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class LoadedDraft:
    """A model beside the target, with its weights. `build.max_model_len` is the longest text that it was made for."""

    model: Model
    build: BuildContext
    tokenizer: Callable[[], Tokenizer | None]  # opens its own; None: its folder has none


@dataclass(frozen=True, kw_only=True)
class SpeculatorContext:
    """The surroundings that a speculator is made in.

    `settings` are the keys of --speculative-config that are the speculator's own: the server has taken out those that
    hold for all of them. `load(settings)` loads the model that `settings["model"]` names, in the target's type
    and with its own quantization; it raises StartupError.
    """

    num_tokens: int  # the most guesses for a row
    num_slots: int  # requests that may run at a time
    target: Model  # whose next tokens are guessed, with its weights
    build: BuildContext  # of the target
    quantization: QuantizationMethod | None = None  # of the target's weights; None: they are floats
    settings: Mapping[str, Any] = field(default_factory=dict)
    load: Callable[[Mapping[str, Any]], LoadedDraft]
    tokenizer: Callable[[], Tokenizer | None]  # opens the target's; None: there is none


class DraftSteps(Protocol):
    """Forward passes of a speculator's own layers, over the caches that `Speculator.cache_specs` names.

    They lie in the target's blocks: position p of a request has a place in them once the target's cache has. A pass
    computes positions [starts[r], starts[r] + counts[r]) of the request in slots[r], all of them from `first(slots[r])`
    on and below `room(slots[r])`; a position that is computed again is overwritten. The entries of a cached prefix are
    those that the request which computed it has left.
    """

    def first(self, slot: int) -> int:
        """Return the first position of a slot whose blocks are the request's own still; 0 without windowed layers."""

    def room(self, slot: int) -> int:
        """Return how many positions the blocks of a slot have."""

    def context(self, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> ForwardContext:
        """Return the context of a pass."""

    def ids(self, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
        """Return the ids [tokens] int64 at a pass's positions, as the requests' history has them."""

    def forward(
        self, model: Model, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int], ids: torch.Tensor
    ) -> torch.Tensor:
        """Return a model's hidden states [tokens, hidden] of a pass over `ids` [tokens] int64.

        A pass over one token of each row is replayed where the device records steps, and one over two where it can.
        """

    def chain(
        self, model: Model, slots: Sequence[int], starts: Sequence[int], count: int
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that makes up to `count` passes over one token of each row, one with each call.

        The first computes positions `starts`, and each other one the positions behind. A call takes `ids` [rows] and
        returns what `forward` would; but all that the passes need to know is made at once, so they cost less.
        """


@dataclass(frozen=True, kw_only=True)
class KnownRows:
    """Requests that have sampled in a step, and that guesses are wanted for (`Chunk.wanted`).

    history[slots[r], : lengths[r]] are the known ids of row r. How many these are may be known to the device only, if
    the row had guesses. The last id is not computed yet; hidden[r] is the target's hidden state of the one before it.
    """

    slots: tuple[int, ...]
    wanted: tuple[int, ...]  # the most guesses that are of use, by row: at least 1
    lengths: torch.Tensor  # [rows] int64
    history: torch.Tensor  # [slots, at least max_model_len] int32, not to be changed
    hidden: torch.Tensor  # [rows, hidden]


class Speculator(ABC):
    """A source of guesses, called on the worker's thread for each step: `admit` if requests begin, `observe`, then
    `propose` if guesses are wanted.

    Guesses need not be right. They cost the computation of a token each, and a request with guesses is planned again
    only when the result of its last step is known. Methods that wait for the device hold up steps.

    Three literals of the class itself are read without an import. `own_settings`: the keys of --speculative-config that
    it reads from `SpeculatorContext.settings`; others are refused. `usual_tokens`: how many guesses it makes where the
    user gives no number. `model_types`: what a model says of itself in its config.json (`model_type`, or one of
    `architectures`) that this speculator is for, where the user names no method; `*` stands for any text, and the
    longest pattern counts. These are also further names of the method.
    """

    own_settings: ClassVar[tuple[str, ...]] = ()
    usual_tokens: ClassVar[int] = 5
    model_types: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def __init__(self, context: SpeculatorContext) -> None:
        """Allocate what guessing needs. Raises ConfigError for settings that cannot be met."""

    def modules(self) -> Sequence[torch.nn.Module]:
        """Return the modules whose weights are the speculator's own. By default there are none.

        They count as weights, and sleep and wake with the target's.
        """
        return ()

    def cache_specs(self) -> Mapping[str, LayerCache]:
        """Name each layer of the speculator's own that caches. By default there are none.

        Layers of `modules()` with these names say how they attend (`AttentionLayer`). The names may be the target's.
        """
        return {}

    def admit(self, admits: Sequence[Admit]) -> None:
        """See requests that take slots in this step, in the place of what was there. By default nothing is done.

        What is learnt of a request may serve others of the same `Admit.scope` only.
        """

    def observe(self, chunks: Sequence[Chunk], hidden: torch.Tensor, steps: DraftSteps) -> None:
        """See what a step has computed: hidden states [tokens, hidden] of the tokens of all chunks.

        A new epoch in a slot is a new request. Hidden states behind a guess that was wrong mean nothing; the request's
        next chunk begins in their place, or before. What a prefix cache held was never computed here.
        """

    @abstractmethod
    def propose(self, rows: KnownRows, steps: DraftSteps) -> torch.Tensor:
        """Guess what follows each row: ids [rows, any number] int64 on the device, -1 from where there is no guess."""

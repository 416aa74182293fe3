"""`model`: an architecture. Entry point name = a value of the checkpoint's `architectures`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.ranks import WHOLE, Shard
from ferrule.types import CacheGroup, MediaItem, Pooling, PromptBorder

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch

    from ferrule.interfaces.adapters import AdapterBank


PoolingKind = Literal["cls", "mean", "last"]  # the first token's hidden state, the mean of all, the last token's


@dataclass(frozen=True, kw_only=True)
class PoolingSpec:
    """The way in which prompts become vectors, as the checkpoint or the user says.

    `kind` None: the way that the architecture is usually used in.
    """

    kind: PoolingKind | None = None
    normalize: bool = True  # to a length of 1, where a request does not say


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """The surroundings that a model is built in. `config` is the checkpoint's ``config.json`` (its text part), as a
    mapping.
    """

    config: Mapping[str, Any]
    dtype: torch.dtype
    device: torch.device
    block_size: int
    max_model_len: int
    folder: Path | None = None  # the checkpoint; None for a model without files
    trust_remote_code: bool = False
    kernels: Kernels = Kernels()  # the device's; what has none is computed by torch
    sliding_window: bool = True  # False: --disable-sliding-window, treat every layer as full attention
    pooling: PoolingSpec = PoolingSpec()  # for a model that `Pools`
    adapters: AdapterBank | None = None  # whose parts `Adaptable` submodules are given once the model is built
    shard: Shard = WHOLE  # which part of the model this is; layers divide themselves, model files need not look


@dataclass(frozen=True)
class LayerCache:
    """The cache of one attention layer: a group, and the shape of one token's entry.

    With `value_dim`, values are the first so many numbers of the keys and are not stored: so it is in latent attention,
    whose queries and keys have `head_dim`. Such a layer is served by backends with the feature "latent".
    """

    group: CacheGroup  # num_layers is filled in by the runner
    num_kv_heads: int
    head_dim: int
    value_dim: int = 0  # 0: values are stored, and as wide as keys
    attended: bool = True  # False: the model reads num_kv_heads * head_dim numbers itself (`ForwardContext.recall`)


@runtime_checkable
class ScaledCache(Protocol):
    """An attention layer that can keep keys and values divided by a number, for a cache of 8 bits."""

    @property
    def name(self) -> str: ...  # of its cache, with the number of its layer in it

    def set_cache_scales(self, key: float, value: float) -> None:
        """Set the scales, before the first step: what is cached, times its scale, are keys and values."""


@runtime_checkable
class HeadScaledCache(ScaledCache, Protocol):
    """A `ScaledCache` that can also keep each head's keys and values divided by numbers of their own."""

    def set_head_scales(self, keys: Sequence[float], values: Sequence[float]) -> None:
        """Set a scale for each key head and each value head, as `set_cache_scales` sets one for all.

        Raises CheckpointError for another number of them.
        """


@dataclass(frozen=True)
class StateSpec:
    """A tensor of `shape` that a recurrent layer keeps for each request, however long that is.

    It begins as zeros, or as what it was behind the same tokens in another request.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None  # None: the model's


@dataclass(frozen=True)
class StateRows:
    """One state of every request, and which requests are in this step. All tensors are on the device.

    Row r of the step owns its tokens [query_start[r], query_start[r + 1]). data[slots[r]] is the state before the first
    of them; the model leaves there the state after the last, and touches no other slot. No slot is named twice.
    """

    data: torch.Tensor  # [all slots, *shape]
    slots: torch.Tensor  # [rows] int64
    query_start: torch.Tensor  # [rows + 1] int64
    query_lens_host: tuple[int, ...]  # the lengths on the host, so that no device needs to be asked


@dataclass(frozen=True)
class InputEmbeds:
    """Embeddings that prompts were given as, in the place of what the model's embedding layer gives for ids."""

    tokens: torch.Tensor  # [n] int64, ascending: which of the step's tokens they are
    data: torch.Tensor  # [n, Model.embed_size()], of the type that `Model.encode` or the client gave it, on the device


@dataclass(frozen=True)
class StepRow:
    """One request's part of a step: its tokens [first, first + count), behind `begin` that earlier steps computed."""

    first: int
    count: int
    begin: int


@dataclass(frozen=True, kw_only=True)
class PoolRow:
    """A request whose prompt ends in a step: tokens [first, first + count) of the hidden states, and what is asked.

    They are the whole prompt in a model that does not split prompts, else what of it this step computed.
    """

    first: int
    count: int
    work: Pooling


class ForwardContext(Protocol):
    """One step's inputs, handed to `Model.forward` by the runner."""

    @property
    def positions(self) -> torch.Tensor:  # [tokens] int64, or [position_numbers, tokens]
        ...

    @property
    def lengths(self) -> torch.Tensor:  # [tokens] int64
        """max(prompt length, position + 1) of each token's request: what length-dependent rotations scale by."""

    @property
    def embeds(self) -> InputEmbeds | None:
        """Embeddings that replace those of ids; None in a step without any. Only for a model with an `embed_size`."""

    def attend(
        self,
        layer: str,
        q: torch.Tensor,  # [tokens, num_heads, head_dim]
        k: torch.Tensor,  # [tokens, num_kv_heads, head_dim]
        v: torch.Tensor,  # [tokens, num_kv_heads, head_dim], or a view of k's first `value_dim` numbers
        options: AttentionOptions,
    ) -> torch.Tensor:  # [tokens, num_heads, head_dim or value_dim]
        """Write k and v to the layer's cache, and attend over everything cached so far, causally.

        A layer with ``options.causal`` False has no cache, and attends over all tokens of its request in the step.
        """

    def attend_heads(
        self, layer: str, q: torch.Tensor, write: Callable[..., None], options: AttentionOptions
    ) -> torch.Tensor | None:
        """Attend like `attend`, where `write(cache, slots)` finishes q and writes k and v; None: the cache is not of
        that kind.
        """

    def state(self, name: str) -> StateRows:
        """Return one of the states that `Model.state_specs` names, to be read and updated in place."""

    @property
    def rows(self) -> Sequence[StepRow]:
        """The step's requests, in the order of their tokens."""

    def recall(self, layer: str, row: int) -> torch.Tensor:
        """Return the entries [tokens, numbers] that a row has in a layer that is not `attended`, from before this step.

        They are all of the `begin` tokens, or the last `window - 1` of them in a sliding group.
        """

    def keep(self, layer: str, row: int, entries: torch.Tensor) -> None:
        """Write the entries [count, numbers] of a row's tokens in this step to a layer that is not `attended`."""


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Constants of an attention layer. `window` counts the tokens seen, the query's own included; 0 is all.

    With `chunk` a query sees the tokens of its own chunk: those from the last multiple of `chunk` on. Such a layer is
    served by backends with the feature "chunk".

    With `causal` False each token sees all of its prompt: `window` and `chunk` stay 0, the layer is not in
    `Model.cache_specs`, and it is served by backends with the feature "bidirectional".
    """

    scale: float
    window: int = 0
    chunk: int = 0
    soft_cap: float = 0.0
    alibi_slopes: tuple[float, ...] = ()
    sinks: torch.Tensor | None = None  # [num_heads], a learned logit per head
    causal: bool = True


@runtime_checkable
class AttentionLayer(Protocol):
    """A submodule that attends. `name` is its key in `Model.cache_specs`; attention backends are chosen by `options`.

    A layer without such a submodule is taken to attend with the options' defaults.
    """

    name: str
    options: AttentionOptions


@runtime_checkable
class Packable(Protocol):
    """A submodule that lays its weights out for the kernel that reads them."""

    def pack(self) -> None:
        """Lay the weights out for the kernel that will read them, once all weights of the model were loaded.

        A second call changes nothing. The submodule's parameters may be empty afterwards.
        """


@runtime_checkable
class HasPackedTensors(Protocol):
    """A submodule whose weights may be in other tensors than its parameters."""

    def packed_tensors(self) -> Iterable[torch.Tensor]:
        """Return tensors that hold weights and are not parameters: those in which `pack` has left them.

        They are counted as weights, and they go to the host's memory and come back with the parameters. A tensor that
        is not named here stays on the device.
        """


class Model(ABC):
    """A language model, which also `Generates`, or `Pools`, or both. Concrete classes are also `torch.nn.Module`.

    Submodules may implement `AttentionLayer`, `Packable`, `HasPackedTensors` and
    `ferrule.interfaces.quantization.Quantizable`. Weights come in four steps: the model is built, `Quantizable`
    submodules are given the quantization method, `load_weights` fills the parameters, `Packable` submodules pack them.

    The constructor takes a `BuildContext` and allocates parameters without initialising them. All tensors hold the
    tokens of many requests, flat: there is no batch dimension and no padding.

    `config_names` maps names of this architecture in ``config.json`` to the common ones (`n_head` to
    `num_attention_heads`), `config_defaults` common names to what a file means that does not have the key. What is read
    of the configuration, by the model and by others, has the common names too and the defaults; a key with null has no
    default.

    A plugin with `any_architecture` is named for its implementation and not for an architecture: it takes the place of
    native ones that there are not. It may read any part of the configuration. This is a literal of the class itself,
    because it is read without an import.
    """

    any_architecture: ClassVar[bool] = False
    config_names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    config_defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    splits_prompts: bool = True  # False: a prompt is computed whole, in one step, because its tokens see later ones
    position_numbers: ClassVar[int] = 1  # of a token's position; 3: by time, height and width

    @abstractmethod
    def cache_specs(self) -> dict[str, LayerCache]:
        """Name each layer that caches, in order, with what it caches; none for a model of states or without memory."""

    def state_specs(self) -> dict[str, StateSpec]:
        """Name each state. With any, a cached prefix is reused up to where the runner has saved all of them."""
        return {}

    def prompt_border(self) -> PromptBorder | None:
        """Return the length of a prompt from which on all of it is computed in another way; None where there is no such
        length.
        """
        return None

    def embed_size(self) -> int:
        """Return the width of the embeddings that `forward` accepts in the place of ids; 0 when it accepts only ids."""
        return 0

    def encode(self, items: Sequence[MediaItem]) -> Sequence[torch.Tensor]:
        """Make embeddings [count, embed_size] of each item, on the device. Not called for the kind "embeds".

        They depend on the item's `data` and `grid` alone: another request may get them, at another place.
        """
        raise NotImplementedError(f"{type(self).__name__} encodes nothing")

    def positions(self, length: int, media: Sequence[MediaItem]) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """Say where the `length` tokens of a prompt with media are, [position_numbers, length]; None: at their indices.

        Tokens behind the prompt go on from the largest number. The items have no data.
        """
        return None

    @abstractmethod
    def forward(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Map ids [tokens] to hidden states [tokens, hidden] after the final norm."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy checkpoint tensors into parameters; return the *parameter* names that were filled.

        Raises CheckpointError, naming the tensor, for an unknown name or a wrong shape. The caller checks that every
        parameter was filled.
        """


class Generates(ABC):
    """Mix-in of a `Model` that continues text. Its layers attend causally."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden [rows, hidden] to logits [rows, vocab], float32."""


class TellsInner(ABC):
    """Mix-in of a `Model` that can give hidden states from between its layers, for heads that guess by them."""

    @abstractmethod
    def tell_inner(self, layers: Sequence[int]) -> None:
        """Have `forward` return hidden states [tokens, hidden + n * hidden] from now on: behind the usual ones those
        that enter each of n layers. `logits` accepts these, and reads the usual ones.

        Called before the first step. Raises ConfigError.
        """


class Pools(ABC):
    """Mix-in of a `Model` that gives one vector for a prompt."""

    @abstractmethod
    def pool(self, hidden: torch.Tensor, rows: Sequence[PoolRow]) -> torch.Tensor:
        """Map hidden [tokens, hidden], those of all of a step's rows, to a vector for each of `rows`.

        They are [rows, size], float32, and of a length of 1 where `Pooling.normalize`, or else `PoolingSpec.normalize`,
        says so.
        """

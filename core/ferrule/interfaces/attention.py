"""`attention`: paged attention for one kind of device. Entry point name = what `--attention-backend` takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from ferrule.interfaces.model import AttentionOptions, LayerCache
    from ferrule.interfaces.platform import DeviceCaps


@dataclass(frozen=True)
class AttentionLayout:
    """The places of a step's tokens, for one cache group. All tensors are int32 on the device unless noted.

    Row r owns query tokens [query_start[r], query_start[r+1]); they are the last ones of its context_lens[r] tokens.
    """

    query_start: torch.Tensor  # [rows + 1]
    context_lens: torch.Tensor  # [rows], tokens in the cache after this step's writes
    block_table: torch.Tensor  # [rows, max_blocks]; entries that are dead or unused are 0, the null block
    slot_mapping: torch.Tensor  # [tokens] int64, block * block_size + offset, where each token's k and v go
    block_size: int
    max_query_len: int
    max_context_len: int
    query_lens_host: tuple[int, ...]  # the same on the host, so that no device needs to be asked
    context_lens_host: tuple[int, ...]
    window: int = 0  # of the group; its table entries before max(0, query position - window + 1) are dead, 0: none are


class AttentionBackend(ABC):
    """Stateless but for what `plan` returns. One instance serves all layers of a model.

    `recordable` promises that for one query per row, `plan` and `run` launch the same work for every content of a
    layout's tensors, given its shapes and `max_context_len`, and wait for no device. Rows without context are skipped:
    they have no query, or one that is not read; a token whose slot is -1 is not written. `ragged` promises the same for
    rows with several queries each, given how many rows and queries there are.

    `features` are those of "latent" (`LayerCache.value_dim`), "chunk" (`AttentionOptions.chunk`) and "bidirectional"
    (`AttentionOptions.causal` is False) that it has: layers that need another one are never given to it.
    """

    recordable: ClassVar[bool] = False
    ragged: ClassVar[bool] = False
    features: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    @abstractmethod
    def refuses(cls, spec: LayerCache, options: AttentionOptions, caps: DeviceCaps, dtype: torch.dtype) -> str | None:
        """Say why this layer cannot be served here, or return None."""

    @classmethod
    def cache_type(cls, name: str, dtype: torch.dtype) -> torch.dtype | None:
        """Return the type of the cache's elements for `--kv-cache-dtype` and a model of `dtype`, or None where there is
        none.
        """
        return dtype if name in ("auto", str(dtype).removeprefix("torch.")) else None

    def begin(self, caps: DeviceCaps) -> None:
        """Take note of the device, once, before the first step. The default does not need to know it."""

    @abstractmethod
    def cache_shape(self, spec: LayerCache, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's cache tensor; the first dimension is `num_blocks`. Zero-initialised by the runner."""

    @abstractmethod
    def plan(self, layout: AttentionLayout) -> Any:
        """Prepare once per step and group what all its layers share."""

    @abstractmethod
    def run(
        self,
        q: torch.Tensor,  # [tokens, num_heads, head_dim]
        k: torch.Tensor,  # [tokens, num_kv_heads, head_dim]
        v: torch.Tensor,
        cache: torch.Tensor,
        plan: Any,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Write k, v into `cache`, then attend. Returns [tokens, num_heads, head_dim].
        Of a layer with a `value_dim`, v is a view of k, nothing but k is written, and the result is as wide as v.
        """

    def run_heads(
        self, q: torch.Tensor, write: Callable[..., None], cache: torch.Tensor, plan: Any, options: AttentionOptions
    ) -> torch.Tensor | None:
        """Attend like `run`, where `write(cache, slots)` finishes q in place and writes k and v: a pass over them is
        saved.

        The cache's pages must be [2, num_kv_heads, block_size, head_dim]. None means that nothing was done: use `run`.
        """
        return None

    def run_uncached(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        query_start: torch.Tensor,  # [rows + 1] int32: row r owns the tokens [query_start[r], query_start[r + 1])
        query_lens: tuple[int, ...],  # the rows' lengths on the host
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Attend over all tokens of each token's own row, for a backend with the feature "bidirectional".

        Returns [tokens, num_heads, head_dim].
        """
        raise NotImplementedError(f"{type(self).__name__} has no bidirectional attention")

"""`attention`: paged attention for one kind of device. Entry point name = what `--attention-backend` takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ferrule.interfaces.model import AttentionOptions, LayerCache
    from ferrule.interfaces.platform import DeviceCaps


@dataclass(frozen=True)
class AttentionLayout:
    """Where a step's tokens are, for one cache group. All tensors are int32 on the device unless noted.

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
    """Stateless but for what `plan` returns. One instance serves all layers of a model."""

    @classmethod
    @abstractmethod
    def refuses(cls, spec: LayerCache, options: AttentionOptions, caps: DeviceCaps, dtype: torch.dtype) -> str | None:
        """Say why this layer cannot be served here, or return None."""

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
        """Write k, v into `cache`, then attend. Returns [tokens, num_heads, head_dim]."""

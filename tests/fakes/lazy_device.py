"""Simulated devices: one whose values cannot be read, and one that records what is launched.

`Unread` brings inputs to the device "meta": reading a value of a tensor there, or copying one to or from it, raises
an error. So a step that begins on it is proved to wait for nothing. `Tape` records operations as a CUDA graph does, and
replays them on the same memory: what the host knew when it was recorded is frozen. `PagedAttention` can be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ferrule.interfaces.attention import AttentionBackend, AttentionLayout
from ferrule.interfaces.model import AttentionOptions, LayerCache
from ferrule.interfaces.platform import Copies, DeviceCaps, Transfers


class WaitedError(AssertionError):
    """An error for a copy between the host and the device that did not go through `Transfers`."""


class _Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch's compiler is imported to be told otherwise, which takes seconds."""
        return False


class NoWaiting(_Mode):
    """A mode that refuses copies between the host and "meta", but for those that `allowed` lets through."""

    def __init__(self) -> None:
        super().__init__()
        self._open = 0

    @contextmanager
    def allowed(self) -> Any:
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        flat = [each for each in tree_flatten((args, kwargs, out))[0] if isinstance(each, torch.Tensor)]
        sized = {each.device.type for each in flat if each.dim()}
        if len(sized) > 1 and not self._open:
            raise WaitedError(f"{func} is given tensors of {sorted(sized)}: a copy that waits for the device")
        return out


class Unread(Transfers):
    """Transfers to "meta". What is fetched reads as ones."""

    def __init__(self, watch: NoWaiting) -> None:
        self._watch = watch
        self.staged = 0  # calls
        self.fetched = 0

    def stage(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        self.staged += 1
        if any(tensor.device.type != "cpu" for tensor in tensors):
            raise WaitedError("stage takes tensors of the host")
        with self._watch.allowed():
            return [tensor.to(device) for tensor in tensors]

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Copies:
        self.fetched += 1
        return Copies([torch.ones(tensor.shape, dtype=tensor.dtype) for tensor in tensors])


class NoEvent:
    """An event where nothing runs beside the host."""

    def record(self) -> None:
        """Do nothing: everything that was launched has run."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Do nothing: there is nothing to wait for."""


@dataclass(frozen=True)
class Launch:
    func: Any
    args: Any
    kwargs: Any
    out: Any

    def replay(self) -> None:
        """Run the operation again, into the memory of the first time. Views and changes in place exist already."""
        again = self.func(*self.args, **self.kwargs)
        for old, new in zip(tree_flatten(self.out)[0], tree_flatten(again)[0], strict=True):
            if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)


class Tape(_Mode):
    """A mode that records every operation while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        self.launches.append(Launch(func, args, kwargs or {}, out))
        return out


def tape_capture(function: Callable[[], None]) -> Callable[[], None]:
    """Record what `function` launches; the answer replays it."""
    tape = Tape()
    with tape:
        function()

    def replay() -> None:
        for launch in tape.launches:
            launch.replay()

    return replay


@dataclass(frozen=True)
class PagedPlan:
    layout: AttentionLayout
    rows: torch.Tensor  # [tokens], whose token each is
    positions: torch.Tensor  # [tokens]
    slots: torch.Tensor  # [tokens, keys], where each key of its row lies
    seen: torch.Tensor  # [tokens, keys] bool


class PagedAttention(AttentionBackend):
    """Attention for tiny tensors: every token looks at its row's whole table. Nothing depends on what the host
    knows.
    """

    recordable = True

    @classmethod
    def refuses(cls, spec: LayerCache, options: AttentionOptions, caps: DeviceCaps, dtype: torch.dtype) -> str | None:
        return None

    def cache_shape(self, spec: LayerCache, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, spec.group.block_size, 2, spec.num_kv_heads, spec.head_dim)

    def plan(self, layout: AttentionLayout) -> PagedPlan:
        tokens = torch.arange(len(layout.slot_mapping), device=layout.slot_mapping.device)
        ends = layout.query_start[1:].contiguous()
        rows = torch.searchsorted(ends, tokens, right=True).clamp_max(len(ends) - 1)
        lengths = layout.context_lens.index_select(0, rows)
        positions = lengths - ends.index_select(0, rows) + tokens
        size = layout.block_size
        keys = torch.arange(layout.block_table.shape[1] * size, device=tokens.device)
        blocks = layout.block_table.index_select(0, rows).long().repeat_interleave(size, 1)
        seen = keys <= positions.unsqueeze(1)
        if layout.window:
            seen = seen & (keys > positions.unsqueeze(1) - layout.window)
        return PagedPlan(layout, rows, positions, blocks * size + keys % size, seen)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: torch.Tensor,
        plan: Any,
        options: AttentionOptions,
    ) -> torch.Tensor:
        flat = cache.flatten(0, 1)
        here = plan.layout.slot_mapping
        there, real = here.clamp_min(0), (here >= 0).view(-1, 1, 1, 1)
        new = torch.stack((k, v), dim=1).to(flat.dtype)
        flat.index_copy_(0, there, torch.where(real, new, flat.index_select(0, there)))
        held = flat.index_select(0, plan.slots.flatten()).view(*plan.slots.shape, *flat.shape[1:])
        repeat = q.shape[1] // k.shape[1]
        keys, values = (held[:, :, part].repeat_interleave(repeat, 2) for part in (0, 1))
        scores = torch.einsum("thd,tkhd->thk", q, keys) * options.scale
        shares = scores.masked_fill(~plan.seen.unsqueeze(1), float("-inf")).softmax(-1)
        return torch.einsum("thk,tkhd->thd", shares, values)

"""Ranks of one model as threads of one process, which exchange tensors where devices would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch

from ferrule.interfaces.ranks import Collectives, Shard

T = TypeVar("T")
_TIMEOUT = 60.0  # seconds for which a rank waits for the others


class Exchange:
    """A meeting point of `size` ranks: `shards` has the place of each. Counts the calls of all together."""

    def __init__(self, size: int) -> None:
        self.calls = 0
        self._barrier = Barrier(size, timeout=_TIMEOUT)
        self._given: list[torch.Tensor] = [torch.empty(0)] * size
        self.shards = [Shard(rank=rank, size=size, collectives=_Rank(self, rank)) for rank in range(size)]

    def run(self, work: Sequence[Callable[[], T]]) -> list[T]:
        """Call what each rank does, all at once. Raises the exception of the rank that failed first."""

        def guarded(call: Callable[[], T]) -> T:
            try:
                return call()
            except BaseException:
                self._barrier.abort()  # the others would wait for it
                raise

        with ThreadPoolExecutor(len(self.shards)) as pool:
            futures = [pool.submit(guarded, call) for call in work]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, BrokenBarrierError)), errors[0])
        return [future.result() for future in futures]

    def meet(self, rank: int, x: torch.Tensor, join: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> torch.Tensor:
        """Return what `join` makes of the tensors of all ranks. Raises ValueError where these do not fit each other."""
        self._given[rank] = x
        self.calls += not rank
        self._barrier.wait()
        if len({(each.shape, each.dtype) for each in self._given}) > 1:
            raise ValueError(f"ranks exchange {[(tuple(each.shape), each.dtype) for each in self._given]}")
        joined = join(self._given)
        self._barrier.wait()
        return joined


class _Rank(Collectives):
    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange, self._rank = exchange, rank

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._exchange.meet(self._rank, x, lambda given: torch.stack(tuple(given)).sum(0, dtype=x.dtype))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._exchange.meet(self._rank, x, lambda given: torch.cat(tuple(given), dim=-1))

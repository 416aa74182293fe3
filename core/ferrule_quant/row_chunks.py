"""A function of the rows of a large matrix, some at a time and on all processors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_NUMBERS = 1 << 17  # in a part: with what is made of them, they stay in a processor's cache


def in_chunks(function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Apply `function`, which treats each row on its own, to parts of `rows` [n, k]; return the results as one tensor.

    Each part is computed by one thread. Threads that share each operation wait for one another at its end, which takes
    most of the time of small ones where other programs run.
    """
    parts = torch.split(rows, max(1, _NUMBERS // rows.shape[1]))
    count = torch.get_num_threads()
    if min(count, len(parts)) == 1:
        return torch.cat([function(part) for part in parts])
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return torch.cat(list(pool.map(function, parts)))
    finally:
        torch.set_num_threads(count)  # it was set for new threads too

"""Latent attention of one layer of DeepSeek-V2-Lite on a CPU: `python -m tools.benchmarks.latent`.

The backends `cpu_native` and `cpu` run in turns on one thread, in bfloat16. Printed are medians of the processor's
milliseconds, and of each turn's ratio.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from ferrule.interfaces.attention import AttentionBackend
from ferrule.interfaces.model import AttentionOptions, LayerCache
from ferrule.types import CacheGroup
from ferrule_plugins.attention.cpu import CpuAttention
from ferrule_plugins.attention.cpu_native import CpuNativeAttention
from ferrule_testkit.kits.attention import layout_of

HEADS, DIM, VALUES = 16, 576, 512
STEPS = ([(1, 2048)], [(1, 8192)], [(1, 2048)] * 8, [(512, 2048)])  # (query tokens, context tokens) of each row
TURNS = 9


def layer(backend: AttentionBackend, step: list[tuple[int, int]]) -> Callable[[], torch.Tensor]:
    """What computes the layer for a step, over a cache of random numbers."""
    layout, tokens = layout_of(step, 16), sum(count for count, _ in step)
    spec = LayerCache(CacheGroup("full", 16), 1, DIM, value_dim=VALUES)
    shape = backend.cache_shape(spec, int(layout.block_table.max()) + 1)
    cache, q, k = (torch.randn(size).bfloat16() for size in (shape, (tokens, HEADS, DIM), (tokens, 1, DIM)))
    cache[0] = 0
    plan, options = backend.plan(layout), AttentionOptions(scale=192**-0.5)
    return lambda: backend.run(q, k, k[..., :VALUES], cache, plan, options)


def milliseconds(run: Callable[[], torch.Tensor]) -> float:
    start = time.thread_time()
    run()
    return (time.thread_time() - start) * 1e3


def main() -> None:
    torch.set_num_threads(1)
    for step in STEPS:
        runs = [layer(backend, step) for backend in (CpuNativeAttention(), CpuAttention())]
        for run in runs:
            run()
        times = [[milliseconds(run) for run in runs] for _ in range(TURNS)]
        native, other = (statistics.median(each) for each in zip(*times, strict=True))
        ratio = statistics.median(b / a for a, b in times)
        (tokens, context), rows = step[0], len(step)
        print(f"{rows} x {tokens} in {context}: cpu_native {native:.2f} ms, cpu {other:.2f} ms, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()

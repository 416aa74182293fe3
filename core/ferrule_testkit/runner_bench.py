"""Seconds per step of the runner alone: `python -m ferrule_testkit.runner_bench FOLDER [--rows 1,16] [--context 256]`.

Prints one line per batch size, for a decode step of rows that have `context` tokens each, and one for a prefill.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

from ferrule.config import Config, LoadConfig, ModelConfig, PluginConfig, SchedulerConfig
from ferrule.env import calm_threads, read
from ferrule.interfaces.executor import Executor
from ferrule.plugin import discover
from ferrule.types import Admit, Chunk, ModelInfo, StepPlan, TokenSampling


@dataclass
class Bench:
    """Drives an executor by hand. Each row has its own blocks; sampled tokens feed the next step."""

    executor: Executor
    info: ModelInfo
    sampling: TokenSampling
    step: int = 0

    def blocks(self, row: int, tokens: int) -> tuple[tuple[int, ...], ...]:
        """One group after the other, in a row's own range of ids."""
        size = self.info.groups[0].block_size
        each = -(-tokens // size)
        first = 1 + row * each * len(self.info.groups)
        return tuple(tuple(range(first + g * each, first + (g + 1) * each)) for g in range(len(self.info.groups)))

    def run(self, chunks: list[Chunk], admits: list[Admit]) -> None:
        self.step += 1
        self.executor.submit(StepPlan(self.step, tuple(chunks), tuple(admits))).result()

    def start(self, rows: int, context: int, spare: int) -> float:
        """Prefill all rows, one per step; seconds for the last."""
        prompt = tuple(range(3, 3 + context)) if self.info.vocab_size > context + 3 else (3,) * context
        took = 0.0
        for row in range(rows):
            admit = Admit(row, str(row), 0, prompt, context, replace_seed(self.sampling, row))
            chunk = Chunk(row, str(row), 0, 0, context, True, (), self.blocks(row, context + spare))
            took = timed(lambda chunk=chunk, admit=admit: self.run([chunk], [admit]))  # type: ignore[misc]
        return took

    def decode(self, rows: int, context: int, steps: int) -> float:
        """Median seconds of a decode step."""
        times = []
        for n in range(steps):
            chunks = [Chunk(row, str(row), 0, context + n, 1, True) for row in range(rows)]
            times.append(timed(lambda chunks=chunks: self.run(chunks, [])))  # type: ignore[misc]
        return sorted(times)[len(times) // 2]

    def release(self, rows: int) -> None:
        self.step += 1
        self.executor.submit(StepPlan(self.step, (), releases=tuple(range(rows)))).result()


def replace_seed(sampling: TokenSampling, seed: int) -> TokenSampling:
    from msgspec.structs import replace as changed

    return changed(sampling, seed=seed)


def timed(function: Callable[[], None]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    options = parser.parse_args()
    batches = [int(rows) for rows in options.rows.split(",")]
    env = read()
    config = Config(
        model=ModelConfig(model=options.folder, dtype=options.dtype, max_model_len=options.context + options.steps + 1),
        load=LoadConfig(load_format=options.load_format, use_tqdm_on_load=False),
        scheduler=SchedulerConfig(max_num_seqs=max(batches)),
        env=env,
    )
    calm_threads()
    from ferrule.execution.uni import UniExecutor

    executor = UniExecutor()
    info = executor.start(config, discover(PluginConfig(), env))
    executor.init_cache(info.max_blocks)
    sampling = TokenSampling(seed=0, max_tokens=1, temperature=options.temperature, top_p=options.top_p)
    bench = Bench(executor, info, sampling)
    print(f"{info.architecture} {info.dtype} {info.num_parameters / 1e6:.1f}M parameters, attention {info.attention}")
    for rows in batches:
        prefill = bench.start(rows, options.context, options.steps)
        decode = bench.decode(rows, options.context, options.steps)
        bench.release(rows)
        print(
            f"rows {rows:4d}  prefill {options.context / prefill:9.1f} tok/s  "
            f"decode step {decode * 1e3:8.2f} ms  {rows / decode:9.1f} tok/s"
        )
    executor.shutdown()


if __name__ == "__main__":
    main()

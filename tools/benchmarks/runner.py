"""Seconds per step of the runner alone: `python -m tools.benchmarks.runner MODEL [--rows 1,16] [--context 256]`.

Prints one line per batch size, for a decode step of rows that have `context` tokens each, and one for a prefill. With
``--beside 64`` also for steps in which so many tokens of a prompt are computed beside the rows that decode. With
``--profile`` also where the time of both goes, in steps that are not recorded: the clocks themselves add about 2 % to a
step of one row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ferrule.config import CacheConfig, Config, LoadConfig, ModelConfig, SchedulerConfig
from ferrule.config.resolve import resolve
from ferrule.env import before_libraries, read
from ferrule.interfaces.executor import Executor
from ferrule.interfaces.plugins import Plugins
from ferrule.locate.localise import localise
from ferrule.plugin import discover
from ferrule.types import Admit, Chunk, ModelInfo, StepPlan, TokenSampling


@dataclass
class Bench:
    """A driver of an executor. Each row has its own blocks; sampled tokens feed the next step."""

    executor: Executor
    info: ModelInfo
    sampling: TokenSampling
    step: int = 0

    def blocks(self, row: int, tokens: int) -> tuple[tuple[int, ...], ...]:
        """Return block ids of one paged group after the other, in a row's own range."""
        groups = sum(group.paged for group in self.info.groups)
        each = -(-tokens // self.info.groups[0].block_size)
        first = 1 + row * each * groups
        return tuple(tuple(range(first + g * each, first + (g + 1) * each)) for g in range(groups))

    def run(self, chunks: list[Chunk], admits: list[Admit]) -> None:
        self.step += 1
        self.executor.submit(StepPlan(step=self.step, chunks=tuple(chunks), admits=tuple(admits))).result()

    def start(self, rows: int, context: int, spare: int) -> float:
        """Prefill all rows, one per step; return the seconds of the last step."""
        prompt = tuple(range(3, 3 + context)) if self.info.vocab_size > context + 3 else (3,) * context
        took = 0.0
        for row in range(rows):
            admit = Admit(
                slot=row,
                id=str(row),
                epoch=0,
                known_ids=prompt,
                num_prompt=context,
                work=replace_seed(self.sampling, row),
            )
            chunk = Chunk(
                slot=row,
                id=str(row),
                epoch=0,
                start=0,
                count=context,
                ends="sample",
                new_blocks=self.blocks(row, context + spare),
            )
            took = timed(lambda chunk=chunk, admit=admit: self.run([chunk], [admit]))  # type: ignore[misc]
        return took

    def decode(self, rows: int, context: int, steps: int) -> float:
        """Return the median seconds of a decode step."""
        times = []
        for n in range(steps):
            chunks = [
                Chunk(slot=row, id=str(row), epoch=0, start=context + n, count=1, ends="sample") for row in range(rows)
            ]
            times.append(timed(lambda chunks=chunks: self.run(chunks, [])))  # type: ignore[misc]
        return sorted(times)[len(times) // 2]

    def mixed(self, rows: int, context: int, beside: int, spare: int) -> float:
        """Return the median seconds of a step in which the rows decode and one more computes `beside` tokens of its
        prompt.

        Runs at most 8 steps, and no more than the prompt has pieces; the prompt is no longer than context + spare.
        """
        times, steps = [], max(1, min(8, spare, (context + spare - 1) // beside))
        prompt = (3,) * (beside * steps + 1)
        admits = [Admit(slot=rows, id="prompt", epoch=0, known_ids=prompt, num_prompt=len(prompt), work=self.sampling)]
        for n in range(steps):
            blocks = () if n else self.blocks(rows, context + spare)
            chunks = [
                Chunk(slot=row, id=str(row), epoch=0, start=context + n, count=1, ends="sample") for row in range(rows)
            ]
            chunks.append(
                Chunk(
                    slot=rows,
                    id="prompt",
                    epoch=0,
                    start=n * beside,
                    count=beside,
                    ends="",
                    new_blocks=blocks,
                )
            )
            times.append(timed(lambda c=chunks, a=[] if n else admits: self.run(c, a)))  # type: ignore[misc]
        self.release(range(rows, rows + 1))
        return sorted(times)[len(times) // 2]

    def release(self, rows: range) -> None:
        self.step += 1
        self.executor.submit(StepPlan(step=self.step, chunks=(), releases=tuple(rows))).result()


def replace_seed(sampling: TokenSampling, seed: int) -> TokenSampling:
    from msgspec.structs import replace as changed

    return changed(sampling, seed=seed)


def timed(function: Callable[[], None]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


@dataclass
class Clock:
    """A sum of the seconds inside of some functions, and of their calls."""

    seconds: float = 0.0
    calls: int = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began
                self.calls += 1

        return timed


PARTS = ("matmul", "attention", "norms, rope, activation", "sampling", "host")


@contextmanager
def clocks(parts: dict[str, list[tuple[type, str]]]) -> Iterator[dict[str, Clock]]:
    """Time methods of classes, by part, for as long as the context lasts."""
    found = {part: Clock() for part in parts}
    before = [(owner, name, getattr(owner, name)) for methods in parts.values() for owner, name in methods]
    for part, methods in parts.items():
        for owner, name in methods:
            setattr(owner, name, found[part].around(getattr(owner, name)))
    try:
        yield found
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def methods(info: ModelInfo, config: Config, plugins: Plugins) -> dict[str, list[tuple[type, str]]]:
    """Return the methods that are timed for each part; `step` is all of it."""
    import ferrule_nn
    from ferrule.execution.worker import Worker
    from ferrule_kernels.cpu import elementwise

    return {
        "step": [(Worker, "execute")],
        "matmul": [(ferrule_nn.Linear, "forward")],  # which a head calls too
        "attention": [(plugins.load("attention", info.attention), "run")],
        "norms, rope, activation": [
            *((elementwise.RMSNorm, name) for name in ("__call__", "after")),
            *((kernel, "__call__") for kernel in (elementwise.Heads, elementwise.Gate)),
        ],
        "sampling": [(plugins.load("sampler", config.model.sampler), "sample")],
    }


def table(found: dict[str, Clock], steps: int) -> str:
    """Format one line per part: milliseconds of a step, share, calls. Time that no clock counted is the host's."""
    whole = found["step"].seconds
    seen = {part: clock for part, clock in found.items() if part != "step"}
    seen["host"] = Clock(whole - sum(clock.seconds for clock in seen.values()), steps)
    lines = []
    for part, clock in ((part, seen[part]) for part in PARTS):
        each, share = clock.seconds / steps * 1e3, clock.seconds / whole
        lines.append(f"  {part:<24}{each:9.3f} ms {share:7.1%} {clock.calls // steps:6d} calls")
    return "\n".join(lines)


def _config(options: argparse.Namespace, most: int) -> Config:
    return Config(
        model=ModelConfig(
            model=options.model,
            dtype=options.dtype,
            max_model_len=options.context + options.steps + 1,
            quantization=options.quantization,
            enforce_eager=options.profile or options.enforce_eager,
        ),
        cache=CacheConfig(kv_cache_dtype=options.kv_cache_dtype),
        load=LoadConfig(load_format=options.load_format, use_tqdm_on_load=False),
        scheduler=SchedulerConfig(max_num_seqs=most),
        env=read(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder or a GGUF file")
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--beside", default="", help="tokens of a prompt in a step, such as 32,64")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--enforce-eager", action="store_true", help="launch steps as they are, as --profile does")
    options = parser.parse_args()
    batches = [int(rows) for rows in options.rows.split(",")]
    config = _config(options, max(batches) + 1)
    before_libraries()
    plugins = discover()
    executor = plugins.load("executor", "uni")()
    info = executor.start(localise(resolve(config), plugins), plugins)
    executor.init_cache(info.max_blocks)
    sampling = TokenSampling(seed=0, max_tokens=1, temperature=options.temperature, top_p=options.top_p)
    bench = Bench(executor, info, sampling)
    kind = info.quantization or info.dtype
    print(f"{info.architecture} {kind} {info.num_parameters / 1e6:.1f}M parameters, attention {info.attention}")
    for rows in batches:
        bench.start(rows, options.context, options.steps)  # the first one gets its memory from the system
        bench.release(range(rows))
        prefill = bench.start(rows, options.context, options.steps)
        decode = bench.decode(rows, options.context, options.steps)
        print(
            f"rows {rows:4d}  prefill {options.context / prefill:9.1f} tok/s  "
            f"decode step {decode * 1e3:8.2f} ms  {rows / decode:9.1f} tok/s"
        )
        for beside in filter(None, options.beside.split(",")):
            took = bench.mixed(rows, options.context, int(beside), options.steps)
            print(f"           beside {beside:>5} tokens of a prompt {took * 1e3:8.2f} ms  {took / decode:5.2f} x")
        if options.profile:
            with clocks(methods(info, config, plugins)) as found:
                bench.decode(rows, options.context, options.steps)
            print(table(found, options.steps))
            bench.release(range(rows))
            with clocks(methods(info, config, plugins)) as found:
                bench.start(rows, options.context, options.steps)
            print(" prefill\n" + table(found, rows))
        bench.release(range(rows))
    executor.shutdown()


if __name__ == "__main__":
    main()

"""A step of Ferrule and of another program, in turns: what the comparisons with llama.cpp, vLLM and others share.

Both compute steps of so many streams without HTTP; Ferrule's also sample. The other program runs in a process of its
own, in an environment of its own. With one thread the processor's seconds are counted, so that other work on the
machine matters little. With several threads, and for prompts, wall-clock time is: threads that wait for each other may
spin.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

import torch

from ferrule.config import Config, LoadConfig, ModelConfig, SchedulerConfig
from ferrule.config.resolve import resolve
from ferrule.env import read
from ferrule.locate.localise import localise
from ferrule.plugin import discover
from ferrule.types import TokenSampling
from tools.benchmarks.runner import Bench


def arguments(description: str | None, kind: str, given: Sequence[str] | None) -> argparse.Namespace:
    """The options of such a comparison; `models` are its positional arguments, of that `kind`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar=kind)
    parser.add_argument("--python", required=True, help="of an environment with the other program")
    parser.add_argument("--streams", default="1,16")
    parser.add_argument("--context", type=int, default=128, help="tokens that each stream begins with")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1, help="of each of the two")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args(given)


def compare(given: argparse.Namespace, other: str, name: str, quantization: str | None = None) -> None:
    """Print, for each model and number of streams, tokens per second and the median of the rounds' ratios.

    `other` is a program for Python: its arguments are the model, the most streams, the tokens that each may have, and
    the threads. It prints "ready", reads lines "streams context steps", and answers each with the seconds of all steps
    and, if it computed them just then, those of the last stream's context.
    """
    torch.set_num_threads(given.threads)
    clock = time.process_time if given.threads == 1 else time.perf_counter
    streams = [int(each) for each in given.streams.split(",")]
    room = given.context + given.steps + 16
    print(f"threads: {given.threads}, {given.context} tokens of context; Ferrule and {name}, tokens/s")
    for model in given.models:
        command = [given.python, "-c", other, model, str(max(streams)), str(room), str(given.threads)]
        with (
            opened(model, max(streams), room, quantization) as ours,
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as theirs,
        ):
            asked, told = _pipes(theirs)
            _answer(told, name)
            for count in streams:
                pairs, prompts = [], []
                for _ in range(given.rounds):
                    prompt = ours.start(count, given.context, given.steps + 1)
                    start = clock()
                    ours.decode(count, given.context, given.steps)
                    seconds = clock() - start
                    ours.release(range(count))
                    asked.write(f"{count} {given.context} {given.steps}\n")
                    asked.flush()
                    answer, *other_prompt = map(float, _answer(told, name).split())
                    pairs.append((count * given.steps / seconds, count * given.steps / answer))
                    prompts += [(given.context / prompt, given.context / each) for each in other_prompt]
                print(f"{model}, {count} streams: {_summary(pairs)}", flush=True)
            if prompts:
                print(f"{model}, a prompt: {_summary(prompts)}", flush=True)
            asked.close()


def _summary(pairs: Sequence[tuple[float, float]]) -> str:
    first, second = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratios = sorted(a / b for a, b in pairs)
    return f"{first:.1f}, {second:.1f}; ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


@contextmanager
def opened(model: str, streams: int, room: int, quantization: str | None = None) -> Iterator[Bench]:
    """Ferrule with a cache for so many streams of `room` tokens."""
    config = Config(
        model=ModelConfig(model=model, max_model_len=room, quantization=quantization),
        load=LoadConfig(use_tqdm_on_load=False),
        scheduler=SchedulerConfig(max_num_seqs=streams + 1),
        env=read(),
    )
    plugins = discover()
    executor = plugins.load("executor", "uni")()
    try:
        info = executor.start(localise(resolve(config), plugins), plugins)
        executor.init_cache(min(info.max_blocks, 2 + (streams + 1) * -(-room // info.groups[0].block_size)))
        yield Bench(executor, info, TokenSampling(seed=0, max_tokens=1))
    finally:
        executor.shutdown()


def _answer(told: IO[str], name: str) -> str:
    """The next line. Raises RuntimeError where the process has ended; its own message is on stderr."""
    line = told.readline()
    if not line:
        raise RuntimeError(f"{name}'s process has ended: it may not take this model")
    return line


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process has no pipes")
    return process.stdin, process.stdout

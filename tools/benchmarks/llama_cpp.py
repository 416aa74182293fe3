"""GGUF files: decoding by Ferrule and by llama.cpp, in turns, of the same file.

    python -m tools.benchmarks.llama_cpp --python VENV/bin/python Q4_0.gguf Q8_0.gguf --streams 1,16

VENV is an environment with llama-cpp-python. Both compute steps of so many streams with random tokens, without HTTP;
Ferrule's also sample. llama.cpp runs in a process of its own, with a cache for each stream. Both have one thread, and
what is counted is the processor's seconds, so that other work on the machine matters little. Prints tokens per second,
medians of the rounds, and the median of the rounds' ratios.
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
from ferrule.env import before_libraries, read
from ferrule.launch.localise import localise
from ferrule.plugin import discover
from ferrule.types import TokenSampling
from tools.benchmarks.runner import Bench

# Reads lines "streams context steps" and answers each with the seconds of all steps.
_OTHER = """
import ctypes, sys, time
import llama_cpp as api

file, most, context = sys.argv[1], *map(int, sys.argv[2:])
quiet = api.llama_log_callback(lambda *_: None)
api.llama_log_set(quiet, ctypes.c_void_p(0))
api.llama_backend_init()
model = api.llama_model_load_from_file(file.encode(), api.llama_model_default_params())
options = api.llama_context_default_params()
options.n_ctx, options.n_seq_max, options.n_batch, options.n_ubatch = most * context, most, 2048, 512
options.n_threads = options.n_threads_batch = 1
options.kv_unified = False
state = api.llama_init_from_model(model, options)
batch = api.llama_batch_init(2048, 0, 1)

def decode(rows):
    for i, (token, position, stream, wanted) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
        batch.seq_id[i][0] = stream
    batch.n_tokens = len(rows)
    if api.llama_decode(state, batch):
        raise SystemExit("llama.cpp cannot compute the batch")
    api.llama_synchronize(state)

print("ready", flush=True)
for line in sys.stdin:
    streams, begun, steps = map(int, line.split())
    api.llama_memory_clear(api.llama_get_memory(state), True)
    for stream in range(streams):
        decode([(3 + i, i, stream, i == begun - 1) for i in range(begun)])
    start = time.process_time()
    for step in range(steps):
        decode([(3 + (7 * step + stream) % 200, begun + step, stream, True) for stream in range(streams)])
    print(time.process_time() - start, flush=True)
"""


@contextmanager
def opened(file: str, streams: int, room: int) -> Iterator[Bench]:
    """Ferrule with a cache for so many streams of `room` tokens."""
    config = Config(
        model=ModelConfig(model=file, max_model_len=room),
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE.gguf")
    parser.add_argument("--python", required=True, help="of an environment with llama-cpp-python")
    parser.add_argument("--streams", default="1,16")
    parser.add_argument("--context", type=int, default=128, help="tokens that each stream begins with")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    streams = [int(each) for each in given.streams.split(",")]
    room = given.context + given.steps + 16
    print(f"one thread, {given.context} tokens of context; Ferrule and llama.cpp, tokens/s")
    for file in given.files:
        command = [given.python, "-c", _OTHER, file, str(max(streams)), str(room)]
        with (
            opened(file, max(streams), room) as ours,
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as theirs,
        ):
            asked, told = _pipes(theirs)
            _answer(told)
            for count in streams:
                pairs = []
                for _ in range(given.rounds):
                    ours.start(count, given.context, given.steps + 1)
                    start = time.process_time()
                    ours.decode(count, given.context, given.steps)
                    seconds = time.process_time() - start
                    ours.release(range(count))
                    asked.write(f"{count} {given.context} {given.steps}\n")
                    asked.flush()
                    pairs.append(tuple(count * given.steps / each for each in (seconds, float(_answer(told)))))
                first, second = (statistics.median(each) for each in zip(*pairs, strict=True))
                ratios = sorted(a / b for a, b in pairs)
                spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                print(f"{file}, {count} streams: {first:.1f}, {second:.1f}; ratio {spread}", flush=True)
            asked.close()


def _answer(told: IO[str]) -> str:
    """The next line. Raises RuntimeError where the process has ended; its own message is on stderr."""
    line = told.readline()
    if not line:
        raise RuntimeError("llama.cpp's process has ended: it may not take this file")
    return line


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process has no pipes")
    return process.stdin, process.stdout


if __name__ == "__main__":
    before_libraries()
    main()

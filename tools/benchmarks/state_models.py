"""State models on a CPU: prefill and decoding of Ferrule and of transformers, in turns, on one random checkpoint.

    python -m tools.benchmarks.state_models --shape mamba2 --rounds 5
    python -m tools.benchmarks.state_models --shape qwen3_5 --rounds 5 --prefix --prompt 1024

Weights are bfloat16, both have one thread; requests decode in a batch. What is counted is the processor's seconds, so
that other work on the machine matters little. Prints the medians, and the ratio of each round's pair.

With `--prefix`, Ferrule alone: the seconds to a first token without prefix caching, and with it of prompts that have a
beginning in common.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ferrule.config import LoadConfig
from ferrule_testkit.checkpoints import write_tokenizer
from ferrule_testkit.harness import Engine, Harness

# Half a billion parameters each: mamba2-370m as it is published, and Qwen 3.5 0.8B with a smaller vocabulary.
SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "mamba2": {
            "model_type": "mamba2",
            "hidden_size": 1024,
            "num_hidden_layers": 48,
            "num_heads": 32,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 1,
            "vocab_size": 50_288,
            "tie_word_embeddings": True,
        },
        "qwen3_5": {
            "model_type": "qwen3_5_text",
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "intermediate_size": 3584,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "vocab_size": 50_288,
            "tie_word_embeddings": True,
        },
    }
)
Run = Callable[[list[int], int, int], None]  # a prompt, how many requests have it, and how many tokens to generate


def write_checkpoint(model_type: str, sizes: Mapping[str, Any], folder: Path) -> Any:
    """A folder with random weights. Returns transformers' model with them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    return model


def generating(model: Any) -> Run:
    model.generation_config.eos_token_id = None

    def run(ids: list[int], requests: int, count: int) -> None:
        with torch.inference_mode():
            mask = torch.ones(requests, len(ids), dtype=torch.int64)
            model.generate(torch.tensor([ids] * requests), attention_mask=mask, max_new_tokens=count, do_sample=False)

    return run


def seconds(run: Run, ids: list[int], requests: int, count: int) -> float:
    start = time.process_time()
    run(ids, requests, count)
    return time.process_time() - start


def first_tokens(harness: Harness, ids: list[int], number: int) -> dict[str, float]:
    """Seconds to the first token of prompts that begin with `ids`, in the order in which they are asked."""

    def asked(engine: Engine, *tail: int) -> float:
        start = time.process_time()
        engine.run([[*ids, *tail]], max_tokens=1)
        return time.process_time() - start

    tails = [[5 + (each + 7 * number + place) % 280 for place in range(24)] for each in (0, 90, 180)]
    found = {"caching off": asked(harness.engine(num_blocks=512, prefix_caching=False), *tails[0])}
    engine = harness.engine(num_blocks=512)
    found["first"] = asked(engine, *tails[0])
    found["goes on"] = asked(engine, *tails[0], *tails[1])
    found["parts"] = asked(engine, *tails[1])
    found["parts there too"] = asked(engine, *tails[2])
    return found


def show_prefixes(harness: Harness, ids: list[int], rounds: int) -> None:
    first_tokens(harness, ids[:64], 0)
    measured = [first_tokens(harness, ids, number) for number in range(rounds)]
    for name in measured[0]:
        ratios = [each["caching off"] / each[name] for each in measured]
        middle = statistics.median(each[name] for each in measured)
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{name}: {middle:.3f} s; caching off takes {statistics.median(ratios):.2f} times as long {spread}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="mamba2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16], help="how many decode in a batch")
    parser.add_argument("--prefix", action="store_true", help="what prefix caching saves")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ids = torch.randint(5, 290, (args.prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = dict(SHAPES[args.shape])
        transformers = generating(write_checkpoint(sizes.pop("model_type"), sizes, folder))
        load = LoadConfig(use_tqdm_on_load=False)
        with Harness(folder, block_size=16, dtype="bfloat16", load=load) as harness:
            if args.prefix:
                print(f"{args.shape}, one thread, prompts of {args.prompt} tokens and 24 others")
                show_prefixes(harness, ids, args.rounds)
                return
            engine = harness.engine(num_blocks=512, prefix_caching=False)

            def ferrule(ids: list[int], requests: int, count: int) -> None:
                engine.run([ids] * requests, max_tokens=count)

            runs = (ferrule, transformers)
            for run in runs:
                run(ids[:32], 1, 2)
            rates = [[measure(run, ids, args.requests, args.tokens) for run in runs] for _ in range(args.rounds)]
    print(f"{args.shape}, one thread, prompt {args.prompt}, {args.tokens} tokens; tokens/s")
    for place, what in enumerate(("prefill", *(f"decoding {requests}" for requests in args.requests))):
        pairs = [(ours[place], theirs[place]) for ours, theirs in rates]
        ratios = [a / b for a, b in pairs]
        ours, theirs = (statistics.median(each) for each in zip(*pairs, strict=True))
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{what}: ferrule {ours:.1f}, transformers {theirs:.1f}; ratio {spread}")


def measure(run: Run, ids: list[int], batches: list[int], tokens: int) -> list[float]:
    """Tokens per second of prefill, and of decoding by batches of each size."""
    rates = [len(ids) / seconds(run, ids, 1, 1)]
    for requests in batches:
        decoding = seconds(run, ids[:8], requests, 1 + tokens) - seconds(run, ids[:8], requests, 1)
        rates.append(requests * tokens / decoding)
    return rates


if __name__ == "__main__":
    main()

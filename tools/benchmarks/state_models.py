"""State models on a CPU: prefill and decoding of Ferrule and of transformers, in turns, on one random checkpoint.

    python -m tools.benchmarks.state_models --shape mamba2 --rounds 5

Weights are bfloat16, both have one thread; requests decode in a batch. What is counted is the processor's seconds, so
that other work on the machine matters little. Prints the medians, and the ratio of each round's pair.
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
from ferrule_testkit.harness import Harness

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


def write_checkpoint(shape: str, folder: Path) -> Run:
    """A folder with random weights, and transformers' model with them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(SHAPES[shape])
    config = AutoConfig.for_model(values.pop("model_type"), **values, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(folder)
    model.generation_config.eos_token_id = None
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))

    def run(ids: list[int], requests: int, count: int) -> None:
        with torch.inference_mode():
            mask = torch.ones(requests, len(ids), dtype=torch.int64)
            model.generate(torch.tensor([ids] * requests), attention_mask=mask, max_new_tokens=count, do_sample=False)

    return run


def seconds(run: Run, ids: list[int], requests: int, count: int) -> float:
    start = time.process_time()
    run(ids, requests, count)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="mamba2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16], help="how many decode in a batch")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ids = torch.randint(5, 290, (args.prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        transformers = write_checkpoint(args.shape, folder)
        load = LoadConfig(use_tqdm_on_load=False)
        with Harness(folder, block_size=16, dtype="bfloat16", load=load) as harness:
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

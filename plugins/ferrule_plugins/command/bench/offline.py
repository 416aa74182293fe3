"""`ferrule bench latency` and `ferrule bench throughput`: the engine in this process, no server."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ferrule import LLM, SamplingParams
from ferrule.config import Config
from ferrule.config.option import opt
from ferrule.interfaces.plugins import Plugins
from ferrule_plugins.command.bench.figures import random_prompts, report, summary


@dataclass(frozen=True, kw_only=True)
class LatencyBench:
    """One batch, repeated."""

    input_len: int = opt(32, "Prompt tokens.", ge=1)
    output_len: int = opt(128, "Output tokens.", ge=1)
    batch_size: int = opt(8, "Prompts in the batch.", ge=1)
    n: int = opt(1, "Answers per prompt.", ge=1)
    num_iters_warmup: int = opt(2, "Batches that are not counted.", ge=0)
    num_iters: int = opt(5, "Batches that are counted.", ge=1)
    output_json: str | None = opt(None, "File for the figures.")


@dataclass(frozen=True, kw_only=True)
class ThroughputBench:
    """Many prompts at once."""

    input_len: int = opt(128, "Prompt tokens.", ge=1)
    output_len: int = opt(128, "Output tokens.", ge=1)
    prefix_len: int = opt(0, "Tokens at the start that all prompts share.", ge=0)
    num_prompts: int = opt(100, "Prompts.", ge=1)
    n: int = opt(1, "Answers per prompt.", ge=1)
    output_json: str | None = opt(None, "File for the figures.")


def latency(options: LatencyBench, config: Config, plugins: Plugins) -> int:
    """Time batches of equal shape."""
    with LLM.from_config(config, plugins) as llm:
        params = SamplingParams(n=options.n, temperature=1.0, ignore_eos=True, max_tokens=options.output_len)
        seconds = []
        for number in range(options.num_iters_warmup + options.num_iters):
            prompts = random_prompts(options.batch_size, options.input_len, 0, (10, _vocab(llm)), number)
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - start)
    counted = seconds[options.num_iters_warmup :]
    tokens = options.batch_size * options.n * options.output_len
    figures = {"batches": len(counted), **summary("latency", counted)}
    figures["output_throughput"] = round(tokens * len(counted) / sum(counted), 2)
    report("bench latency", figures, options.output_json)
    return 0


def throughput(options: ThroughputBench, config: Config, plugins: Plugins) -> int:
    """Time one large call of `LLM.generate`."""
    with LLM.from_config(config, plugins) as llm:
        params = SamplingParams(n=options.n, temperature=1.0, ignore_eos=True, max_tokens=options.output_len)
        ids = (10, _vocab(llm))
        llm.generate(random_prompts(1, options.input_len, 0, ids, 1), params, use_tqdm=False)
        prompts = random_prompts(options.num_prompts, options.input_len, options.prefix_len, ids, 0)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        duration = time.perf_counter() - start
    generated = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    prompted = sum(len(output.prompt_token_ids) for output in outputs)
    figures = {
        "requests": len(outputs),
        "duration_s": round(duration, 3),
        "request_throughput": round(len(outputs) / duration, 3),
        "output_throughput": round(generated / duration, 2),
        "total_token_throughput": round((generated + prompted) / duration, 2),
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
    }
    report("bench throughput", figures, options.output_json)
    return 0


def _vocab(llm: LLM) -> int:
    return llm.model.vocab_size

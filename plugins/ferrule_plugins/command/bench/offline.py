"""`ferrule bench latency` and `ferrule bench throughput`: the engine in this process, no server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ferrule import LLM, RequestOutput, SamplingParams
from ferrule.config import Config
from ferrule.config.option import opt
from ferrule.interfaces.plugins import Plugins
from ferrule_plugins.command.bench import limits
from ferrule_plugins.command.bench.figures import guess_figures, percentile, random_prompts, report, summary


@dataclass(frozen=True, kw_only=True)
class LatencyBench:
    """Options of the latency benchmark: one batch, repeated."""

    disable_detokenize: bool = opt(False, "Do not convert output tokens to text.")
    input_len: int = opt(32, "Prompt tokens.", ge=1)
    output_len: int = opt(128, "Output tokens.", ge=1)
    batch_size: int = opt(8, "Prompts in the batch.", ge=1)
    n: int = opt(1, "Outputs per prompt.", ge=1)
    num_iters_warmup: int = opt(2, "Warm-up batches, which are not measured.", ge=0)
    num_iters: int = opt(5, "Batches that are measured.", ge=1)
    output_json: str | None = opt(None, "File to which the figures are written, as JSON.")


@dataclass(frozen=True, kw_only=True)
class ThroughputBench:
    """Options of the throughput benchmark: many prompts at once."""

    dataset_name: str = opt("random", "Source of the prompts.", choices=("random",))
    disable_detokenize: bool = opt(False, "Do not convert output tokens to text.")
    input_len: int = opt(128, "Prompt tokens.", ge=1, aliases=("--random-input-len",))
    output_len: int = opt(128, "Output tokens.", ge=1, aliases=("--random-output-len",))
    prefix_len: int = opt(
        0,
        "Length of a prefix that all prompts share, added to the input length.",
        ge=0,
        aliases=("--random-prefix-len",),
    )
    random_range_ratio: float = opt(
        0.0, "Relative spread of prompt lengths: 0.5 means from half to one and a half times the length.", ge=0, le=1
    )
    num_prompts: int = opt(100, "Prompts.", ge=1)
    n: int = opt(1, "Outputs per prompt.", ge=1)
    output_json: str | None = opt(None, "File to which the figures are written, as JSON.")


def latency(options: LatencyBench, config: Config, plugins: Plugins) -> int:
    """Time batches of equal shape, each after one that stops at its first token: what is left is decoding."""
    machine = limits.measure()
    with LLM.from_config(config, plugins) as llm:
        cost = limits.cost_of(config.model.model, llm.model)
        vocab = llm.model.vocab_size

        def seconds(number: int, output_len: int) -> float:
            params = _params(options).model_copy(update={"max_tokens": output_len})
            prompts = random_prompts(options.batch_size, options.input_len, 0, (10, vocab), number)
            start = time.perf_counter()
            found = llm.generate(prompts, params, use_tqdm=False)
            duration = time.perf_counter() - start
            outputs.extend(found if number >= options.num_iters_warmup else ())
            return duration

        count = options.num_iters_warmup + options.num_iters
        outputs: list[RequestOutput] = []  # of the batches that are measured
        first = [seconds(-1 - number, 1) for number in range(count)][options.num_iters_warmup :]
        counted = [seconds(number, options.output_len) for number in range(count)][options.num_iters_warmup :]
    rows = options.batch_size * options.n
    figures = {"batches": len(counted), **summary("latency", counted), **summary("prefill", first)}
    figures["output_throughput"] = round(rows * options.output_len * len(counted) / sum(counted), 2)
    figures.update(_guessed(outputs))
    prefill, steps = percentile(first, 50), options.output_len - 1
    figures.update(limits.computed("prefill", machine, cost, (options.batch_size * options.input_len, rows), prefill))
    if steps and (step := (percentile(counted, 50) - prefill) / steps) > 0:
        figures["decode_step_ms"] = round(step * 1e3, 3)
        context = options.input_len + options.output_len / 2
        figures.update(limits.decode_figures(machine, cost, rows, context, step))
    figures.update(machine.figures)
    renamed = {  # for scripts for the documented `bench latency`; seconds
        "avg_latency": sum(counted) / len(counted),
        "latencies": counted,
        "percentiles": {str(q): percentile(counted, q) for q in (10, 25, 50, 75, 90, 99)},
    }
    report("bench latency", figures, options.output_json, figures | renamed)
    return 0


def throughput(options: ThroughputBench, config: Config, plugins: Plugins) -> int:
    """Time one large call of `LLM.generate`."""
    machine = limits.measure()
    with LLM.from_config(config, plugins) as llm:
        params = _params(options)
        cost = limits.cost_of(config.model.model, llm.model)
        ids = (10, llm.model.vocab_size)
        llm.generate(random_prompts(1, options.input_len, 0, ids, 1), params, use_tqdm=False)
        length, spread = options.prefix_len + options.input_len, options.random_range_ratio
        prompts = random_prompts(options.num_prompts, length, options.prefix_len, ids, 0, spread)
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
        **_guessed(outputs),
    }
    tokens = prompted + generated - figures["cached_tokens"]
    figures.update(limits.computed("compute", machine, cost, (tokens, generated), duration))
    figures.update(machine.figures)
    renamed = {  # for scripts for the documented `bench throughput`
        "elapsed_time": duration,
        "num_requests": len(outputs),
        "total_num_tokens": generated + prompted,
        "requests_per_second": len(outputs) / duration,
        "tokens_per_second": (generated + prompted) / duration,
    }
    report("bench throughput", figures, options.output_json, figures | renamed)
    return 0


def _guessed(outputs: Sequence[RequestOutput]) -> dict[str, float]:
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    counts = [each.spec_token_acceptance_counts for each in metrics if each.spec_token_acceptance_counts]
    accepted = sum(sum(each[1:]) for each in counts)
    return guess_figures(sum(each[0] for each in counts), sum(each.num_draft_tokens for each in metrics), accepted)


def _params(options: LatencyBench | ThroughputBench) -> SamplingParams:
    return SamplingParams(
        n=options.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=options.output_len,
        detokenize=not options.disable_detokenize,
    )

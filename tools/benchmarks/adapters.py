"""What LoRA adapters cost: streams that each have another one beside streams without, in turns.

    python -m tools.benchmarks.adapters                              bfloat16, the shape of Qwen3 0.6B, made-up weights
    python -m tools.benchmarks.adapters --quantization int8 --rank 64 --targets q_proj,v_proj
    python -m tools.benchmarks.adapters --lora-dtype int8 --processor-time    adapters in 8 bits, for a busy machine
    python -m tools.benchmarks.adapters --loading                    tokens' gaps while further adapters are loaded

Steps alone are compared: the time of an answer less that of its first token, with the prompts in the prefix cache. The
streams without adapters run on a server that knows of none, and, in a second row, on the one that has them.

With `--loading`, streams decode while short requests come one after the other, which name an adapter that has not been
used for long and must be read and loaded, or else one that is there. It prints percentiles of the time between two
tokens of a stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ferrule import LLM, AsyncEngineArgs, AsyncLLM, LoRARequest, SamplingParams
from ferrule.env import before_libraries
from tools.benchmarks.gpu_models import SHAPES, Shape
from tools.benchmarks.timed import percentile
from tools.benchmarks.turns import in_turns

SHAPE = "qwen3-0.6b"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HEADING = "| streams | rank | beside | tokens/s without | with | ratio |\n|--:|--:|---|--:|--:|--:|"


def widths(shape: Shape, target: str) -> tuple[int, int]:
    """Return how many values a linear layer reads and writes."""
    c = shape.config
    hidden, inner, size = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    heads, kv = c["num_attention_heads"] * size, c["num_key_value_heads"] * size
    return {
        "q_proj": (hidden, heads),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (heads, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }[target]


def write_adapter(folder: Path, shape: Shape, rank: int, targets: Sequence[str], seed: int) -> None:
    """Write an adapter with random weights, as PEFT does."""
    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(shape.config["num_hidden_layers"]):
        for target in targets:
            block = "mlp" if target in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            name = f"base_model.model.model.layers.{layer}.{block}.{target}"
            reads, writes = widths(shape, target)
            for part, size in (("lora_A", (rank, reads)), ("lora_B", (writes, rank))):
                tensors[f"{name}.{part}.weight"] = (torch.randn(size, generator=draw) * 0.02).to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    text = json.dumps({**config, "target_modules": list(targets), "base_model_name_or_path": "base"})
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")


def requests(folder: Path, options: argparse.Namespace, count: int) -> list[LoRARequest]:
    """Write so many adapters, and return the requests that name them."""
    for number in range(count):
        write_adapter(folder / f"adapter-{number}", SHAPES[SHAPE], options.rank, options.targets, number)
    return [LoRARequest(f"adapter-{n}", n + 1, str(folder / f"adapter-{n}")) for n in range(count)]


def settings(model: Path, options: argparse.Namespace, slots: int, kept: int) -> dict[str, Any]:
    """Return the options of a server with room for the streams, one request more, and so many adapters; 0: none."""
    room = options.context + options.tokens + 32
    same: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "quantization": options.quantization,
        "max_model_len": room,
        "max_num_seqs": options.streams + 1,
        "num_gpu_blocks_override": 2 + (options.streams + 1) * -(-room // 16) * 2,
        "use_tqdm_on_load": False,
        "log_level": "error",
    }
    if slots:
        same |= {"enable_lora": True, "max_loras": slots, "max_cpu_loras": kept, "max_lora_rank": options.rank}
        same["lora_dtype"] = options.lora_dtype
    return same


def rate(llm: LLM, options: argparse.Namespace, adapters: Sequence[LoRARequest | None]) -> Callable[[int], float]:
    """Return a function that measures the tokens of a second, steps alone, of one stream for each of the adapters."""
    prompts: list[list[int]] = [[3 + stream, *range(3, 2 + options.context)] for stream in range(len(adapters))]
    clock = time.process_time if options.processor_time else time.perf_counter

    def seconds(count: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        begun = clock()
        llm.generate(prompts, params, use_tqdm=False, lora_request=list(adapters))
        return clock() - begun

    def measured(number: int) -> float:
        first, tokens = seconds(1), float(len(adapters) * (options.tokens - 1))
        return tokens / (seconds(options.tokens) - first)

    return measured


def compare(options: argparse.Namespace) -> None:
    """Print a row for a server without adapters, and for one with them, that streams with adapters are beside."""
    kind = "" if options.lora_dtype == "auto" else f"{options.lora_dtype} "
    print(f"{SHAPE}, {options.quantization or 'bfloat16'}, {kind}adapters of {', '.join(options.targets)}\n{HEADING}")
    with tempfile.TemporaryDirectory() as work:
        SHAPES[SHAPE].write(Path(work) / "model")
        adapters = requests(Path(work), options, options.streams)
        nothing: list[LoRARequest | None] = [None] * options.streams
        model = Path(work) / "model"
        with (
            LLM(**settings(model, options, 0, 0)) as plain,
            LLM(**settings(model, options, options.streams, options.streams)) as adapted,
        ):
            theirs = rate(adapted, options, adapters)
            for name, ours in (
                ("a server without adapters", rate(plain, options, nothing)),
                ("the same server", rate(adapted, options, nothing)),
            ):
                pairs = in_turns(options.rounds, ours, theirs)
                print(f"| {options.streams} | {options.rank} | {name} | {pairs} |", flush=True)


class Streams:
    """Streams of a server that decode without end, and when each of their tokens came."""

    def __init__(self, llm: AsyncLLM, options: argparse.Namespace, adapters: Sequence[LoRARequest]) -> None:
        self.gaps: list[float] = []
        self._llm = llm
        self._options = options
        self._adapters = adapters
        self._count = 0

    async def ask(self, prompt: list[int], tokens: int, adapter: LoRARequest) -> AsyncIterator[float]:
        """Yield the time of each token of an answer."""
        self._count += 1
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        async for _ in self._llm.generate(prompt, params, f"r{self._count}", lora_request=adapter):
            yield time.perf_counter()

    async def decode(self, number: int) -> None:
        """Keep a stream busy; the first token of an answer is no gap."""
        while True:
            last = 0.0
            prompt = [3 + number, *range(3, 2 + self._options.context)]
            async for now in self.ask(prompt, self._options.tokens, self._adapters[number]):
                if last:
                    self.gaps.append(now - last)
                last = now

    @asynccontextmanager
    async def running(self, count: int) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.decode(number)) for number in range(count)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def loading(options: argparse.Namespace) -> None:
    """Print the gaps of streams while adapters are loaded, and while none are."""
    with tempfile.TemporaryDirectory() as work:
        model, more = Path(work) / "model", 32
        SHAPES[SHAPE].write(model)
        adapters = requests(Path(work), options, options.streams + more)
        args = AsyncEngineArgs(**settings(model, options, options.streams + 2, options.streams + 2))
        llm = AsyncLLM.from_engine_args(args)
        streams = Streams(llm, options, adapters)
        fresh, there = cycle(adapters[options.streams :]), cycle(adapters[:1])
        found: dict[bool, list[list[float]]] = {True: [], False: []}
        try:
            async with streams.running(options.streams):
                await _gaps(streams, there, 5.0, options.every)  # streams have begun, adapters are loaded
                for number in range(options.rounds):
                    for loads in (True, False) if number % 2 else (False, True):
                        one = await _gaps(streams, fresh if loads else there, options.seconds, options.every)
                        found[loads].append(one)
        finally:
            llm.shutdown()
        print(f"{options.streams} streams, rank {options.rank}, an adapter every {options.every} s; milliseconds")
        print("| percentile | without loading | with | ratio |\n|--:|--:|--:|--:|")
        for percent in (50, 99, 100):
            without, with_them = ([percentile(gaps, percent) for gaps in found[loads]] for loads in (False, True))
            pairs = list(zip(without, with_them, strict=True))
            a, b = (sorted(each)[len(each) // 2] * 1e3 for each in zip(*pairs, strict=True))
            ratio = sorted(with_one / alone for alone, with_one in pairs)[len(pairs) // 2]
            print(f"| {percent} | {a:.1f} | {b:.1f} | {ratio:.2f} |")


async def _gaps(streams: Streams, adapters: Iterator[LoRARequest], seconds: float, every: float) -> list[float]:
    """Return the gaps of streams in so many seconds, in which short requests name these adapters."""
    streams.gaps = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        async for _ in streams.ask([5, 6, 7], 1, next(adapters)):
            pass
        await asyncio.sleep(every)
    return streams.gaps


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loading", action="store_true", help="measure gaps while adapters are loaded")
    parser.add_argument("--quantization", help="of the base, such as int8")
    parser.add_argument("--lora-dtype", default="auto", help="of the adapters, such as int8")
    parser.add_argument("--processor-time", action="store_true", help="compare processor time, on a busy machine")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", type=lambda text: text.split(","), default=list(TARGETS))
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--context", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a round with --loading")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two adapters")
    options = parser.parse_args(given)
    if options.loading:
        asyncio.run(loading(options))
    else:
        compare(options)


if __name__ == "__main__":
    before_libraries()
    main()

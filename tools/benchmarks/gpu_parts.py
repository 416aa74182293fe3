"""The parts of the GPU benchmark, each in a process: `python -m tools.benchmarks.gpu_parts ASKED ANSWER`.

ASKED and ANSWER are files of JSON. A part that breaks, or breaks the device, takes nothing along.
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.benchmarks.gpu_models import (
    DRY,
    FULL,
    SHAPES,
    TINY,
    Request,
    Scale,
    Shape,
    batch_seconds,
    decode_seconds,
    prefill_seconds,
    requests,
)

TRANSFORMERS_SECONDS = 240.0  # for its requests; what is finished by then is counted
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})  # categories in a trace
_TEMPERATURE = 0.6

Asked = Mapping[str, Any]


def limits(asked: Asked) -> dict[str, Any]:
    """Measure the limits of the machine."""
    import torch

    from ferrule_kernels.cuda.machine import measure

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return asdict(measure(device, small=asked["dry"]))


def kernels(asked: Asked) -> list[dict[str, Any]]:
    """Measure every kernel against the machine's limits."""
    import torch

    from ferrule_kernels.cuda import KernelsUnavailableError, available
    from ferrule_kernels.cuda.machine import Limits
    from tools.benchmarks.cuda_kernels import run

    reason = available()
    if reason is not None:
        raise KernelsUnavailableError(reason)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return [asdict(result) for result in run((), device, Limits(**asked["limits"]))]


def ferrule(asked: Asked) -> dict[str, Any]:
    """Measure one model in Ferrule: the time of a start, one stream, a long prompt, many requests, the device's idle
    share.

    The weights are random, and made rather than read: the seconds of the start contain both.
    """
    from ferrule import LLM

    shape, scale = _asked(asked)
    with tempfile.TemporaryDirectory() as folder:
        shape.write(Path(folder))
        began = time.monotonic()
        llm = LLM(
            folder,
            dtype="bfloat16",
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=scale.max_len,
            max_num_batched_tokens=scale.prefill,
            use_tqdm_on_load=False,
        )
        with llm:
            constructed = time.monotonic() - began
            found: dict[str, Any] = {
                "startup_seconds": time.time() - asked["began"],
                "construct_seconds": constructed,
                "device": llm.model.device,
                "dtype": llm.model.dtype,
                "attention": llm.model.attention,
                "weight_bytes": llm.model.weight_bytes,
                "cache_blocks": llm.model.max_blocks,
            }
            work = requests(scale, shape.config["vocab_size"])
            _generate(llm, work[:2], most=4)  # kernels are compiled
            found |= _single_stream(llm, shape, scale, asked["limits"])
            found |= _long_prompt(llm, shape, scale, asked["limits"])
            found |= _many(lambda: _generate(llm, work), shape, work, asked["limits"])
            found["idle_share"] = _idle(lambda: _generate(llm, _traced_work(scale, work)))
    return found


def transformers(asked: Asked) -> dict[str, Any]:
    """Measure the same requests in transformers' continuous batching, on random weights of the same shape."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    shape, scale = _asked(asked)
    work = requests(scale, shape.config["vocab_size"])
    config = AutoConfig.for_model(shape.model_type, **shape.config)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    settings = GenerationConfig(do_sample=True, temperature=_TEMPERATURE, eos_token_id=-1, pad_token_id=0)
    tokens = finished = 0
    with model.continuous_batching_context_manager(generation_config=settings) as manager:
        began = time.monotonic()
        for number, request in enumerate(work):
            manager.add_request(request.prompt, request_id=str(number), max_new_tokens=request.out)
        while finished < len(work) and time.monotonic() - began < TRANSFORMERS_SECONDS:
            result = manager.get_result(timeout=1.0)
            if result is not None and result.error:
                raise RuntimeError(result.error)
            if result is not None and result.is_finished():
                finished += 1
                tokens += len(result.generated_tokens)
        took = time.monotonic() - began
    return {"seconds": took, "output_tokens_per_second": tokens / took, "finished": finished, "requests": len(work)}


PARTS: Mapping[str, Callable[[Asked], Any]] = {
    "limits": limits,
    "kernels": kernels,
    "ferrule": ferrule,
    "transformers": transformers,
}


# ------------------------------------------------------------------------------------------ what is measured


def _asked(asked: Asked) -> tuple[Shape, Scale]:
    return (TINY, DRY) if asked["dry"] else (SHAPES[asked["model"]], FULL)


def _generate(llm: Any, work: Sequence[Request], most: int | None = None, temperature: float = _TEMPERATURE) -> float:
    """Return the seconds until all answers are there. Raises RuntimeError for an answer of the wrong length."""
    from ferrule import SamplingParams

    params = [
        SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=most or r.out, detokenize=False)
        for r in work
    ]
    began = time.monotonic()
    outputs = llm.generate([r.prompt for r in work], params, use_tqdm=False)
    took = time.monotonic() - began
    for output, wanted in zip(outputs, params, strict=True):
        if len(output.outputs[0].token_ids) != wanted.max_tokens:
            raise RuntimeError(f"{len(output.outputs[0].token_ids)} tokens came, {wanted.max_tokens} were asked for")
    return took


def _single_stream(llm: Any, shape: Shape, scale: Scale, limits: Asked) -> dict[str, float]:
    """Measure a token's time as the difference of a long and a short answer, over the tokens between."""
    one = [requests(scale, shape.config["vocab_size"], seed=1)[0]]
    one = [Request((one[0].prompt * scale.prompt)[: scale.prompt], 1)]
    times = []
    for _ in range(scale.runs):
        short = _generate(llm, one, most=1, temperature=0.0)
        times.append((_generate(llm, one, most=1 + scale.decode, temperature=0.0) - short) / scale.decode)
    token = statistics.median(times)
    least = decode_seconds(shape, scale.prompt + scale.decode / 2, limits["copy_bytes"])
    return {"decode_token_seconds": token, "decode_limit_seconds": least, "decode_share": least / token}


def _long_prompt(llm: Any, shape: Shape, scale: Scale, limits: Asked) -> dict[str, float]:
    ids = requests(scale, shape.config["vocab_size"], seed=2)
    tokens = [token for request in ids for token in request.prompt]
    prompt = [Request((tokens * scale.prefill)[: scale.prefill], 1)]
    _generate(llm, prompt, temperature=0.0)
    took = statistics.median(_generate(llm, prompt, temperature=0.0) for _ in range(scale.runs))
    least = prefill_seconds(shape, scale.prefill, limits["half_flops"])
    return {"prefill_seconds": took, "prefill_limit_seconds": least, "prefill_share": least / took}


def _many(run: Callable[[], float], shape: Shape, work: Sequence[Request], limits: Asked) -> dict[str, float]:
    took, out = run(), sum(request.out for request in work)
    least = batch_seconds(shape, work, limits["copy_bytes"], limits["half_flops"])
    return {
        "seconds": took,
        "output_tokens": out,
        "output_tokens_per_second": out / took,
        "limit_tokens_per_second": out / least,
        "requests": len(work),
    }


def _traced_work(scale: Scale, work: Sequence[Request]) -> list[Request]:
    count, out = scale.traced
    return [Request(request.prompt[: scale.least], out) for request in work[:count]]


def _idle(run: Callable[[], float]) -> float | None:
    """Return the idle share of the device while `run` decodes; None where nothing runs on a device.

    The device's work is taken from a trace, and the time from a run without one: a trace makes launches several times
    as long.
    """
    import torch

    took = run()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as recorder:
        run()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json.gz")
        recorder.export_chrome_trace(str(file))
        with gzip.open(file) as stream:
            busy = busy_seconds(json.load(stream)["traceEvents"])
    return max(0.0, 1 - busy / took) if busy else None


def busy_seconds(events: Iterable[Mapping[str, Any]]) -> float:
    """Return how long something ran on the device, from a trace's events. Launches that overlap count once."""
    busy = reached = 0.0
    for begin, end in sorted(
        (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in _ON_DEVICE and "dur" in e
    ):
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return busy / 1e6


def main(argv: Sequence[str]) -> int:
    asked = json.loads(Path(argv[0]).read_text())
    Path(argv[1]).write_text(json.dumps(PARTS[asked["part"]](asked)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Every architecture on the GPU says what it says on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule import LLM, SamplingParams
from ferrule.plugin import discover
from ferrule_quantize import QuantizeCommand
from ferrule_testkit.checkpoints import NATIVE

Open = Callable[..., LLM]
Checkpoint = Callable[[str], Path]
THROUGH_TRANSFORMERS = ("qwen3", "gemma2")
LENGTHS = (1, 3, 16, 17, 40, 90, 5, 33)
TOKENS = 20


def _prompts(lengths: tuple[int, ...] = LENGTHS, room: int = 90) -> list[list[int]]:
    """Draw prompts of so many tokens, or of `room` where that is fewer."""
    draw = random.Random(7)
    return [[draw.randrange(5, 300) for _ in range(min(length, room))] for length in lengths]


def _greedy(llm: LLM, prompts: list[list[int]], tokens: int = TOKENS) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def _logprobs(llm: LLM, prompts: list[list[int]]) -> torch.Tensor:
    """Return the logprobs of the prompts' own tokens, the first of each aside."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        entries: Any = output.prompt_logprobs
        found += [entry[token].logprob for token, entry in zip(prompt[1:], entries[1:], strict=True)]
    return torch.tensor(found)


@pytest.mark.parametrize("name", NATIVE)
def test_greedy_tokens_are_the_references(name: str, device: str, checkpoint: Checkpoint, opened: Open) -> None:
    """Get the CPU's tokens in float32, for prompts in pieces beside answers, with preemption."""
    folder = checkpoint(name)
    reference = opened(folder, device="cpu", dtype="float32")
    prompts = _prompts(room=reference.model.max_model_len - TOKENS)
    expected = _greedy(reference, prompts)
    llm = opened(folder, device=device, dtype="float32", max_num_batched_tokens=24, num_gpu_blocks_override=40)
    assert _greedy(llm, prompts) == expected
    assert _greedy(llm, prompts[:1]) == expected[:1]  # alone, and from the prefix cache
    assert _greedy(llm, prompts) == expected


@pytest.mark.parametrize("name", THROUGH_TRANSFORMERS)
def test_models_of_transformers_are_the_same_there(
    name: str, device: str, checkpoint: Checkpoint, opened: Open
) -> None:
    folder, prompts = checkpoint(name), _prompts()
    options = {"dtype": "float32", "model_impl": "transformers"}
    expected = _greedy(opened(folder, device="cpu", **options), prompts)
    assert _greedy(opened(folder, device=device, **options), prompts) == expected


@pytest.mark.parametrize("name", NATIVE)
def test_bfloat16_is_near_the_reference(name: str, device: str, checkpoint: Checkpoint, opened: Open) -> None:
    """Compare distances: logprobs are about as far from float32's as the CPU's are in bfloat16, whose rounding sends
    tokens to other experts, too.
    """
    folder = checkpoint(name)
    reference = opened(folder, device="cpu", dtype="float32")
    prompts = _prompts((40, 90, 33), room=reference.model.max_model_len - 1)
    exact = _logprobs(reference, prompts)
    there, here = (_logprobs(opened(folder, device=at, dtype="bfloat16"), prompts) for at in (device, "cpu"))
    assert float((there - exact).abs().mean()) < 1.5 * float((here - exact).abs().mean()) + 0.01


@pytest.mark.parametrize(("quantization", "times"), [("int8", 2), ("int4", 2), ("fp8", 5)])
def test_quantized_weights_are_about_as_near_as_on_the_cpu(
    quantization: str, times: int, device: str, checkpoint: Checkpoint, opened: Open
) -> None:
    """Compare distances: the CPU multiplies fp8 by activations of 8 bits that are integers, the GPU by those with 3
    bits and exponents.
    """
    folder, prompts = checkpoint("llama"), _prompts((40, 90, 33))
    exact = _logprobs(opened(folder, device="cpu", dtype="float32"), prompts)
    options = {"dtype": "bfloat16", "quantization": quantization}
    there, here = (_logprobs(opened(folder, device=at, **options), prompts) for at in (device, "cpu"))
    assert float((there - exact).abs().mean()) < times * float((here - exact).abs().mean()) + 0.01


def test_files_of_gguf(device: str, checkpoint: Checkpoint, opened: Open, tmp_path: Path) -> None:
    folder, prompts = checkpoint("llama"), _prompts()
    for kind in ("q8_0", "q4_0"):
        file = tmp_path / f"{kind}.gguf"
        assert QuantizeCommand().run([str(folder), "--to", kind, "--output", str(file)], discover()) == 0
        expected = _logprobs(opened(file, device="cpu", dtype="float32"), prompts)
        found = _logprobs(opened(file, device=device, dtype="float32"), prompts)
        assert float((found - expected).abs().mean()) < 0.05  # the CPU's kernel rounds activations to 8 bits


def test_a_cache_of_8_bits(device: str, checkpoint: Checkpoint, opened: Open) -> None:
    folder, prompts = checkpoint("llama"), _prompts((40, 90, 33))
    exact = _logprobs(opened(folder, device="cpu", dtype="float32"), prompts)
    options = {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    there, here = (_logprobs(opened(folder, device=at, **options), prompts) for at in (device, "cpu"))
    assert float((there - exact).abs().mean()) < 2 * float((here - exact).abs().mean()) + 0.01


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt2"])
def test_graphs_change_nothing(name: str, device: str, checkpoint: Checkpoint, opened: Open) -> None:
    folder = checkpoint(name)
    options = {"device": device, "dtype": "float32", "enable_prefix_caching": False}
    eager = opened(folder, enforce_eager=True, **options)
    recorded = opened(folder, enforce_eager=False, cuda_graph_sizes=(1, 4, 8), **options)
    for count in (1, 2, 3, 8):
        prompts = _prompts()[-count:]
        assert _greedy(recorded, prompts) == _greedy(eager, prompts)


def test_a_seed_gives_the_same_tokens_again(device: str, checkpoint: Checkpoint, opened: Open) -> None:
    llm = opened(checkpoint("llama"), device=device, dtype="bfloat16")
    params = [SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=n, max_tokens=16) for n in range(8)]
    prompts = [[5, 6, 7]] * 8
    first = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)] == first
    assert len(set(map(tuple, first))) > 1


@pytest.mark.parametrize("backend", ["triton", "torch_sdpa"])
def test_attention_backends_agree(backend: str, device: str, checkpoint: Checkpoint, opened: Open) -> None:
    if device != "cuda" and backend == "triton":
        pytest.skip("Triton's kernels need a GPU here")
    folder, prompts = checkpoint("llama"), _prompts()
    expected = _greedy(opened(folder, device="cpu", dtype="float32"), prompts)
    llm = opened(folder, device=device, dtype="float32", attention_backend=backend)
    assert llm.model.attention == backend
    assert _greedy(llm, prompts) == expected

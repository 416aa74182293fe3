"""Recorded steps on a CPU: the same bits as launched ones, whatever the rows and their contexts are."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule.config import Config, DeviceConfig, DeviceSettings, ModelConfig
from ferrule.config.resolve import resolve
from ferrule.interfaces.platform import StepInput
from ferrule.interfaces.scheduler import GuessLimits
from ferrule_plugins.platform.cpu import CpuPlatform
from ferrule_plugins.platform.cpu_steps import MOST_ROWS, StepRecorder
from ferrule_testkit.checkpoints import NATIVE, tiny_checkpoint
from ferrule_testkit.harness import Harness, Output


def settings(**sections: Any) -> DeviceSettings:
    """Return the settings that a plugin gets of a configuration with these sections."""
    return DeviceSettings.of(resolve(Config(**sections)))


PROMPTS = [list(range(5, 5 + length)) for length in (3, 30, 17, 16, 1)]


def recorder_of(harness: Harness) -> StepRecorder | None:
    found: StepRecorder | None = harness.executor._worker._worker.model_runner._replays.recorder  # type: ignore[attr-defined]
    return found


def outputs(harness: Harness) -> list[Output]:
    """Run requests that end at different times, so that there are steps of five rows and fewer; twice."""
    engine = harness.engine(max_num_batched_tokens=40)
    found = []
    for _ in range(2):
        for count in (5, 3, 1):
            found += engine.run(PROMPTS[:count], max_tokens=9 + count, logprobs=3)
    return found


def run(folder: Path, **options: Any) -> tuple[list[Any], list[int]]:
    """Return the output, and the numbers of rows that were recorded."""
    with Harness(folder, block_size=16, **options) as harness:
        said = [(output.token_ids, output.logprobs) for output in outputs(harness)]
        recorder = recorder_of(harness)
        return said, sorted(sizes[0] for sizes in recorder._recordings) if recorder is not None else []


def same_bits(recipe: str, folder: Path, **options: Any) -> list[int]:
    tiny_checkpoint(recipe, folder)
    recorded, rows = run(folder, **options)
    launched, none = run(folder, enforce_eager=True, **options)
    assert recorded == launched
    assert none == []
    return rows


def test_steps_with_guesses_are_recorded_too(tmp_path: Path) -> None:
    """Verify guesses of a model that is the same one, and so says all of them itself, and of one that errs."""
    target = tiny_checkpoint("qwen3", tmp_path / "target")
    for draft in (target, tiny_checkpoint("qwen3", tmp_path / "draft", seed=5)):
        said = []
        for eager in (False, True):
            named = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3, "least_certainty": 0}
            with Harness(target, block_size=16, enforce_eager=eager, speculative=named) as harness:
                guesses = GuessLimits(most=3, adaptive=False, lookahead=3)
                engine = harness.engine(guesses=guesses, max_num_batched_tokens=40)
                outputs = [output for _ in range(3) for output in engine.run(PROMPTS[:2], max_tokens=30, logprobs=3)]
                said.append([(output.token_ids, output.logprobs) for output in outputs])
                recorder = recorder_of(harness)
                if recorder is not None:
                    tokens_and_rows = {(sizes[0], sizes[5]) for sizes in recorder._recordings}
                    assert (8, 2) in tokens_and_rows
        assert said[0] == said[1]


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("qwen3", {"dtype": "bfloat16"}),
        ("qwen3", {"dtype": "float32", "quantization": "int4"}),
        ("llama", {"dtype": "bfloat16", "quantization": "int8"}),
        ("gemma2", {"dtype": "float32", "kv_cache_dtype": "fp8"}),
        ("phi3-longrope-beyond", {"dtype": "float32"}),
        ("falcon-rw", {"dtype": "bfloat16"}),
        ("mixtral", {"dtype": "bfloat16"}),
        ("deepseek_v3", {"dtype": "bfloat16", "quantization": "int4"}),
        ("falcon_mamba", {"dtype": "float32"}),
        ("qwen3_next", {"dtype": "bfloat16", "quantization": "int4"}),
    ],
)
def test_a_recorded_step_has_the_bits_of_a_launched_one(recipe: str, options: dict[str, Any], tmp_path: Path) -> None:
    assert same_bits(recipe, tmp_path, **options) == [1, 3, 5]


@pytest.mark.parametrize("recipe", ["qwen3", "falcon_mamba"])  # without states, and with them
def test_a_step_of_one_row_is_recorded_before_a_request_comes(recipe: str, tmp_path: Path) -> None:
    tiny_checkpoint(recipe, tmp_path)
    with Harness(tmp_path, block_size=16) as harness:
        harness.executor.init_cache(8)
        recorder = recorder_of(harness)
        assert recorder is not None
        while not recorder._recordings:
            time.sleep(0.01)
        assert [sizes[0] for sizes in recorder._recordings] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", NATIVE)
def test_every_architecture_is_recorded_or_refused(recipe: str, dtype: str, tmp_path: Path) -> None:
    same_bits(recipe, tmp_path, dtype=dtype)


def test_a_model_that_reads_values_is_launched_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Launch experts of float32, which are chosen in Python: torch multiplies by one after the other."""
    caplog.set_level("INFO")
    assert same_bits("mixtral", tmp_path, dtype="float32") == []
    said = [record for record in caplog.records if "are not recorded" in record.getMessage()]
    assert len(said) == 1


def test_longer_contexts_are_launched_as_they_are(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path)
    said, rows = run(tmp_path, dtype="float32", max_seq_len_to_capture=16)
    assert said == run(tmp_path, dtype="float32", enforce_eager=True)[0]
    assert rows == [1]  # the short prompt alone


# ------------------------------------------------------------------------------------------ the recorder alone


def steps(*rows: int) -> list[list[StepInput]]:
    return [[StepInput(torch.arange(count).float() + number, 0)] for number, count in enumerate(rows)]


def test_the_second_step_of_as_many_rows_is_recorded() -> None:
    recorder, seen = StepRecorder(100), []

    def compute(inputs: list[torch.Tensor]) -> torch.Tensor:
        seen.append(len(inputs[0]))
        return inputs[0] * 2

    with torch.inference_mode():
        given = steps(2, 2, 3, 2, 3, 2, 3, MOST_ROWS + 1, MOST_ROWS + 1)
        found = [recorder.run(inputs, compute) for inputs in given]
        assert seen == [2, 3]
        assert [each is None for each in found] == [True, False, True, False, False, False, False, True, True]
        last = found[6]
        assert last is not None
        assert torch.equal(last, given[6][0].values * 2)
        recorder.forget()
        assert recorder.run(given[0], compute) is None


@pytest.mark.parametrize("planted", [False, True])
def test_states_are_as_after_one_step(planted: bool) -> None:
    """Restore states: recording computes a step, and the test of a recording computes it again."""
    recorder, state = StepRecorder(100), torch.zeros(2)

    def compute(inputs: list[torch.Tensor]) -> torch.Tensor:
        state.add_(inputs[0])
        if planted:
            state.tolist()
        return state * 1

    def keep() -> Callable[[], None]:
        kept = state.clone()

        def put_back() -> None:
            state.copy_(kept)

        return put_back

    with torch.inference_mode():
        for number, inputs in enumerate(steps(2, 2, 2, 2)):
            given = inputs[0].values
            before = state.clone()
            made = recorder.run_stateful(inputs, compute, keep)
            assert (made is None) == (planted or number == 0)
            assert torch.equal(state, before if made is None else before + given)
            if made is not None:
                assert torch.equal(made, state)


class Plain:
    """Two vectors, as a kernel of somebody else's sees them: nobody is told that it reads one and writes the other."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._at = source.data_ptr(), target.data_ptr(), source.nbytes

    def __call__(self) -> None:
        source, target, size = self._at
        ctypes.memmove(target, source, size)


def test_a_kernel_that_is_not_recorded_is_found() -> None:
    recorder = StepRecorder(100)

    def compute(inputs: list[torch.Tensor]) -> torch.Tensor:
        made = torch.empty_like(inputs[0])
        Plain(inputs[0], made)()
        return made

    with torch.inference_mode():
        assert [recorder.run(inputs, compute) for inputs in steps(2, 2, 2, 2)] == [None] * 4


def test_an_error_of_a_model_is_raised_by_the_step_that_is_launched() -> None:
    recorder, calls = StepRecorder(100), []

    def compute(inputs: list[torch.Tensor]) -> torch.Tensor:
        calls.append(inputs)
        raise ValueError("planted")

    with torch.inference_mode():
        assert [recorder.run(inputs, compute) for inputs in steps(2, 2, 2, 2, 2, 2)] == [None] * 6
    assert len(calls) == 2  # it is tried twice


def test_one_failure_may_be_a_chance() -> None:
    """Try again after one failure, as when a profiler holds frames of the step, and so the tensors in them."""
    recorder, held = StepRecorder(100), []

    def compute(inputs: list[torch.Tensor]) -> torch.Tensor:
        made = inputs[0] + 1
        if not held:
            held.append(made)
        return made * 2

    with torch.inference_mode():
        found = [recorder.run(inputs, compute) is not None for inputs in steps(2, 2, 2, 2, 2)]
    assert found == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("model", "compilation", "recorded"),
    [
        ({}, {}, True),
        ({"enforce_eager": True}, {}, False),
        ({}, {"level": 0}, False),
        ({}, {"use_cudagraph": False}, False),
        ({}, {"level": 3}, True),
    ],
)
def test_options(model: dict[str, Any], compilation: dict[str, Any], recorded: bool) -> None:
    config = settings(model=ModelConfig(**model), device=DeviceConfig(compilation_config=compilation))
    assert (CpuPlatform().execution().recorder(config) is not None) == recorded

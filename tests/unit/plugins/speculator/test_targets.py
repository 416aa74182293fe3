"""Heads beside models of other kinds: outputs stay what they are, and shared parts are packed, tied or quantized."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ferrule.errors import StartupError
from ferrule_testkit.checkpoints import tiny_checkpoint
from ferrule_testkit.harness import Harness
from tests.fakes.heads import INNER_IDS, HeadHarness, eagle3_tensors, eagle_tensors, head_config, write_head

PROMPTS = [list(range(5, 30)), [21, 22, 23], [40], list(range(200, 211))]
TENSORS = {"eagle": eagle_tensors, "eagle3": eagle3_tensors}
TARGETS = {
    "gemma2": {},  # tied and scaled embedding, windows in some layers
    "deepseek_v3": {},  # latent attention
    "lfm2": {},  # states
    "qwen2": {"dtype": "bfloat16", "block_size": 16},  # packed weights, recorded steps
    "llama": {"quantization": "int8", "dtype": "bfloat16", "block_size": 16},
}


def cases() -> Iterator[Any]:
    """Yield pairs of target and method: each once, in `make test-slow` all of them."""
    for number, recipe in enumerate(TARGETS):
        for place, method in enumerate(TENSORS):
            marks = [] if place == number % len(TENSORS) else [pytest.mark.slow]
            yield pytest.param(recipe, method, id=f"{recipe}-{method}", marks=marks)


@pytest.mark.parametrize(("recipe", "method"), list(cases()))
def test_outputs_stay_what_they_are(tmp_path: Path, recipe: str, method: str) -> None:
    model = tiny_checkpoint(recipe, tmp_path / "model")
    head = write_head(tmp_path / "head", head_config(**INNER_IDS), TENSORS[method]())
    options: dict[str, Any] = {"dtype": "float32", **TARGETS[recipe]}
    limits = {"max_num_batched_tokens": 16, "depth": 2}
    with Harness(model, **options) as harness:
        wanted = [output.token_ids for output in harness.engine(**limits).run(PROMPTS, max_tokens=20)]
    with HeadHarness(model, method, 3, options, model=str(head)) as harness:
        found = [output.token_ids for output in harness.engine(**limits).run(PROMPTS, max_tokens=20)]
        assert found == wanted
        assert any(guesses[0] >= 0 for _, guesses in harness.proposed)
        harness.executor.call("check", ())


@pytest.mark.parametrize("method", TENSORS)
def test_a_copy_of_the_embedding_is_not_loaded(tmp_path: Path, tiny_llama: Path, method: str) -> None:
    table = load_file(tiny_llama / "model.safetensors")["model.embed_tokens.weight"]
    sizes, found = [], []
    for number, more in enumerate(({}, {"embed_tokens.weight": table}, {"embed_tokens.weight": table + 1})):
        folder = write_head(tmp_path / str(number), head_config(**INNER_IDS), {**TENSORS[method](), **more})
        with HeadHarness(tiny_llama, method, 3, model=str(folder)) as harness:
            harness.engine().run(PROMPTS, max_tokens=8)
            sizes.append(harness.info.weight_bytes)
            found.append(sorted(harness.proposed))
    assert sizes[1] == sizes[0] == sizes[2] - table.nbytes
    assert found[1] == found[0] != found[2]


def test_a_model_that_gives_no_inner_states(tmp_path: Path) -> None:
    model = tiny_checkpoint("opt", tmp_path / "model")
    head = write_head(tmp_path / "head", head_config(**INNER_IDS), eagle3_tensors())
    with pytest.raises(StartupError, match="does not give hidden states from between its layers"):
        HeadHarness(model, "eagle3", 3, model=str(head))


def test_a_model_of_other_layers(tmp_path: Path, tiny_llama: Path) -> None:
    """Refuse a head without an embedding of its own beside a model whose embedding cannot be called."""
    head = write_head(tmp_path / "head", head_config(), eagle_tensors())
    with pytest.raises(StartupError, match="cannot use its embedding"):
        HeadHarness(tiny_llama, "eagle", 3, {"model_impl": "transformers"}, model=str(head))


def test_inner_states_come_behind_the_usual_ones(tiny_llama: Path) -> None:
    """Compare a decoder's states with those of transformers."""
    from tests.fakes.heads import Reference

    reference, seen = Reference(tiny_llama), []
    ids = PROMPTS[0]
    with Harness(tiny_llama, dtype="float32") as harness:
        model = harness.executor._worker._worker.model_runner.model  # type: ignore[attr-defined]
        model.tell_inner((1, 0))
        forward = model.forward
        model.forward = lambda *given: seen.append(forward(*given)) or seen[-1]
        harness.engine().run([ids], max_tokens=1)
    torch.testing.assert_close(seen[-1][:, :64], reference.hidden(ids), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(seen[-1][:, 64:], reference.hidden(ids, (1, 0)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("level", [1, 2])
def test_heads_sleep_and_wake_with_their_model(tmp_path: Path, tiny_llama: Path, level: int) -> None:
    folder = write_head(tmp_path / "head", head_config(**INNER_IDS), eagle3_tensors())
    with HeadHarness(tiny_llama, "eagle3", 3, model=str(folder)) as harness:
        found = []
        for asleep in (False, True):
            engine = harness.engine()
            if asleep:
                harness.executor.call("release", (("weights", "kv_cache"), level))
                for part in ("weights", "kv_cache"):
                    harness.executor.call("restore", (part,))
                harness.proposed.clear()
            texts = [output.token_ids for output in engine.run(PROMPTS, max_tokens=12)]
            found.append((texts, sorted(harness.proposed)))
    assert found[0] == found[1]

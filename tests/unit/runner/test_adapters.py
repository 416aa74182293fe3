"""Rows of different adapters in one step, and of none: each as with weights that the adapter is a part of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule.config import WorkerSettings
from ferrule.execution import WorkerThread, open_worker
from ferrule.interfaces.plugins import Plugins
from ferrule.types import FinishReason, ModelInfo
from ferrule_nn import Linear
from ferrule_plugins.executor.uni import UniExecutor
from ferrule_testkit.checkpoints import tiny_checkpoint
from ferrule_testkit.harness import Harness, Output
from tests.fakes.adapters import FakeBank, vectors

PROMPTS = [list(range(5, 5 + length)) for length in (3, 30, 17)]
ADAPTERS = ["one", None, "two"]


class WithBank(UniExecutor):
    """A worker whose model has a bank."""

    def __init__(self, bank: FakeBank) -> None:
        super().__init__()
        self._bank = bank

    def start(self, config: WorkerSettings, plugins: Plugins) -> ModelInfo:
        self._worker = WorkerThread(open_worker(config, plugins, self._bank))
        return self._worker.start()


def runner_of(harness: Harness) -> Any:
    return harness.executor._worker._worker.model_runner  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def harness(llama: Path) -> Iterator[Harness]:
    with Harness(llama, block_size=16, dtype="float32", executor=WithBank(FakeBank(2))) as opened:
        yield opened


def merged(folder: Path, adapter: str | None) -> list[Output]:
    """Return the outputs of a model whose weights contain the adapter, through an empty bank."""
    with Harness(folder, dtype="float32", enforce_eager=True) as opened:
        model, plain = runner_of(opened).model, dict[str, Any]()
        if adapter is not None:
            for name, layer in model.named_modules():
                if isinstance(layer, Linear) and layer.of_tokens:
                    inputs, outputs = vectors(adapter, name, layer.in_features, layer.out_features)
                    plain[name] = torch.outer(outputs, inputs)
                    layer.register_forward_hook(lambda layer, x, y, by=plain[name]: y + x[0] @ by.T)
        return opened.engine().run(PROMPTS, max_tokens=8)


def said(outputs: Iterable[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_rows_of_different_adapters_share_steps(harness: Harness, llama: Path) -> None:
    assert harness.info.adapter_slots == 2
    found = harness.engine(max_num_batched_tokens=16).run(PROMPTS, max_tokens=8, adapters=ADAPTERS)
    alone = {adapter: merged(llama, adapter) for adapter in ADAPTERS}
    assert said(found) == [said(alone[adapter])[number] for number, adapter in enumerate(ADAPTERS)]
    assert len({tuple(outputs[0].token_ids) for outputs in alone.values()}) == 3  # the adapters have an effect
    for number, adapter in enumerate(ADAPTERS):
        wanted = [each.logprob for each in alone[adapter][number].logprobs]
        assert [each.logprob for each in found[number].logprobs] == pytest.approx(wanted, abs=1e-4)


def test_recorded_steps_stay_valid_when_another_adapter_is_loaded(harness: Harness, llama: Path) -> None:
    engine = harness.engine(max_num_batched_tokens=64)
    first = engine.run(PROMPTS, max_tokens=12, adapters=ADAPTERS)
    recordings = dict(runner_of(harness)._replays.recorder._recordings)
    (three,) = (sizes for sizes in recordings if sizes[0] == 3)
    second = engine.run(PROMPTS, max_tokens=12, adapters=["three", None, "two"])
    again = engine.run(PROMPTS, max_tokens=12, adapters=[None, "two", "one"])
    assert runner_of(harness)._replays.recorder._recordings[three] is recordings[three]
    with Harness(llama, block_size=16, dtype="float32", enforce_eager=True, executor=WithBank(FakeBank(2))) as launched:
        engine = launched.engine(max_num_batched_tokens=64)
        for found, adapters in ((first, ADAPTERS), (second, ["three", None, "two"]), (again, [None, "two", "one"])):
            wanted = engine.run(PROMPTS, max_tokens=12, adapters=adapters)
            assert [(each.token_ids, each.logprobs) for each in found] == [
                (each.token_ids, each.logprobs) for each in wanted
            ]
    assert said(second)[0] != said(first)[0]
    assert said(second)[1:] == said(first)[1:]


def test_more_adapters_than_slots_take_turns(harness: Harness) -> None:
    names = ["one", "two", "three", "four", None, "one", "three"]
    prompts = [PROMPTS[0]] * len(names)
    together = said(harness.engine().run(prompts, max_tokens=6, adapters=names))
    alone = [said(harness.engine().run([PROMPTS[0]], max_tokens=6, adapters=[name]))[0] for name in names]
    assert together == alone
    assert len({tuple(ids) for ids in together}) == 5


def test_an_adapter_that_does_not_fit_ends_its_request_and_no_other(harness: Harness) -> None:
    bad, good = harness.engine().run(PROMPTS[:2], max_tokens=4, adapters=["bad", "one"])
    assert (bad.finish, bad.invalid, bad.error) == (FinishReason.ERROR, True, "The adapter bad does not fit the model.")
    assert (good.finish, len(good.token_ids)) == (FinishReason.LENGTH, 4)


def test_blocks_of_one_adapter_are_not_those_of_another(harness: Harness) -> None:
    engine = harness.engine()
    for adapter, cached in (("one", 0), ("two", 0), (None, 0), ("one", 16), ("two", 16), (None, 16)):
        (output,) = engine.run([PROMPTS[1]], max_tokens=2, adapters=[adapter])
        assert output.cached == cached


def test_a_model_without_a_bank_has_nothing_of_adapters(llama: Path) -> None:
    with Harness(llama, dtype="float32") as plain:
        runner = runner_of(plain)
        assert not any(layer._forward_hooks for layer in runner.model.modules())
        assert runner._state.adapters is None
        (output,) = plain.engine().run([PROMPTS[0]], adapters=["one"])
        assert (output.invalid, output.error) == (True, "This server has no adapters.")


def test_layers_whose_rows_are_not_the_tokens_have_none(tmp_path: Path) -> None:
    bank = FakeBank(1)
    folder = tiny_checkpoint("deepseek_v3", tmp_path)
    with Harness(folder, dtype="float32", executor=WithBank(bank)) as opened:
        parts = set(bank.parts)
        (found,) = opened.engine().run([PROMPTS[1]], max_tokens=3, adapters=["one"])
        assert found.finish is FinishReason.LENGTH
    assert any(name.endswith("o_proj") for name in parts)
    assert not any(".experts." in name or name.endswith(("kv_b_proj", "lm_head")) for name in parts)

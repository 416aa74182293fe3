"""Weights in the host's memory while the device's is free. A CPU's storages empty and fill as a GPU's do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule.assembly.memory import device_tensors, weight_tensors
from ferrule.config import Config, LoadConfig, ModelConfig, SchedulerConfig
from ferrule.config.resolve import resolve
from ferrule.env import Environment
from ferrule.errors import EngineDead
from ferrule.execution import worker as worker_module
from ferrule.execution.host_copy import HostCopy
from ferrule.execution.worker import Worker
from ferrule.interfaces.executor import Step
from ferrule.plugin import discover
from ferrule.types import StepPlan, StepResult
from ferrule_testkit.checkpoints import tiny_checkpoint

CPU = torch.device("cpu")


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.randn(8, 4))
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding  # tied
        self.first_rows = self.embedding.detach()[:2]  # a view
        self.register_buffer("table", torch.randn(5))
        self.packed = torch.arange(6.0).reshape(2, 3)
        self.unnamed = torch.ones(2)

    def packed_tensors(self) -> list[torch.Tensor]:
        return [self.packed]


def test_a_models_tensors_are_its_parameters_buffers_and_what_its_parts_name() -> None:
    model: Any = Tiny()
    assert [id(tensor) for tensor in weight_tensors(model)] == [id(model.embedding), id(model.packed)]
    found = [id(tensor) for tensor in device_tensors(model, CPU)]
    assert found == [id(model.embedding), id(model.packed), id(model.table)]  # a tied weight once
    assert device_tensors(model, torch.device("meta")) == []


@torch.inference_mode()
def test_weights_come_back_into_the_same_tensors() -> None:
    model: Any = Tiny()
    x = torch.randn(3, 4)
    before, packed = model.head(x), model.packed.clone()
    copy = HostCopy(device_tensors(model, CPU))
    assert sum(held.nbytes() for _, held in copy._copies) == 4 * (32 + 5 + 6)  # the tied table once
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in device_tensors(model, CPU))
    copy.restore()
    assert torch.equal(model.head(x), before)
    assert torch.equal(model.packed, packed)
    assert torch.equal(model.unnamed, torch.ones(2))  # it stayed where it was
    assert torch.equal(model.first_rows, model.embedding[:2])
    assert model.head.weight is model.embedding
    assert not copy._copies


def test_restoring_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose nothing on a device whose memory somebody else took meanwhile."""
    tensors = [torch.full((4,), float(n)) for n in range(3)]
    copy = HostCopy(tensors)
    resize, calls = torch.UntypedStorage.resize_, []

    def full(storage: torch.UntypedStorage, size: int) -> object:
        calls.append(size)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("full")
        return resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", full)
    with pytest.raises(torch.OutOfMemoryError):
        copy.restore()
    copy.restore()
    assert [tensor.tolist() for tensor in tensors] == [[float(n)] * 4 for n in range(3)]


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """Make a worker whose device is said to have memory of its own. It computes nothing: a CPU's kernels keep
    addresses.
    """
    monkeypatch.setattr(worker_module, "device_tensors", lambda model, device: device_tensors(model, CPU))
    config = resolve(
        Config(
            model=ModelConfig(model=str(tiny_checkpoint("qwen3", tmp_path / "model")), dtype="float32"),
            load=LoadConfig(use_tqdm_on_load=False),
            scheduler=SchedulerConfig(max_num_seqs=2),
            env=Environment(cpu_kvcache_space=0.01),
        )
    )
    worker = Worker(config, discover())
    worker.start()
    worker._own_memory = True
    monkeypatch.setattr(worker, "_warm_up", lambda runner: None)
    worker.init_cache(8)
    return worker


def _numbers(worker: Worker) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in worker.model_runner.model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("level", [1, 2])
def test_a_device_with_its_own_memory_keeps_weights_with_the_host(level: int, worker: Worker) -> None:
    """Wake the same model at level 1, and read nothing; at level 2 it is another one with the same weights."""
    model, before = worker.model_runner.model, [tensor.clone() for tensor in _numbers(worker)]
    worker.release(("weights", "kv_cache"), level)
    left = sum(tensor.untyped_storage().nbytes() for tensor in device_tensors(model, CPU))
    assert (left == 0) == (level == 1)
    with pytest.raises(RuntimeError, match="given back"):
        worker.model_runner.model  # noqa: B018
    worker.restore("weights")
    worker.restore("kv_cache")
    assert (worker.model_runner.model is model) == (level == 1)
    assert all(torch.equal(a, b) for a, b in zip(_numbers(worker), before, strict=True))


def test_deeper_sleep_forgets_the_copy(worker: Worker) -> None:
    model = worker.model_runner.model
    worker.release(("weights",), 1)
    worker.release(("weights",), 1)  # nothing is left to move
    worker.release(("weights",), 2)
    worker.restore("weights")
    assert worker.model_runner.model is not model
    assert all(tensor.untyped_storage().nbytes() for tensor in _numbers(worker) if tensor.numel())


def test_what_fails_while_a_result_is_waited_for_is_advised_on_too(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advise on a failure that shows only when somebody asks for the device's result."""

    class Late(Step):
        def done(self) -> bool:
            return True

        def result(self) -> StepResult:
            raise torch.OutOfMemoryError("CUDA out of memory")

    @contextmanager
    def guard(stage: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise EngineDead(f"a {stage} does not fit") from error

    monkeypatch.setattr(worker.platform.memory(), "guard", guard)
    monkeypatch.setattr(worker.model_runner, "compute", lambda plan: Late())
    step = worker.begin(StepPlan(step=1, chunks=()))
    with pytest.raises(EngineDead, match="a step does not fit"):
        worker.end(step)

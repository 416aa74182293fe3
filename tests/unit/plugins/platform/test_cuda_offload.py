"""Weights that the host keeps. Ordinary memory that torch did not allocate stands in for what a GPU maps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ferrule.assembly.memory import device_tensors
from ferrule.assembly.model import Loaded, load_model
from ferrule.config import CacheConfig, Config, DeviceSettings, LoadConfig, ModelConfig
from ferrule.config.resolve import resolve
from ferrule.errors import ConfigError
from ferrule.execution.host_copy import HostCopy
from ferrule.plugin import discover
from ferrule_plugins.platform import cuda_offload
from ferrule_plugins.platform.cpu import CpuMemory
from ferrule_plugins.platform.cuda import CudaPlatform
from ferrule_plugins.platform.cuda_memory import Reading, TorchDevice
from ferrule_plugins.platform.cuda_offload import HostWeights
from ferrule_testkit.checkpoints import tiny_checkpoint


def settings(**sections: Any) -> DeviceSettings:
    """Return the settings that a plugin gets of a configuration with these sections."""
    return DeviceSettings.of(resolve(Config(**sections)))


CPU = torch.device("cpu")
MIB = 2**20


class Host:
    """Memory of numpy's, which torch can use and not resize."""

    def __init__(self) -> None:
        self.made: list[np.ndarray] = []

    def map(self, size: int) -> torch.Tensor:
        self.made.append(np.zeros(size, np.uint8))
        return torch.from_numpy(self.made[-1])

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in {block.ctypes.data for block in self.made}


class Abacus(TorchDevice):
    """A GPU of which only the size is asked."""

    def name(self) -> str:
        return "Abacus 9"

    def capability(self) -> tuple[int, int]:
        return 9, 0

    def read(self) -> Reading:
        return Reading(80 * 2**30, 80 * 2**30, 0)


class Layers(torch.nn.Module):
    """A small one, and four matrices of 4 MiB, the first of which is also seen transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.ones(1024))
        self.layers = torch.nn.ParameterList([torch.randn(1024, 1024) for _ in range(4)])
        self.turned = self.layers[0].detach().t()

    def packed_tensors(self) -> list[torch.Tensor]:
        return [self.turned]


@pytest.fixture
def host() -> Host:
    return Host()


def _moved(model: torch.nn.Module, host: Host) -> list[bool]:
    return [host.has(tensor) for tensor in model.parameters()]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(0, 0), (4 * MIB - 1, 0), (4 * MIB, 1), (9 * MIB, 2), (100 * MIB, 4)],
)
def test_the_first_that_fit_are_moved(limit: int, expected: int, host: Host) -> None:
    model: Any = Layers()
    held, before = list(model.parameters()), [tensor.clone() for tensor in model.parameters()]
    assert HostWeights(limit, host.map, CPU).move(model) == expected * 4 * MIB
    assert _moved(model, host) == [False] + [True] * expected + [False] * (4 - expected)
    assert all(old is new for old, new in zip(held, model.parameters(), strict=True))
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert torch.equal(model.turned, model.layers[0].t())
    assert host.has(model.turned) == host.has(model.layers[0])


def test_what_is_moved_is_moved_once_and_counted_while_it_is_held(host: Host) -> None:
    model: Any = Layers()
    weights = HostWeights(8 * MIB, host.map, CPU)
    assert weights.move(model) == weights.move(model) == 8 * MIB
    assert len(host.made) == 2
    model.layers[1] = torch.nn.Parameter(torch.zeros(8))  # packed into less
    assert weights.move(model) == 8 * MIB
    assert _moved(model, host) == [False, True, False, True, False]


def test_they_are_moved_while_others_come(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write later tensors where their parameters are by then."""
    monkeypatch.setattr(cuda_offload, "_EVERY", 4 * MIB)
    model: Any = Layers()

    def come() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(4):
            assert len(host.made) == min(2, 4 if number else 0)
            yield f"layers.{number}", torch.full((1024, 1024), float(number))

    for name, tensor in HostWeights(8 * MIB, host.map, CPU).loading(model, come()):
        with torch.no_grad():
            model.get_parameter(name).copy_(tensor)
    assert [int(layer[5, 5]) for layer in model.layers] == [0, 1, 2, 3]
    assert _moved(model, host) == [False, True, True, False, False]


def test_asleep_they_stay_where_they_are(host: Host) -> None:
    model: Any = Layers()
    HostWeights(8 * MIB, host.map, CPU).move(model)
    before = [tensor.clone() for tensor in model.parameters()]
    copy = HostCopy(device_tensors(model, CPU))
    assert [bool(tensor.untyped_storage().nbytes()) for tensor in model.parameters()] == [
        False,
        True,
        True,
        False,
        False,
    ]
    copy.restore()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def _open(folder: Path, **options: Any) -> Loaded:
    config = resolve(
        Config(
            model=ModelConfig(model=str(folder), dtype="float32", **options),
            load=LoadConfig(use_tqdm_on_load=False),
        )
    )
    return load_model(config, discover())


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_model_that_is_loaded_through_it_is_the_same(
    quantization: str | None, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Move weights during loading, at any moment; layers that are packed are moved in their new form."""
    folder = tiny_checkpoint("qwen3", tmp_path / "model")
    plain = _open(folder, quantization=quantization).model
    weights = HostWeights(2**40, host.map, CPU)
    monkeypatch.setattr(cuda_offload, "_EVERY", 1)
    monkeypatch.setattr(cuda_offload, "_LEAST", 1)
    monkeypatch.setattr(CpuMemory, "loading", lambda self, model, source: weights.loading(model, source))
    loaded = _open(folder, quantization=quantization)
    assert host.made
    for model in (loaded.model, loaded.reload()):
        theirs = [tensor for tensor in device_tensors(model, CPU) if tensor.numel()]
        assert all(host.has(tensor) for tensor in theirs)
        ours = [tensor for tensor in device_tensors(plain, CPU) if tensor.numel()]
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_option_decides_and_more_than_the_host_has_is_refused() -> None:
    platform, weights = CudaPlatform(Abacus()), iter(())
    config = settings()
    platform.prepare(config)
    assert platform.memory().loading(object(), weights) is weights  # type: ignore[arg-type]
    platform.prepare(replace(config, cache=CacheConfig(cpu_offload_gb=0.5)))
    assert platform.memory().loading(object(), weights) is not weights  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"--cpu-offload-gb 1e\+06: the host has"):
        platform.prepare(replace(config, cache=CacheConfig(cpu_offload_gb=1e6)))

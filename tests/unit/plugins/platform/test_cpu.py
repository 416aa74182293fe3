"""The CPU platform: what it finds, and what it makes of options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule.config import Config, DeviceConfig, DeviceSettings, ModelConfig, SchedulerConfig
from ferrule.config.resolve import resolve
from ferrule.env import Environment
from ferrule.errors import ConfigError
from ferrule_kernels.cpu import dense
from ferrule_plugins.platform import cpu
from ferrule_plugins.platform.cpu import CpuPlatform, bind, describe, parse_cores, without_effect


def settings(**sections: Any) -> DeviceSettings:
    """Return the settings that a plugin gets of a configuration with these sections."""
    return DeviceSettings.of(resolve(Config(**sections)))


def _platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str) -> CpuPlatform:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nmodel name : Abacus 9\nflags : fpu {flags}\n\n")
    caps = describe(tmp_path, tmp_path)
    monkeypatch.setattr(cpu, "describe", lambda: caps)
    return CpuPlatform()


def test_describes_the_processor(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("model name\t: Abacus 9\nflags\t\t: fpu avx2 avx512_bf16\n")
    (tmp_path / "memory.max").write_text("1048576\n")
    caps = describe(tmp_path, tmp_path)
    assert (caps.platform, caps.name, caps.memory_bytes) == ("cpu", "Abacus 9", 1 << 20)
    assert caps.features == {"avx2", "avx512_bf16", "host_memory"}


def test_a_machine_that_says_nothing_can_still_compute(tmp_path: Path) -> None:
    caps = describe(tmp_path / "none", tmp_path / "none")
    assert caps.features == {"host_memory"}
    assert caps.memory_bytes > 0


@pytest.mark.parametrize(
    ("flags", "requested", "stored", "expected"),
    [
        ("avx512_bf16", "auto", "float32", torch.bfloat16),
        ("avx512_bf16", "auto", "float16", torch.bfloat16),
        ("amx_bf16", "auto", "bfloat16", torch.bfloat16),
        ("neon", "auto", "bfloat16", torch.float32),
        ("neon", "auto", None, torch.float32),
        ("avx512_bf16", "float32", "bfloat16", torch.float32),
        ("avx512_bf16", "float", "bfloat16", torch.float32),
        ("avx2", "half", "float32", torch.float16),
        ("avx2", "bfloat16", "float32", torch.bfloat16),
    ],
)
def test_dtype(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: str,
    requested: str,
    stored: str | None,
    expected: torch.dtype,
) -> None:
    monkeypatch.setattr(dense, "unit", lambda: None)
    assert _platform(monkeypatch, tmp_path, flags).dtype(requested, {"dtype": stored}) == expected


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16", None])
def test_kernels_that_widen_make_bfloat16_the_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stored: str | None
) -> None:
    monkeypatch.setattr(dense, "unit", lambda: "fma")
    assert _platform(monkeypatch, tmp_path, "avx2").dtype("auto", {"dtype": stored}) == torch.bfloat16


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ConfigError, match="float7"):
        CpuPlatform().dtype("float7", {})


def test_cache_bytes_come_from_the_environment() -> None:
    assert CpuPlatform().memory().cache_bytes(settings(env=Environment(cpu_kvcache_space=0.5))) == 1 << 29


def test_a_cache_larger_than_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="GiB of memory"):
        CpuPlatform().memory().cache_bytes(settings(env=Environment(cpu_kvcache_space=1e6)))


@pytest.mark.parametrize(("spec", "cores"), [("0", {0}), ("0-3,8", {0, 1, 2, 3, 8}), ("5,5", {5})])
def test_core_lists(spec: str, cores: set[int]) -> None:
    assert parse_cores(spec) == cores


@pytest.mark.parametrize("spec", ["", "a", "3-1", "1-", "-2", "0-99999999", "1;2"])
def test_wrong_core_lists(spec: str) -> None:
    with pytest.raises(ConfigError):
        parse_cores(spec)


def test_binding_stays_within_what_is_allowed() -> None:
    before = os.sched_getaffinity(0)
    try:
        core = min(before)
        assert bind(str(core)) == 1
        assert os.sched_getaffinity(0) == {core}
        os.sched_setaffinity(0, before)
        assert bind(f"{core}|4000-4003") == 1  # the second list is another worker's
        assert os.sched_getaffinity(0) == {core}
        with pytest.raises(ConfigError, match="must be"):
            bind(f"{core}|")
        with pytest.raises(ConfigError, match="may not use"):
            bind("4000")
    finally:
        os.sched_setaffinity(0, before)
    assert 1 <= bind("auto") <= bind("nobind") == bind("all") <= len(before)


def test_it_never_refuses() -> None:
    assert CpuPlatform.refuses() is None
    assert CpuPlatform().attention_order() == ("cpu_native", "cpu", "torch_sdpa")


def test_options_of_graphs_for_a_gpu_are_said_to_have_no_effect() -> None:
    graphs = DeviceSettings.of(
        resolve(
            Config(
                model=ModelConfig(max_seq_len_to_capture=100),
                scheduler=SchedulerConfig(cuda_graph_sizes=(1, 2)),
                device=DeviceConfig(compilation_config={"level": 2, "cudagraph_capture_sizes": [1]}),
            )
        )
    )
    said = [notice.partition(" has no effect")[0] for notice in without_effect(graphs)]
    assert said == ["--cuda-graph-sizes", "--compilation-config: cudagraph_capture_sizes"]
    for level, count in ((0, 0), (2, 0), (3, 1)):
        assert len(without_effect(settings(device=DeviceConfig(compilation_config={"level": level})))) == count
    assert without_effect(settings()) == []

"""The CUDA platform over a device that is made of numbers: sizes, types, and what it advises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ferrule.config import CacheConfig, Config, DeviceSettings, ModelConfig, SchedulerConfig
from ferrule.config.resolve import resolve
from ferrule.errors import ConfigError, EngineDead
from ferrule_plugins.platform.cuda import CudaPlatform
from ferrule_plugins.platform.cuda_graphs import GraphLimits
from ferrule_plugins.platform.cuda_memory import Reading

GIB = 2**30


class Numbers:
    """A GPU of `total` bytes: what others hold, what this process holds, and what of that is only kept for use."""

    def __init__(self, total: float = 80, others: float = 1, capability: tuple[int, int] = (9, 0)) -> None:
        self.total, self.others, self.version = int(total * GIB), int(others * GIB), capability
        self.held = self.spare = self.most = 0
        self.calls: list[str] = []

    def name(self) -> str:
        return "Abacus 9"

    def capability(self) -> tuple[int, int]:
        return self.version

    def read(self) -> Reading:
        return Reading(self.total, self.total - self.others - self.held, self.held)

    def reset_peak(self) -> None:
        self.most = self.held

    def peak(self) -> int:
        return self.most

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def give_back(self) -> None:
        self.calls.append("give_back")
        self.held -= self.spare
        self.spare = 0

    def take(self, size: float, *, keep: float = 0) -> None:
        """Hold more; `keep` of it is freed at once, and stays with the allocator."""
        if self.held + size * GIB > self.total - self.others:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.held += int(size * GIB)
        self.spare += int(keep * GIB)
        self.most = max(self.most, self.held)


def _config(**changes: Any) -> DeviceSettings:
    """Return settings. `changes` are fields of the sections for the cache, the scheduler and the model."""
    cache, scheduler = CacheConfig.__dataclass_fields__, SchedulerConfig.__dataclass_fields__
    return DeviceSettings.of(
        resolve(
            Config(
                cache=CacheConfig(**{name: value for name, value in changes.items() if name in cache}),
                scheduler=SchedulerConfig(**{name: value for name, value in changes.items() if name in scheduler}),
                model=ModelConfig(**{n: v for n, v in changes.items() if n not in cache and n not in scheduler}),
            )
        )
    )


def _loaded(
    numbers: Numbers, weights: float, step: float | None = None, **changes: Any
) -> tuple[CudaPlatform, Callable[[], int]]:
    """Return a platform after loading and rehearsing, and a function that asks it for the cache's size."""
    platform, config = CudaPlatform(numbers), _config(**changes)
    platform.prepare(config)
    numbers.take(weights)
    if step is not None:
        platform.memory().rehearse(lambda: numbers.take(step, keep=step))
    return platform, lambda: platform.memory().cache_bytes(config)


def test_it_says_what_there_is() -> None:
    caps = CudaPlatform(Numbers(total=80)).prepare(_config())
    assert (caps.platform, caps.name, caps.memory_bytes) == ("cuda", "Abacus 9", 80 * GIB)
    assert caps.features - {"triton"} == {"cuda", "sm90"}


def test_an_old_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"compute capability 6\.1") as caught:
        CudaPlatform(Numbers(capability=(6, 1))).prepare(_config())
    assert "--device cpu" in caught.value.hint


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build of torch with CUDA")
def test_a_build_without_cuda_refuses() -> None:
    assert "without CUDA" in (CudaPlatform.refuses() or "")


def test_no_device_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "CUDA_VISIBLE_DEVICES" in (CudaPlatform.refuses() or "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert CudaPlatform.refuses() is None


@pytest.mark.parametrize(
    ("capability", "requested", "stored", "expected"),
    [
        ((9, 0), "auto", "bfloat16", torch.bfloat16),
        ((9, 0), "auto", "float32", torch.bfloat16),
        ((8, 0), "auto", "float16", torch.float16),
        ((8, 0), "auto", None, torch.bfloat16),
        ((7, 5), "auto", "bfloat16", torch.float16),
        ((7, 5), "float32", "bfloat16", torch.float32),
        ((9, 0), "half", "bfloat16", torch.float16),
        ((9, 0), "bfloat16", "float32", torch.bfloat16),
    ],
)
def test_dtype(capability: tuple[int, int], requested: str, stored: str | None, expected: torch.dtype) -> None:
    platform = CudaPlatform(Numbers(capability=capability))
    platform.prepare(_config())
    assert platform.dtype(requested, {"dtype": stored} if stored else {}) == expected
    assert platform.dtype(requested, {"torch_dtype": stored} if stored else {}) == expected


@pytest.mark.parametrize(("requested", "capability"), [("float7", (9, 0)), ("bfloat16", (7, 5))])
def test_a_dtype_that_it_has_not(requested: str, capability: tuple[int, int]) -> None:
    platform = CudaPlatform(Numbers(capability=capability))
    platform.prepare(_config())
    with pytest.raises(ConfigError, match=requested):
        platform.dtype(requested, {})


def test_the_cache_gets_what_weights_and_steps_leave_of_the_share() -> None:
    """Compute 0.9 x 80 - 16 - 3; memory of other processes does not count, as long as enough is free."""
    _, cache_bytes = _loaded(Numbers(80, others=1), weights=16, step=3)
    assert cache_bytes() == pytest.approx(53 * GIB, abs=8)


def test_what_libraries_took_since_the_start_counts() -> None:
    numbers = Numbers(80, others=1)
    _, cache_bytes = _loaded(numbers, weights=16, step=3)
    numbers.others += GIB
    assert cache_bytes() == pytest.approx(52 * GIB, abs=8)


def test_what_others_hold_is_not_given_away_twice() -> None:
    """Free: 80 - 40 - 16, less the step and half a GiB of headroom."""
    _, cache_bytes = _loaded(Numbers(80, others=40), weights=16, step=3)
    assert cache_bytes() == pytest.approx(20.5 * GIB, abs=8)


def test_two_instances_have_their_own_shares() -> None:
    """Do not charge the second for the first: both get half of the device, less what they need."""
    _, first = _loaded(Numbers(80, others=0.5), weights=10, step=2, gpu_memory_utilization=0.45)
    _, second = _loaded(Numbers(80, others=36.5), weights=10, step=2, gpu_memory_utilization=0.45)
    assert first() == second() == pytest.approx(24 * GIB, abs=8)


def test_without_a_rehearsal_weights_count_alone() -> None:
    _, cache_bytes = _loaded(Numbers(80), weights=16)
    assert cache_bytes() == pytest.approx(56 * GIB, abs=8)


def test_the_rehearsal_gives_back_what_it_kept() -> None:
    numbers = Numbers(80)
    _loaded(numbers, weights=16, step=3)
    assert numbers.held == 16 * GIB
    assert numbers.calls == ["give_back", "synchronize", "give_back"]


def test_too_small_a_share_names_one_that_does() -> None:
    """Name a share: 16 + 3 and a quarter of a GiB of 80 are 24.1 %."""
    _, cache_bytes = _loaded(Numbers(80), weights=16, step=3, gpu_memory_utilization=0.2)
    with pytest.raises(ConfigError, match=r"0\.2 is 16\.00 GiB of 80\.00 GiB") as caught:
        cache_bytes()
    assert "--gpu-memory-utilization 0.25" in caught.value.hint
    _, enough = _loaded(Numbers(80), weights=16, step=3, gpu_memory_utilization=0.25)
    assert enough() > 0


def test_a_large_step_beside_large_weights_is_advised_to_be_smaller() -> None:
    _, cache_bytes = _loaded(Numbers(24), weights=18, step=4.8, max_num_batched_tokens=8192)
    with pytest.raises(ConfigError) as caught:
        cache_bytes()
    assert caught.value.hint == "Set --max-num-batched-tokens 4096."


def test_others_in_the_way_are_named() -> None:
    _, cache_bytes = _loaded(Numbers(80, others=63.5), weights=16, step=0.1)
    with pytest.raises(ConfigError, match=r"other processes hold 63\.50 GiB and 0\.50 GiB are free") as caught:
        cache_bytes()
    assert "CUDA_VISIBLE_DEVICES" in caught.value.hint


def test_a_number_of_blocks_overrides_the_share() -> None:
    _, cache_bytes = _loaded(Numbers(80), weights=16, step=3, gpu_memory_utilization=0.1, num_gpu_blocks_override=64)
    assert cache_bytes() > 0


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"max_num_batched_tokens": 8192}, "--max-num-batched-tokens 4096."),
        ({"max_num_batched_tokens": 8192, "max_num_seqs": 32}, "--max-num-batched-tokens 4096."),
        ({}, "--max-num-batched-tokens 1024."),
        ({"max_num_batched_tokens": 256, "max_num_seqs": 200}, "--max-num-seqs 100 and --max-num-batched-tokens 200."),
    ],
)
def test_a_rehearsal_that_does_not_fit(changes: dict[str, Any], advice: str) -> None:
    with pytest.raises(ConfigError, match=r"largest step does not fit.* 80\.00 GiB") as caught:
        _loaded(Numbers(80), weights=70, step=20, **changes)
    assert caught.value.hint == f"Set {advice}"
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize(
    ("numbers", "changes", "advice"),
    [
        (Numbers(24, others=12), {}, "CUDA_VISIBLE_DEVICES"),
        (Numbers(24), {"dtype": "float32"}, "--dtype bfloat16"),
        (Numbers(24), {}, "--quantization"),
    ],
)
def test_weights_that_do_not_fit(numbers: Numbers, changes: dict[str, Any], advice: str) -> None:
    platform = CudaPlatform(numbers)
    platform.prepare(_config(**changes))
    with (
        pytest.raises(ConfigError, match=r"weights do not fit.* 24\.00 GiB") as caught,
        platform.memory().guard("load"),
    ):
        numbers.take(28)
    assert advice in caught.value.hint


def test_a_cache_that_does_not_fit() -> None:
    numbers = Numbers(80)
    platform, _ = _loaded(numbers, weights=16)
    with pytest.raises(ConfigError) as caught, platform.memory().guard("cache"):
        numbers.take(70)
    assert caught.value.hint == "Set --gpu-memory-utilization 0.85."
    platform, _ = _loaded(Numbers(80), weights=16, num_gpu_blocks_override=99)
    with pytest.raises(ConfigError) as caught, platform.memory().guard("cache"):
        raise torch.OutOfMemoryError
    assert "--num-gpu-blocks-override" in caught.value.hint
    platform, _ = _loaded(Numbers(80), weights=16, kv_cache_memory_bytes=70 * GIB)
    with pytest.raises(ConfigError) as caught, platform.memory().guard("cache"):
        raise torch.OutOfMemoryError
    assert caught.value.hint == f"Set --kv-cache-memory-bytes to less than {70 * GIB}."


def test_a_step_that_does_not_fit_says_what_to_lower() -> None:
    numbers = Numbers(80)
    platform, _ = _loaded(numbers, weights=78.9)
    advice = r"--gpu-memory-utilization 0\.85, or --max-num-batched-tokens 1024"
    with pytest.raises(EngineDead, match=advice), platform.memory().guard("step"):
        numbers.take(2)


def test_other_errors_pass_the_guard() -> None:
    with pytest.raises(KeyError), CudaPlatform(Numbers()).memory().guard("step"):
        raise KeyError("x")


def test_two_steps_are_in_flight() -> None:
    assert CudaPlatform(Numbers()).execution().depth() == 2
    assert CudaPlatform(Numbers()).attention_order()[0] == "triton"


def test_the_cache_leaves_room_for_graphs() -> None:
    """Leave room for as many as the options ask for; none where they forbid them."""
    sizes = []
    for eager in (True, False):
        device = Numbers(total=24)
        platform = CudaPlatform(device)
        config = DeviceSettings.of(
            resolve(
                Config(model=ModelConfig(model="none", enforce_eager=eager), scheduler=SchedulerConfig(max_num_seqs=8))
            )
        )
        platform.prepare(config)
        recorder = platform.execution().recorder(config)
        assert (recorder is None) is eager
        platform.memory().rehearse(lambda: None)
        sizes.append(platform.memory().cache_bytes(config))
    limits = GraphLimits.of(config)
    assert limits is not None
    assert limits.sizes == (1, 2, 4, 8)
    assert sizes[0] - sizes[1] == limits.budget_bytes

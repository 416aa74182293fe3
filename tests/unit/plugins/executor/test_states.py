"""How many requests run at a time in a model that keeps a state for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from ferrule.assembly.limits import scheduler_limits
from ferrule.config import CacheConfig, Config, LoadConfig, ModelConfig, SchedulerConfig
from ferrule.config.resolve import resolve
from ferrule.env import Environment
from ferrule.errors import ConfigError
from ferrule.plugin import discover
from ferrule.types import ModelInfo
from ferrule_testkit.checkpoints import tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("bamba", tmp_path_factory.mktemp("bamba"))


def start(folder: Path, max_num_seqs: int | None, room: float = 4.0, caching: bool = True) -> tuple[ModelInfo, int]:
    """Return the executor's information with `room` GiB for the cache, and how many requests the scheduler will run."""
    config = resolve(
        Config(
            model=ModelConfig(model=str(folder), dtype="float32"),
            load=LoadConfig(use_tqdm_on_load=False),
            cache=CacheConfig(block_size=4, enable_prefix_caching=caching),
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
            env=Environment(cpu_kvcache_space=room),
        )
    )
    plugins = discover()
    executor = plugins.make("executor", "uni")
    try:
        info = executor.start(config, plugins)
        return info, scheduler_limits(config, info, 8).max_num_seqs
    finally:
        executor.shutdown()


def test_as_many_run_as_states_fit(folder: Path) -> None:
    room = 0.001
    each = 2 * (8 * 16 * 16 + 3 * (128 + 2 * 2 * 16)) * 4  # bytes: two layers' states and inputs of convolutions
    fit = int(room * 2**30) // 2 // each
    info, seqs = start(folder, None, room)
    assert info.max_num_seqs == seqs == fit < 256
    assert f"at most {fit} requests run at a time" in " ".join(info.notes)
    assert start(folder, fit - 1, room)[1] == fit - 1
    with pytest.raises(ConfigError, match="states of --max-num-seqs requests"):
        start(folder, 4 * fit, room)


def test_all_run_where_states_fit(folder: Path) -> None:
    info, seqs = start(folder, None)
    assert info.max_num_seqs is None
    assert seqs == 256


def test_a_quarter_of_what_requests_leave_is_for_saved_states(folder: Path) -> None:
    info, _ = start(folder, 4, 0.01)
    each = 2 * (8 * 16 * 16 + 3 * (128 + 2 * 2 * 16)) * 4
    left = int(0.01 * 2**30) - 4 * each
    assert info.state_bytes == each
    assert info.max_snapshots == left // 4 // each
    assert info.max_blocks == (left - info.max_snapshots * each) // info.page_bytes
    without, _ = start(folder, 4, 0.01, caching=False)
    assert (without.max_snapshots, without.max_blocks) == (0, left // info.page_bytes)
    note = "prefixes are not cached: the cache has no room"
    assert not any(note in each for each in info.notes + without.notes)
    assert any(note in each for each in start(folder, 4, 4.5 * each / 2**30)[0].notes)


def test_a_model_of_states_alone_saves_as_many_as_fit(tmp_path: Path) -> None:
    info, seqs = start(tiny_checkpoint("mamba", tmp_path), None, 0.001)
    assert info.page_bytes == 0
    assert info.groups[-1].block_size == 4
    assert info.max_snapshots == int(0.001 * 2**30) // info.state_bytes - seqs > 0

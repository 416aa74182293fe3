"""The cache that an error asks for is large enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from ferrule.assembly.limits import least_cache_bytes, scheduler_limits
from ferrule.config import CacheConfig, Config, LoadConfig, ModelConfig, SchedulerConfig
from ferrule.config.resolve import resolve
from ferrule.engine.cache import capacity
from ferrule.plugin import discover
from ferrule.types import ModelInfo
from ferrule_testkit.checkpoints import tiny_checkpoint


@pytest.fixture(scope="module", params=["bamba", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with states, and one with windows."""
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp("limits") / request.param)


def room(folder: Path, cache: int, max_num_seqs: int | None, caching: bool) -> tuple[int, int, ModelInfo]:
    """Return, for so many bytes, the tokens that a request may have, the bytes for the longest one, and the model."""
    config = resolve(
        Config(
            model=ModelConfig(model=str(folder), dtype="float32"),
            load=LoadConfig(use_tqdm_on_load=False),
            cache=CacheConfig(block_size=4, enable_prefix_caching=caching, kv_cache_memory_bytes=cache),
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        )
    )
    plugins = discover()
    executor = plugins.make("executor", "uni")
    try:
        info = executor.start(config, plugins)
        return capacity(scheduler_limits(config, info, info.max_blocks)), least_cache_bytes(config, info), info
    finally:
        executor.shutdown()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("max_num_seqs", [None, 3])
def test_the_cache_that_is_asked_for_has_room_for_the_longest_request(
    folder: Path, max_num_seqs: int | None, caching: bool
) -> None:
    little = 100_000
    tokens, needed, info = room(folder, little, max_num_seqs, caching)
    assert tokens < info.max_model_len
    assert needed > little
    assert room(folder, needed, max_num_seqs, caching)[0] == info.max_model_len
    pages = needed - (info.state_bytes * max_num_seqs if max_num_seqs else 0)
    assert room(folder, needed - pages // 2, max_num_seqs, caching)[0] < info.max_model_len

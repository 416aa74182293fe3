"""torch's flex_attention as a backend: its kit, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from ferrule.interfaces.model import AttentionOptions, LayerCache
from ferrule.types import CacheGroup
from ferrule_plugins.attention.flex_attention import FlexAttention
from ferrule_testkit.caps import fake_caps
from ferrule_testkit.kits import AttentionKit


@pytest.mark.slow
class TestConformance(AttentionKit):
    plugin = FlexAttention


@pytest.mark.parametrize(
    ("platform", "dim", "dtype", "said"),
    [
        ("abacus", 64, torch.float32, "not on abacus"),
        ("cpu", 64, torch.float64, "not in float64"),
        ("cuda", 8, torch.float16, "from 16 on, not 8"),
        ("cpu", 8, torch.float16, None),
        ("cuda", 128, torch.bfloat16, None),
    ],
)
def test_what_it_takes(platform: str, dim: int, dtype: torch.dtype, said: str | None) -> None:
    spec, caps = LayerCache(CacheGroup("full", 16), 2, dim), fake_caps(platform)
    reason = FlexAttention.refuses(spec, AttentionOptions(scale=1.0), caps, dtype)
    assert reason is None if said is None else said in (reason or "")

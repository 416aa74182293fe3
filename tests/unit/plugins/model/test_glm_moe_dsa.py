"""Which layers of GLM-5 have an indexer: a list, a pattern, or every so many layers; what is none of these."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ferrule.checkpoint import completed
from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext
from ferrule_plugins.model.glm_moe_dsa import GlmMoeDsa
from ferrule_testkit.checkpoints import tiny_config


def choosing(**changes: Any) -> list[bool]:
    """Return which of 6 layers have an indexer."""
    config = tiny_config("glm_moe_dsa").to_dict()
    config = {**config, "num_hidden_layers": 6, "mlp_layer_types": ["dense"] * 6, "indexer_types": None, **changes}
    config = completed(config, GlmMoeDsa.config_names, GlmMoeDsa.config_defaults)
    ctx = BuildContext(config=config, dtype=torch.float32, device=torch.device("meta"), block_size=4, max_model_len=64)
    return [layer.self_attn.indexer is not None for layer in GlmMoeDsa(ctx).layers]  # type: ignore[union-attr]


def test_all_ways_of_saying_it() -> None:
    assert choosing() == [True] * 6
    assert choosing(index_topk_freq=2) == [True, True, False, True, False, True]
    assert choosing(index_topk_pattern="FSSFSF") == [True, False, False, True, False, True]
    assert choosing(indexer_types=["full", "shared"] * 3) == [True, False] * 3


@pytest.mark.parametrize("kinds", [["full"], ["full"] * 7, ["shared"] + ["full"] * 5, ["all"] * 6, "XXXXXX"])
def test_what_does_not_fit_is_an_error(kinds: Any) -> None:
    with pytest.raises(CheckpointError, match="'indexer_types' must"):
        choosing(indexer_types=kinds)

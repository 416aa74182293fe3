"""The longest texts that a model is served with: the checkpoint's, the user's, and those that adapters were trained
with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrule import checkpoint as checkpoints
from ferrule import rotary
from ferrule.config import WorkerSettings
from ferrule.errors import ConfigError
from ferrule.interfaces.adapters import ContextScaling


def max_model_len(config: WorkerSettings, checkpoint: Mapping[str, Any]) -> int:
    """Return the longest context in tokens, of any adapter. Raises ConfigError for more than checkpoint and adapters
    were made for, unless the environment allows it.
    """
    limit = checkpoints.max_length(checkpoint, sliding_window=not config.model.disable_sliding_window)
    wanted = config.model.max_model_len
    scaling = context_scaling(config, checkpoint)
    for factor in scaling.factors:
        limit = max(limit, int(scaling.original * factor))
    if wanted is not None and wanted > limit and not config.env.allow_long_max_model_len:
        raise ConfigError(
            f"--max-model-len {wanted} is more than the {limit} tokens that the checkpoint was made for.",
            "Set FERRULE_ALLOW_LONG_MAX_MODEL_LEN=1 to try it; expect nonsense, or NaN, beyond the limit.",
        )
    return wanted or limit


def own_length(config: WorkerSettings, checkpoint: Mapping[str, Any]) -> int:
    """Return the longest text without an adapter, where some adapters have longer ones; 0: the longest of all."""
    scaling = context_scaling(config, checkpoint)
    return scaling.length(scaling.own) if scaling.factors and not config.env.allow_long_max_model_len else 0


def context_scaling(config: WorkerSettings, checkpoint: Mapping[str, Any]) -> ContextScaling:
    """Return the factors that adapters may scale positions by: none for a model whose own scaling is not linear."""
    own = rotary.linear_factor(checkpoint)
    length = checkpoints.max_length(checkpoint, sliding_window=not config.model.disable_sliding_window)
    return ContextScaling(
        original=int(length / (own or 1.0)),
        own=own or 1.0,
        factors=config.lora.long_lora_scaling_factors if config.lora.enable_lora and own else (),
        longest=config.model.max_model_len or 0,
    )


def checked_scaling(config: WorkerSettings, checkpoint: Mapping[str, Any]) -> ContextScaling:
    """Return `context_scaling`. Raises ConfigError where the user has named factors that do not fit the model."""
    scaling = context_scaling(config, checkpoint)
    if scaling.factors != config.lora.long_lora_scaling_factors:
        raise ConfigError(
            "--long-lora-scaling-factors: config.json has rotary settings of another type than default and linear, or "
            "different ones by layer: positions of single adapters cannot be scaled beside them."
        )
    return scaling

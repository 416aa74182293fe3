"""The SDK that models are built from. All tensors are flat: [tokens, ...], no batch dimension, no padding."""

from ferrule_nn.attention import Attention, AttentionSpec
from ferrule_nn.decoder import (
    CausalLM,
    Decoder,
    DecoderLayer,
    DecoderSpec,
    building,
    layer_windows,
    need,
)
from ferrule_nn.embedding import Embedding, Head
from ferrule_nn.linear import Dense, Linear, MergedLinear, Packed, PacksForCpu
from ferrule_nn.loading import Naming, load_into
from ferrule_nn.mlp import MLP, GatedMLP, activation
from ferrule_nn.norm import LayerNorm, RMSNorm
from ferrule_nn.parameters import CheckpointParameter, checkpoint_parameter, parameter
from ferrule_nn.rope import Rope, RopeConfig, Rotation

__all__ = [
    "MLP",
    "Attention",
    "AttentionSpec",
    "CausalLM",
    "CheckpointParameter",
    "Decoder",
    "DecoderLayer",
    "DecoderSpec",
    "Dense",
    "Embedding",
    "GatedMLP",
    "Head",
    "LayerNorm",
    "Linear",
    "MergedLinear",
    "Naming",
    "Packed",
    "PacksForCpu",
    "RMSNorm",
    "Rope",
    "RopeConfig",
    "Rotation",
    "activation",
    "building",
    "checkpoint_parameter",
    "layer_windows",
    "load_into",
    "need",
    "parameter",
]

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
from ferrule_nn.linear import Dense, Linear, MergedLinear, Packed, parameter
from ferrule_nn.loading import Naming, load_into
from ferrule_nn.mlp import MLP, GatedMLP, activation
from ferrule_nn.norm import LayerNorm, RMSNorm
from ferrule_nn.rope import Rope, RopeConfig, Rotation
from ferrule_nn.stored import Stored, stored

__all__ = [
    "MLP",
    "Attention",
    "AttentionSpec",
    "CausalLM",
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
    "RMSNorm",
    "Rope",
    "RopeConfig",
    "Rotation",
    "Stored",
    "activation",
    "building",
    "layer_windows",
    "load_into",
    "need",
    "parameter",
    "stored",
]

"""The SDK that models are built from. All tensors are flat: [tokens, ...], no batch dimension, no padding."""

from ferrule.nn.attention import Attention, AttentionSpec
from ferrule.nn.decoder import (
    CausalLM,
    Decoder,
    DecoderLayer,
    DecoderSpec,
    building,
    layer_windows,
    need,
)
from ferrule.nn.embedding import Embedding, Head, pack
from ferrule.nn.linear import Dense, Linear, LinearScheme, MergedLinear, Packed, parameter
from ferrule.nn.loading import Naming, load_into
from ferrule.nn.mlp import MLP, GatedMLP, activation
from ferrule.nn.norm import LayerNorm, RMSNorm
from ferrule.nn.rope import Rope, RopeConfig, Rotation

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
    "LinearScheme",
    "MergedLinear",
    "Naming",
    "Packed",
    "RMSNorm",
    "Rope",
    "RopeConfig",
    "Rotation",
    "activation",
    "building",
    "layer_windows",
    "load_into",
    "need",
    "pack",
    "parameter",
]

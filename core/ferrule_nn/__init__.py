"""The SDK that models are built from. All tensors are flat: [tokens, ...], no batch dimension, no padding."""

from ferrule_nn.adapted import TokenAdd, token_add, undivided
from ferrule_nn.alibi import alibi_slopes
from ferrule_nn.attention import Attention, AttentionSpec, GatedAttention
from ferrule_nn.configuration import first, need
from ferrule_nn.decoder import (
    CausalLM,
    Decoder,
    DecoderLayer,
    DecoderSpec,
    building,
    layer_windows,
    sliding_layers,
)
from ferrule_nn.delta import DeltaSpec, GatedDelta
from ferrule_nn.division import ROWS, UNDIVIDED, Division, Section, Shared, Split, inputs, outputs
from ferrule_nn.embedding import Embedding, Head
from ferrule_nn.layers import OutputNormLayer, ParallelLayer, SandwichLayer, TwoNormParallelLayer
from ferrule_nn.linear import Dense, Linear, MergedLinear, PacksForCpu, division_of
from ferrule_nn.loading import Naming, load_into
from ferrule_nn.mamba import MambaMixer, MambaSpec
from ferrule_nn.mamba2 import Mamba2Mixer, Mamba2Spec
from ferrule_nn.mixers import MixerDecoder, MixerLayer
from ferrule_nn.mla import LatentAttention, LatentSpec
from ferrule_nn.mlp import MLP, GatedMLP, activation
from ferrule_nn.moe import Experts, MoE, MoESpec, Router, Routing
from ferrule_nn.moe_decoder import MoEDecoder, read_grouped_routing, read_moe, read_routing, sparse_layers
from ferrule_nn.norm import LayerNorm, RMSNorm
from ferrule_nn.ops import LayerKernels
from ferrule_nn.parameters import CheckpointParameter, checkpoint_parameter, parameter
from ferrule_nn.pooling import Pooler
from ferrule_nn.rope import Rope, RopeConfig, Rotation
from ferrule_nn.states import GatedRMSNorm, ShortConv, StateLayer, run_rows, wide_parameter

__all__ = [
    "MLP",
    "ROWS",
    "UNDIVIDED",
    "Attention",
    "AttentionSpec",
    "CausalLM",
    "CheckpointParameter",
    "Decoder",
    "DecoderLayer",
    "DecoderSpec",
    "Dense",
    "Division",
    "Embedding",
    "Experts",
    "GatedMLP",
    "Head",
    "LatentAttention",
    "LatentSpec",
    "LayerKernels",
    "LayerNorm",
    "Linear",
    "MergedLinear",
    "MoE",
    "MoEDecoder",
    "MoESpec",
    "Naming",
    "OutputNormLayer",
    "PacksForCpu",
    "Pooler",
    "ParallelLayer",
    "RMSNorm",
    "Rope",
    "RopeConfig",
    "Rotation",
    "Router",
    "Routing",
    "SandwichLayer",
    "Section",
    "Shared",
    "Split",
    "TwoNormParallelLayer",
    "activation",
    "alibi_slopes",
    "building",
    "checkpoint_parameter",
    "division_of",
    "layer_windows",
    "load_into",
    "need",
    "parameter",
    "MambaMixer",
    "MambaSpec",
    "Mamba2Mixer",
    "Mamba2Spec",
    "DeltaSpec",
    "GatedDelta",
    "GatedAttention",
    "GatedRMSNorm",
    "ShortConv",
    "StateLayer",
    "run_rows",
    "wide_parameter",
    "MixerLayer",
    "MixerDecoder",
    "first",
    "inputs",
    "outputs",
    "read_grouped_routing",
    "read_moe",
    "read_routing",
    "sliding_layers",
    "sparse_layers",
    "TokenAdd",
    "token_add",
    "undivided",
]

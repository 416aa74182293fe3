"""Every rotary scaling against transformers' own, at short and at long lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from ferrule.errors import CheckpointError
from ferrule_nn import Rope, RopeConfig

HEAD_DIM = 16

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
        "beta_fast": 16,
        "truncate": False,
    },
    "yarn-given": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "attention_factor": 1.5},
    "longrope": {
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.5 + 0.5 * i for i in range(8)],
        "original_max_position_embeddings": 64,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "proportional": {"partial_rotary_factor": 0.5, "factor": 2.0},
}


@dataclass(frozen=True)
class Places:
    positions: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def prompt(cls, length: int) -> Places:
        return cls(torch.arange(length), torch.full((length,), length))


def _config(name: str) -> LlamaConfig:
    options = SCALINGS[name]
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=128,
        rope_parameters={"rope_type": options.get("rope_type", name), "rope_theta": 5000.0, **options},
    )


@pytest.mark.parametrize("length", [8, 65, 200])
@pytest.mark.parametrize("name", SCALINGS)
def test_rotation_equals_transformers(name: str, length: int) -> None:
    config = _config(name)
    q, k = torch.randn(length, 4, HEAD_DIM), torch.randn(length, 2, HEAD_DIM)
    theirs = LlamaRotaryEmbedding(config)
    cos, sin = theirs(q, torch.arange(length).unsqueeze(0))
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    rope = Rope(RopeConfig.of(config.to_dict(), HEAD_DIM))
    rotation = rope.at(Places.prompt(length), torch.float32)
    for x, want in zip((q, k), expected, strict=True):
        torch.testing.assert_close(rope.rotate(x, rotation), want[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_length_dependent_rotation_is_each_requests_own(name: str) -> None:
    rope = Rope(RopeConfig.of(_config(name).to_dict(), HEAD_DIM))
    long, short = Places.prompt(200), Places.prompt(20)
    mixed = Places(torch.cat((long.positions, short.positions)), torch.cat((long.lengths, short.lengths)))
    for alone, part in ((long, slice(0, 200)), (short, slice(200, 220))):
        for own, batched in zip(rope.at(alone, torch.float32), rope.at(mixed, torch.float32), strict=True):
            assert torch.equal(own, batched[part])


def test_partial_rotation_leaves_the_rest_of_the_head() -> None:
    config = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "max_position_embeddings": 64}
    rope = Rope(RopeConfig.of(config, HEAD_DIM))
    x = torch.randn(5, 3, HEAD_DIM)
    turned = rope.rotate(x, rope.at(Places.prompt(5), torch.float32))
    assert torch.equal(turned[..., 8:], x[..., 8:])
    whole = Rope(RopeConfig.of({**config, "partial_rotary_factor": 1.0}, 8))
    assert torch.equal(turned[..., :8], whole.rotate(x[..., :8], whole.at(Places.prompt(5), torch.float32)))


def test_interleaved_rotation_turns_neighbours() -> None:
    config = RopeConfig.of({"rope_theta": 10000.0}, 8)
    halves, pairs = Rope(config), Rope(config, interleaved=True)
    rotation = halves.at(Places.prompt(6), torch.float32)
    x = torch.randn(6, 2, 8)
    shuffled = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    expected = halves.rotate(shuffled, rotation)
    turned = pairs.rotate(x, rotation)
    assert torch.equal(torch.cat((turned[..., 0::2], turned[..., 1::2]), dim=-1), expected)


def test_old_form_of_the_configuration_reads_the_same() -> None:
    new = RopeConfig.of({"rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0}}, 8)
    old = RopeConfig.of({"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, 8)
    assert torch.equal(Rope(new).inv_freq, Rope(old).inv_freq)


def test_one_of_several_layer_types() -> None:
    config = {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 9.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3.0},
        }
    }
    assert RopeConfig.of(config, 8, "sliding_attention").theta == 3.0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rope_type": "spiral"}, "spiral"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "short_factor"),
    ],
)
def test_a_wrong_configuration_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        Rope(RopeConfig.of({"rope_parameters": options}, 8))


def test_settings_by_type_of_layer_are_not_read_as_those_of_all() -> None:
    alike = {"rope_type": "default", "rope_theta": 5.0}
    both = {"full_attention": alike, "sliding_attention": dict(alike)}
    assert RopeConfig.of({"rope_parameters": both}, HEAD_DIM).theta == 5.0
    differing = {"full_attention": alike, "sliding_attention": {**alike, "rope_theta": 6.0}}
    assert RopeConfig.of({"rope_parameters": differing}, HEAD_DIM, "full_attention").theta == 5.0
    for layer_type in (None, "linear_attention"):
        with pytest.raises(CheckpointError, match=r"'rope_parameters' differ.*full_attention, sliding_attention"):
            RopeConfig.of({"rope_parameters": differing}, HEAD_DIM, layer_type)

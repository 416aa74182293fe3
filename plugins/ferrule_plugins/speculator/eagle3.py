"""`eagle3`: a decoder layer over hidden states from within the target (Li et al. 2025).

The states that enter three of the target's layers are fused to one; the layer attends by it and the token's embedding,
side by side. Its head may know the frequent ids of the vocabulary alone (`d2t`, the distance of each from its own id).
https://arxiv.org/abs/2503.01840
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ferrule.errors import CheckpointError, ConfigError
from ferrule.interfaces.model import BuildContext, ForwardContext, TellsInner
from ferrule.interfaces.speculator import SpeculatorContext
from ferrule_nn import (
    Attention,
    DecoderSpec,
    Embedding,
    GatedMLP,
    Head,
    Linear,
    MergedLinear,
    Naming,
    Rope,
    RopeConfig,
    Rotation,
    building,
    need,
)
from ferrule_plugins.speculator.chain import ChainHead, ChainSpeculator
from ferrule_plugins.speculator.eagle import head_config
from ferrule_plugins.speculator.head_files import HeadFiles, TargetSizes, best, folder_of, size
from ferrule_plugins.speculator.target import Map, TargetParts

_INNER = "eagle_aux_hidden_state_layer_ids"
_IDS = ("d2t", "t2d")


class MidLayer(nn.Module):
    """A layer like Llama's whose attention sees the token's embedding beside the hidden state."""

    def __init__(self, spec: DecoderSpec, rope: Rope, norm_before: bool) -> None:
        super().__init__()
        size, attention = spec.hidden_size, spec.attention(0)
        self.norm_before = norm_before  # the sum begins with the normed state
        self.input_layernorm, self.hidden_norm = spec.make_norm(size), spec.make_norm(size)
        self.self_attn = Attention("eagle3.attn", attention, rope)
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        projections = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.self_attn.qkv_proj = MergedLinear(2 * size, projections, spec.qkv_bias, split=attention.split_outputs)
        self.post_attention_layernorm = spec.make_norm(size)
        self.mlp = GatedMLP(size, spec.inner_size, spec.act, spec.mlp_bias)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, ctx: ForwardContext, rotation: Rotation
    ) -> torch.Tensor:
        normed = self.hidden_norm(hidden)
        both = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        x = (normed if self.norm_before else hidden) + self.self_attn(both, ctx, rotation)
        y: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Eagle3Head(ChainHead):
    naming = Naming(renames=((r"^(model\.)+", ""), (r"^layers\.0\.", "midlayer.")), ignored=_IDS)

    def __init__(self, ctx: BuildContext, files: HeadFiles, target: TargetParts, hidden_size: int) -> None:
        """Make a head for a target with states of `hidden_size`."""
        super().__init__()
        names = files.shapes
        bias = {key: f"midlayer.self_attn.{name}.bias" in names for key, name in _BIASES.items()}
        spec = DecoderSpec.of(ctx, num_layers=1, windows=(), **bias)
        self.hidden_size, self.outer_size = spec.hidden_size, hidden_size
        rows = names["lm_head.weight"][0] if "lm_head.weight" in names else spec.vocab_size
        with building(ctx):
            self.rope = Rope(RopeConfig.of(ctx.config, spec.head_dim))
            own = Embedding(spec.vocab_size, spec.hidden_size) if "embed_tokens.weight" in names else None
            self.embed_tokens = own
            self.fc = Linear(files.need("fc.weight")[1], spec.hidden_size, bias="fc.bias" in names)
            self.midlayer = MidLayer(spec, self.rope, bool(ctx.config.get("norm_before_residual")))
            self.norm = spec.make_norm(spec.hidden_size)
            self.lm_head = Head(spec.hidden_size, rows) if "lm_head.weight" in names else None
        self._ids = _target_ids(files, rows, spec.vocab_size, ctx.device)
        self._shared: tuple[Map, Map] = own or target.embedding, self.lm_head or target.head  # no submodules

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.fc(hidden[:, self.outer_size :])
        return inner

    def follow(self, ids: torch.Tensor, hidden: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x: torch.Tensor = self.midlayer(self._shared[0](ids), hidden, ctx, self.rope.at(ctx, hidden.dtype))
        return x

    def guess(self, hidden: torch.Tensor) -> torch.Tensor:
        ids = best(self._shared[1](self.norm(hidden)))
        return ids if self._ids is None else self._ids.index_select(0, ids)


_BIASES = {"qkv_bias": "q_proj", "out_bias": "o_proj"}


def _target_ids(files: HeadFiles, rows: int, vocab: int, device: torch.device) -> torch.Tensor | None:
    """Return the target's id for each row of the head; None where they are the same.

    Raises CheckpointError for ids that the target does not have.
    """
    distances = files.tensor("d2t")
    if distances is None:
        if rows != vocab:
            raise CheckpointError(
                f"{files.folder}: lm_head.weight has {rows} rows for {vocab} ids, and there is no d2t to tell which."
            )
        return None
    if len(distances) != rows:
        raise CheckpointError(f"{files.folder}: d2t is for {len(distances)} ids, and lm_head.weight has {rows} rows.")
    ids = torch.arange(rows) + distances.long()
    if rows and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise CheckpointError(f"{files.folder}: d2t names ids outside the vocabulary of {vocab}.")
    return ids.to(device)


def inner_layers(config: Mapping[str, Any], folder: Path, layers: int) -> Sequence[int]:
    """Return the layers of the target that the head sees the inputs of: those in config.json, else an early one, the
    middle, and one near the end. Raises CheckpointError for layers that the target does not have.
    """
    stated = config.get(_INNER) or (config.get("eagle_config") or {}).get(_INNER) or (2, layers // 2, layers - 3)
    if not all(type(layer) is int and 0 <= layer < layers for layer in stated):
        raise CheckpointError(
            f"{folder}: the head needs the states before the layers {', '.join(map(str, stated))}, and the model has "
            f"the layers 0 to {layers - 1}.",
            f"'{_INNER}' in its config.json names others.",
        )
    return tuple(stated)


class Eagle3(ChainSpeculator):
    own_settings = ("model", "revision")
    usual_tokens = 3
    model_types = ("eagle3", "*Eagle3*")

    def make_head(self, context: SpeculatorContext) -> ChainHead:
        folder, sizes, target = folder_of(context, "eagle3"), TargetSizes.of(context), context.target
        files, config = HeadFiles(folder, Eagle3Head.naming), head_config(folder)
        sizes.check(folder, hidden=sizes.hidden, vocab=size(config, "vocab_size"))
        layers = inner_layers(config, folder, sizes.layers)
        width = files.need("fc.weight")[1]
        sizes.check(folder, hidden=width // len(layers), vocab=sizes.vocab)
        shared = {"embed_tokens.weight", "lm_head.weight"} - files.shapes.keys()
        if shared and size(config, "hidden_size") != sizes.hidden:
            raise CheckpointError(
                f"The weights in {folder} lack {' and '.join(sorted(shared))}, and the model's are not of its hidden "
                f"size {need(config, 'hidden_size')}."
            )
        if not isinstance(target, TellsInner):
            raise ConfigError(
                f"--speculative-config: eagle3 needs hidden states from within the model, and {type(target).__name__} "
                "does not give any.",
                "Take another method.",
            )
        parts = TargetParts(context)
        files = parts.without_copy(files)
        head = Eagle3Head(replace(context.build, config=config), files, parts, sizes.hidden)
        files.fill(head, context.build)
        target.tell_inner(layers)
        return head

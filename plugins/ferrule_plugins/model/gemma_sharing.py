"""What Gemma 3n and 4 have in common: late layers that read an earlier one's cache, and inputs of each layer's own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ferrule.errors import CheckpointError
from ferrule.interfaces.model import AttentionOptions, BuildContext, ForwardContext, LayerCache
from ferrule_nn import AttentionSpec, Decoder, Embedding, Linear, Rope, RopeConfig, Rotation


@dataclass
class LayerInputs:
    """What a layer gets beside the hidden states."""

    ctx: ForwardContext
    rotation: Rotation | None
    shared: dict[str, tuple[torch.Tensor, torch.Tensor]]  # keys and values of the step's tokens, by the layer's name
    own: torch.Tensor | None  # [tokens, hidden_size_per_layer_input]


class SharingAttention(nn.Module):
    """Attention with norms on queries, keys and values. With a `donor` it has queries only, and that layer's cache.

    The donor's keys and values of the step's tokens are written once more, to the same places.
    """

    def __init__(self, name: str, spec: AttentionSpec, rope: Rope | None, donor: str, keys_are_values: bool) -> None:
        super().__init__()
        self.name, self.donor, self.spec = donor or name, donor, spec
        self.options = AttentionOptions(scale=1.0, window=spec.window)
        self._rope = (rope,)  # in a tuple, so that torch does not register it as a submodule of every layer
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        make_norm: Any = spec.qk_norm
        self.q_proj = Linear(spec.hidden_size, q_size, spec.qkv_bias)
        self.o_proj = Linear(q_size, spec.hidden_size, spec.out_bias)
        self.q_norm = make_norm(spec.head_dim)
        if not donor:
            self.k_norm = make_norm(spec.head_dim)
            self.k_proj = Linear(spec.hidden_size, kv_size, spec.qkv_bias)
            self.v_proj = None if keys_are_values else Linear(spec.hidden_size, kv_size, spec.qkv_bias)

    def forward(self, x: torch.Tensor, given: LayerInputs) -> torch.Tensor:
        """[tokens, hidden] → [tokens, hidden]."""
        q = self._turned(self.q_norm(self._heads(self.q_proj(x))), given)
        if not self.donor:
            keys = self._heads(self.k_proj(x))
            values = keys if self.v_proj is None else self._heads(self.v_proj(x))
            wide = values.float()
            values = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.k_norm.eps)).to(x.dtype)
            given.shared[self.name] = self._turned(self.k_norm(keys), given), values
        out = given.ctx.attend(self.name, q, *given.shared[self.name], self.options)
        y: torch.Tensor = self.o_proj(out.reshape(out.shape[0], -1))
        return y

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], -1, self.spec.head_dim)

    def _turned(self, x: torch.Tensor, given: LayerInputs) -> torch.Tensor:
        rope = self._rope[0]
        return x if rope is None or given.rotation is None else rope.rotate(x, given.rotation)


class SharingDecoder(Decoder):
    """The last `num_kv_shared_layers` layers have a `donor`. Each has `own_inputs`, made from ids and embeddings."""

    def cache_specs(self) -> dict[str, LayerCache]:
        layers = [layer for layer in self.modules() if isinstance(layer, SharingAttention)]
        return {layer.name: layer.spec.cache for layer in layers if not layer.donor}

    def embed_size(self) -> int:
        """0: the layers' own inputs are looked up by id."""
        return 0

    def donor(self, index: int) -> int | None:
        """The layer whose keys and values layer `index` uses: the last of its kind with any; None: its own."""
        sliding = self.spec.sliding
        first = len(sliding) - int(self.config["num_kv_shared_layers"])
        if index < first:
            return None
        donors = [other for other in range(max(first, 0)) if sliding[other] == sliding[index]]
        if not donors:
            raise CheckpointError(f"config.json: 'num_kv_shared_layers' leaves no keys for layer {index} to share.")
        return donors[-1]

    def make_rope(self, ctx: BuildContext) -> Rope | None:
        return Rope(RopeConfig.of(ctx.config, self.spec.head_dim, "full_attention"))

    def make_local_rope(self, ctx: BuildContext) -> Rope | None:
        return Rope(RopeConfig.local(ctx.config, self.spec.head_dim, float(ctx.config["rope_local_base_freq"])))

    def make_positions(self, ctx: BuildContext) -> None:
        spec, own = self.spec, int(self.config["hidden_size_per_layer_input"] or 0)
        self.own_size = own
        if own:
            table = int(self.config["vocab_size_per_layer_input"])
            self.embed_tokens_per_layer = Embedding(table, spec.num_layers * own, own**0.5)
            self.per_layer_model_projection = Linear(spec.hidden_size, spec.num_layers * own)
            self.per_layer_projection_norm = spec.make_norm(own)

    def make_attention(self, index: int) -> nn.Module:
        donor = self.donor(index)
        spec = self.spec.attention(index, **self.changes_of(index))
        keys_are_values = bool(self.config.get("attention_k_eq_v")) and not self.spec.sliding[index]
        name = "" if donor is None else f"layers.{donor}.attn"
        return SharingAttention(f"layers.{index}.attn", spec, self.rope_of(index), name, keys_are_values)

    def make_experts(self) -> nn.Module | None:
        """What a layer has beside its feed-forward block."""
        return None

    def changes_of(self, index: int) -> dict[str, Any]:
        """In which numbers the attention of layer `index` differs."""
        return {}

    def own_inputs(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """[tokens, layers, own size]; None in a model without."""
        if not self.own_size:
            return None
        table = self.embed_tokens_per_layer
        looked_up = table(ids.where(ids < table.weight.shape[0], 0)).view(len(ids), -1, self.own_size)
        projected = self.per_layer_model_projection(x) * self.spec.hidden_size**-0.5
        own: torch.Tensor = (self.per_layer_projection_norm(projected.view(looked_up.shape)) + looked_up) * 0.5**0.5
        return own

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Without the keys and values of layers that share those of others: files have them, nothing uses them."""
        shared = "|".join(str(index) for index in range(self.spec.num_layers) if self.donor(index) is not None)
        unused = re.compile(rf"layers\.({shared or '-'})\.self_attn\.[kv]_(proj|norm)\.")
        return super().load_weights(item for item in weights if not unused.search(item[0]))

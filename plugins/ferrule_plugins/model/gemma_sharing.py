"""What Gemma 3n and 4 have in common: late layers that read an earlier one's cache, and inputs of each layer's own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext, LayerCache
from ferrule_nn import Decoder, Embedding, Linear, Rope, RopeConfig
from ferrule_plugins.model.sharing_attention import SharingAttention


class SharingDecoder(Decoder):
    """A decoder whose last `num_kv_shared_layers` layers have a `donor`. Each layer has `own_inputs`, made from ids and
    embeddings.
    """

    def cache_specs(self) -> dict[str, LayerCache]:
        layers = [layer for layer in self.modules() if isinstance(layer, SharingAttention)]
        return {layer.name: layer.spec.cache for layer in layers if not layer.donor}

    def embed_size(self) -> int:
        """Return 0: the layers' own inputs are looked up by id."""
        return 0

    def donor(self, index: int) -> int | None:
        """Return the layer whose keys and values layer `index` uses: the last of its kind that has its own; None: layer
        `index` has its own.
        """
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
        """Make the experts that a layer has beside its feed-forward block, or None."""
        return None

    def changes_of(self, index: int) -> dict[str, Any]:
        """Return the numbers in which the attention of layer `index` differs."""
        return {}

    def own_inputs(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Return the layers' own inputs [tokens, layers, own size]; None in a model without them."""
        if not self.own_size:
            return None
        table = self.embed_tokens_per_layer
        looked_up = table(ids.where(ids < table.count, 0)).view(len(ids), -1, self.own_size)
        projected = self.per_layer_model_projection(x) * self.spec.hidden_size**-0.5
        own: torch.Tensor = (self.per_layer_projection_norm(projected.view(looked_up.shape)) + looked_up) * 0.5**0.5
        return own

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the weights, without the keys and values of layers that share those of others: files have them, nothing
        uses them.
        """
        shared = "|".join(str(index) for index in range(self.spec.num_layers) if self.donor(index) is not None)
        unused = re.compile(rf"layers\.({shared or '-'})\.self_attn\.[kv]_(proj|norm)\.")
        return super().load_weights(item for item in weights if not unused.search(item[0]))

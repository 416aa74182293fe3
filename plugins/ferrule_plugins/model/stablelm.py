"""StableLM 2 and StableLM 3B (Bellagente et al. 2024): Llama with layer norms, a quarter of each head turns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Attention, Decoder, DecoderLayer, DecoderSpec, Naming, ParallelLayer
from ferrule_plugins.model.cohere import PerHeadNormAttention


class StableLM(Decoder):
    """The 12B model has attention and MLP side by side, and a norm on each head."""

    config_names = {"rope_pct": "partial_rotary_factor", "norm_eps": "layer_norm_eps"}
    config_defaults = {
        "num_key_value_heads": 32,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": False,
    }
    naming = Naming(renames=((r"^model\.", ""), (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm.")))

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        return DecoderSpec.of(ctx, norm="layer", qkv_bias=bool(ctx.config["use_qkv_bias"]))

    def make_attention(self, index: int) -> nn.Module:
        kind = PerHeadNormAttention if self.config.get("qk_layernorm") else Attention
        return kind(f"layers.{index}.attn", self.spec.attention(index), self.rope_of(index))

    def make_layer(self, index: int) -> nn.Module:
        return (ParallelLayer if self.config.get("use_parallel_residual") else DecoderLayer)(self, index)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return super().load_weights(self._with_whole_norms(weights))

    def _with_whole_norms(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights with the norms of all heads, `norms.N.weight` in the checkpoint, as one tensor [heads,
        head_dim].
        """
        found: dict[str, dict[int, torch.Tensor]] = {}
        for name, tensor in weights:
            path, ours, rest = name.partition("_layernorm.norms.")
            if not ours:
                yield name, tensor
                continue
            heads = found.setdefault(path, {})
            heads[int(rest.removesuffix(".weight"))] = tensor
            if len(heads) == (self.spec.num_heads if path.endswith("q") else self.spec.num_kv_heads):
                yield f"{path}_layernorm.weight", torch.stack([heads[index] for index in sorted(heads)])

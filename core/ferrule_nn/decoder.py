"""The decoder-only transformer that most models are, with a method for everything in which they differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext, ForwardContext, LayerCache, Model
from ferrule.types import PromptBorder
from ferrule_nn.attention import Attention, AttentionSpec
from ferrule_nn.embedding import Embedding, Head
from ferrule_nn.loading import Naming, load_into
from ferrule_nn.mlp import GatedMLP
from ferrule_nn.norm import RMSNorm, add_and_norm
from ferrule_nn.rope import Rope, RopeConfig, Rotation


@contextmanager
def building(ctx: BuildContext) -> Iterator[None]:
    """Modules made inside have the type and device of `ctx`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(ctx.dtype)
    try:
        with torch.device(ctx.device):
            yield
    finally:
        torch.set_default_dtype(before)


def need(config: Mapping[str, Any], *names: str) -> Any:
    """The first of `names` that config.json has. Raises CheckpointError."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise CheckpointError(f"config.json lacks {' or '.join(repr(name) for name in names)}.")


def layer_windows(ctx: BuildContext, num_layers: int) -> tuple[int, ...]:
    """Each layer's window, 0 for full attention, from `sliding_window`, `layer_types` and what older files say."""
    config = ctx.config
    window = int(config.get("sliding_window") or 0)
    if not window or not ctx.sliding_window or config.get("use_sliding_window") is False:
        return (0,) * num_layers
    kinds = config.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:num_layers])
    if config.get("use_sliding_window"):  # Qwen: the first `max_window_layers` see everything
        first = int(config.get("max_window_layers") or 0)
        return tuple(window if index >= first else 0 for index in range(num_layers))
    return (window,) * num_layers


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """The numbers of a decoder. `of` reads them under the names that most config.json files use."""

    hidden_size: int
    inner_size: int  # of the MLP
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    norm_eps: float = 1e-6
    act: str = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    windows: tuple[int, ...] = ()  # of each layer
    attention_scale: float | None = None
    attention_soft_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_soft_cap: float = 0.0

    @classmethod
    def of(cls, ctx: BuildContext, **changes: Any) -> DecoderSpec:
        """Read config.json, then apply `changes`. Raises CheckpointError for a missing name."""
        c = ctx.config
        hidden = int(need(c, "hidden_size", "n_embd"))
        heads = int(need(c, "num_attention_heads", "n_head"))
        layers = int(need(c, "num_hidden_layers", "n_layer"))
        bias = bool(c.get("attention_bias", False))
        spec = cls(
            hidden_size=hidden,
            inner_size=int(need(c, "intermediate_size", "ffn_dim", "n_inner")) if "inner_size" not in changes else 0,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(c.get("num_key_value_heads") or heads),
            head_dim=int(c.get("head_dim") or hidden // heads),
            vocab_size=int(need(c, "vocab_size")),
            block_size=ctx.block_size,
            norm_eps=float(c.get("rms_norm_eps") or c.get("layer_norm_eps") or c.get("layer_norm_epsilon") or 1e-6),
            act=str(c.get("hidden_act") or c.get("hidden_activation") or c.get("activation_function") or "silu"),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bool(c.get("mlp_bias", False)),
            tied=bool(c.get("tie_word_embeddings", False)),
            windows=layer_windows(ctx, layers),
        )
        return replace(spec, **changes)

    def attention(self, index: int, **changes: Any) -> AttentionSpec:
        """The numbers of layer `index`'s attention."""
        spec = AttentionSpec(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
            window=self.windows[index] if self.windows else 0,
            scale=self.attention_scale,
            soft_cap=self.attention_soft_cap,
        )
        return replace(spec, **changes)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); `residual_scale` multiplies what is added."""

    def __init__(self, owner: Decoder, index: int) -> None:
        super().__init__()
        self.residual_scale = owner.spec.residual_scale
        self.input_layernorm = owner.make_norm()
        self.self_attn = owner.make_attention(index)
        self.post_attention_layernorm = owner.make_norm()
        self.mlp = owner.make_mlp(index)

    def forward(self, x: torch.Tensor, ctx: ForwardContext, rotation: Rotation | None) -> torch.Tensor:
        y = self.self_attn(self.input_layernorm(x), ctx, rotation)
        x, y = add_and_norm(self.post_attention_layernorm, x, y, self.residual_scale)
        return self.add(x, self.mlp(y))

    def fused(
        self, x: torch.Tensor, y: torch.Tensor, after: nn.Module, ctx: ForwardContext, rotation: Rotation | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, where y is norm(x): the result, and `after` of it. Sums and norms are one pass each."""
        y = self.self_attn(y, ctx, rotation)
        x, y = add_and_norm(self.post_attention_layernorm, x, y, self.residual_scale)
        return add_and_norm(after, x, self.mlp(y), self.residual_scale)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + (y if self.residual_scale == 1.0 else y * self.residual_scale)


class CausalLM(nn.Module, Model):
    """What needs no knowledge of the architecture. A subclass has a `Head` called `lm_head`."""

    naming: ClassVar[Naming] = Naming(renames=((r"^model\.", ""),))
    lm_head: Head

    def cache_specs(self) -> dict[str, LayerCache]:
        return {layer.name: layer.cache for layer in self.modules() if isinstance(layer, Attention)}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_into(self, weights, self.naming)


class Decoder(CausalLM):
    """A decoder-only transformer: embedding, layers, norm, head.

    A model file subclasses it and overrides what is special about the model: `describe` for numbers, the `make_…`
    methods for submodules, `embed` and `logits` for what happens around the layers, `naming` for a checkpoint with
    other names. The submodules have the names that Llama's checkpoints use:

        embed_tokens
        layers.N.{input_layernorm, self_attn.{q,k,v,o}_proj, post_attention_layernorm, mlp.{gate,up,down}_proj}
        norm
        lm_head
    """

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self.spec = spec = self.describe(ctx)
        with building(ctx):
            self.rope = self.make_rope(ctx)
            self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, spec.embedding_scale)
            self.make_positions(ctx)
            self.layers = nn.ModuleList(self.make_layer(index) for index in range(spec.num_layers))
            self.norm = self.make_norm()
            self.lm_head = Head(spec.hidden_size, spec.vocab_size, self.embed_tokens if spec.tied else None)
        self.lm_head.scale = spec.logits_scale
        self.lm_head.soft_cap = spec.logits_soft_cap

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        """Read the configuration."""
        return DecoderSpec.of(ctx)

    def make_rope(self, ctx: BuildContext) -> Rope | None:
        """The rotation that all layers share, or None for a model with learned positions."""
        return Rope(RopeConfig.of(ctx.config, self.spec.head_dim))

    def prompt_border(self) -> PromptBorder | None:
        return None if self.rope is None else self.rope.border

    def make_positions(self, ctx: BuildContext) -> None:
        """Make the position embedding, in a model that has one."""

    def make_norm(self) -> nn.Module:
        return RMSNorm(self.spec.hidden_size, self.spec.norm_eps)

    def make_attention(self, index: int) -> nn.Module:
        return Attention(f"layers.{index}.attn", self.spec.attention(index), self.rope)

    def make_mlp(self, index: int) -> nn.Module:
        spec = self.spec
        return GatedMLP(spec.hidden_size, spec.inner_size, spec.act, spec.mlp_bias)

    def make_layer(self, index: int) -> nn.Module:
        return DecoderLayer(self, index)

    def embed_size(self) -> int:
        return self.embed_tokens.weight.shape[1]

    def embed(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[tokens] → [tokens, hidden]."""
        x: torch.Tensor = self.embed_tokens(ids, ctx.embeds)
        return x

    def forward(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x = self.embed(ids, ctx)
        rotation = self.rope.at(ctx, x.dtype) if self.rope is not None else None
        layers: list[Any] = list(self.layers)
        if layers and all(type(layer) is DecoderLayer for layer in layers):  # a subclass may have another order
            y: torch.Tensor = layers[0].input_layernorm(x)
            for layer, after in zip(layers, (*(layer.input_layernorm for layer in layers[1:]), self.norm), strict=True):
                x, y = layer.fused(x, y, after, ctx, rotation)
            return y
        for layer in layers:
            x = layer(x, ctx, rotation)
        hidden: torch.Tensor = self.norm(x)
        return hidden

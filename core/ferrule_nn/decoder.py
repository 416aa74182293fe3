"""The decoder-only transformer of most models, with a method for everything in which they differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from ferrule.checkpoint import completed
from ferrule.errors import CheckpointError
from ferrule.interfaces.model import (
    AttentionLayer,
    BuildContext,
    ForwardContext,
    Generates,
    LayerCache,
    Model,
    StateSpec,
)
from ferrule.types import PromptBorder
from ferrule_nn.attention import Attention, AttentionSpec
from ferrule_nn.configuration import need
from ferrule_nn.division import ROWS, sharded
from ferrule_nn.embedding import Embedding, Head
from ferrule_nn.loading import Naming, load_into
from ferrule_nn.mlp import MLP, GatedMLP
from ferrule_nn.norm import LayerNorm, RMSNorm, add_and_norm
from ferrule_nn.ops import using
from ferrule_nn.rope import Rope, RopeConfig, Rotation
from ferrule_nn.states import StateLayer

_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")


@contextmanager
def building(ctx: BuildContext) -> Iterator[None]:
    """Give modules made inside the type, the device and the kernels of `ctx`, and make them its shard's part.

    Raises ConfigError.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(ctx.dtype)
    try:
        with torch.device(ctx.device), sharded(ctx.shard), using(ctx.kernels):
            yield
    finally:
        torch.set_default_dtype(before)


def layer_windows(ctx: BuildContext, num_layers: int) -> tuple[int, ...]:
    """Return each layer's window, 0 for full attention, from `sliding_window`, `layer_types` and older names."""
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


def _share(hidden: int, heads: int) -> int:
    """Return each head's part of the hidden size. Raises CheckpointError where it cannot be divided."""
    if heads < 1 or hidden % heads:
        raise CheckpointError(
            f"config.json: 'hidden_size' {hidden} is not a multiple of 'num_attention_heads' {heads}, and there is no "
            "'head_dim'."
        )
    return hidden // heads


def sliding_layers(config: Mapping[str, Any], num_layers: int, period: int = 0) -> tuple[bool, ...]:
    """Return which layers are `sliding_attention`: by `layer_types`, else all but each `period`-th; none for 0.

    A layer's kind may decide more than its window, so it stays with --disable-sliding-window.
    """
    kinds = config.get("layer_types")
    if kinds:
        return tuple(kind == "sliding_attention" for kind in kinds[:num_layers])
    return tuple(bool(period and (index + 1) % period) for index in range(num_layers))


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
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # is added to the weights of norms
    norm_bias: bool = True  # of layer norms
    norm_affine: bool = True  # layer norms have weights
    act: str = "silu"
    gated: bool = True  # the MLP
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    tied: bool = False
    windows: tuple[int, ...] = ()  # of each layer
    sliding: tuple[bool, ...] = ()  # the layers of the kind `sliding_attention`, whatever their window is
    turning: tuple[bool, ...] = ()  # the layers with rotary positions; all where it is empty
    rope_interleaved: bool = False
    alibi_slopes: tuple[float, ...] = ()
    qk_norm: Literal["", "head", "width"] = ""  # norms of queries and keys: of each head, or of all together
    norm_turned: bool = False  # see `AttentionSpec`, as for `qkv_by_group`
    qkv_clip: float = 0.0
    qkv_by_group: bool = False
    attention_scale: float | None = None
    attention_soft_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_soft_cap: float = 0.0

    @classmethod
    def of(cls, ctx: BuildContext, *, period: int = 0, **changes: Any) -> DecoderSpec:
        """Read config.json, then apply `changes`. Raises CheckpointError for a missing name.

        With `period` all layers but each `period`-th have the window, unless `layer_types` says which.
        """
        c = ctx.config
        hidden = int(need(c, "hidden_size"))
        heads = int(need(c, "num_attention_heads"))
        layers = int(changes.get("num_layers") or need(c, "num_hidden_layers"))
        bias = bool(c.get("attention_bias", False))
        eps = (c[name] for name in _EPS if c.get(name) is not None)
        spec = cls(
            hidden_size=hidden,
            inner_size=int(need(c, "intermediate_size")) if "inner_size" not in changes else 0,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(c.get("num_key_value_heads") or heads),
            head_dim=int(c.get("head_dim") or _share(hidden, heads)),
            vocab_size=int(need(c, "vocab_size")),
            block_size=ctx.block_size,
            norm_eps=float(next(eps, 1e-6)),
            act=str(c.get("hidden_act") or c.get("hidden_activation") or c.get("activation_function") or "silu"),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bool(c.get("mlp_bias", False)),
            tied=bool(c.get("tie_word_embeddings", False)),
            windows=layer_windows(ctx, layers),
            sliding=sliding_layers(c, layers, period),
        )
        if period:
            window = int(c.get("sliding_window") or 0) if ctx.sliding_window else 0
            spec = replace(spec, windows=tuple(window if sliding else 0 for sliding in spec.sliding))
        return replace(spec, **changes)

    def attention(self, index: int, **changes: Any) -> AttentionSpec:
        """Return the attention's numbers for layer `index`."""
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
            alibi_slopes=self.alibi_slopes,
            qk_norm=self.make_norm if self.qk_norm else None,
            norm_width=self.qk_norm == "width",
            norm_turned=self.norm_turned,
            qkv_clip=self.qkv_clip,
            by_group=self.qkv_by_group,
        )
        return replace(spec, **changes)

    def make_norm(self, size: int) -> nn.Module:
        """Make a norm over a last dimension of that size."""
        if self.norm == "layer":
            return LayerNorm(size, self.norm_eps, self.norm_bias, self.norm_affine, self.norm_offset)
        return RMSNorm(size, self.norm_eps, self.norm_offset)


class DecoderLayer(nn.Module):
    """A layer x + attention(norm(x)), then x + mlp(norm(x)); `residual_scale` multiplies the added terms."""

    def __init__(self, owner: Decoder, index: int) -> None:
        super().__init__()
        self.residual_scale = owner.spec.residual_scale
        self.input_layernorm = owner.make_norm()
        self.self_attn = owner.make_attention(index)
        self.post_attention_layernorm = owner.make_norm()
        self.mlp = owner.make_mlp(index)

    def forward(self, x: torch.Tensor, ctx: ForwardContext, rotation: Rotation | None) -> torch.Tensor:
        return self.fused(x, self.input_layernorm(x), nn.Identity(), ctx, rotation)[0]

    def fused(
        self, x: torch.Tensor, y: torch.Tensor, after: nn.Module, ctx: ForwardContext, rotation: Rotation | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layer for y = `input_layernorm(x)`; return its result and `after` of it.

        Each sum is one pass with the norm that follows.
        """
        y = self.self_attn(y, ctx, rotation)
        x, y = add_and_norm(self.post_attention_layernorm, x, y, self.residual_scale)
        return add_and_norm(after, x, self.mlp(y), self.residual_scale)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + (y if self.residual_scale == 1.0 else y * self.residual_scale)


@runtime_checkable
class CachedLayer(AttentionLayer, Protocol):
    """A submodule that attends, and declares what it caches for each token."""

    @property
    def cache(self) -> LayerCache: ...


class CausalLM(nn.Module, Model, Generates):
    """The part of a model that needs no knowledge of the architecture. A subclass has a `Head` called `lm_head`."""

    naming: ClassVar[Naming] = Naming(renames=((r"^model\.", ""),))
    lm_head: Head

    def cache_specs(self) -> dict[str, LayerCache]:
        return {layer.name: layer.cache for layer in self.modules() if isinstance(layer, CachedLayer)}

    def state_specs(self) -> dict[str, StateSpec]:
        return {layer.name: layer.state for layer in self.modules() if isinstance(layer, StateLayer)}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_into(self, weights, self.naming)

    @classmethod
    def module_name(cls, name: str) -> str:
        """Return the model's name of a module that the checkpoint calls `name`."""
        return cls.naming.rename(f"{name}.weight").removesuffix(".weight")


class Decoder(CausalLM):
    """A decoder-only transformer: embedding, layers, norm, head.

    A model file subclasses it and overrides what is special about the model: `describe` for numbers, the `make_…`
    methods for submodules, `embed` and `logits` for what happens around the layers, `naming` for a checkpoint with
    other names, `config_names` and `config_defaults` for a config.json with other names or without some keys.
    `layer_class` is one of those in `ferrule_nn.layers`, or the model's own. The submodules have the names that Llama's
    checkpoints use:

        embed_tokens
        layers.N.{input_layernorm, self_attn.{q,k,v,o}_proj, post_attention_layernorm, mlp.{gate,up,down}_proj}
        norm
        lm_head
    """

    layer_class: ClassVar[type[nn.Module]] = DecoderLayer

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self.config = completed(ctx.config, self.config_names, self.config_defaults)
        ctx = replace(ctx, config=self.config)
        self.spec = spec = self.describe(ctx)
        with building(ctx):
            self.rope = self.make_rope(ctx)
            self.local_rope = self.make_local_rope(ctx)
            self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, spec.embedding_scale, ROWS)
            self.make_positions(ctx)
            self.layers = nn.ModuleList(self.make_layer(index) for index in range(spec.num_layers))
            self.norm = self.make_norm()
            tied = self.embed_tokens if spec.tied else None
            self.lm_head = Head(spec.hidden_size, spec.vocab_size, tied, spec.head_bias)
        self.lm_head.scale = spec.logits_scale
        self.lm_head.soft_cap = spec.logits_soft_cap

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        """Read the configuration."""
        return DecoderSpec.of(ctx)

    def make_rope(self, ctx: BuildContext) -> Rope | None:
        """Make the rotation that all layers share, or return None for a model with other positions."""
        if self.spec.alibi_slopes:
            return None
        return Rope(RopeConfig.of(ctx.config, self.spec.head_dim), self.spec.rope_interleaved)

    def make_local_rope(self, ctx: BuildContext) -> Rope | None:
        """Make the rotation of `sliding_attention` layers, where they have one of their own."""
        return None

    def rope_of(self, index: int) -> Rope | None:
        """Return the rotation of layer `index`."""
        spec = self.spec
        if spec.turning and not spec.turning[index]:
            return None
        return self.local_rope if self.local_rope is not None and spec.sliding[index] else self.rope

    def prompt_border(self) -> PromptBorder | None:
        return None if self.rope is None else self.rope.border

    def make_positions(self, ctx: BuildContext) -> None:
        """Make the position embedding, in a model that has one."""

    def make_norm(self) -> nn.Module:
        return self.spec.make_norm(self.spec.hidden_size)

    def make_attention(self, index: int) -> nn.Module:
        return Attention(f"layers.{index}.attn", self.spec.attention(index), self.rope_of(index))

    def make_mlp(self, index: int) -> nn.Module:
        spec, kind = self.spec, GatedMLP if self.spec.gated else MLP
        return kind(spec.hidden_size, spec.inner_size, spec.act, spec.mlp_bias)

    def make_layer(self, index: int) -> nn.Module:
        return self.layer_class(self, index)

    def embed_size(self) -> int:
        return self.embed_tokens.size

    def embed(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Map ids [tokens] to [tokens, hidden]."""
        x: torch.Tensor = self.embed_tokens(ids, ctx.embeds)
        return x

    def forward(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x = self.embed(ids, ctx)
        rotations = self.rotations(ctx, x.dtype)
        layers: list[Any] = list(self.layers)
        if layers and all(type(layer).forward is DecoderLayer.forward for layer in layers):  # by way of `fused`
            y: torch.Tensor = layers[0].input_layernorm(x)
            norms = (*(layer.input_layernorm for layer in layers[1:]), self.norm)
            for layer, after, rotation in zip(layers, norms, rotations, strict=True):
                x, y = layer.fused(x, y, after, ctx, rotation)
            return y
        for layer, rotation in zip(layers, rotations, strict=True):
            x = layer(x, ctx, rotation)
        hidden: torch.Tensor = self.norm(x)
        return hidden

    def rotations(self, ctx: ForwardContext, dtype: torch.dtype) -> list[Rotation | None]:
        """Return the rotation of each layer's queries and keys, computed once for layers that share it."""
        shared = None if self.rope is None else self.rope.at(ctx, dtype)
        if self.local_rope is None:
            return [shared] * len(self.layers)
        local = self.local_rope.at(ctx, dtype)
        return [local if sliding else shared for sliding in self.spec.sliding]

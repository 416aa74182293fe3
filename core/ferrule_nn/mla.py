"""Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434): one small latent for all heads.

A token's keys and values are products of a latent of `kv_rank` numbers with matrices of each head, and all heads share
one rotated key of `rope_dim` numbers. Only latent and rotated key are cached: 576 numbers for DeepSeek. The matrices
are absorbed: a query is multiplied by its head's key matrix, so that it meets latents as they are, and a head's sum of
latents is multiplied by its value matrix. So this is attention with one key head of kv_rank + rope_dim, whose values
are the first kv_rank numbers of its keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from ferrule.interfaces.adapters import AdapterBank, Add, Stacked
from ferrule.interfaces.model import AttentionOptions, BuildContext, ForwardContext, LayerCache
from ferrule.types import CacheGroup
from ferrule_nn import ops
from ferrule_nn.adapted import adapted, undivided
from ferrule_nn.configuration import need
from ferrule_nn.division import Shared, inputs, outputs
from ferrule_nn.linear import Linear, MergedLinear
from ferrule_nn.norm import RMSNorm
from ferrule_nn.rope import Rope, RopeConfig, Rotation

SplitFactors = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
_EPS = 1e-6  # of the norms within, whatever config.json says of others


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """The numbers of one layer. A query has `nope_dim` numbers that stay and `rope_dim` that are rotated."""

    hidden_size: int
    num_heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    block_size: int
    scale: float
    q_rank: int = 0  # of the queries' latent; 0: they have none
    bias: bool = False

    @classmethod
    def of(cls, ctx: BuildContext) -> LatentSpec:
        """Read config.json. Raises CheckpointError for a missing name."""
        c = ctx.config
        nope, rope = int(need(c, "qk_nope_head_dim")), int(need(c, "qk_rope_head_dim"))
        return cls(
            hidden_size=int(need(c, "hidden_size")),
            num_heads=int(need(c, "num_attention_heads")),
            kv_rank=int(need(c, "kv_lora_rank")),
            nope_dim=nope,
            rope_dim=rope,
            value_dim=int(need(c, "v_head_dim")),
            block_size=ctx.block_size,
            scale=(nope + rope) ** -0.5 * _sharpening(RopeConfig.of(c, rope)) ** 2,
            q_rank=int(c.get("q_lora_rank") or 0),
            bias=bool(c.get("attention_bias", False)),
        )


def _sharpening(config: RopeConfig) -> float:
    """Return the factor that YaRN with `mscale_all_dim` applies to queries and keys."""
    weight = float(config.options.get("mscale_all_dim") or 0.0)
    factor = float(config.options.get("factor") or 1.0)
    return 1.0 if config.kind == "default" or not weight or factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


class LatentAttention(nn.Module):
    """Projections, latent attention, output projection. `name` is the layer's name in the cache.

    Parameters: `qkv_a_proj` (merges q_proj, or q_a_proj, and kv_a_proj_with_mqa), `q_a_layernorm` and `q_b_proj` where
    queries have a latent, `kv_a_layernorm`, `kv_b_proj`, `o_proj`.
    """

    def __init__(self, name: str, spec: LatentSpec, rope: Rope) -> None:
        super().__init__()
        self.name = name
        self._rope = (rope,)  # in a tuple, so that torch does not register it as a submodule of every layer
        q_size = spec.num_heads * (spec.nope_dim + spec.rope_dim)
        first = {"q_a_proj": spec.q_rank} if spec.q_rank else {"q_proj": q_size}
        projections = {**first, "kv_a_proj_with_mqa": spec.kv_rank + spec.rope_dim}
        split = outputs(Shared(1) if spec.q_rank else spec.num_heads, Shared(1))  # latents are whole in each rank
        self.qkv_a_proj = MergedLinear(spec.hidden_size, projections, spec.bias, split=split)
        self._q_width = next(iter(self.qkv_a_proj.projections.values()))
        self.q_a_layernorm = RMSNorm(spec.q_rank, _EPS) if spec.q_rank else None
        heads = outputs(spec.num_heads)
        self.q_b_proj = Linear(spec.q_rank, q_size, split=heads) if spec.q_rank else None
        self.kv_a_layernorm = RMSNorm(spec.kv_rank, _EPS)
        self.kv_b_proj = Linear(spec.kv_rank, spec.num_heads * (spec.nope_dim + spec.value_dim), split=heads)
        self.kv_b_proj.of_tokens = False  # it is taken apart: see `_absorbed`
        values = spec.num_heads * spec.value_dim
        self.o_proj = Linear(values, spec.hidden_size, spec.bias, split=inputs(spec.num_heads))
        self.spec = replace(spec, num_heads=self.o_proj.in_features // spec.value_dim)  # of this rank's heads
        self.options = AttentionOptions(scale=spec.scale)
        self._kernels = ops.for_layers()
        self._matrices: tuple[HeadMatrices, HeadMatrices] | None = None  # of keys and of values
        self._adds: tuple[Add, Add, AdapterBank] | None = None  # adapters' parts of both, and their bank

    @property
    def cache(self) -> LayerCache:
        """Cache entries that this layer keeps for each token."""
        spec = self.spec
        group = CacheGroup("full", spec.block_size)
        return LayerCache(group, 1, spec.kv_rank + spec.rope_dim, value_dim=spec.kv_rank)

    def adapt(self, name: str, bank: AdapterBank) -> bool:
        """Add the adapters' part of `kv_b_proj` to the products with its parts.

        Of W + B A, a head's keys give queries q the product q Bₖ A beside q Wₖ, and its values Bᵥ A beside Wᵥ.
        """
        spec, kv_b = self.spec, adapted(f"{name}.kv_b_proj", [self.kv_b_proj], {})
        heads, nope, value, rank = spec.num_heads, spec.nope_dim, spec.value_dim, spec.kv_rank

        def parts(up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = kv_b.outputs(up, None).view(heads, nope + value, -1).tensor_split([nope], dim=1)
            return keys, values

        def layer(own: str, inputs: int, outputs: int, split: SplitFactors) -> Add | None:
            (whole,) = kv_b.out_features.values()
            stacked = Stacked(module=kv_b.name, inputs=rank, outputs=whole, ranks=1, split=split)
            described = undivided(f"{kv_b.name}.{own}", inputs, outputs)
            return bank.layer(replace(described, parts=heads, modules={}, stacked=stacked))

        keys = layer("keys", nope, rank, lambda down, up: (parts(up)[0].mT, down.t().expand(heads, -1, -1)))
        values = layer("values", rank, value, lambda down, up: (down.expand(heads, -1, -1), parts(up)[1]))
        if keys is not None and values is not None:
            self._adds = keys, values, bank
        return self._adds is not None

    def _added(self, which: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Add the adapters' part to what `HeadMatrices` have made of x [tokens, heads, in]."""
        if self._adds is None:
            return y
        tokens, heads, bank = len(x), self.spec.num_heads, self._adds[2]
        slots = (bank.token_slots.unsqueeze(1) * heads + torch.arange(heads, device=x.device)).flatten()
        add = self._adds[1] if which else self._adds[0]
        return add(x.reshape(tokens * heads, -1), y.reshape(tokens * heads, -1), slots).view(y.shape)

    def pack(self) -> None:
        if self._matrices is None:
            self.kv_b_proj.pack()
            self._matrices = self._absorbed()

    def packed_tensors(self) -> Iterable[torch.Tensor]:
        for matrices in self._matrices or ():
            yield from matrices.tensors()

    def _absorbed(self) -> tuple[HeadMatrices, HeadMatrices]:
        """Return each head's part of `kv_b_proj`. Its weights, however quantized, are its results for unit vectors."""
        spec, like = self.spec, self.kv_a_layernorm.weight
        ones = torch.eye(spec.kv_rank, dtype=like.dtype, device=like.device)
        weights = self.kv_b_proj(ones).t().reshape(spec.num_heads, -1, spec.kv_rank)
        keys, values = weights.split([spec.nope_dim, spec.value_dim], dim=1)
        return HeadMatrices(keys.transpose(1, 2), self._kernels), HeadMatrices(values, self._kernels)

    def forward(self, x: torch.Tensor, ctx: ForwardContext, rotation: Rotation) -> torch.Tensor:
        """Map [tokens, hidden] to [tokens, hidden]."""
        query, key = self.meet(*self.project(x), rotation)
        latents = key[..., : self.spec.kv_rank]
        return self.finish(ctx.attend(self.name, query, key, latents, self.options))

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Map [tokens, hidden] to latents of queries, latents, and keys to rotate; queries may have no latents."""
        q, latent, turned = self.qkv_a_proj(x).split([self._q_width, self.spec.kv_rank, self.spec.rope_dim], dim=1)
        if self.q_a_layernorm is not None:
            q = self.q_a_layernorm(q)
        return q, self.kv_a_layernorm(latent), turned

    def meet(
        self, q: torch.Tensor, latent: torch.Tensor, turned: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries [tokens, heads, kv_rank + rope_dim] and their keys [tokens, 1, kv_rank + rope_dim]."""
        spec, tokens = self.spec, q.shape[0]
        keys_of, _ = self._matrices or self._absorbed()
        if self.q_b_proj is not None:
            q = self.q_b_proj(q)
        still, q_turned = q.view(tokens, spec.num_heads, -1).tensor_split([spec.nope_dim], dim=2)
        both = self._rope[0].rotate(torch.cat((q_turned, turned.unsqueeze(1)), dim=1), rotation)
        query = torch.cat((self._added(0, still, keys_of.multiply(still)), both[:, :-1]), dim=2)
        return query, torch.cat((latent.unsqueeze(1), both[:, -1:]), dim=2)

    def finish(self, sums: torch.Tensor) -> torch.Tensor:
        """Map each head's weighted sums of latents [tokens, heads, kv_rank] to [tokens, hidden]."""
        _, values_of = self._matrices or self._absorbed()
        values = self._added(1, sums, values_of.multiply(sums))
        y: torch.Tensor = self.o_proj(values.reshape(sums.shape[0], -1))
        return y


class HeadMatrices:
    """A matrix for each head: [tokens, heads, in] → [tokens, heads, out]. `weights` [heads, out, in].

    Each is packed like any other weight, where the device has kernels for that. On a CPU a token's result then has the
    same bits in any batch.
    """

    def __init__(self, weights: torch.Tensor, kernels: ops.LayerKernels) -> None:
        self._weights = weights.contiguous()
        self._packed: list[ops.Library] = []
        made = [kernels.matrix(weight, None, False) for weight in self._weights] if kernels.matrix else []
        self._dense = [matrix for matrix in made if matrix is not None]
        self._bank = kernels.bank(self._dense) if kernels.bank and self._dense else None
        if self._bank is None and kernels.packed is not None:
            self._packed = [packed for packed in map(kernels.packed, self._weights) if packed is not None]
        if self._bank or self._packed:
            self._weights = weights.new_empty(0)

    def tensors(self) -> Iterable[torch.Tensor]:
        """Yield every tensor that is read."""
        yield self._weights
        yield from (packed.matrix for packed in self._packed)
        for matrix in self._dense:
            yield from matrix.tensors()

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        tokens, heads = x.shape[:2]
        by_head = x.transpose(0, 1)
        if self._bank is not None:
            rows = by_head.reshape(heads * tokens, -1)
            counts = torch.full((heads,), tokens, dtype=torch.int64)
            y = self._bank.multiply(rows, counts, heads * tokens).view(heads, tokens, -1)
        elif self._packed:
            y = torch.stack([matrix.matmul(rows, None) for matrix, rows in zip(self._packed, by_head, strict=True)])
        else:
            y = torch.bmm(by_head, self._weights.transpose(1, 2))
        return y.transpose(0, 1)

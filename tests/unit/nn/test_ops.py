"""Fused kernels against the layers' torch code, which they stand in for; equal bits alone and in a batch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ferrule.assembly.model import pack
from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.model import AttentionOptions, BuildContext
from ferrule_kernels.cpu import elementwise, library
from ferrule_nn import (
    Attention,
    AttentionSpec,
    Decoder,
    DecoderLayer,
    GatedMLP,
    LayerNorm,
    RMSNorm,
    Rope,
    RopeConfig,
    ops,
)
from ferrule_nn import norm as norms
from ferrule_plugins.platform.cpu_kernels import cpu_kernels
from ferrule_plugins.platform.cuda_kernels import triton_layers

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
SIZES = [5, 16, 200, 1024]  # less than a vector, one, a remainder, many
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of bfloat16 one unit in the last place, relative


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = CLOSE[theirs.dtype]
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def _fill(module: nn.Module, dtype: torch.dtype) -> None:
    module.to(dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm(dtype: torch.dtype, size: int, offset: float) -> None:
    layer = RMSNorm(size, 1e-5, offset)
    _fill(layer, dtype)
    x, y = (torch.randn(40, size).to(dtype) * 3 for _ in range(2))
    plain, (total, after) = layer(x), norms.add_and_norm(layer, x, y, 0.25)
    layer.pack()
    assert layer.kernel is not None
    _close(layer(x), plain)
    fused_total, fused = norms.add_and_norm(layer, x, y, 0.25)
    assert torch.equal(fused_total, total)
    _close(fused, after)
    one_total, one = norms.add_and_norm(layer, x[7:8], y[7:8], 0.25)
    assert torch.equal(one_total, total[7:8])
    assert torch.equal(one, fused[7:8])


def test_norm_of_rows_that_do_not_follow_each_other_or_are_of_another_type() -> None:
    layer = RMSNorm(16)
    _fill(layer, torch.float32)
    wide = torch.randn(6, 40)
    plain = layer(wide[:, 8:24])
    layer.pack()
    _close(layer(wide[:, 8:24]), plain)
    assert layer(wide[:, 8:24].bfloat16()).dtype == torch.float32  # as torch has it: the weights are wider


def test_norm_of_what_is_not_finite() -> None:
    layer = RMSNorm(16)
    _fill(layer, torch.bfloat16)
    layer.pack()
    x = torch.randn(3, 16).bfloat16()
    x[1, 4] = float("nan")
    out = layer(x)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_other_norms_keep_their_own_code() -> None:
    class Doubled(RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    x, y = torch.randn(2, 16), torch.randn(2, 16)
    for layer in (Doubled(16), LayerNorm(16)):
        _fill(layer, torch.float32)
        if isinstance(layer, RMSNorm):
            layer.pack()
        total, after = norms.add_and_norm(layer, x, y)
        assert torch.equal(total, x + y)
        assert torch.equal(after, layer(x + y))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [5, 24, 600])
@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh"])
def test_gate(dtype: torch.dtype, size: int, act: str) -> None:
    kernel = ops.gate(ops.for_layers(), act, size)
    assert kernel is not None
    x = torch.randn(70, 2 * size).to(dtype) * 4
    x[0, :4] = torch.tensor([0.0, -0.0, 1e4, -1e4])
    gate, up = x.chunk(2, dim=-1)
    _close(kernel(x), GatedMLP(8, size, act).act(gate) * up)
    assert torch.equal(kernel(x)[3:4], kernel(x[3:4]))


def test_an_activation_without_a_kernel() -> None:
    mlp = GatedMLP(8, 24, "relu")
    _fill(mlp, torch.float32)
    x = torch.randn(3, 8)
    before = mlp(x)
    mlp.pack()
    assert torch.equal(mlp(x), before)


def _attention(norm: Callable[[int], nn.Module] | None, rope: Rope | None, dim: int, dtype: torch.dtype) -> Attention:
    spec = AttentionSpec(hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=dim, block_size=16, qk_norm=norm)
    layer = Attention("layer", spec, rope)
    _fill(layer, dtype)
    return layer


def _seen(layer: Attention, x: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
    """Return queries, keys and values as attention gets them."""
    seen: list[torch.Tensor] = []

    def attend(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        seen.extend((q.clone(), k.clone(), v.clone()))
        return q

    ctx: Any = SimpleNamespace(attend=attend, positions=positions, lengths=positions + 1)
    rope = layer._rope[0]
    layer(x, ctx, None if rope is None else rope.at(ctx, x.dtype))
    return seen


ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "partial": {"partial_rotary_factor": 0.5},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 24, 64])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rope", [*ROPES, None])
def test_heads(dtype: torch.dtype, dim: int, interleaved: bool, normed: bool, rope: str | None) -> None:
    config = {"max_position_embeddings": 64, **ROPES.get(rope or "", {})}
    made = Rope(RopeConfig.of(config, dim), interleaved) if rope is not None else None
    layer = _attention(RMSNorm if normed else None, made, dim, dtype)
    x, positions = torch.randn(70, 32).to(dtype), torch.arange(70)
    plain = _seen(layer, x, positions)
    layer.pack()
    fused = _seen(layer, x, positions)
    for ours, theirs in zip(fused, plain, strict=True):
        _close(ours, theirs)
    q, k, _ = layer.qkv_proj(x).view(70, -1, dim).split([4, 2, 2], dim=1)  # rows alone: from the same projection
    if layer._heads is not None:
        rows = layer.qkv_proj(x).view(70, -1, dim)
        rotation = None if made is None else made.at(_places(positions), dtype)
        layer._heads(rows, rotation)
        one = torch.cat((q, k), dim=1)[30:31].contiguous()
        layer._heads(one, None if rotation is None else (rotation[0][30:31], rotation[1][30:31]))
        assert torch.equal(one[0], rows[30, :6])


def _places(positions: torch.Tensor) -> Any:
    return SimpleNamespace(positions=positions, lengths=positions + 1)


def test_heads_with_a_norm_of_another_kind_keep_their_own_code() -> None:
    layer = _attention(lambda size: nn.LayerNorm(size), Rope(RopeConfig.of({}, 16)), 16, torch.float32)
    x = torch.randn(3, 32)
    plain = _seen(layer, x, torch.arange(3))
    layer.pack()
    for ours, theirs in zip(_seen(layer, x, torch.arange(3)), plain, strict=True):
        assert torch.equal(ours, theirs)


def test_without_kernels_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise library.KernelsUnavailableError("no compiler")

    monkeypatch.setattr(library, "load", missing)
    kernels = cpu_kernels()
    with ops.using(kernels):
        layer = RMSNorm(16)
    _fill(layer, torch.float32)
    layer.pack()
    assert layer.kernel is None
    found = kernels.part(ops.LayerKernels)
    assert found is not None
    assert ops.gate(found, "silu", 8) is None
    assert ops.heads(found, (2, 1), 8, None, 8, False) is None


def test_types_and_devices_without_a_kernel() -> None:
    ours, none = ops.for_layers(), ops.LayerKernels()
    assert ops.rms_norm(ours, torch.ones(8, dtype=torch.float16), 1e-6, 0.0) is None
    assert ops.rms_norm(none, torch.ones(8), 1e-6, 0.0) is None
    assert ops.gate(none, "silu", 8) is None
    assert ops.heads(none, (2, 1), 8, None, 8, False) is None
    kernel = ops.gate(ours, "silu", 8)
    assert kernel is not None
    assert not kernel.accepts(torch.ones(1, 16, dtype=torch.float16))


def test_a_layer_has_the_kernels_that_it_was_made_with() -> None:
    made: Any = [lambda *given: given] * 2
    kernels = ops.LayerKernels(dtypes=(torch.float16,), acts=("relu",), gate=made[0], heads=made[1])
    with ops.using(Kernels((object(), kernels))):
        assert ops.for_layers() is kernels
    assert ops.for_layers() is not kernels
    assert ops.gate(kernels, "relu", 8) == ("relu", 8)
    assert ops.gate(kernels, "silu", 8) is None
    assert ops.activation(kernels, "relu", 8) is None
    assert ops.heads(kernels, (2, 1), 8, None, 4, True) == ((2, 1), 8, [], 4, True)


def test_the_home_of_a_layer_is_where_what_is_left_of_it_is() -> None:
    layer = GatedMLP(8, 24)
    layer.gate_up_proj.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    layer.down_proj.weight = nn.Parameter(torch.empty(8, 24, device="meta"), requires_grad=False)
    assert ops.weights_device(layer) == torch.device("meta")
    layer.down_proj.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    assert ops.weights_device(layer) == CPU


def test_kernels_of_both_kinds_have_one_form() -> None:
    """Compare what the layers call, by name and by parameters."""
    import inspect

    pytest.importorskip("triton")
    ours, theirs = triton_layers(), ops.for_layers()
    for name in ("rms_norm", "heads", "gate"):
        kernel, twin = getattr(ours, name), getattr(theirs, name)
        for method in ("__init__", "__call__", "accepts", *(("after",) if name == "rms_norm" else ())):
            parameters = [inspect.signature(getattr(each, method)).parameters for each in (kernel, twin)]
            assert list(parameters[0]) == list(parameters[1])
    assert set(elementwise.GATES) <= set(ours.acts)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_layers_that_make_their_sums_in_the_next_norm_have_the_same_bits(packed: bool, scale: float) -> None:
    class Alone(DecoderLayer):
        """One whose type is its own is called, and not taken apart."""

    class Other(Decoder):
        def make_layer(self, index: int) -> nn.Module:
            return Alone(self, index)

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 30}
    config = {**sizes, "num_hidden_layers": 3}
    ctx = BuildContext(
        config=config, dtype=torch.float32, device=CPU, block_size=4, max_model_len=64, kernels=ops.current()
    )
    models = [Decoder(ctx), Other(ctx)]
    _fill(models[0], torch.float32)
    models[1].load_state_dict(models[0].state_dict())
    step: Any = SimpleNamespace(
        embeds=None, attend=lambda name, q, k, v, options: q + k, **vars(_places(torch.arange(5)))
    )
    found = []
    for model in models:
        for layer in model.layers:
            assert isinstance(layer, DecoderLayer)
            layer.residual_scale = scale
        if packed:
            pack(model)
        found.append(model(torch.arange(5), step))
    assert torch.equal(found[0], found[1])
    assert found[0].isfinite().all()

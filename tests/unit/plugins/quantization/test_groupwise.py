"""GPTQ, AWQ and the forms of Marlin: every variant, beside the product with the weights that it means."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ferrule.errors import CheckpointError
from ferrule_nn import Dense
from ferrule_plugins.quantization.groupwise import Awq, Either, Gptq
from ferrule_plugins.quantization.marlin import Qqq
from ferrule_testkit.caps import fake_caps
from tests.unit.plugins.quantization.packers import (
    Numbers,
    awq_fast,
    awq_gemm,
    awq_gemv,
    drawn,
    gptq,
    gptq_planes,
    layer_of,
    loaded,
    marlin,
    marlin_sparse,
    merged,
    off,
    qqq,
)

CPU = fake_caps()
NEAR = 5e-3


def _gptq(bits: int, group: int, **more: Any) -> Gptq:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": False, **more}
    assert Gptq.refuses(config, CPU, torch.bfloat16) is None
    return Gptq(config)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [32, 48, 20, 0])
@pytest.mark.parametrize("ordered", [False, True])
def test_gptq(bits: int, group: int, ordered: bool) -> None:
    """Read groups of any size, the last of them shorter; inputs in the order of their groups, and in any other."""
    given = drawn(64, 160, bits, group, shuffled=ordered and group > 0)
    layer = loaded(_gptq(bits, group, desc_act=ordered), gptq(given, bits), (64, 160))
    assert off(layer, given.meant) < NEAR


def test_an_order_of_zeros_is_that_of_the_inputs() -> None:
    """Read the order of older files."""
    given = drawn(32, 96, 4, 32)
    tensors = {**gptq(given, 4), "g_idx": torch.zeros(96, dtype=torch.int32)}
    assert off(loaded(_gptq(4, 32, desc_act=True), tensors, (32, 96)), given.meant) < NEAR


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_v2_and_symmetric(bits: int) -> None:
    given = drawn(32, 64, bits, 32)
    method = _gptq(bits, 32, checkpoint_format="gptq_v2")
    assert off(loaded(method, gptq(given, bits, less=0), (32, 64)), given.meant) < NEAR
    given = drawn(32, 64, bits, 32, symmetric=True)
    layer = loaded(_gptq(bits, 32, sym=True, static_groups=True, desc_act=True), gptq(given, bits), (32, 64))
    assert off(layer, given.meant) < NEAR
    assert sum(each.nbytes for each in layer.packed_tensors()) == 32 * 64 * bits // 8 + 2 * 32 * 2  # no offsets


@pytest.mark.parametrize("bits", range(2, 9))
def test_gptq_in_planes(bits: int) -> None:
    given = drawn(64, 96, bits, 32)
    layer = loaded(_gptq(bits, 32, checkpoint_format="gptq_p"), gptq_planes(given, bits), (64, 96))
    assert off(layer, given.meant) < NEAR


@pytest.mark.parametrize("ordered", [False, True])
def test_zero_points_take_four_bits(ordered: bool) -> None:
    given = drawn(64, 256, 4, 32, shuffled=ordered)
    layer = loaded(_gptq(4, 32, desc_act=ordered), gptq(given, 4), (64, 256))
    size = sum(each.nbytes for each in layer.packed_tensors())
    assert size == 64 * 256 // 2 + 64 * 8 * (2 + 2) + 4 * 256 * ordered


def test_merged_projections_of_one_order_and_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("ferrule_quant.products._log.warning", lambda text, *args: said.append(args[0]))
    rows = {"q_proj": 64, "k_proj": 32}
    for seeds, wide in (((3, 3), False), ((3, 4), True)):
        parts = {}
        for (name, count), seed in zip(rows.items(), seeds, strict=True):
            index = drawn(1, 96, 4, 32, seed=seed, shuffled=True).index
            own = drawn(count, 96, 4, 32, seed=count)
            parts[name] = Numbers(own.numbers, own.zeros, own.scales, index)
        layer = merged(_gptq(4, 32, desc_act=True), {name: gptq(own, 4) for name, own in parts.items()}, rows, 96)
        assert off(layer, torch.cat([own.meant for own in parts.values()])) < NEAR
        assert isinstance(layer.scheme, Dense) is wide
        assert bool(said) is wide


@pytest.mark.parametrize(("value", "said"), [(7, "groups that the layer does not have"), (1, "more than 32 inputs")])
def test_a_damaged_order_is_told(value: int, said: str) -> None:
    given = drawn(32, 128, 4, 32, shuffled=True)
    tensors = gptq(given, 4)
    tensors["g_idx"] = torch.full_like(tensors["g_idx"], value)
    with pytest.raises(CheckpointError, match=said):
        loaded(_gptq(4, 32, desc_act=True), tensors, (32, 128))


def test_damaged_orders_of_merged_projections_are_told() -> None:
    rows, parts = {"q_proj": 32, "k_proj": 32}, {}
    for seed, (name, count) in enumerate(rows.items()):
        parts[name] = gptq(drawn(count, 96, 4, 32, seed=seed, shuffled=True), 4)
    parts["k_proj"]["g_idx"][5] = -1
    with pytest.raises(CheckpointError, match="groups that the layer does not have"):
        merged(_gptq(4, 32, desc_act=True), parts, rows, 96)


def test_settings_that_differ_between_layers() -> None:
    dynamic = {
        r"-:.*\.k_proj": {},
        r"+:model\.layers\.1\..*": {"bits": 8, "group_size": -1},
        r".*\.layers\.2\.mlp.*": {"desc_act": True},
        "lm_head": {"bits": 8},
    }
    method = _gptq(4, 32, dynamic=dynamic, lm_head=True)

    def found(name: str) -> Any:
        scheme: Any = method.scheme(layer_of(name))
        return None if scheme is None else (scheme.bits, scheme.group, scheme.ordered, scheme.dtype)

    assert found("layers.0.mlp.up_proj") == (4, 32, False, None)
    assert found("layers.0.self_attn.k_proj") is None
    assert found("layers.1.mlp.up_proj") == (8, 0, False, None)
    assert found("layers.2.mlp.up_proj") == (4, 32, True, None)
    assert found("lm_head") == (8, 32, False, torch.float32)
    assert _gptq(4, 32).scheme(layer_of("lm_head")) is None


def test_merged_projections_with_settings_of_their_own() -> None:
    """Merge one of 4 bits, one of 8 in other groups, and one that is not quantized, with biases."""
    dynamic = {r"+:.*\.k_proj": {"bits": 8, "group_size": 16}, r"-:.*\.v_proj": {}}
    rows, draw = {"q_proj": 64, "k_proj": 32, "v_proj": 32}, torch.Generator().manual_seed(0)
    given = {"q_proj": drawn(64, 96, 4, 32), "k_proj": drawn(32, 96, 8, 16, seed=1)}
    plain = torch.randn((32, 96), generator=draw)
    parts = {name: gptq(own, 4 if name == "q_proj" else 8) for name, own in given.items()}
    parts["v_proj"] = {"weight": plain}
    biases = {name: torch.randn(count, generator=draw) for name, count in rows.items()}
    for name, bias in biases.items():
        parts[name]["bias"] = bias
    layer = merged(_gptq(4, 32, dynamic=dynamic), parts, rows, 96, bias=True)
    x = torch.randn(5, 96, generator=draw)
    meant = torch.cat([*(own.meant for own in given.values()), plain])
    expected = x @ meant.t() + torch.cat(list(biases.values()))
    assert (layer(x) - expected).norm() < NEAR * expected.norm()
    assert {name for name, own in layer.named_parameters() if own.numel()} <= {f"{name}.bias" for name in rows}


def test_the_memory_that_is_told_before_loading_is_what_it_takes() -> None:
    for bits, symmetric, shuffled in ((4, False, False), (4, True, False), (3, False, False), (8, False, False)):
        given = drawn(64, 256, bits, 32, symmetric, shuffled=shuffled)
        layer = loaded(_gptq(bits, 32, sym=symmetric), gptq(given, bits), (64, 256))
        scheme: Any = layer.scheme
        assert scheme.form.packed_bytes(64, 256) == sum(each.nbytes for each in layer.packed_tensors())


@pytest.mark.parametrize("only", [["self_attn.o_proj"], [["self_attn.q_proj"], ["self_attn.o_proj"]]])
def test_only_some_modules_of_a_block(only: list[Any]) -> None:
    method = _gptq(4, 32, modules_in_block_to_quantize=only, lm_head=True)
    names = ("layers.0.self_attn.o_proj", "layers.0.mlp.up_proj", "lm_head")
    assert [method.scheme(layer_of(name)) is not None for name in names] == [True, False, True]


@pytest.mark.parametrize(("bits", "group", "symmetric"), [(4, 32, False), (4, 0, False), (4, 24, True), (8, 32, False)])
def test_awq_gemm(bits: int, group: int, symmetric: bool) -> None:
    given = drawn(64, 96, bits, group, symmetric)
    method = Awq({"quant_method": "awq", "w_bit": bits, "q_group_size": group or -1, "zero_point": not symmetric})
    assert off(loaded(method, awq_gemm(given, bits), (64, 96)), given.meant) < NEAR


@pytest.mark.parametrize(("version", "write"), [("GEMV", awq_gemv), ("gemv_fast", awq_fast)])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_awq_in_other_layouts(version: str, write: Any, group: int) -> None:
    given = drawn(16, 384, 4, group)
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": version}
    assert Awq.refuses(config, CPU, torch.float16) is None
    assert off(loaded(Awq(config), write(given, group), (16, 384)), given.meant) < NEAR
    rows = {"gate_proj": 16, "up_proj": 8}
    parts = {name: drawn(count, 384, 4, group, seed=count) for name, count in rows.items()}
    layer = merged(Awq(config), {name: write(own, group) for name, own in parts.items()}, rows, 384)
    assert off(layer, torch.cat([own.meant for own in parts.values()])) < NEAR


def test_awq_leaves_layers_out() -> None:
    method = Awq({"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": ["mlp"]})
    assert method.scheme(layer_of()) is None
    assert method.scheme(layer_of("layers.0.self_attn.o_proj")) is not None


@pytest.mark.parametrize("group", [128, 0])
def test_marlin(group: int) -> None:
    given = drawn(128, 256, 4, group, symmetric=True)
    for config in (
        {"quant_method": "gptq", "checkpoint_format": "marlin"},
        {"quant_method": "gptq", "is_marlin_format": True},
        {"quant_method": "marlin"},
    ):
        stated = {**config, "bits": 4, "group_size": group or -1}
        assert Gptq.refuses(stated, CPU, torch.float16) is None
        assert off(loaded(Gptq(stated), marlin(given), (128, 256)), given.meant) < NEAR
    tensors = marlin(given)
    renamed = {"qweight": tensors["B"], "scales": tensors["s"]}
    method = Awq({"quant_method": "awq", "bits": 4, "group_size": group or -1, "version": "marlin"})
    assert off(loaded(method, renamed, (128, 256)), given.meant) < NEAR


@pytest.mark.parametrize(("bits", "group"), [(4, 128), (4, 0), (8, 0)])
def test_sparse_marlin(bits: int, group: int) -> None:
    """Read two of four inputs, some of which are in the middle of the range too."""
    given = drawn(64, 256, bits, group, symmetric=True)
    draw = torch.rand((64, 64, 4), generator=torch.Generator().manual_seed(0)).sort(dim=-1).indices
    numbers = given.numbers.view(64, 64, 4).scatter(2, draw[..., :2], 1 << (bits - 1)).flatten(1)
    given = Numbers(numbers, given.zeros, given.scales, given.index)
    config = {"quant_method": "gptq", "checkpoint_format": "marlin_24", "bits": bits, "group_size": group or -1}
    assert Gptq.refuses(config, CPU, torch.float16) is None
    tensors = marlin_sparse(given, bits)
    assert off(loaded(Gptq(config), tensors, (64, 256)), given.meant) < NEAR
    tensors["B_meta"].zero_()
    with pytest.raises(CheckpointError, match="twice"):
        loaded(Gptq(config), tensors, (64, 256))


@pytest.mark.parametrize("group", [128, 0])
def test_qqq(group: int) -> None:
    """Multiply activations of 8 bits: one part in 127 of a row."""
    given = drawn(128, 256, 4, group, symmetric=True)
    method = Qqq({"quant_method": "qqq", "wbits": 4, "group_size": group or -1})
    assert off(loaded(method, qqq(given), (128, 256)), given.meant) < 0.02


@pytest.mark.parametrize("name", ["moe_wna16", "ipex"])
def test_names_of_other_kernels_read_both(name: str) -> None:
    for config, tensors, kind in (
        ({"quant_method": "gptq", "sym": True, "desc_act": False}, gptq, Gptq),
        ({"quant_method": "awq", "zero_point": True}, awq_gemm, Awq),
    ):
        given, stated = drawn(32, 64, 4, 32), {**config, "bits": 4, "group_size": 32}
        assert Either.refuses(stated, CPU, torch.bfloat16) is None
        assert off(loaded(Either(stated), tensors(given, 4), (32, 64)), given.meant) < NEAR
        assert set(kind.formats) <= set(Either.formats)
    assert "not quantized" in (Either.refuses({}, CPU, torch.bfloat16) or "")

"""AutoRound, HQQ, SqueezeLLM, AQLM, and the names of weights of 8 bits: read, refused, and which layers they mean."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ferrule.errors import CheckpointError
from ferrule_nn import Dense, Linear, MergedLinear
from ferrule_plugins.quantization.autoround import AutoRound
from ferrule_plugins.quantization.compressed import CompressedTensors
from ferrule_plugins.quantization.deepspeedfp import DeepSpeedFp
from ferrule_plugins.quantization.groupwise import Awq, Gptq
from ferrule_plugins.quantization.hqq import Hqq
from ferrule_plugins.quantization.integers import ExpertsInt8, LayersInt8
from ferrule_plugins.quantization.marlin import Qqq
from ferrule_plugins.quantization.tables import Aqlm, SqueezeLlm
from ferrule_testkit.caps import fake_caps
from tests.unit.plugins.quantization.packers import (
    Tensors,
    awq_gemm,
    compressed,
    drawn,
    gptq,
    layer_of,
    loaded,
    merged,
    off,
    words,
)

CPU = fake_caps()
NEAR = 5e-3


# ---------------------------------------------------------------------------------------- AutoRound


def _auto_round(**changes: Any) -> AutoRound:
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int", **changes}
    assert AutoRound.refuses(config, CPU, torch.bfloat16) is None
    return AutoRound(config)


@pytest.mark.parametrize("bits", range(2, 9))
def test_auto_round_in_the_layout_of_gptq(bits: int) -> None:
    given = drawn(32, 96, bits, 32)
    for name, less in (("auto_round:auto_gptq", 1), ("auto_gptq", 1), ("auto_round", 0), ("auto_round:gptqmodel", 0)):
        method = _auto_round(bits=bits, packing_format=name)
        assert off(loaded(method, gptq(given, bits, less, ordered=False), (32, 96)), given.meant) < NEAR
    method = _auto_round(bits=bits, backend="auto_round:exllamav2")
    assert off(loaded(method, gptq(given, bits, less=0), (32, 96)), given.meant) < NEAR


@pytest.mark.parametrize("bits", [4, 5, 7])
def test_auto_round_in_the_layout_of_awq(bits: int) -> None:
    """Interleave eight numbers, of any bits."""
    given = drawn(32, 96, bits, 32)
    tensors = awq_gemm(given, bits, [0, 2, 4, 6, 1, 3, 5, 7])
    layer = loaded(_auto_round(bits=bits, packing_format="auto_round:auto_awq"), tensors, (32, 96))
    assert off(layer, given.meant) < NEAR


def test_auto_round_has_settings_of_single_layers() -> None:
    extra = {
        "model.layers.0.mlp.up_proj": {"bits": 8, "group_size": 128},
        "model.layers.1.mlp.up_proj": {"bits": 16, "data_type": "float"},
        r".*mlp\.gate_proj": {"bits": 2},
        "lm_head": {"bits": 4, "group_size": 64},
    }
    method = _auto_round(extra_config=extra, block_name_to_quantize="model.layers")

    def found(name: str) -> tuple[int, int] | None:
        scheme: Any = method.scheme(layer_of(name))
        return None if scheme is None else (scheme.bits, scheme.group)

    assert found("layers.0.mlp.up_proj") == (8, 128)
    assert found("layers.1.mlp.up_proj") is None
    assert found("layers.3.mlp.gate_proj") == (2, 32)
    assert found("layers.10.mlp.up_proj") == (4, 32)
    assert found("lm_head") == (4, 64)
    assert found("projector.up_proj") is None
    assert _auto_round().scheme(layer_of("lm_head")) is None


# ---------------------------------------------------------------------------------------- compressed-tensors


def _packed(bits: int, group: int, symmetric: bool = False, **weights: Any) -> CompressedTensors:
    stated = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel"}
    weights = {**stated, "group_size": group or None, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    assert CompressedTensors.refuses(config, CPU, torch.bfloat16) is None
    return CompressedTensors(config)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_integers_of_any_bits_and_groups(bits: int, symmetric: bool) -> None:
    for group in (0, 16, 24, 96):
        given = drawn(40, 96, bits, group, symmetric)
        layer = loaded(_packed(bits, group, symmetric), compressed(given, bits, symmetric), (40, 96))
        assert off(layer, given.meant) < NEAR
    given = drawn(40, 90, bits, 0, symmetric)  # whose rows end within a word
    layer = loaded(_packed(bits, 0, symmetric), compressed(given, bits, symmetric), (40, 90))
    assert off(layer, given.meant) < NEAR


@pytest.mark.parametrize("order", ["group", "dynamic", True])
def test_packed_integers_out_of_order(order: Any) -> None:
    given = drawn(40, 96, 4, 32, shuffled=True)
    layer = loaded(_packed(4, 32, actorder=order), compressed(given, 4, ordered=True), (40, 96))
    assert off(layer, given.meant) < NEAR
    rows, parts = {"q_proj": 64, "k_proj": 32}, {}
    for name, count in rows.items():
        parts[name] = drawn(count, 96, 4, 32, seed=count, shuffled=True)
    written = {name: compressed(own, 4, ordered=True) for name, own in parts.items()}
    layer = merged(_packed(4, 32, actorder=order), written, rows, 96)
    assert off(layer, torch.cat([own.meant for own in parts.values()])) < NEAR
    assert isinstance(layer.scheme, Dense)  # no kernel has two orders


def test_packed_projections_share_no_word_of_zero_points() -> None:
    method = _packed(4, 32)
    with pytest.raises(CheckpointError, match="20 inputs or outputs, which do not fill words"):
        MergedLinear(96, {"q_proj": 20, "k_proj": 32}).quantize("qkv_proj", method)


# ---------------------------------------------------------------------------------------- HQQ


def _hqq(bits: int, group: int | None, axis: int = 1, **more: Any) -> Hqq:
    params = {"weight_quant_params": {"nbits": bits, "group_size": group, "axis": axis, "channel_wise": True}}
    config = {"quant_method": "hqq", "quant_config": params, "skip_modules": ["lm_head"], **more}
    assert Hqq.refuses(config, CPU, torch.bfloat16) is None
    return Hqq(config)


def _hqq_tensors(n: int, k: int, bits: int, group: int, axis: int = 1, seed: int = 0) -> tuple[Tensors, torch.Tensor]:
    """Return the tensors that ``Quantizer.quantize`` and ``BitPack`` write, and the weights that they encode."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 1 << bits, (n * k // group, group) if axis else (group, n * k // group), generator=draw)
    shape = (len(rows), 1) if axis else (1, rows.shape[1])
    scale = (torch.rand(shape, generator=draw) * 0.02 + 0.005).half()
    zero = (torch.rand(shape, generator=draw) * (1 << bits)).half()
    meant = ((rows - zero.float()) * scale.float()).view(n, k)
    per = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}[bits]
    filled = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % per))
    each = filled.view(per, -1, filled.shape[1])
    packed = sum(each[place] << (bits * (per - 1 - place)) for place in range(per))
    assert isinstance(packed, torch.Tensor)
    meta = {name: torch.tensor(1, dtype=torch.uint8) for name in ("nbits", "axis", "group_size", "view_as_float")}
    kind = torch.int32 if bits == 3 else torch.uint8
    return {"W_q": packed.to(kind), "scale": scale, "zero": zero, "shape": torch.tensor([n, k]), **meta}, meant


@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
@pytest.mark.parametrize("group", [64, 16, 24])
def test_hqq(bits: int, group: int) -> None:
    tensors, meant = _hqq_tensors(32, 192, bits, group)
    layer = loaded(_hqq(bits, group), tensors, (32, 192))
    assert off(layer, meant) < NEAR
    assert (
        sum(each.nbytes for each in layer.packed_tensors())
        < 32 * 192 * (8 if bits == 8 else 4) / 8 + 4 * meant.numel() / group + 2048
    )


@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
def test_hqq_of_far_groups_is_widened(bits: int) -> None:
    tensors, meant = _hqq_tensors(64, 96, bits, 32, axis=0)
    layer = loaded(_hqq(bits, 32, axis=0), tensors, (64, 96))
    assert off(layer, meant) < 1e-5
    assert isinstance(layer.scheme, Dense)


@pytest.mark.parametrize("axis", [0, 1])
def test_hqq_merges_projections(axis: int) -> None:
    rows = {"q_proj": 64, "k_proj": 32}
    parts = {name: _hqq_tensors(count, 64, 4, 32, axis, seed=count) for name, count in rows.items()}
    layer = merged(_hqq(4, 32, axis), {name: tensors for name, (tensors, _) in parts.items()}, rows, 64)
    assert off(layer, torch.cat([meant for _, meant in parts.values()])) < NEAR


def test_hqq_bytes_may_be_called_floats() -> None:
    tensors, meant = _hqq_tensors(32, 128, 4, 64)
    tensors["W_q"] = tensors["W_q"].view(torch.bfloat16)
    assert off(loaded(_hqq(4, 64), tensors, (32, 128)), meant) < NEAR


def test_hqq_chooses_layers() -> None:
    params = {"weight_quant_params": {"nbits": 2, "group_size": 16, "axis": 1}}
    method = Hqq({"quant_method": "hqq", "quant_config": {"self_attn.o_proj": params}, "skip_modules": []})
    assert method.scheme(layer_of("layers.0.self_attn.o_proj")) is not None
    assert method.scheme(layer_of("layers.0.mlp.down_proj")) is None
    assert _hqq(4, 64).scheme(layer_of("lm_head")) is None


@pytest.mark.parametrize(("spoiled", "said"), [("W_q", "of another form"), ("scale", "of another form")])
def test_hqq_tensors_of_another_form_are_told(spoiled: str, said: str) -> None:
    tensors, _ = _hqq_tensors(32, 128, 4, 64)
    tensors[spoiled] = tensors[spoiled][1:]
    with pytest.raises(CheckpointError, match=said):
        loaded(_hqq(4, 64), tensors, (32, 128))


def test_hqq_groups_that_reach_into_the_next_output_are_told() -> None:
    tensors, _ = _hqq_tensors(32, 96, 4, 64)
    with pytest.raises(CheckpointError, match="reach into the next output"):
        loaded(_hqq(4, 64), tensors, (32, 96))


def test_projections_that_are_interleaved_are_told() -> None:
    layer = MergedLinear(64, {"q_proj": 64, "k_proj": 64}, groups=2)
    with pytest.raises(CheckpointError, match="cannot be told apart"):
        layer.quantize("qkv_proj", _hqq(4, 64))


# ---------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("bits", [3, 4])
def test_squeezellm(bits: int) -> None:
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 1 << bits, (48, 96), generator=draw)
    table = torch.randn((48, 1 << bits), generator=draw)
    method = SqueezeLlm({"quant_method": "squeezellm", "wbits": bits})
    layer = loaded(method, {"qweight": words(numbers, bits).t(), "lookup_table": table}, (48, 96))
    assert off(layer, table.gather(1, numbers)) < 1e-5
    assert _bytes_kept(layer) == layer.scheme.form.packed_bytes(48, 96)  # type: ignore[attr-defined]
    assert method.scheme(layer_of("lm_head")) is None


def _bytes_kept(layer: Linear) -> int:
    return sum(each.nbytes for each in layer.scheme.packed_tensors())


@pytest.mark.parametrize(("books", "bits", "outer"), [(1, 10, 1), (2, 8, 1), (2, 5, 4)])
def test_aqlm(books: int, bits: int, outer: int) -> None:
    """Read codes of two projections, each with separate codebooks, as unsigned numbers."""
    config = {"quant_method": "aqlm", "in_group_size": 8, "out_group_size": outer, "num_codebooks": books}
    config = {**config, "nbits_per_codebook": bits, "linear_weights_not_to_quantize": ["lm_head.weight"]}
    assert Aqlm.refuses(config, CPU, torch.float16) is None
    draw, parts, meant = torch.Generator().manual_seed(0), {}, []
    rows = {"gate_proj": 32, "up_proj": 16}
    for name, count in rows.items():
        codes = torch.randint(0, 1 << bits, (count // outer, 8, books), generator=draw)
        codebooks = torch.randn((books, 1 << bits, outer, 8), generator=draw)
        scales = torch.rand((count // outer, 1, 1, 1), generator=draw) + 0.5
        weight = torch.zeros(count, 64)
        for row in range(count):
            for group in range(8):
                for book in range(books):
                    vector = codebooks[book, codes[row // outer, group, book], row % outer]
                    weight[row, 8 * group : 8 * group + 8] += vector * scales[row // outer, 0, 0, 0]
        meant.append(weight)
        stored = codes.to(torch.uint8).view(torch.int8) if bits <= 8 else codes.to(torch.int16)
        parts[name] = {"codes": stored, "codebooks": codebooks, "scales": scales}
    method = Aqlm(config)
    layer = merged(method, parts, rows, 64)
    assert off(layer, torch.cat(meant)) < 1e-5
    if outer == 1:
        assert _bytes_kept(layer) == layer.scheme.form.packed_bytes(48, 64)  # type: ignore[attr-defined]
    assert method.scheme(layer_of("lm_head")) is None


# ---------------------------------------------------------------------------------------- from floats


def test_names_of_eight_bits_mean_some_layers() -> None:
    names = ("layers.0.mlp.experts.3.down_proj", "layers.0.mlp.up_proj", "lm_head")
    for method, expected in ((ExpertsInt8({}), [True, False, False]), (LayersInt8({}), [True, True, False])):
        assert [method.scheme(layer_of(name)) is not None for name in names] == expected
    weight = torch.randn(64, 64)
    layer = loaded(LayersInt8({"quant_method": "tpu_int8", "activation_scheme": "none"}), {"weight": weight}, (64, 64))
    assert off(layer, weight) < 0.01


@pytest.mark.parametrize(("bits", "fraction", "exponents"), [(8, 3, 4), (6, 2, 3)])
def test_deepspeedfp_rounds_to_the_nearest_float(bits: int, fraction: int, exponents: int) -> None:
    """Round to the nearest of all floats: the largest of a group is the largest float."""
    bias = (1 << (exponents - 1)) - 1
    floats = [
        (1 + m / 2**fraction) * 2.0 ** (e - bias) if e else m / 2**fraction * 2.0 ** (1 - bias)
        for e in range(1 << exponents)
        for m in range(1 << fraction)
    ]
    numbers = torch.tensor(sorted({*floats, *(-each for each in floats)}), dtype=torch.float64)
    weight = torch.randn(24, 100, generator=torch.Generator().manual_seed(0))
    cells = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 512)).view(-1, 512).double()
    scales = cells.abs().amax(1, keepdim=True) / numbers.max()
    nearest = numbers[(cells.unsqueeze(-1) / scales.unsqueeze(-1) - numbers).abs().argmin(-1)] * scales
    meant = nearest.flatten()[: weight.numel()].view_as(weight).float()
    method = DeepSpeedFp({"quant_method": "deepspeedfp", "bits": bits, "group_size": 512})
    assert off(loaded(method, {"weight": weight}, (24, 100)), meant) < 1e-5
    assert method.scheme(layer_of("lm_head")) is None


# ---------------------------------------------------------------------------------------- what is refused

_HQQ = {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}


@pytest.mark.parametrize(
    ("method", "config", "said"),
    [
        (Gptq, {"bits": 5, "group_size": 32}, "2, 3, 4, 8 bits, and the checkpoint has 5"),
        (Gptq, {"bits": 4, "group_size": 0}, "the group size is 0"),
        (Gptq, {"bits": 4, "group_size": 32, "desc_act": "yes"}, "'yes'"),
        (Gptq, {"bits": 4, "group_size": 32, "checkpoint_format": "exl3"}, "exl3"),
        (Gptq, {"bits": 4, "group_size": 32, "checkpoint_format": "exotic"}, "'exotic'"),
        (Gptq, {"bits": 4, "group_size": 32, "dynamic": [1]}, "'dynamic'"),
        (Gptq, {"bits": 4, "group_size": 32, "dynamic": {"x": {"bits": 7}}}, "has 7"),
        (Gptq, {"bits": 8, "group_size": 128, "checkpoint_format": "marlin"}, "reads 4 bits"),
        (Gptq, {"bits": 4, "group_size": 128, "checkpoint_format": "marlin", "desc_act": True}, "no order"),
        (Awq, {"bits": 4, "group_size": 32, "version": "exllama"}, "'exllama'"),
        (Awq, {"bits": 3, "group_size": 32}, "has 3"),
        (Qqq, {"wbits": 8}, "8"),
        (AutoRound, {"bits": 4, "group_size": 32, "packing_format": "llm_compressor"}, "compressed-tensors"),
        (AutoRound, {"bits": 4, "group_size": 32, "packing_format": "gguf"}, "'gguf'"),
        (AutoRound, {"bits": 4, "group_size": 32, "packing_format": "auto_round:fake"}, "'auto_round:fake'"),
        (AutoRound, {"bits": 4, "group_size": 32, "act_bits": 8}, "to 8 bits"),
        (AutoRound, {"bits": 4, "group_size": 32, "data_type": "mx_fp"}, "'mx_fp'"),
        (AutoRound, {"bits": 4, "group_size": 32, "extra_config": {"a": 4}}, "extra_config"),
        (AutoRound, {"bits": 4, "group_size": 32, "block_name_to_quantize": 4}, "block_name_to_quantize"),
        (AutoRound, {"bits": 3, "group_size": 32, "packing_format": "auto_round:auto_awq"}, "has 3"),
        (Hqq, {"quant_config": {}}, "weight_quant_params"),
        (Hqq, {"quant_config": {"weight_quant_params": {"nbits": 7}}}, "has 7"),
        (Hqq, {"quant_config": {"weight_quant_params": {"nbits": 4, "group_size": "x"}}}, "'x'"),
        (Hqq, {"quant_config": {"weight_quant_params": {"nbits": 4, "channel_wise": False}}}, "channel-wise"),
        (SqueezeLlm, {"wbits": 2}, "has 2"),
        (Aqlm, {"in_group_size": 8, "out_group_size": 1, "num_codebooks": 1}, "nbits_per_codebook"),
        (DeepSpeedFp, {"bits": 4}, "not 4"),
        (LayersInt8, {"activation_scheme": "static"}, "'static'"),
    ],
)
def test_variants_that_are_not_read_are_named(method: Any, config: dict[str, Any], said: str) -> None:
    config = {"quant_method": method.formats[0], **config}
    assert said in (method.refuses(config, CPU, torch.bfloat16) or "")


@pytest.mark.parametrize("method", [Gptq, Awq, Qqq, AutoRound, Hqq, SqueezeLlm, Aqlm])
def test_floats_are_refused(method: Any) -> None:
    assert "not quantized" in (method.refuses({}, CPU, torch.bfloat16) or "")


_SOUND: dict[Any, dict[str, Any]] = {
    Gptq: {"bits": 4, "group_size": 32, "desc_act": False, "dynamic": {"-:x": {}}, "checkpoint_format": "gptq"},
    Awq: {"bits": 4, "group_size": 32, "version": "gemm", "modules_to_not_convert": ["x"]},
    Qqq: {"wbits": 4, "group_size": -1},
    AutoRound: {"bits": 4, "group_size": 32, "extra_config": {"lm_head": {"bits": 4}}, "block_name_to_quantize": "a"},
    Hqq: {"quant_config": _HQQ, "skip_modules": ["x"]},
    SqueezeLlm: {"wbits": 4},
    Aqlm: {"in_group_size": 8, "out_group_size": 1, "num_codebooks": 2, "nbits_per_codebook": 8},
    DeepSpeedFp: {"bits": 8, "group_size": 512},
    LayersInt8: {"activation_scheme": "none"},
}
_JUNK: list[Any] = [
    *(None, 0, -1, 1, 2, 3, 8, 48, 1.5, float("nan"), 10**30, True, "", "x", "marlin", "gptq_p", "gemv", "gemv_fast"),
    *([], [1], ["a"], [["a"], [1]], {}, {"a": 1}, {"-:(": {}}, {"a": {"bits": 7}}, {"a": {"group_size": []}}),
    {"weight_quant_params": {"nbits": []}},
]


def _changed(draw: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    made = dict(config)
    for _ in range(draw.randint(1, 3)):
        key = draw.choice([*made, "lm_head"])
        inner = made.get(key)
        made[key] = _changed(draw, inner) if isinstance(inner, dict) and draw.random() < 0.6 else draw.choice(_JUNK)
    return made


def test_any_configuration_is_read_refused_or_told() -> None:
    """Read whatever may be anywhere in JSON: no other error, for no layer."""
    draw, outcomes = random.Random(0), set()
    for _ in range(2000):
        method = draw.choice(list(_SOUND))
        config = {"quant_method": method.formats[0], **_changed(draw, _SOUND[method])}
        try:
            refused = method.refuses(config, CPU, torch.bfloat16)
            outcomes.add(type(refused))
            if refused is None:
                made = method(config)
                for layer in (Linear(64, 128), MergedLinear(96, {"q_proj": 64, "k_proj": 64}), Linear(100, 36)):
                    layer.quantize("layers.0.self_attn.qkv_proj", made)
        except CheckpointError as error:
            outcomes.add(type(error))
    assert outcomes == {str, type(None), CheckpointError}

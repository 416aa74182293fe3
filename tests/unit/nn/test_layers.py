"""Layers against transformers' modules, and the loading of weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from ferrule.assembly import model as assembly
from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext
from ferrule_kernels.cpu import dense
from ferrule_kernels.cpu.matmul import PackedMatrix, Workspace
from ferrule_nn import (
    MLP,
    Decoder,
    Embedding,
    GatedMLP,
    Head,
    LayerNorm,
    Linear,
    MergedLinear,
    Naming,
    RMSNorm,
    activation,
    building,
    layer_windows,
    load_into,
)
from ferrule_nn.linear import PacksForCpu
from ferrule_nn.ops import current
from ferrule_plugins.quantization.integers import FromFloats, Int4, Int8WeightOnly

CONFIG: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def _context(dtype: torch.dtype = torch.float32, **changes: Any) -> BuildContext:
    return BuildContext(
        config={**CONFIG, **changes},
        dtype=dtype,
        device=torch.device("cpu"),
        block_size=4,
        max_model_len=64,
        kernels=current(),
    )


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.randn(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_transformers(dtype: torch.dtype) -> None:
    x, weight = torch.randn(7, 16, dtype=dtype) * 3, torch.randn(16, dtype=dtype)
    for ours, theirs in (
        (RMSNorm(16, 1e-5), LlamaRMSNorm(16, 1e-5)),
        (RMSNorm(16, 1e-5, 1.0), Gemma2RMSNorm(16, 1e-5)),
    ):
        load_into(ours.to(dtype), {"weight": weight}.items())
        theirs.to(dtype).weight.data.copy_(weight)
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-6)


def test_layer_norm_is_torchs() -> None:
    ours, theirs = LayerNorm(16, 1e-5), nn.LayerNorm(16, 1e-5)
    nn.init.normal_(theirs.weight)
    assert load_into(ours, theirs.state_dict().items()) == {"weight", "bias"}
    x = torch.randn(3, 16)
    assert torch.equal(ours(x), theirs(x))


def test_gated_mlp_equals_transformers() -> None:
    theirs = LlamaMLP(LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=4, mlp_bias=True))
    holder = nn.Module()
    holder.mlp = GatedMLP(16, 24, "silu", bias=True)
    load_into(holder, ((f"mlp.{name}", tensor) for name, tensor in theirs.state_dict().items()))
    x = torch.randn(5, 16)
    torch.testing.assert_close(holder.mlp(x), theirs(x))


def test_plain_mlp() -> None:
    mlp = MLP(4, 8, "relu")
    weights = _weights(mlp)
    load_into(mlp, weights.items())
    x = torch.randn(3, 4)
    inner = torch.relu(x @ weights["up_proj.weight"].T + weights["up_proj.bias"])
    torch.testing.assert_close(mlp(x), inner @ weights["down_proj.weight"].T + weights["down_proj.bias"])


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "quick_gelu", "relu2"])
def test_activations_equal_transformers(name: str) -> None:
    from transformers.activations import ACT2FN

    x = torch.linspace(-6, 6, 101)
    torch.testing.assert_close(activation(name)(x), ACT2FN[name](x), rtol=1e-5, atol=1e-6)


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(CheckpointError, match="wobble"):
        activation("wobble")


def test_head_scales_caps_and_widens() -> None:
    head = Head(8, 12, bias=True).to(torch.bfloat16)
    load_into(head, _weights(head).items())
    head.scale, head.soft_cap = 0.5, 2.0
    hidden = torch.randn(3, 8, dtype=torch.bfloat16)
    plain = nn.functional.linear(hidden, head.weight, head.bias)
    assert head(hidden).dtype == torch.float32
    torch.testing.assert_close(head(hidden), (torch.tanh(plain * 0.5 / 2) * 2).float())


def test_embedding_scale_is_rounded_to_the_tables_type() -> None:
    table = Embedding(6, 4, scale=3**0.5).to(torch.bfloat16)
    load_into(table, _weights(table).items())
    expected = table.weight[[2, 5]] * torch.tensor(3**0.5, dtype=torch.bfloat16)
    assert torch.equal(table(torch.tensor([2, 5])), expected)


def test_building_sets_type_and_restores_it() -> None:
    with building(_context(torch.bfloat16)):
        assert Linear(2, 3).weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


# ------------------------------------------------------------------------------------------------ loading


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.ab_proj = MergedLinear(4, {"a_proj": 2, "b_proj": 3}, bias=True)
        self.embed = Embedding(6, 4)
        self.head = Head(4, 6, tied=self.embed)


def _parts() -> dict[str, torch.Tensor]:
    shapes = {"a_proj.weight": (2, 4), "a_proj.bias": (2,), "b_proj.weight": (3, 4), "b_proj.bias": (3,)}
    return {**{f"inner.{n}": torch.randn(s) for n, s in shapes.items()}, "embed.weight": torch.randn(6, 4)}


def test_parts_land_in_their_rows() -> None:
    model, parts = _Pair(), _parts()
    assert load_into(model, parts.items()) == {n for n, _ in model.named_parameters()}
    assert torch.equal(model.inner.ab_proj.weight[:2], parts["inner.a_proj.weight"])
    assert torch.equal(model.inner.ab_proj.bias[2:], parts["inner.b_proj.bias"])


def test_the_merged_name_works_too() -> None:
    model, whole = _Pair(), torch.randn(5, 4)
    assert load_into(model, [("inner.ab_proj.weight", whole)]) == {"inner.ab_proj.weight"}
    assert torch.equal(model.inner.ab_proj.weight, whole)


def test_a_part_that_is_missing_is_named() -> None:
    parts = _parts()
    del parts["inner.b_proj.weight"]
    with pytest.raises(CheckpointError, match=r"inner\.b_proj\.weight"):
        load_into(_Pair(), parts.items())


@pytest.mark.parametrize("shape", [(3, 4), (2, 4, 1), (2,)])
def test_a_wrong_shape_is_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match=r"inner\.a_proj\.weight.*shape"):
        load_into(_Pair(), [("inner.a_proj.weight", torch.zeros(shape))])


def test_an_unexpected_tensor_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"inner\.c_proj\.weight"):
        load_into(_Pair(), {**_parts(), "inner.c_proj.weight": torch.zeros(1)}.items())


def test_what_is_derived_or_tied_is_dropped() -> None:
    extra = {"layers.0.rotary_emb.inv_freq": torch.zeros(3), "head.weight": torch.zeros(6, 4), "x.mask": torch.zeros(1)}
    filled = load_into(_Pair(), {**_parts(), **extra}.items(), Naming(ignored=(r"\.mask$",)))
    assert "embed.weight" in filled
    assert not any("head" in name for name in filled)


def test_renames_and_transposes() -> None:
    naming = Naming(renames=((r"^old\.", "inner."), (r"first", "a_proj")), transposed=(r"first\.weight$",))
    model, parts = _Pair(), _parts()
    stored = {"old.first.weight" if n == "inner.a_proj.weight" else n: t for n, t in parts.items()}
    stored["old.first.weight"] = stored["old.first.weight"].T
    load_into(model, stored.items(), naming)
    assert torch.equal(model.inner.ab_proj.weight[:2], parts["inner.a_proj.weight"])


def test_loading_casts() -> None:
    table = Embedding(2, 2).to(torch.bfloat16)
    load_into(table, [("weight", torch.full((2, 2), 1.001, dtype=torch.float64))])
    assert torch.equal(table.weight, torch.ones(2, 2, dtype=torch.bfloat16))


# ------------------------------------------------------------------------------------------------ packing

own_kernel = pytest.mark.skipif(dense.unit() is None, reason="there are no compiled kernels here")


class _Rows(nn.Module):
    """A layer of bfloat16 that is quantized, whose rows come from two tensors."""

    def __init__(self, first: int, second: int, inputs: int, method: type[FromFloats]) -> None:
        super().__init__()
        self.ab_proj = MergedLinear(inputs, {"a_proj": first, "b_proj": second}, bias=True).to(torch.bfloat16)
        self.ab_proj.quantize("ab_proj", method({}))

    @property
    def matrix(self) -> PackedMatrix:
        scheme = self.ab_proj.scheme
        assert isinstance(scheme, PacksForCpu)
        assert isinstance(scheme.matrix, PackedMatrix)
        return scheme.matrix


@own_kernel
@pytest.mark.parametrize("method", [Int8WeightOnly, Int4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("first", "second", "nodes", "taken"),
    [(64, 128, 1, True), (128, 40, 1, True), (40, 64, 1, False), (64, 64, 2, False)],
)
@pytest.mark.parametrize("whole", [False, True])
def test_rows_are_quantized_as_they_come(
    method: type[FromFloats],
    dtype: torch.dtype,
    first: int,
    second: int,
    nodes: int,
    taken: bool,
    whole: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Quantize rows early where projections begin with a panel and memory has one node. The packed form is that of the
    whole matrix.
    """
    monkeypatch.setattr("ferrule_plugins.platform.cpu_products.memory_nodes", lambda: tuple(range(nodes)))
    model, inputs, copied = _Rows(first, second, 70, method), 70, []
    monkeypatch.setattr("ferrule_nn.loading.copy_to_new", lambda to, rows: copied.append(rows.shape) or to.copy_(rows))
    weight, bias = torch.randn(first + second, inputs, dtype=dtype), torch.randn(first + second, dtype=dtype)
    tensors = {"ab_proj.weight": weight}
    if not whole:
        tensors = {"b_proj.weight": weight[first:], "a_proj.weight": weight[:first]}
    kept = weight.clone()
    load_into(model, {**tensors, "ab_proj.bias": bias}.items())
    assert len(copied) == 1 if taken else len(copied) == 1 + len(tensors)  # the bias, and what was not taken
    assert torch.equal(weight, kept)
    assert not model.ab_proj.weight.numel()
    same = PackedMatrix(weight.bfloat16(), method.form, bias.bfloat16(), Workspace())
    assert torch.equal(model.matrix.packed, same.packed)
    x = torch.randn(3, inputs, dtype=torch.bfloat16)
    assert torch.equal(model.ab_proj(x), same.multiply(x))


@own_kernel
def test_rows_that_cannot_be_quantized_are_told_with_their_layer() -> None:
    with pytest.raises(CheckpointError, match=r"^ab_proj: .* not a finite number"):
        load_into(_Rows(64, 64, 32, Int4), [("a_proj.weight", torch.full((64, 32), float("nan")))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (8, 3), (33, 65), (256, 512)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_computes_the_same(dtype: torch.dtype, inputs: int, outputs: int, bias: bool) -> None:
    layer = Linear(inputs, outputs, bias).to(dtype)
    weights = {name: tensor.to(dtype) for name, tensor in _weights(layer).items()}
    load_into(layer, weights.items())
    x = torch.randn(9, inputs, dtype=dtype)
    expected = nn.functional.linear(x, weights["weight"], weights.get("bias"))
    layer.pack()
    for rows in (1, 2, 9):
        out = layer(x[:rows])
        assert out.shape == (rows, outputs)
        torch.testing.assert_close(out, expected[:rows], rtol=2e-2 if dtype != torch.float32 else 1e-4, atol=1e-3)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="the processor has no bfloat16")
def test_a_packed_row_has_the_same_bits_in_any_batch() -> None:
    layer = Linear(128, 96).to(torch.bfloat16)
    load_into(layer, _weights(layer).items())
    layer.pack()
    assert not layer.weight.numel()
    x = torch.randn(80, 128, dtype=torch.bfloat16)
    whole = layer(x)
    for rows in (1, 2, 3, 4, 7, 16, 33):
        assert torch.equal(layer(x[:rows]), whole[:rows])


@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_head_leaves_the_embedding_its_table(tied: bool) -> None:
    model = Decoder(_context(tie_word_embeddings=tied))
    weights = _weights(model)
    model.load_weights(weights.items())
    hidden = torch.randn(3, 16)
    expected = model.logits(hidden)
    assembly.pack(model)
    torch.testing.assert_close(model.logits(hidden), expected)
    assert torch.equal(model.embed_tokens(torch.tensor([3])), weights["embed_tokens.weight"][3:4])


@pytest.mark.skipif(dense.unit() is None, reason="there is no kernel for bfloat16 here")
@pytest.mark.parametrize("vocab_size", [48, 50])  # packed in its own memory, and not
def test_a_tied_table_is_kept_once(vocab_size: int) -> None:
    table = Embedding(vocab_size, 32, scale=2.0).to(torch.bfloat16)
    head = Head(32, vocab_size, table)
    nn.init.normal_(table.weight)
    weight, ids, hidden = table.weight.detach().clone(), torch.tensor([3, vocab_size - 1, 3]), torch.randn(4, 32)
    expected = table(ids)
    for _ in range(2):  # the second time does nothing
        head.pack()
        table_bytes = sum(parameter.nbytes for parameter in (*table.parameters(), *head.parameters()))
        assert table_bytes == 0
        assert sum(tensor.nbytes for tensor in head.packed_tensors()) < weight.nbytes * 1.3
        assert table.weight.shape == (0, 32)
        assert torch.equal(table(ids), expected)
    logits = head(hidden.bfloat16())
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden.bfloat16().float() @ weight.float().t(), rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------ decoder


def test_decoder_takes_a_llama_checkpoint_whole() -> None:
    theirs = LlamaForCausalLM(LlamaConfig(**CONFIG))
    ours = Decoder(_context())
    assert ours.load_weights(theirs.state_dict().items()) == {name for name, _ in ours.named_parameters()}


def test_tied_decoder_has_one_table() -> None:
    ours = Decoder(_context(tie_word_embeddings=True))
    assert not any("lm_head" in name for name, _ in ours.named_parameters())
    assert list(ours.cache_specs()) == ["layers.0.attn", "layers.1.attn"]


def test_a_missing_number_is_named() -> None:
    with pytest.raises(CheckpointError, match="hidden_size"):
        Decoder(
            BuildContext(
                config={k: v for k, v in CONFIG.items() if k != "hidden_size"},
                dtype=torch.float32,
                device=torch.device("cpu"),
                block_size=4,
                max_model_len=8,
                folder=Path("/nowhere"),
            )
        )


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({}, (0, 0, 0)),
        ({"sliding_window": 8}, (8, 8, 8)),
        ({"sliding_window": 8, "use_sliding_window": False}, (0, 0, 0)),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, (0, 0, 8)),
        ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, (8, 0, 8)),
    ],
)
def test_layer_windows(config: Mapping[str, Any], windows: tuple[int, ...]) -> None:
    assert layer_windows(_context(**config), 3) == windows

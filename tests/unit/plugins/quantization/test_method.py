"""Quantization from the option to the layers: which method is chosen, what layers hold, what the model then says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule.assembly.model import Loaded, pack
from ferrule.errors import CheckpointError, ConfigError, PluginError
from ferrule.interfaces.model import BuildContext
from ferrule.interfaces.platform import DeviceCaps
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.quantization import LinearLayer, LinearScheme, QuantizationMethod
from ferrule_kernels.cpu import library
from ferrule_nn import Decoder, Head, Linear, MergedLinear, load_into, parameter
from ferrule_nn.ops import current, using
from ferrule_plugins.platform.cpu_kernels import cpu_kernels
from ferrule_plugins.quantization.integers import Int4, Int8
from ferrule_testkit.caps import fake_caps
from tests.unit.plugins.quantization.loading import load_folder

CPU = fake_caps()
METHODS = ("int8", "int8_per_channel_weight_only", "int4", "int4_weight_only")

# The relative error (root of the mean square) of a layer's products: that of the bits of its weights and activations.
BOUNDS = dict(zip(METHODS, (0.016, 0.011, 0.11, 0.11), strict=True))


def _logits(loaded: Loaded) -> torch.Tensor:
    """Return the logits of hidden states that are the same for every model of this size."""
    hidden = torch.randn(5, loaded.info.hidden_size, generator=torch.Generator().manual_seed(0))
    return loaded.model.logits(hidden)


# ---------------------------------------------------------------------------------------- what is chosen


@pytest.mark.parametrize("method", METHODS)
def test_the_option_quantizes_all_layers_and_the_head(folder: Path, plugins: Plugins, method: str) -> None:
    plain, loaded = load_folder(folder, plugins), load_folder(folder, plugins, quantization=method)
    assert plain.info.quantization is None
    assert loaded.info.quantization == method
    assert loaded.info.num_parameters == plain.info.num_parameters
    assert loaded.info.weight_bytes < 0.75 * plain.info.weight_bytes
    assert isinstance(loaded.model, torch.nn.Module)
    layers = [part for part in loaded.model.modules() if isinstance(part, Linear)]
    assert all(any(True for _ in layer.packed_tensors()) and not layer.weight.numel() for layer in layers)
    made, expected = _logits(loaded), _logits(plain)
    assert made.dtype == torch.float32
    assert not torch.equal(made, expected)
    assert (made - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("method", METHODS)
def test_layers_are_as_exact_as_their_bits(folder: Path, plugins: Plugins, method: str) -> None:
    plain, loaded = load_folder(folder, plugins), load_folder(folder, plugins, quantization=method)
    assert isinstance(plain.model, torch.nn.Module)
    assert isinstance(loaded.model, torch.nn.Module)
    floats, errors = dict(plain.model.named_modules()), {}
    for name, layer in loaded.model.named_modules():
        exact = floats[name]
        if isinstance(layer, Linear) and not isinstance(layer, Head) and isinstance(exact, Linear):
            x = torch.randn(32, layer.in_features, generator=torch.Generator().manual_seed(0)).to(plain.context.dtype)
            expected = exact(x).float()
            errors[name] = float((layer(x).float() - expected).norm() / expected.norm())
    assert errors
    assert all(BOUNDS[method] / 10 < error < BOUNDS[method] for error in errors.values()), errors


def test_a_model_that_is_read_again_is_quantized_again(folder: Path, plugins: Plugins) -> None:
    loaded = load_folder(folder, plugins, quantization="int8")
    before = _logits(loaded)
    fresh = loaded.reload()
    hidden = torch.randn(5, loaded.info.hidden_size, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fresh.logits(hidden), before)


def test_an_unknown_method_is_named(folder: Path, plugins: Plugins) -> None:
    with pytest.raises(PluginError, match="no quantization plugin 'int9'. Did you mean 'int4'") as told:
        load_folder(folder, plugins, quantization="int9")
    assert "int4_weight_only" in str(told.value) + str(told.value.hint)


def test_quantized_weights_that_nothing_reads_are_named(folder: Path, plugins: Plugins) -> None:
    stored = {"quantization_config": {"quant_method": "runes", "bits": 4}}
    with pytest.raises(PluginError, match="quantization") as told:
        load_folder(folder, plugins, hf_overrides=stored)
    assert "runes" in str(told.value) + str(told.value.hint)
    with pytest.raises(ConfigError, match="--quantization int8: the weights are quantized"):
        load_folder(folder, plugins, hf_overrides=stored, quantization="int8")


@pytest.mark.parametrize("stored", ["gptq", 7, [1]])
def test_a_quantization_that_is_no_object_is_told(folder: Path, plugins: Plugins, stored: object) -> None:
    with pytest.raises(CheckpointError, match="quantization_config is an object"):
        load_folder(folder, plugins, hf_overrides={"quantization_config": stored})


def test_a_model_without_such_layers_refuses(folder: Path, plugins: Plugins) -> None:
    with pytest.raises(ConfigError, match="has no layer that it quantizes"):
        load_folder(
            folder, plugins, hf_overrides={"quantization_config": {"quant_method": "mxfp4"}}
        )  # of experts alone


def test_any_device_computes_and_other_types_are_refused() -> None:
    assert Int8.refuses({}, CPU, torch.bfloat16) is None
    assert Int8.refuses({}, fake_caps("abacus"), torch.bfloat16) is None
    assert "float64" in (Int8.refuses({}, CPU, torch.float64) or "")


# ---------------------------------------------------------------------------------------- what layers do


class Halves(LinearScheme):
    """A checkpoint's form with other parameters: weights at half their size, in halves."""

    def allocate(self, layer: Any) -> None:
        layer.weight = None
        layer.small = parameter(layer.out_features, layer.in_features)

    def pack(self, layer: Any) -> None:
        self.whole = layer.small.detach() * 2
        layer.small = parameter(0)

    def matmul(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.whole, layer.bias)


class Halving(QuantizationMethod):
    formats = ("halves",)
    seen: list[LinearLayer]

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.seen = []

    @classmethod
    def refuses(cls, config: Mapping[str, Any], caps: DeviceCaps, dtype: torch.dtype) -> str | None:
        return None

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        self.seen.append(layer)
        return None if layer.name in self.config["ignore"] else Halves()


CONFIG = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
}


def _decoder(**changes: Any) -> Decoder:
    context = BuildContext(
        config={**CONFIG, **changes},
        dtype=torch.float32,
        device=torch.device("cpu"),
        block_size=16,
        max_model_len=64,
        kernels=current(),
    )
    return Decoder(context)


def _quantize(model: Decoder, method: QuantizationMethod) -> list[bool]:
    return [part.quantize(name, method) for name, part in model.named_modules() if isinstance(part, Linear)]


def test_a_method_decides_by_name_and_brings_its_own_parameters() -> None:
    plain, model = _decoder(), _decoder()
    weights = {
        name: torch.ones(tensor.shape) if "norm" in name else torch.randn(tensor.shape)
        for name, tensor in plain.named_parameters()
    }
    plain.load_weights(weights.items())
    method = Halving({"ignore": ["lm_head", "layers.0.mlp.down_proj"]})
    assert _quantize(model, method) == [True, True, True, False, False]
    assert method.seen[0] == LinearLayer("layers.0.self_attn.qkv_proj", 16, 32, ("q_proj", "k_proj", "v_proj"))
    assert method.seen[-1] == LinearLayer("lm_head", 16, 32, head=True)
    halves = {
        name.replace(".weight", ".small") if name.rpartition(".")[0] in taken else name: tensor / 2
        if name.rpartition(".")[0] in taken
        else tensor
        for taken in [{"layers.0.self_attn.qkv_proj", "layers.0.self_attn.o_proj", "layers.0.mlp.gate_up_proj"}]
        for name, tensor in weights.items()
    }
    assert model.load_weights(halves.items()) == {name for name, _ in model.named_parameters()}
    pack(model)
    x = torch.randn(3, 16)
    torch.testing.assert_close(model.layers[0].mlp(x), plain.layers[0].mlp(x), rtol=1e-4, atol=1e-4)


def test_a_layer_packs_when_its_last_tensor_came_and_not_before() -> None:
    holder = torch.nn.Module()
    holder.qkv = MergedLinear(8, {"q": 4, "k": 4}, bias=True)
    assert holder.qkv.quantize("qkv", Int8({}))
    packed = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("q.weight", "k.bias", "k.weight", "q.bias"):
            packed.append(any(True for _ in holder.qkv.packed_tensors()))
            yield name, torch.randn(4, 8) if name.endswith("weight") else torch.randn(4)
        packed.append(any(True for _ in holder.qkv.packed_tensors()))

    assert load_into(holder, tensors()) == {"qkv.weight", "qkv.bias"}
    assert packed == [False, False, False, False, True]
    assert not holder.qkv.weight.numel()


def test_weights_that_come_twice_are_named() -> None:
    layer = Linear(8, 4)
    layer.quantize("layer", Int8({}))
    with pytest.raises(CheckpointError, match="'weight'"):
        load_into(layer, [("weight", torch.randn(4, 8))] * 2)


@pytest.mark.parametrize("tied", [False, True])
def test_a_quantized_head_leaves_the_embedding_its_table(tied: bool) -> None:
    model = _decoder(tie_word_embeddings=tied)
    _quantize(model, Int8({}))
    weights = {name: torch.randn(tensor.shape) for name, tensor in model.named_parameters()}
    model.load_weights(weights.items())
    pack(model)
    pack(model)  # the second time does nothing
    table = weights["embed_tokens.weight" if tied else "lm_head.weight"]
    hidden = torch.randn(3, 16)
    torch.testing.assert_close(model.logits(hidden), hidden @ table.t(), rtol=0.05, atol=0.15)
    assert torch.equal(model.embed_tokens(torch.tensor([3])), weights["embed_tokens.weight"][3:4])


def test_a_quantized_layer_without_weights_says_so() -> None:
    layer = Linear(8, 4)
    layer.quantize("layer", Int8({}))
    with pytest.raises(RuntimeError, match="packed"):
        layer(torch.randn(1, 8))


@pytest.mark.parametrize("method", [Int8, Int4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_compiler_torch_computes_the_same(
    method: type[QuantizationMethod], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute the same, and log that it is slower; a head's answer is float32 in both."""
    x = torch.randn(5, 96).to(dtype)
    weights = {"weight": torch.randn(40, 96).to(dtype), "bias": torch.randn(40).to(dtype)}

    def made() -> torch.Tensor:
        head = Head(96, 40, bias=True).to(dtype)
        head.quantize("lm_head", method({}))
        load_into(head, weights.items())
        return head(x)

    def missing() -> None:
        raise library.KernelsUnavailableError("there is no compiler")

    compiled = made()
    monkeypatch.setattr(library, "load", missing)
    without = cpu_kernels()
    said: list[str] = []
    monkeypatch.setattr("ferrule_quant.products._log.warning", lambda text, *args: said.append(args[0]))
    with using(without):
        torch.testing.assert_close(made(), compiled, rtol=1e-2, atol=1e-1)
    assert len(said) == 1
    assert "slower" in said[0]


def test_a_layer_too_long_for_exact_sums_stays_as_it_is() -> None:
    assert Int8({}).scheme(LinearLayer("layer", 70_000, 8)) is None
    assert Int4({}).scheme(LinearLayer("layer", 70_000, 8)) is not None

"""Checkpoints of every format that is read, from the files to the layers: products beside those of what they mean."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import regex
import torch
from safetensors.torch import load_file, save_file

from ferrule.assembly.model import Loaded
from ferrule.errors import CheckpointError, ConfigError, PluginError
from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.quantization import LinearLayer
from ferrule_kernels.cpu import library
from ferrule_nn import Decoder, Dense, LayerKernels, Linear, MergedLinear, checkpoint_parameter
from ferrule_nn.ops import using
from ferrule_plugins.platform import cpu
from ferrule_plugins.platform.cpu_kernels import cpu_kernels
from ferrule_plugins.quantization.compressed import CompressedTensors
from ferrule_plugins.quantization.fp8 import Fp8Method
from ferrule_plugins.quantization.groupwise import Awq, Gptq
from ferrule_plugins.quantization.quark import Quark
from ferrule_plugins.quantization.torchao import TorchAo
from ferrule_quant.names import chosen
from ferrule_testkit.caps import fake_caps
from ferrule_testkit.quantized import FORMATS, quantized_checkpoint
from tests.unit.plugins.quantization.loading import load_folder

_PRESHUFFLED = {"default": {"_type": "Float8DynamicActivationInt4WeightConfig", "_data": {}}}
_FP8_GROUPS = {
    "default": {
        "_type": "Float8WeightOnlyConfig",
        "_data": {"granularity": {"_type": "PerGroup", "_data": {"group_size": 32}}},
    }
}
CPU = fake_caps()
GPU = fake_caps("cuda", {"sm90"})
BF16 = torch.bfloat16


def _layers(loaded: Loaded) -> dict[str, Linear]:
    assert isinstance(loaded.model, torch.nn.Module)
    return {name: part for name, part in loaded.model.named_modules() if isinstance(part, Linear)}


def _meant(name: str, layer: Linear, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    before = name.rpartition(".")[0]
    names = [f"{before}.{part}" for part in layer.projections] or [name]
    return torch.cat([weights[f"model.{part}.weight"] for part in names])


# ---------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("name", FORMATS)
def test_layers_multiply_by_what_the_checkpoint_means(
    folder: Path, plugins: Plugins, tmp_path: Path, name: str
) -> None:
    """Multiply by merged projections, each with separate scales. Where activations are quantized, to one part in 127 of
    a row.
    """
    weights = quantized_checkpoint(folder, tmp_path / "made", name)
    loaded = load_folder(tmp_path / "made", plugins)
    assert loaded.info.quantization is not None
    layers = _layers(loaded)
    assert isinstance(layers["lm_head"].scheme, Dense)
    del layers["lm_head"]
    assert any(isinstance(layer, MergedLinear) for layer in layers.values())
    for path, layer in layers.items():
        x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(1))
        y, expected = layer(x), x @ _meant(path, layer, weights).t()
        assert y.dtype == torch.float32
        off = (y - expected).norm() / expected.norm()
        eight = (
            name in ("nf4", "nf4-nested", "fp4", "modelopt-blocks") or not FORMATS[name].wide
        )  # 8 bits of a table, or activations
        assert off < (0.02 if name == "int8" else 1e-2 if eight else 5e-3), path
    hidden = torch.randn(5, loaded.info.hidden_size, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded.reload().logits(hidden), loaded.model.logits(hidden))


@pytest.mark.parametrize("quantized", [None, "int8", "awq"])
def test_weights_may_get_their_memory_when_they_come(
    folder: Path, plugins: Plugins, tmp_path: Path, quantized: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load as on a GPU: the model is the same, and before the weights come its linear layers hold nothing."""
    if quantized == "awq":
        quantized_checkpoint(folder, tmp_path / "made", "awq")
        folder = tmp_path / "made"
    chosen = {"quantization": "int8"} if quantized == "int8" else {}
    expected = load_folder(folder, plugins, **chosen)
    monkeypatch.setattr(cpu, "cpu_kernels", _late)
    held: list[int] = []
    load = Decoder.load_weights

    def watched(model: Decoder, weights: Any) -> set[str]:
        layers = [part for part in model.modules() if isinstance(part, Linear)]
        held.append(sum(tensor.nbytes for part in layers for tensor in part.parameters() if not tensor.is_meta))
        return load(model, weights)

    monkeypatch.setattr(Decoder, "load_weights", watched)
    made = load_folder(folder, plugins, **chosen)
    assert held == [0]
    assert made.info == expected.info
    for name, layer in _layers(made).items():
        x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(1))
        assert torch.equal(layer(x), _layers(expected)[name](x)), name


def _late() -> Kernels:
    """Return a processor's kernels, with weights that get memory when they come."""
    first, *others = cpu_kernels().parts
    assert isinstance(first, LayerKernels)
    return Kernels((replace(first, late=True), *others))


def test_weights_that_never_got_memory_are_named() -> None:
    with using(_late()):
        layer = Linear(8, 4)
    assert layer.weight.is_meta
    with pytest.raises(RuntimeError, match="load_into"):
        layer.pack()


@pytest.mark.parametrize("method", ["fp8", "ptpc_fp8"])
def test_fp8_from_floats(folder: Path, plugins: Plugins, method: str) -> None:
    """Quantize on a CPU as integers, whose largest number of 32 is 127."""
    loaded, floats = load_folder(folder, plugins, quantization=method), _layers(load_folder(folder, plugins))
    assert loaded.info.quantization == method
    for path, layer in _layers(loaded).items():
        x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(1))
        expected = floats[path](x)
        assert (layer(x) - expected).norm() < 0.01 * expected.norm(), path
        assert (path == "lm_head") == isinstance(layer.scheme, Dense)


@pytest.mark.parametrize(
    "name",
    ["int8", "fp8-blocks", "fp8-channels", "gptq", "awq", "mxfp8-compressed", "mxfp6-compressed", "modelopt-int4"],
)
def test_weights_stay_small(folder: Path, plugins: Plugins, tmp_path: Path, name: str) -> None:
    """Count a layer's bytes: scales and zero points of small groups beside the numbers."""
    quantized_checkpoint(folder, tmp_path / "made", name)
    for path, layer in _layers(load_folder(tmp_path / "made", plugins, dtype="bfloat16")).items():
        if path != "lm_head":
            bits = {"gptq": 4, "awq": 4, "modelopt-int4": 4}.get(name, 8) + 1.5
            assert (
                sum(tensor.nbytes for tensor in layer.packed_tensors())
                <= layer.in_features * layer.out_features * bits / 8
            )
            assert not sum(parameter.numel() for parameter in layer.parameters())


@pytest.mark.parametrize("name", ["int8", "fp8-channels", "packed", "awq"])
def test_without_a_compiler_torch_computes_the_same(
    folder: Path, plugins: Plugins, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = quantized_checkpoint(folder, tmp_path / "made", name)

    def missing() -> None:
        raise library.KernelsUnavailableError("there is no compiler")

    monkeypatch.setattr(library, "load", missing)
    layer = _layers(load_folder(tmp_path / "made", plugins))["layers.0.mlp.down_proj"]
    x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(1))
    expected = x @ weights["model.layers.0.mlp.down_proj.weight"].t()
    assert (layer(x) - expected).norm() < 0.02 * expected.norm()


def test_layers_may_have_schemes_of_their_own(folder: Path, plugins: Plugins, tmp_path: Path) -> None:
    """Choose schemes by names and patterns: some of merged projections stay floats."""
    own = {"*.down_proj": {"weight": None}, "model.layers.0.self_attn.q_proj": {"weight": None}}
    weights = _partly(
        folder, tmp_path / "quark", "quark-uint4", ("down_proj", "0.self_attn.q_proj"), layer_quant_config=own
    )
    named = {"re:.*down_proj": None, "model.layers.0.self_attn.q_proj": None}
    every = FORMATS["torchao-int4"].config["quant_type"]["default"]
    stated = {"default": {"_type": "FqnToConfig", "_data": {"fqn_to_config": {**named, "_default": every}}}}
    same = _partly(folder, tmp_path / "torchao", "torchao-int4", ("down_proj", "0.self_attn.q_proj"), quant_type=stated)
    for made, meant in (("quark", weights), ("torchao", same)):
        layers = _layers(load_folder(tmp_path / made, plugins))
        assert isinstance(layers["layers.0.mlp.down_proj"].scheme, Dense)
        assert not isinstance(layers["layers.0.mlp.gate_up_proj"].scheme, Dense)
        for path in ("layers.0.self_attn.qkv_proj", "layers.0.mlp.down_proj", "layers.0.mlp.gate_up_proj"):
            x = torch.randn(5, layers[path].in_features, generator=torch.Generator().manual_seed(1))
            expected = x @ _meant(path, layers[path], meant).t()
            assert (layers[path](x) - expected).norm() < 5e-3 * expected.norm(), path


def _partly(folder: Path, made: Path, name: str, left: tuple[str, ...], **changes: Any) -> dict[str, torch.Tensor]:
    """Write a checkpoint whose projections that end in `left` stay floats; return the weights that it encodes."""
    meant = quantized_checkpoint(folder, made, name)
    floats, tensors = load_file(folder / "model.safetensors"), load_file(made / "model.safetensors")
    for key in [key for key in meant if key.removesuffix(".weight").endswith(left)]:
        before = key.removesuffix("weight")
        tensors = {end: value for end, value in tensors.items() if not end.startswith(before)} | {key: floats[key]}
        meant[key] = floats[key]
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"] |= changes
    (made / "config.json").write_text(json.dumps(config))
    return meant


def test_other_names_of_a_method_read_it_too(folder: Path, plugins: Plugins, tmp_path: Path) -> None:
    quantized_checkpoint(folder, tmp_path / "made", "awq")
    assert load_folder(tmp_path / "made", plugins).info.quantization == "awq"
    assert load_folder(tmp_path / "made", plugins, quantization="awq_marlin").info.quantization == "awq_marlin"


@pytest.mark.parametrize("made", ["awq", "gptq", "nf4", "fp8-blocks"])
def test_another_method_than_the_checkpoint_has_is_told_what_reads_it(
    folder: Path, plugins: Plugins, tmp_path: Path, made: str
) -> None:
    quantized_checkpoint(folder, tmp_path / "made", made)
    form = FORMATS[made].config["quant_method"]
    reader = load_folder(tmp_path / "made", plugins).info.quantization
    for name in plugins.names("quantization"):
        if form not in plugins.load("quantization", name).formats:
            with pytest.raises(
                ConfigError, match=f"--quantization {name}: the weights are quantized .{form}."
            ) as caught:
                load_folder(tmp_path / "made", plugins, quantization=name)
            assert caught.value.hint == f"Leave --quantization out: {reader} then serves the weights as they are."
    if form != "bitsandbytes":
        with pytest.raises(ConfigError, match="Leave --load-format out"):
            load_folder(tmp_path / "made", plugins, load_format="bitsandbytes")


@pytest.mark.parametrize(("file", "method"), [("quantize_config.json", "gptq"), ("quant_config.json", "awq_marlin")])
def test_settings_may_be_in_a_file_of_their_own(
    folder: Path, plugins: Plugins, tmp_path: Path, file: str, method: str
) -> None:
    """Read them for the method that is named: without a name nothing says whose settings they are."""
    form, made = method.partition("_")[0], tmp_path / "made"
    quantized_checkpoint(folder, made, form)
    expected = load_folder(made, plugins, quantization=method)
    config = json.loads((made / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    (made / "config.json").write_text(json.dumps(config))
    (made / file).write_text(json.dumps(settings))
    loaded = load_folder(made, plugins, quantization=method)
    assert loaded.info == expected.info
    (folder_with := tmp_path / "floats").mkdir()
    for each in folder.iterdir():
        (folder_with / each.name).write_bytes(each.read_bytes())
    (folder_with / file).write_text(json.dumps(settings))
    assert load_folder(folder_with, plugins, quantization="int8").info.quantization == "int8"
    assert load_folder(folder_with, plugins).info.quantization is None


def test_settings_may_be_in_the_file_of_modelopt(folder: Path, plugins: Plugins, tmp_path: Path) -> None:
    made = tmp_path / "made"
    quantized_checkpoint(folder, made, "modelopt-fp8")
    expected = load_folder(made, plugins)
    config = json.loads((made / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    (made / "config.json").write_text(json.dumps(config))
    beside = made / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt", "version": "0.29.0"}, **settings}))
    assert load_folder(made, plugins).info == expected.info
    beside.write_text(json.dumps({"producer": ["another"], **settings}))
    with pytest.raises(PluginError, match="modelopt .*: reads what is by ModelOpt, and 'producer' is"):
        load_folder(made, plugins)


# ---------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors", "gguf", "quark", "ferrule_packed"])
def test_methods_of_checkpoints_do_not_take_float_weights(folder: Path, plugins: Plugins, method: str) -> None:
    with pytest.raises(ConfigError, match=f"--quantization {method}: the weights are not ") as caught:
        load_folder(folder, plugins, quantization=method)
    assert "are floats: leave --quantization out to serve them as they are" in caught.value.hint


def _changed(name: str, **changes: Any) -> dict[str, Any]:
    """Return the configuration with changes, those of the weights' group under ``weights__`` names."""
    config = copy.deepcopy(dict(FORMATS[name].config))
    for key, value in changes.items():
        group, _, part = key.partition("__")
        if part:
            config["config_groups"]["group_0"][group][part] = value
        elif key in ("weights", "input_activations", "targets"):
            config["config_groups"]["group_0"][key] = value
        else:
            config[key] = value
    return config


@pytest.mark.parametrize(
    ("method", "config", "said"),
    [
        (Fp8Method, _changed("fp8-blocks", weight_block_size=[64, 0]), "outputs and inputs"),
        (Fp8Method, _changed("fp8-blocks", fmt="e5m2"), "e5m2"),
        (Fp8Method, _changed("fp8-blocks", weight_block_size=7), "outputs and inputs"),
        (CompressedTensors, _changed("packed", weights__actorder="columns"), "actorder"),
        (CompressedTensors, _changed("packed", weights__actorder=["group"]), "['group']"),
        (CompressedTensors, _changed("packed", weights__symmetric="false"), "another type"),
        (CompressedTensors, _changed("int8", input_activations="int8"), "another type"),
        (CompressedTensors, _changed("packed", weights__num_bits=9), "has 9"),
        (CompressedTensors, _changed("packed", weights__group_size=0), "groups of 1 input or more"),
        (CompressedTensors, _changed("int8", weights__num_bits=16), "does not read"),
        (CompressedTensors, _changed("int8", input_activations__num_bits=4), "to 4 bits"),
        (CompressedTensors, _changed("fp8-compressed-blocks", weights__block_structure=None), "block_structure"),
        (CompressedTensors, _changed("int8", kv_cache_scheme={"num_bits": 8, "type": "int"}), "kv_cache_scheme"),
        (CompressedTensors, _changed("int8", sparsity_config={"format": "sparse-bitmask"}), "sparse-bitmask"),
        (CompressedTensors, _changed("fp8-compressed-blocks", weights__block_structure=7), "outputs and inputs"),
        (CompressedTensors, _changed("int8", sparsity_config="dense"), "sparse"),
        (CompressedTensors, _changed("packed", sparsity_config={"format": "sparse-24-bitmask"}), "sparse weights of 8"),
        (Quark, _changed("quark-int4", layer_type_quant_config={"Linear": {}}), "layer_type_quant_config"),
        (Quark, _changed("quark-int4", export={"pack_method": "tiles"}), "tiles"),
        (Quark, _changed("quark-int4", layer_quant_config={"*q_proj": {"weight": {"dtype": "fp6_e3m2"}}}), "fp6_e3m2"),
        (TorchAo, _changed("torchao-int8", quant_type="int8_weight_only"), "pickles"),
        (TorchAo, _changed("torchao-int8", quant_type={"default": {"_type": "MXFPConfig", "_data": {}}}), "MXFPConfig"),
        (TorchAo, _changed("torchao-int8", quant_type=_FP8_GROUPS), "not for groups"),
        (TorchAo, _changed("torchao-int4", quant_type=_PRESHUFFLED), "PRESHUFFLED"),
        (CompressedTensors, _changed("int8", targets=7), "'targets' is not a list"),
        (CompressedTensors, _changed("int8", config_groups={}), "config_groups"),
        (CompressedTensors, _changed("int8", weights=None), "weights"),
    ],
)
def test_variants_that_are_not_read_are_named(method: Any, config: dict[str, Any], said: str) -> None:
    for caps in (CPU, GPU):
        assert said in (method.refuses(config, caps, BF16) or "")


@pytest.mark.parametrize(
    ("form", "kind", "size", "said"),
    [
        ("naive-quantized", "int", None, None),
        ("naive-quantized", "float", 64, None),
        ("int-quantized", "int", 32, None),
        ("float-quantized", "float", None, None),
        ("mxfp8-quantized", "float", 32, None),
        ("mxfp8-quantized", "float", 16, "groups of 32"),
        ("pack-quantized", "int", 32, None),
        ("nvfp4-pack-quantized", "float", None, "does not read"),
        ("mxfp4-pack-quantized", "float", 32, "does not read"),
        ("mxfp6-pack-quantized", "float", 32, "does not read"),
        ("dense", "float", None, "'dense': groups of it have floats"),
        ("marlin-24", "int", 128, "'marlin-24'"),
        ("sparse-bitmask", "int", None, "sparsity_config"),
        ("sparse-24-bitmask", "int", None, "sparsity_config"),
        ("mixed-precision", "int", None, "formats of their own"),
        ("one-of-tomorrow", "int", None, "'one-of-tomorrow'"),
    ],
)
def test_every_format_of_eight_bits_is_read_or_named(form: str, kind: str, size: int | None, said: str | None) -> None:
    """Use the names of `CompressionFormat` in compressed-tensors 0.20; a group's format goes before that of all."""
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "group" if size else "channel"}
    group = {"targets": ["Linear"], "weights": {**weights, "group_size": size}, "input_activations": None}
    for config in ({"format": form}, {"format": "mixed-precision", "own": form}):
        own = {"format": config["own"]} if "own" in config else {}
        stated = {"quant_method": "compressed-tensors", "format": config["format"], "config_groups": {"a": group | own}}
        found = CompressedTensors.refuses(stated, CPU, BF16)
        assert found is None if said is None else said in (found or ""), stated


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group", "block", "token", "tensor_group", "attn_head"])
def test_every_strategy_is_read_or_named(strategy: str) -> None:
    more = {"block_structure": [64, 32]} if strategy == "block" else {"group_size": 32} if strategy == "group" else {}
    found = CompressedTensors.refuses(_changed("fp8-channels", weights=_eight(strategy, **more)), CPU, BF16)
    assert (found is None) == (strategy in ("tensor", "channel", "group", "block")), found
    assert found is None or repr(strategy) in found


def _eight(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}


@pytest.mark.parametrize("name", FORMATS)
def test_devices_and_types(name: str, plugins: Plugins) -> None:
    config = FORMATS[name].config
    method = plugins.load("quantization", config["quant_method"])
    assert method.refuses(config, CPU, BF16) is None
    assert method.refuses(config, fake_caps("abacus"), BF16) is None
    assert "float64" in (method.refuses(config, CPU, torch.float64) or "")


def test_a_variant_that_nothing_reads_stops_the_start(folder: Path, plugins: Plugins, tmp_path: Path) -> None:
    stored_as = {"quantization_config": {**FORMATS["gptq"].config, "bits": 5}}
    with pytest.raises(PluginError, match="quantization") as told:
        load_folder(folder, plugins, hf_overrides=stored_as)
    assert "2, 3, 4, 8 bits" in str(told.value) + str(told.value.hint)


def _spoiled(source: Path, target: Path, name: str, key: str, tensor: Any) -> Path:
    quantized_checkpoint(source, target, name)
    file = target / "model.safetensors"
    tensors = load_file(file)
    tensors[key] = tensor(tensors[key])
    save_file(tensors, file, metadata={"format": "pt"})
    return target


DOWN = "model.layers.0.mlp.down_proj"


def _first(value: float) -> Any:
    """Return a function that changes a tensor's first number."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return changed


def _with_nan(weight: torch.Tensor) -> torch.Tensor:
    weight.view(torch.uint8)[3, 5] = 0x7F
    return weight


@pytest.mark.parametrize(
    ("name", "end", "change", "said"),
    [
        ("fp8-matrix", "weight", _with_nan, "not a finite number"),
        ("int8", "weight", torch.Tensor.float, "float32, but the format has torch.int8"),
        ("awq", "qzeros", lambda zeros: zeros[:1].clone(), "qzeros.*shape"),
        ("packed", "weight_packed", lambda words: words.t().contiguous(), "weight_packed.*shape"),
        ("gptq", "scales", _first(float("nan")), "not a finite number"),
        ("awq", "scales", _first(float("inf")), "not a finite number"),
        ("packed-zeros", "weight_scale", _first(float("-inf")), "not a finite number"),
        ("int8", "weight_scale", _first(3.4e38), "not a finite number"),  # bfloat16 does not hold it
        ("fp8-blocks", "weight_scale_inv", _first(float("nan")), "not a finite number"),
        ("fp8-fbgemm", "weight_scale", _first(float("inf")), "not a finite number"),
        ("fp8-fbgemm", "weight_scale", _first(1e37), "not a finite number"),  # times e4m3's largest
        ("sparse-int8", "bitmask", _first(0xFF), "not half of its inputs"),
        ("torchao-intx", "_weight_qdata", _first(100), "not a number of 4 bits"),
        ("quark-mxfp4", "weight_scale", _first(255), "not a finite number"),
    ],
)
def test_damaged_checkpoints_are_named(
    folder: Path, plugins: Plugins, tmp_path: Path, name: str, end: str, change: Any, said: str
) -> None:
    spoiled = _spoiled(folder, tmp_path / "made", name, f"{DOWN}.{end}", change)
    with pytest.raises(CheckpointError, match=said) as told:
        load_folder(spoiled, plugins)
    assert "model.safetensors" in told.value.message


def test_scales_must_be_finite_in_the_type_of_the_activations(folder: Path, plugins: Plugins, tmp_path: Path) -> None:
    spoiled = _spoiled(folder, tmp_path / "made", "gptq", f"{DOWN}.scales", lambda scales: scales.float() + 7e4)
    assert load_folder(spoiled, plugins, dtype="bfloat16").info.quantization == "gptq"
    with pytest.raises(CheckpointError, match="not a finite number"):
        load_folder(spoiled, plugins, dtype="float16")


def test_weights_whose_scale_is_zero_are_zero(folder: Path, plugins: Plugins, tmp_path: Path) -> None:
    spoiled = _spoiled(folder, tmp_path / "made", "int8", f"{DOWN}.weight_scale", _first(0.0))
    layer = _layers(load_folder(spoiled, plugins))["layers.0.mlp.down_proj"]
    y = layer(torch.randn(3, layer.in_features))
    assert bool((y[:, 0] == 0).all())
    assert bool((y[:, 1:] != 0).all())


@pytest.mark.parametrize(("name", "key"), [("gptq", "modules_to_not_convert"), ("fp8-blocks", "ignored_layers")])
@pytest.mark.parametrize("value", [7, "lm_head", {"lm_head": 1}, [7], [["lm_head"]], float("nan"), True])
def test_what_is_no_list_of_layers_is_told(
    folder: Path, plugins: Plugins, tmp_path: Path, name: str, key: str, value: Any
) -> None:
    quantized_checkpoint(folder, tmp_path / "made", name)
    with pytest.raises(CheckpointError, match=f"{key}.*is not a list of names"):
        load_folder(tmp_path / "made", plugins, hf_overrides={"quantization_config": _changed(name, **{key: value})})
    with pytest.raises(CheckpointError, match="'ignore' is not a list of names"):
        CompressedTensors(_changed("int8", ignore=value))


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("(", "not a regular expression"),
        ("(?:a|" * 150, "not a regular expression"),
        ("(?:a|" * 3000, "too long"),
        ("((a{100}){100}){100}", "too long"),
        ("a{99999999999999999999}", "too long"),
        ("(?R)", "not a regular expression"),
        ("(?:a|(?1))(b)", "not a regular expression"),
        ("(?:.|..)*(?!.)(?=x)", "takes too long"),
    ],
)
def test_an_expression_that_is_none_or_does_not_end_is_told(expression: str, said: str) -> None:
    layer = LinearLayer("layers.10.self_attn.a_projection_with_a_long_name_0", 8, 8)
    with pytest.raises(CheckpointError, match=said):
        chosen(layer, [f"re:{expression}"])


def test_an_expression_that_takes_all_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report it: on a quick machine memory runs out before time does."""

    def match(*args: Any, **options: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(regex, "match", match)
    with pytest.raises(CheckpointError, match="takes too long"):
        chosen(LinearLayer("layers.0.up_proj", 8, 8), ["re:a"])


@pytest.mark.parametrize("parts", [{}, {"a": 64, "b": 60}])
def test_layers_that_do_not_fill_words_are_told(parts: dict[str, int]) -> None:
    """Refuse layers whose numbers would share words with those of others."""
    layer = MergedLinear(64, parts) if parts else Linear(60, 64)
    given = LinearLayer("layers.0.mlp.x", layer.in_features, layer.out_features, tuple(parts))
    for scheme in (Gptq(FORMATS["gptq"].config).scheme(given), Awq(FORMATS["awq"].config).scheme(given)):
        assert scheme is not None
        with pytest.raises(CheckpointError, match="60 inputs or outputs"):
            scheme.allocate(layer)


def test_zero_points_are_cut_where_projections_meet() -> None:
    scheme = CompressedTensors(FORMATS["packed-zeros"].config).scheme(LinearLayer("x", 64, 124, ("a", "b")))
    assert scheme is not None
    with pytest.raises(CheckpointError, match="60 inputs or outputs"):
        scheme.allocate(MergedLinear(64, {"a": 60, "b": 64}))
    scheme.allocate(MergedLinear(64, {"a": 64, "b": 60}))


# ---------------------------------------------------------------------------------------- which layers


def test_layers_are_chosen_by_their_own_names() -> None:
    qkv = LinearLayer("layers.0.self_attn.qkv_proj", 8, 8, ("q_proj", "k_proj", "v_proj"))
    down, head = LinearLayer("layers.11.mlp.down_proj", 8, 8), LinearLayer("lm_head", 8, 8, head=True)
    for pattern in ("lm_head", "re:.*lm_head"):
        assert [chosen(layer, [pattern]) for layer in (qkv, down, head)] == [False, False, True]
    for pattern in ("model.layers.11.mlp.down_proj", "re:model.layers.1[0-9].*", "layers.11", "down_proj", "mlp"):
        assert [chosen(layer, [pattern]) for layer in (qkv, down, head)] == [False, True, False]
    assert not chosen(down, ["layers.1", "model.layers.1.mlp.down_proj", "proj"])
    assert chosen(qkv, ["q_proj", "k_proj", "v_proj"])
    with pytest.raises(CheckpointError, match="some of q_proj, k_proj, v_proj"):
        chosen(qkv, ["model.layers.0.self_attn.q_proj"])


def test_ignored_layers_stay_as_they_are(folder: Path, plugins: Plugins, tmp_path: Path) -> None:
    quantized_checkpoint(folder, tmp_path / "made", "int8")
    original = load_file(folder / "model.safetensors")
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    tensors[f"{name}.weight"] = original[f"{name}.weight"]
    del tensors[f"{name}.weight_scale"]
    save_file(tensors, tmp_path / "made" / "model.safetensors", metadata={"format": "pt"})
    config = {**FORMATS["int8"].config, "ignore": ["lm_head", name]}
    layers = _layers(load_folder(tmp_path / "made", plugins, hf_overrides={"quantization_config": config}))
    assert isinstance(layers["layers.1.mlp.down_proj"].scheme, Dense)
    assert not isinstance(layers["layers.0.mlp.down_proj"].scheme, Dense)


def test_parameters_are_cut_where_projections_meet() -> None:
    layer = MergedLinear(32, {"a": 64, "b": 192})
    words = checkpoint_parameter(layer, (32, -1), torch.int32, count=lambda rows: rows // 8)
    assert words.shape == (32, 32)
    assert words.outputs(64, 256).shape == (32, 24)
    assert words.outputs(0, 0).shape == (32, 32)
    blocks = checkpoint_parameter(layer, (-1, 1), torch.float32, count=lambda rows: -(-rows // 128))
    assert blocks.shape == (3, 1)
    assert blocks.outputs(64, 256).shape == (2, 1)
    assert [words.accepts(dtype) for dtype in (torch.int32, torch.int8, torch.float32)] == [True, False, False]
    assert [blocks.accepts(dtype) for dtype in (BF16, torch.float8_e4m3fn)] == [True, False]

"""Layers that ranks divide: each has its part, loads no more than that, and gives what the whole layer gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule import checkpoint
from ferrule.errors import CheckpointError, ConfigError
from ferrule.interfaces.model import BuildContext, Model
from ferrule.interfaces.platform import DeviceCaps
from ferrule.interfaces.quantization import LinearLayer, LinearScheme, QuantizationMethod
from ferrule.interfaces.ranks import Shard
from ferrule.plugin import Plugins, discover
from ferrule_nn import (
    ROWS,
    Division,
    Embedding,
    Head,
    Linear,
    MergedLinear,
    Shared,
    building,
    inputs,
    load_into,
    loading,
    outputs,
)
from ferrule_nn.division import DividedParameter
from ferrule_testkit.kits.model_run import Runner, recipe_folder
from ferrule_testkit.quantized import quantized_checkpoint
from ferrule_testkit.ranks import Exchange

PROMPTS = [[5, 17, 200, 31, 99, 250, 8, 12, 40], [7, 300, 11]]
CUTS = [[6, 1, 2], [3]]


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return discover()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def built(plugins: Plugins, folder: Path, shard: Shard, packed: bool = False) -> Any:
    """Build the model of a checkpoint with its weights, or one rank's part of it."""
    config = checkpoint.read(folder)
    cls = plugins.load("model", config["architectures"][0])
    model = cls(context(shard, config=checkpoint.completed(config, cls.config_names, cls.config_defaults)))
    with torch.no_grad():
        assert model.load_weights(iter(tensors(folder).items())) == {name for name, _ in model.named_parameters()}
    for part in model.modules() if packed else ():
        if hasattr(part, "pack"):
            part.pack()
    return model


def context(shard: Shard, config: Any = None) -> BuildContext:
    return BuildContext(
        config=config or {},
        dtype=torch.float32,
        device=torch.device("cpu"),
        block_size=4,
        max_model_len=64,
        shard=shard,
    )


def logits(model: Model) -> torch.Tensor:
    return torch.stack([row for found in Runner(model, 320).run(PROMPTS, CUTS) for row in found])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "gemma", "opt", "deepseek_v2", "gpt_oss", "phi3"])
def test_ranks_give_the_logits_of_one(plugins: Plugins, name: str, size: int) -> None:
    """Divide key heads that ranks share, experts, tied and merged tables, biases, latents, sinks, merged tensors."""
    folder, exchange = recipe_folder(name), Exchange(size)
    whole = built(plugins, folder, Shard(), packed=True)
    parts = [built(plugins, folder, shard, packed=True) for shard in exchange.shards]
    wanted = logits(whole)
    for found in exchange.run([partial(logits, part) for part in parts]):
        assert float((wanted - found).abs().max()) < 1e-4 * float(wanted.abs().max())


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_neox"])
def test_a_rank_keeps_and_loads_its_part_alone(plugins: Plugins, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    copied = []
    monkeypatch.setattr(
        loading, "copy_to_new", lambda view, tensor: (copied.append(tensor.numel()), view.copy_(tensor))
    )
    folder = recipe_folder(name)
    whole = sum(parameter.numel() for parameter in built(plugins, folder, Shard()).parameters())
    copied.clear()
    part = built(plugins, folder, Exchange(4).shards[3])
    assert sum(copied) == sum(parameter.numel() for parameter in part.parameters()) < 0.35 * whole


def test_a_rank_caches_its_heads(plugins: Plugins) -> None:
    for size, heads in ((1, 2), (2, 1), (4, 1)):
        part = built(plugins, recipe_folder("llama"), Exchange(size).shards[-1])
        assert {spec.num_kv_heads for spec in part.cache_specs().values()} == {heads}
        assert part.layers[0].self_attn.spec.num_heads == 4 // size


def test_heads_that_cannot_be_divided(plugins: Plugins) -> None:
    with pytest.raises(ConfigError, match="6 heads or rows cannot be divided among 4 ranks"):
        built(plugins, recipe_folder("bloom"), Exchange(4).shards[0])


def test_stages_are_refused(plugins: Plugins) -> None:
    with pytest.raises(ConfigError, match="cannot be divided into stages"):
        built(plugins, recipe_folder("llama"), Shard(stage=1))


def test_an_undivided_rank_exchanges_nothing(plugins: Plugins) -> None:
    exchange = Exchange(1)
    model = built(plugins, recipe_folder("llama"), exchange.shards[0])
    logits(model)
    assert exchange.calls == 0
    assert not any(part._forward_hooks for part in model.modules())


# ------------------------------------------------------------------------------------------------- layers


def layers(size: int, make: Any) -> Iterator[tuple[Shard, Any]]:
    for shard in Exchange(size).shards:
        with building(context(shard)):
            yield shard, make()


def loaded(layer: torch.nn.Module, **given: torch.Tensor) -> None:
    module = torch.nn.Module()
    module.layer = layer
    load_into(module, [(f"layer.{name}", tensor) for name, tensor in given.items()])


def test_sizes_are_those_of_the_whole_outside_and_of_the_part_inside() -> None:
    for _, layer in layers(2, lambda: MergedLinear(8, {"a": 8, "b": 2}, split=outputs(4, Shared(1)))):
        assert (layer.in_features, layer.out_features, dict(layer.projections)) == (8, 6, {"a": 4, "b": 2})
        assert layer.weight.shape == (6, 8)
    for _, layer in layers(2, lambda: Linear(8, 6, split=inputs(4))):
        assert (layer.in_features, layer.out_features, layer.weight.shape) == (4, 6, (6, 4))
    for _, layer in layers(2, lambda: Linear(8, 6)):
        assert (layer.division, layer.weight.shape) == (None, (6, 8))


def test_the_first_rank_alone_adds_the_bias() -> None:
    given = {"weight": torch.randn(6, 8), "bias": torch.randn(6)}
    for shard, layer in layers(2, lambda: Linear(8, 6, bias=True, split=inputs())):
        loaded(layer, **given)
        assert torch.equal(layer.weight, given["weight"][:, 4 * shard.rank :][:, :4])
        assert torch.equal(layer.bias, torch.zeros(6) if shard.rank else given["bias"])


def test_a_table_ends_with_rows_of_zeros() -> None:
    table, ids = torch.randn(70, 4), torch.tensor([0, 63, 64, 69])
    exchange = Exchange(2)
    parts = []
    for shard in exchange.shards:
        with building(context(shard)):
            embedding = Embedding(70, 4, split=ROWS)
            parts.append((embedding, Head(4, 70, embedding)))
        loaded(embedding, weight=table)
        assert embedding.weight.shape == (64, 4)
    assert torch.equal(parts[1][0].weight[:6], table[64:])
    assert not parts[1][0].weight[6:].any()

    def both(embedding: Embedding, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
        return embedding(ids), head(table[:2])

    for rows, found in exchange.run([partial(both, *part) for part in parts]):
        assert torch.equal(rows, table[ids])
        torch.testing.assert_close(found, table[:2] @ table.t())


def test_a_head_follows_an_embedding_that_is_not_divided() -> None:
    for _, (embedding, head) in layers(2, lambda: (made := Embedding(70, 4), Head(4, 70, made))):
        assert embedding.weight.shape == (70, 4)
        assert head.division is None


def test_a_part_of_a_tensor_that_does_not_fit_is_refused() -> None:
    for _, layer in layers(2, lambda: Linear(8, 6, split=inputs())):
        for shape in ((6, 4), (6, 16), (6, 7)):
            with pytest.raises(CheckpointError):
                loaded(layer, weight=torch.randn(shape))


def test_divisions_make_the_whole_of_parts() -> None:
    whole = torch.randn(3, 12)
    for division in (outputs(0, Shared(1), 2).of(4, 4, 4), outputs(0, 0).of(12)):
        turned = replace(division, axis=1)
        parts = [turned.part(whole, rank, 2) for rank in range(2)]
        assert torch.equal(turned.whole("", parts), whole)
    assert Division().part(whole, 1, 2) is whole


def test_a_parameter_that_is_not_a_linear_layers_is_divided_too() -> None:
    from ferrule_nn import parameter

    for shard, sinks in layers(2, lambda: parameter(4, division=outputs().of(4))):
        module = torch.nn.Module()
        module.sinks = sinks
        load_into(module, [("sinks", torch.arange(4.0))])
        assert isinstance(sinks, DividedParameter)
        assert sinks.tolist() == [2.0 * shard.rank, 2.0 * shard.rank + 1]


# ------------------------------------------------------------------------------------------------- quantization


class Whole(QuantizationMethod):
    """A method whose schemes say nothing of divisions, or have outputs and inputs in `units`."""

    def __init__(self, units: tuple[int, int] | None = None) -> None:
        super().__init__({})
        self.units = units
        self.seen: list[LinearLayer] = []

    @classmethod
    def refuses(cls, config: Any, caps: DeviceCaps, dtype: torch.dtype) -> str | None:
        return None

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        self.seen.append(layer)
        found = _Floats()
        if self.units is not None:
            found.units = lambda layer: self.units  # type: ignore[method-assign]
        return found


class _Floats(LinearScheme):
    def pack(self, layer: Any) -> None:
        pass

    def matmul(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight.t()


def test_schemes_are_given_the_sizes_of_a_part_and_say_what_is_not_cut() -> None:
    for _, layer in layers(2, lambda: Linear(8, 12, split=outputs())):
        method = Whole((3, 8))
        assert layer.quantize("a", method)
        assert (method.seen[0].in_features, method.seen[0].out_features) == (8, 6)
        with pytest.raises(ConfigError, match="b: its quantized outputs cannot be divided among 2 ranks.*groups of 4"):
            layer.quantize("b", Whole((4, 1)))
        with pytest.raises(ConfigError, match="c: its quantized outputs cannot be divided among 2 ranks.$"):
            layer.quantize("c", Whole())
    for _, layer in layers(1, lambda: Linear(8, 12, split=outputs())):
        assert layer.quantize("a", Whole())


@pytest.mark.parametrize("name", ["int8-weights", "fp8-matrix", "gptq", "awq", "packed-zeros", "mxfp4-compressed"])
def test_quantized_weights_are_cut_as_floats_are(plugins: Plugins, tmp_path: Path, name: str) -> None:
    """Divide one layer by outputs and one by inputs: the sum of the ranks equals the result of the whole layers."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"architectures": ["Any"]}')
    from safetensors.torch import save_file

    torch.manual_seed(0)
    save_file({f"{x}_proj.weight": torch.randn(64, 64) for x in "ab"}, source / "model.safetensors")
    meant = quantized_checkpoint(source, tmp_path / name, name)
    config = checkpoint.read(tmp_path / name)["quantization_config"]

    def made(shard: Shard) -> torch.nn.Module:
        module = torch.nn.Module()
        with building(context(shard)):
            module.a_proj, module.b_proj = Linear(64, 64, split=outputs()), Linear(64, 64, split=inputs())
        method = plugins.make("quantization", config["quant_method"], config)
        for path in ("a_proj", "b_proj"):
            assert getattr(module, path).quantize(path, method)
        load_into(module, tensors(tmp_path / name).items())
        return module

    def both(module: Any) -> torch.Tensor:
        module.a_proj.pack(), module.b_proj.pack()
        y: torch.Tensor = module.b_proj(module.a_proj(x))
        return y

    exchange, x = Exchange(2), torch.randn(3, 64)
    parts: list[Any] = [made(shard) for shard in exchange.shards]
    wanted = x @ meant["a_proj.weight"].t() @ meant["b_proj.weight"].t()
    for found in exchange.run([partial(both, part) for part in parts]):
        assert float((found - wanted).abs().max()) < 0.01 * float(wanted.abs().max())

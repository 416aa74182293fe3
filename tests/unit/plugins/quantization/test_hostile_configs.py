"""Whatever a checkpoint's ``quantization_config`` says, it is read, refused with a reason, or a CheckpointError."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.plugins import Plugins
from ferrule_nn import Linear
from ferrule_testkit.caps import fake_caps
from ferrule_testkit.quantized import FORMATS
from tests.mutations import bounded_memory

CPU = fake_caps()
HQQ = {"nbits": 4, "group_size": 64, "axis": 1, "channel_wise": True}
CONFIGS: list[dict[str, Any]] = [
    *(dict(made.config) for made in FORMATS.values()),
    {
        "quant_method": "aqlm",
        "in_group_size": 8,
        "out_group_size": 1,
        "num_codebooks": 1,
        "nbits_per_codebook": 8,
        "linear_weights_not_to_quantize": [],
    },
    {"quant_method": "hqq", "quant_config": {"weight_quant_params": HQQ}, "skip_modules": ["lm_head"]},
    {"quant_method": "hqq", "quant_config": {"layers.0.mlp.up_proj": {"weight_quant_params": HQQ}}},
    {"quant_method": "qqq", "wbits": 4, "group_size": 128, "modules_to_not_convert": ["x"]},
    {"quant_method": "squeezellm", "wbits": 4, "include_sparse": True, "topX": 10},
    {"quant_method": "gptq", "checkpoint_format": "bitblas", "bits": 4, "group_size": 32, "bitblas_zeros": "zeros"},
    {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "packing_format": "auto_round:auto_gptq",
        "extra_config": {"x": {"bits": 8}},
        "block_name_to_quantize": "layers",
    },
    {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "dynamic": {"+:x": {"bits": 8}},
        "desc_act": True,
        "modules_in_block_to_quantize": [["mlp.up_proj"]],
    },
    {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm*"]}},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"model.layers.0.mlp": {"quant_algo": "W4A16_AWQ", "group_size": 32}},
    },
    {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "llm_int8_skip_modules": ["lm_head"],
    },
    {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "ignored_layers": []},
    {"quant_method": "deepspeedfp", "bits": 8, "group_size": 512},
    {"quant_method": "gguf", "types": {"Q4_0": ["model.layers.0.mlp.up_proj"]}},
    {"quant_method": "gptq_marlin_24", "bits": 8, "group_size": 128},
    {"quant_method": "tpu_int8", "activation_scheme": "none"},
    {"quant_method": "fp_quant", "forward_dtype": "mxfp4", "hadamard_group_size": 32, "pseudoquantization": False},
]
VALUES: list[Any] = [
    *(None, True, 0, -1, 1, 3, 7, 128, 2**31, 10**12, 10**40, 1.5, float("nan")),
    *("", "x", "*" * 5000, "re:(a+)+$", "re:[", "\ud800"),
    *([], [None], [[[]]], [0, 0], [128, 128], {}, {"a": 1}, {"a": {"bits": {}}}),
]


def changed(value: Any, draw: random.Random) -> Any:
    """Return a value with another value somewhere."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice([key for key in value if key != "quant_method"])
        return {**value, key: changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.6:
        return [changed(value[0], draw), *value[1:]]
    return draw.choice(VALUES)


def outcomes(seed: int, count: int, plugins: Plugins) -> dict[str, int]:
    """Count how many of so many configurations are refused, an error, or read."""
    draw, ends = random.Random(seed), dict.fromkeys(("refused", "error", "read"), 0)
    names = [name for name in plugins.names("quantization") if name != "ferrule_packed"]
    readers = {form: plugins.load("quantization", name) for name in names for form in _formats(plugins, name)}
    for _ in range(count):
        config = draw.choice(CONFIGS)
        for _ in range(draw.randrange(1, 4)):
            config = changed(config, draw)
            if not isinstance(config, dict) or "quant_method" not in config:
                config = {**draw.choice(CONFIGS)}
        method = readers[config["quant_method"]]
        reason = method.refuses(config, CPU, torch.bfloat16)
        if reason is not None:
            assert 0 < len(reason) <= 500
            ends["refused"] += 1
            continue
        try:
            made = method(config)
            for inputs, outputs in ((64, 48), (128, 256)):
                layer = Linear(inputs, outputs)
                layer.quantize("model.layers.0.mlp.up_proj", made)
                for parameter in layer.parameters():
                    parameter.data.zero_()
                layer.pack()
        except CheckpointError:
            ends["error"] += 1
        else:
            ends["read"] += 1
    return ends


@pytest.mark.parametrize("seed", range(4))
def test_no_configuration_is_another_kind_of_error(seed: int, plugins: Plugins) -> None:
    assert all(outcomes(seed, 250, plugins).values())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_none_of_a_hundred_thousand_is(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ferrule_quant.products._log.warning", lambda *said: None)  # pytest keeps it all
    with bounded_memory():
        assert all(outcomes(4, 100_000, plugins).values())


def _formats(plugins: Plugins, name: str) -> tuple[str, ...]:
    found: tuple[str, ...] = plugins.load("quantization", name).formats
    return found

"""Schemes of quantized layers with the kernels for GPUs: what a layer holds then, and its products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.quantization import LinearLayer, QuantizationMethod
from ferrule_kernels.matmul import Levels
from ferrule_nn import Dense, Linear, MergedLinear
from ferrule_nn.ops import using
from ferrule_plugins.gguf.blocks import TABLES, Decoded
from ferrule_plugins.platform.cuda_kernels import cuda_kernels
from ferrule_plugins.platform.cuda_products import CudaProducts
from ferrule_plugins.quantization import integers
from ferrule_plugins.quantization.compressed import CompressedTensors
from ferrule_plugins.quantization.fp8 import Fp8Method
from ferrule_plugins.quantization.gguf import GgufMethod
from ferrule_plugins.quantization.groupwise import Awq, Gptq
from ferrule_plugins.quantization.modelopt import ModelOpt
from ferrule_plugins.quantization.quark import Quark
from ferrule_plugins.quantization.torchao import TorchAo
from ferrule_testkit.quantized import FORMATS
from tests.shared import allocated
from tests.unit.plugins.quantization.packers import drawn, gptq, loaded

READERS: dict[str, type[QuantizationMethod]] = {
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8Method,
    "fbgemm_fp8": Fp8Method,
    "modelopt": ModelOpt,
    "quark": Quark,
    "torchao": TorchAo,
    "gptq": Gptq,
    "awq": Awq,
}
WIDENED = {  # of which no kernel multiplies the numbers
    *("mxfp4-compressed", "mxfp6-compressed", "mxfp8-compressed", "nvfp4-compressed", "nvfp4-compressed-activations"),
    *("int8-groups", "int8-zeros", "modelopt-fp4", "modelopt-mxfp8", "quark-mxfp4", "sparse", "torchao-int4"),
}
PARTS = {"a_proj": 64, "b_proj": 32}


@pytest.fixture(autouse=True, params=[(9, 0), (8, 0)], ids=["sm90", "sm80"])
def capability(request: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """Pass tensors of the CPU to the kernels, under the interpreter, without a GPU."""
    if device.type == "cuda":
        if request.param == (8, 0):
            pytest.skip("a GPU is what it is")
        with using(cuda_kernels()):
            yield torch.cuda.get_device_capability(device)
        return
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: request.param)
    with using(Kernels((CudaProducts(),))):
        yield request.param


def _checked(layer: Linear, meant: torch.Tensor, error: float, bits: float) -> None:
    device = meant.device
    emptied = [tensor for name, tensor in layer.named_parameters() if name != "bias"]
    assert not sum(tensor.numel() for tensor in emptied)
    assert {tensor.device for tensor in emptied} == {device}  # by which other layers choose their kernels
    assert list(layer.packed_tensors()) == list(layer.buffers())
    assert sum(tensor.nbytes for tensor in layer.buffers()) <= meant.numel() * bits / 8
    x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(1)).to(device)
    expected = x @ meant.t()
    if layer.bias is not None:
        expected += layer.bias
    assert (layer(x) - expected).norm() <= error * expected.norm()
    layer.to(torch.device("cpu"))  # what moves a model moves the buffers
    assert all(tensor.device.type == "cpu" for tensor in layer.buffers())


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].config["quant_method"] in READERS])
def test_layers_of_checkpoints(name: str, device: torch.device) -> None:
    method = READERS[FORMATS[name].config["quant_method"]](FORMATS[name].config)
    with device:
        layer = MergedLinear(256, PARTS)
    layer.quantize("layers.0.mlp.ab_proj", method)
    allocated(layer)
    meant, start = [], 0
    for index, rows in enumerate(PARTS.values()):
        weight = torch.randn(rows, 256, generator=torch.Generator().manual_seed(index)) * 0.05
        tensors, means = FORMATS[name].encode(weight)
        meant.append(means)
        for key, parameter in layer.named_parameters():
            part = parameter.outputs(start, start + rows)
            given = tensors.get(key, torch.ones(1, 256) if parameter.optional else None)
            part.copy_(parameter.expanded(given.to(device), part))
        start += rows
    layer.pack()
    wide, whole = FORMATS[name].wide, torch.cat(meant).to(device)
    assert (not layer.quantized) == (name in WIDENED)
    if layer.quantized:
        eight = "8" in name or name == "modelopt-blocks"
        _checked(layer, whole, 2e-3 if wide else 0.04, 8.7 if eight else 5.6)
    else:
        x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).to(device)
        torch.testing.assert_close(layer(x), x @ whole.t(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("bits", "group", "ordered"), [(3, 40, True), (4, 64, True), (2, 16, False), (8, 0, True)])
def test_groups_and_orders(bits: int, group: int, ordered: bool, device: torch.device) -> None:
    """Store numbers of fewer bits as four; fill up groups that are not a multiple of 32."""
    given = drawn(64, 320, bits, group, symmetric=bits == 8, shuffled=ordered and group > 0)
    config = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": ordered}
    with device:
        layer = loaded(Gptq(config), {name: each.to(device) for name, each in gptq(given, bits).items()}, (64, 320))
    _checked(layer, given.meant.to(device), 2e-3, 13)


@pytest.mark.parametrize(("bits", "group", "symmetric"), [(8, 32, True), (8, 0, False)])
def test_what_no_kernel_takes_is_widened(bits: int, group: int, symmetric: bool, device: torch.device) -> None:
    given = drawn(64, 128, bits, group, symmetric)
    config = {"quant_method": "gptq", "bits": bits, "group_size": group or -1}
    with device:
        layer = loaded(Gptq(config), {name: each.to(device) for name, each in gptq(given, bits).items()}, (64, 128))
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).to(device)
    torch.testing.assert_close(layer(x), x @ given.meant.to(device).t(), rtol=1e-3, atol=1e-3)
    assert isinstance(layer.scheme, Dense)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "IQ4_NL"])
def test_types_of_gguf_files(kind: str, device: torch.device) -> None:
    """Keep four bits without offsets as four, and widen the others."""
    with device:
        layer = Linear(128, 48)
    assert layer.quantize("mlp.up_proj", GgufMethod({"quant_method": "gguf", "types": {kind: ["mlp.up_proj"]}}))
    draw = torch.Generator().manual_seed(1)
    allocated(layer)
    table = TABLES.get(kind, ())
    choices = torch.arange(0 if table else -8, 16 if table else 8, dtype=torch.int8)
    layer.get_parameter("numbers").data.copy_(choices[torch.randint(0, 16, (48, 128), generator=draw)])
    for name, _ in list(layer.named_parameters())[1:]:
        into = layer.get_parameter(name).data
        values = torch.randn(48, 4, generator=draw).bfloat16().float()  # for 32 inputs each
        into.copy_(values.repeat_interleave(into.shape[1] // 4, 1))
    weights = [parameter.detach().clone() for parameter in layer.parameters()]
    meant = Decoded(weights[0], *(Levels(floats) for floats in weights[1:]), table=table).widened()
    layer.pack()
    if kind == "Q4_0":
        _checked(layer, meant, 2e-3, 6.2)
    else:
        x = torch.randn(3, 128, generator=draw).to(device)
        torch.testing.assert_close(layer(x), x @ meant.t(), rtol=1e-4, atol=1e-2)
        assert isinstance(layer.scheme, Dense)


@pytest.mark.parametrize(
    ("method", "error", "bits"),
    [
        (integers.Int8, 0.02, 8.3),
        (integers.Int8WeightOnly, 0.01, 8.3),
        (integers.Int4, 0.15, 5.1),
        (integers.Int4WeightOnly, 0.15, 5.1),
        (Fp8Method, 0.06, 8.3),
    ],
)
def test_float_weights(method: type[QuantizationMethod], error: float, bits: float, device: torch.device) -> None:
    with device:
        layer = Linear(256, 96, bias=True)
    layer.quantize("layers.0.mlp.up_proj", method({}))
    allocated(layer)
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(0)) * 0.05
    layer.weight.copy_(weight)
    layer.bias.copy_(torch.randn(96, generator=torch.Generator().manual_seed(1)))
    layer.pack()
    _checked(layer, weight.to(device), error, bits)


def test_a_head_gives_float32(device: torch.device) -> None:
    scheme = integers.Int8({}).scheme(LinearLayer("lm_head", 64, 32, head=True))
    with device:
        layer = Linear(64, 32, scheme=scheme)
    layer.weight = torch.nn.Parameter(torch.randn(32, 64, device=device, dtype=torch.float16), requires_grad=False)
    layer.pack()
    assert layer(torch.randn(2, 64, device=device, dtype=torch.float16)).dtype == torch.float32

"""Every scheme of quantization: how a layer of it is made of floats, and what its bits are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.quantization import LinearLayer, QuantizationMethod
from ferrule_files.gguf.reader import FLOATS, TYPES
from ferrule_kernels.matmul import Levels
from ferrule_nn import Linear, load_into
from ferrule_plugins.gguf import blocks
from ferrule_plugins.quantization.gguf import form_of
from ferrule_quantize.gguf.encode import encode
from ferrule_testkit.quantized import FORMATS, sparse
from ferrule_testkit.samples import integers as sampled_integers
from ferrule_testkit.samples import quantization as sampled
from tools.quality.rounding import E4M3, Rounding, coded, e2m1, floats, integers, ranged, table

Tensors = Mapping[str, torch.Tensor]
Encode = Callable[[LinearLayer, torch.Tensor, Mapping[str, Any]], Tensors]
BYTE, BYTES_OF_32 = integers(8), integers(8, 32)  # activations
_NAME = "layers.2.mlp.up_proj"
_ON_CPU = (E4M3, integers(8, 32))  # fp8
_GROUPS_OF_32 = (replace(E4M3, group=32, power=448.0), integers(8, 32))  # mxfp8
_E2M3 = (replace(floats(3, 0, 7.5, 32), power=7.5), integers(8, 32))  # mxfp6


@dataclass(frozen=True)
class Scheme:
    """`weights` are the roundings of weights, one after the other, `activations` None where they keep 15 bits or more.

    `encode` gives the layer's parameters, or with `stored` what a checkpoint has. `halved`: for weights of which two of
    four are zero.
    """

    plugin: str
    weights: tuple[Rounding, ...]
    activations: Rounding | None = None
    config: Mapping[str, Any] | None = None
    encode: Encode | None = None
    stored: bool = False
    halved: bool = False
    name: str = _NAME

    def layer(self, plugins: Plugins, weight: torch.Tensor) -> Linear:
        """Load and pack a layer. `weight` [outputs, inputs] is bfloat16."""
        method: QuantizationMethod = plugins.load("quantization", self.plugin)(self.config or {})
        n, k = weight.shape
        holder = torch.nn.Module()
        layer = holder.layer = Linear(k, n).to(weight.dtype)
        if not layer.quantize(self.name, method):
            raise ValueError(f"{self.plugin} does not quantize {self.name}")
        made = {"weight": weight}
        if self.encode is not None:
            made = dict(self.encode(LinearLayer(self.name, k, n), weight, self.config or {}))
        if self.encode is None or self.stored:
            load_into(holder, ((f"layer.{name}", tensor.contiguous()) for name, tensor in made.items()))
            layer.pack()  # where a tensor that may be missing is
        else:
            for name, tensor in made.items():
                layer.get_parameter(name).data.copy_(tensor)
            layer.pack()
        return layer

    def usable(self, weight: torch.Tensor) -> torch.Tensor:
        return sparse(weight)[1] if self.halved else weight


# Methods that make their numbers of floats.
FROM_FLOATS: Mapping[str, Scheme] = {
    "int8": Scheme("int8", (integers(8),), BYTE),
    "int8_per_channel_weight_only": Scheme("int8_per_channel_weight_only", (integers(8),)),
    "int4": Scheme("int4", (integers(4, 32),), BYTES_OF_32),
    "int4_weight_only": Scheme("int4_weight_only", (integers(4, 32),)),
    "experts_int8": Scheme("experts_int8", (integers(8),), name="layers.0.mlp.experts.1.down_proj"),
    "tpu_int8, neuron_quant": Scheme("tpu_int8", (integers(8),), config={"quant_method": "tpu_int8"}),
    "fp8, ptpc_fp8": Scheme("fp8", (integers(8, 32),), BYTES_OF_32),
    "deepspeedfp": Scheme("deepspeedfp", (floats(3, -6, 480, 512),)),
    "deepspeedfp, 6 bits": Scheme("deepspeedfp", (floats(2, -2, 28, 512),), config={"bits": 6}),
    "bitsandbytes": Scheme("bitsandbytes", (coded("nf4"),)),
    "fp8_per_tensor, fp8_per_channel": Scheme("fp8_per_channel", (integers(8, 32),), BYTES_OF_32),
    "fp8_per_block": Scheme("fp8_per_block", (integers(8, 32),), BYTES_OF_32),
    "mxfp8": Scheme("mxfp8", (integers(8, 32),), BYTES_OF_32),
    "mxfp4, from floats": Scheme("mxfp4", (e2m1(32, power=True),)),
    "nvfp4_per_token": Scheme("nvfp4_per_token", (e2m1(16),), name="layers.0.mlp.experts.1.down_proj"),
    "online": Scheme("online", (integers(8, 32),), BYTES_OF_32, {"quant_method": "online", "linear": "mxfp8"}),
}
# Weights of the checkpoints in `ferrule_testkit.quantized.FORMATS`.
_STORED: Mapping[str, tuple[Rounding, ...]] = {
    **dict.fromkeys(("int8", "int8-weights", "bitsandbytes-int8", "sparse-int8", "torchao-int8"), (integers(8),)),
    **dict.fromkeys(("fp8-channels", "fp8-compressed-blocks", "fp8-blocks", "fp8-matrix", "fp8-fbgemm"), _ON_CPU),
    **dict.fromkeys(("modelopt-fp8", "modelopt-blocks", "sparse-fp8", "quark-fp8", "fp8-exponents"), _ON_CPU),
    **dict.fromkeys(("mxfp8-compressed", "modelopt-mxfp8"), _GROUPS_OF_32),
    **dict.fromkeys(("packed", "gptq", "quark-int4", "modelopt-int4-plain"), (integers(4, 32),)),
    "modelopt-int4": (replace(integers(4, 32), factors=(1.0, 2.0)),),
    "mxfp6-compressed": _E2M3,
    "int8-groups": (integers(8, 32),),
    "int8-zeros": (ranged(8),),
    **dict.fromkeys(("packed-zeros", "gptq-zeros", "gptq-v2", "awq", "quark-uint4"), (ranged(4, 32),)),
    **dict.fromkeys(("torchao-intx", "torchao-int4"), (ranged(4, 32),)),
    **dict.fromkeys(("mxfp4-compressed", "quark-mxfp4"), (e2m1(32, power=True),)),
    **dict.fromkeys(("nvfp4-compressed", "nvfp4-compressed-activations", "modelopt-fp4"), (e2m1(16),)),
    **dict.fromkeys(("nf4", "nf4-nested"), (coded("nf4"),)),
    "fp4": (coded("fp4"),),
    "sparse": (),
}
_BYTES_OF_ROWS = frozenset({"int8"})  # formats whose activations have one scale for a token
# Layers in the formats that have no checkpoint above, as `ferrule plugins check` makes them.
_SAMPLED: Mapping[str, tuple[str, Mapping[str, Any], tuple[Rounding, ...], Rounding | None]] = {
    "auto-round, 3 bits": ("auto-round", sampled_integers.AUTO_ROUND, (ranged(3, 32),), None),
    "gptq, desc_act": ("gptq", sampled_integers.GPTQ, (ranged(4, 32),), None),
    "hqq": ("hqq", sampled_integers.HQQ, (ranged(4, 16),), None),
    "qqq": ("qqq", sampled_integers.QQQ, (integers(4),), BYTE),
    "squeezellm": ("squeezellm", sampled_integers.SQUEEZELLM, (ranged(4),), None),
    "aqlm, books of 256 numbers": ("aqlm", sampled_integers.AQLM, (integers(8),), None),
    "fp_quant, nvfp4": ("fp_quant", sampled_integers.FP_QUANT, (e2m1(16),), None),
    "moe_wna16, ipex": ("moe_wna16", sampled_integers.AWQ, (ranged(4, 32),), None),
    "mxfp4": ("mxfp4", sampled.MXFP4, (e2m1(32, power=True),), None),
    "ferrule_packed, 4 bits": ("ferrule_packed", sampled.PACKED, (integers(4, 32),), None),
}
# Types that llama.cpp's Python package or this project writes. For the others, numbers are made here.
_WRITTEN = frozenset({"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K"})


def schemes() -> Iterator[tuple[str, Scheme]]:
    """Yield all schemes by title. Raises KeyError for a format that has no entry here."""
    yield from FROM_FLOATS.items()
    for name, form in FORMATS.items():
        activations = None if form.wide else BYTE if name in _BYTES_OF_ROWS else BYTES_OF_32
        plugin = str(form.config["quant_method"])
        made = Scheme(plugin, _STORED[name], activations, form.config, _stored(form.encode), stored=True)
        yield f"`{name}`", Scheme(**{**vars(made), "halved": name.startswith("sparse")})
        if name == "gptq":
            yield "humming, of gptq", replace(made, plugin="humming")
    for title, (plugin, sample, weights, activations) in _SAMPLED.items():
        name = "layers.0.mlp.experts.1.down_proj" if plugin == "mxfp4" else _NAME
        yield title, Scheme(plugin, weights, activations, sample["config"], sample["encode"], name=name)
    for kind in TYPES.values():
        if kind.name not in FLOATS:
            yield f"GGUF {kind.name}", _gguf(kind.name)


def _stored(form: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]) -> Encode:
    return lambda layer, weight, config: form(weight)[0]


def _gguf(kind: str) -> Scheme:
    form, bits = form_of(kind), blocks.BITS[kind]
    if form.table:
        rounding = table(form.table, form.group)
    else:
        rounding = ranged(bits, form.group) if form.offsets else integers(bits, form.group)

    def made(layer: LinearLayer, weight: torch.Tensor, config: Mapping[str, Any]) -> Tensors:
        if kind not in _WRITTEN:
            return sampled.levelled(weight, form)
        found = blocks.decode(kind, torch.from_numpy(encode(kind, weight)))
        numbers = {"numbers": found.numbers}
        return (
            numbers
            | _levels("scale", found.scales)
            | ({} if found.offsets is None else _levels("offset", found.offsets))
        )

    config = {"quant_method": "gguf", "types": {f"{kind}/{form.block or form.group}": [_NAME]}}  # taken apart
    return Scheme("gguf", (rounding,), integers(8, form.group), config, made)


def _levels(name: str, levels: Levels) -> dict[str, torch.Tensor]:
    """Return the parameters of a layer."""
    steps = {} if levels.steps is None else {f"{name}_steps": levels.steps}
    return {f"{name}s": levels.floats, **steps}

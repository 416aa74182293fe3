"""Weights of 8 or 4 bits, made from any float checkpoint as it loads.

On CPUs `int8` and `int4` quantize activations too, row by row, to 8 bits: the fastest. `…_weight_only` give them 15
bits, finer than bfloat16, so that nothing is lost but what the weights lose; decoding is as fast, prompts take twice
the time. On GPUs `int8` quantizes activations; layers of the others multiply in the activations' own type. The head has
8 bits in all of them.

Other engines have names for weights of 8 bits whose activations keep their type: `experts_int8` for experts alone,
`tpu_int8` and `neuron_quant` for all layers but the head (https://github.com/vllm-project/vllm, v0.8.4,
vllm/model_executor/layers/quantization). A checkpoint of floats may ask for them in its configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_kernels.cpu.matmul import LONGEST
from ferrule_kernels.matmul import Form
from ferrule_quant.method import CheckedMethod
from ferrule_quant.online import Online


class FromFloats(CheckedMethod):
    """A method with one form for all layers but the head."""

    form: Form
    head_form: Form
    from_floats = True

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        form = self.head_form if layer.head else self.form
        if form.widths(layer.in_features)[0] > LONGEST:
            return None
        return Online(form, self.shared, torch.float32 if layer.head else None)


class Int8(FromFloats):
    form = head_form = Form(bits=8)


class Int8WeightOnly(FromFloats):
    form = head_form = Form(bits=8, digits=2)


class ExpertsInt8(Int8WeightOnly):
    conformance = {"config": {"quant_method": "experts_int8"}}
    formats = ("experts_int8",)

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        return super().scheme(layer) if ".experts." in layer.name else None


class LayersInt8(Int8WeightOnly):
    """The methods `tpu_int8` and `neuron_quant`, with their settings."""

    conformance = {"config": {"quant_method": "tpu_int8", "activation_scheme": "none"}}
    formats = ("tpu_int8", "neuron_quant")
    _SETTINGS: Mapping[str, tuple[str, ...]] = {  # values that are read
        "activation_scheme": ("none",),
        "quantize_method": ("vector_dynamic",),
        "quant_dtype": ("s8",),
    }

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        for key, values in cls._SETTINGS.items():
            if config.get(key, values[0]) not in values:
                raise ValueError(f"reads {key} {values[0]!r}, and it is {config[key]!r:.40}")

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        return None if layer.head else super().scheme(layer)


class Int4(FromFloats):
    form = Form(bits=4, group=32)
    head_form = Form(bits=8)


class Int4WeightOnly(FromFloats):
    form = Form(bits=4, group=32, digits=2)
    head_form = Form(bits=8, digits=2)

"""`humming`: in vLLM, kernels of its own for the formats of other methods; here a name for all of these.

https://github.com/vllm-project/vllm, vllm/model_executor/layers/quantization/humming.py.
"""

from __future__ import annotations

from ferrule_plugins.quantization.compressed import CompressedTensors
from ferrule_plugins.quantization.fp8 import Fp8Method
from ferrule_plugins.quantization.groupwise import Awq, Gptq
from ferrule_plugins.quantization.modelopt import ModelOpt
from ferrule_plugins.quantization.mxfp4 import Mxfp4
from ferrule_quant.method import OneOf

_METHODS = (Awq, Gptq, CompressedTensors, Fp8Method, ModelOpt, Mxfp4)


class AnyFormat(OneOf):
    conformance = "ferrule_testkit.samples.integers:AWQ"
    methods = _METHODS
    usual = Gptq
    formats = tuple(form for method in _METHODS for form in method.formats)

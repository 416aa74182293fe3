"""FP-Quant (https://arxiv.org/abs/2509.23202): e2m1 in groups, after a rotation of the inputs.

Layers have `qweight` uint8 [n, k / 2], of a pair the first in the low half, and `scales` uint8: powers of two for 32
inputs (``mxfp4``), or the bytes of e4m3 for 16 (``nvfp4``), which `weight_global_scale` divides. They are multiplied by
activations that `forward_hadamard_matrix` has rotated, each so many inputs in turn. Here the weights are rotated back
once, and are floats of the model's type from there on: activations need not be rotated, and are not quantized.
https://github.com/IST-DASLab/FP-Quant, fp_quant/module/linear.py. ``pseudoquantization`` keeps such floats, `dqweight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_nn import checkpoint_parameter
from ferrule_quant.code_tables import E2M1, Coded, halves, powers_of_two
from ferrule_quant.decoded_parameters import decoded_parameter
from ferrule_quant.method import CheckedMethod
from ferrule_quant.names import chosen
from ferrule_quant.packed_words import outputs
from ferrule_quant.products import Floats, Quantized, Shared, Wide, checked

_GROUPS = {"mxfp4": 32, "nvfp4": 16}
_ROTATED = (16, 32, 64, 128)  # inputs
_NUMBERS = ("qweight", "scales", "weight_global_scale")
_UNUSED = ("act_global_scale", "backward_hadamard_matrix")
_WHY = "weights of FP-Quant are rotated back once, and take 16 bits from there on, or 32 with --dtype float32"


class FpQuant(CheckedMethod):
    conformance = "ferrule_testkit.samples.integers:FP_QUANT"
    formats = ("fp_quant",)
    left_keys = ("modules_to_not_convert",)

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        if _kind(config) not in _GROUPS:
            raise ValueError(f"reads a forward_dtype of {' and '.join(_GROUPS)}, and it is {_kind(config)!r:.80}")
        if config.get("store_master_weights"):
            raise ValueError("does not read weights before they are quantized (store_master_weights)")
        size = _rotated(config)
        if type(size) is not int or size not in _ROTATED:
            raise ValueError(f"takes a hadamard_group_size of {', '.join(map(str, _ROTATED))}, and it is {size!r}")

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        if layer.head or chosen(layer, self.left):
            return None
        return FpQuantScheme(self.shared, self.config)


def _kind(config: Mapping[str, Any]) -> str:
    return str(config.get("forward_dtype", "nvfp4"))


def _rotated(config: Mapping[str, Any]) -> Any:
    return config.get("hadamard_group_size") or _GROUPS[_kind(config)]


class FpQuantScheme(Quantized):
    """A scheme with the module's parameters, a matrix for each projection; or with `dqweight` [n, k], rotated too."""

    def __init__(self, shared: Shared, config: Mapping[str, Any]) -> None:
        super().__init__(shared, wide=True)
        self.kind = _kind(config)
        self.floats, self.size = bool(config.get("pseudoquantization")), int(_rotated(config))

    def allocate(self, layer: Any) -> None:
        self.given, self.form, k = layer.weight.dtype, Floats(layer.weight.dtype), layer.in_features
        group = _GROUPS[self.kind]
        if k % max(self.size, group):
            raise CheckpointError(f"{k} inputs of a layer are not a whole number of groups of {max(self.size, group)}.")
        made: dict[str, torch.nn.Parameter] = {
            "forward_hadamard_matrix": decoded_parameter(
                layer, (-1, self.size, self.size), torch.float32, _matrix, count=lambda _: 1
            )
        }
        if self.floats:
            made["dqweight"] = checkpoint_parameter(layer, (-1, k), torch.float32)
        else:
            made["qweight"] = checkpoint_parameter(layer, (-1, k // 2), torch.uint8)
            made["scales"] = checkpoint_parameter(layer, (-1, k // group), torch.uint8)
            made["weight_global_scale"] = checkpoint_parameter(layer, (-1, 1), torch.float32, broadcast=True)
        unused = (*_UNUSED, "weight", *(name for name in ("dqweight", *_NUMBERS) if name not in made))
        layer.ignored_tensors = (*layer.ignored_tensors, *unused)
        layer.weight = None
        for name, parameter in made.items():
            setattr(layer, name, parameter)

    def weights(self, layer: Any) -> Wide:
        rotated = layer.dqweight.detach() if self.floats else self._numbers(layer)
        matrices = layer.forward_hadamard_matrix.detach()
        parts = zip(torch.split(rotated, list(outputs(layer))), matrices, strict=True)
        back = [(part.reshape(len(part), -1, self.size) @ matrix.t()).flatten(1) for part, matrix in parts]
        return Wide(torch.cat(back).to(self.given), _WHY)

    def _numbers(self, layer: Any) -> torch.Tensor:
        """Return the weights as float32 [n, k]."""
        scales = layer.scales.detach()
        if self.kind == "mxfp4":
            scales = powers_of_two(scales)
        else:
            scales = checked(scales.view(torch.float8_e4m3fn)).float()
        scales = scales / layer.weight_global_scale.detach()
        return Coded(halves(layer.qweight.detach()), E2M1, scales, _GROUPS[self.kind]).widened(torch.float32)


def _matrix(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if not tensor.is_floating_point():
        raise ValueError("a rotation is of floats")
    return tensor.float().reshape(shape)

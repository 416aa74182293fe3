"""vLLM's names for what float weights become as they load, and `online`, by which layers and experts may differ.

https://docs.vllm.ai/en/latest/features/quantization/online/ describes them:

    fp8_per_tensor, fp8_per_channel   e4m3; on a GPU with a scale for each output channel in either case
    fp8_per_block                     e4m3, on a GPU with a scale for each block of 128 x 128
    mxfp8                             e4m3 in groups of 32, whose scales are powers of two there: CPUs alone
    mxfp4                             e2m1 in groups of 32, whose scales are powers of two
    nvfp4_per_token                   experts alone: e2m1 in groups of 16, whose scales are e4m3 by one of the matrix
    online                            what `quantization_config` says: "linear", "moe" and "ignore"

On CPUs weights of 8 bits are integers with a scale for each 32 inputs, as those of `fp8`. Heads stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from ferrule.interfaces.platform import DeviceCaps
from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_kernels.matmul import Form
from ferrule_quant.code_tables import E2M1, Coded, CodedScheme
from ferrule_quant.fp8 import BLOCK, Fp8FromFloats
from ferrule_quant.method import CheckedMethod
from ferrule_quant.names import chosen
from ferrule_quant.online import Online
from ferrule_quant.products import FP8_FORM, Fp8, Shared

_E4M3, _E2M1 = 448.0, 6.0  # the largest numbers
_ROWS = 1024  # that are quantized at a time
_TINY = 1e-30


class BlocksFromFloats(Fp8FromFloats):
    def e4m3(self, layer: Any) -> Fp8:
        return blocks_of(layer.weight.detach())


class Mxfp4FromFloats(CodedScheme):
    def read_codes(self, layer: Any) -> Coded:
        self.given = layer.weight.dtype
        return in_rows(layer.weight.detach(), 32, powers)


class NvFp4FromFloats(CodedScheme):
    def read_codes(self, layer: Any) -> Coded:
        self.given, weight = layer.weight.dtype, layer.weight.detach()
        whole = weight.abs().amax().float() / (_E4M3 * _E2M1)
        return in_rows(weight, 16, lambda parts: small_floats(parts, whole))


_MAKERS: Mapping[str, Callable[[Shared], LinearScheme]] = {
    **dict.fromkeys(
        ("fp8_per_tensor", "fp8_per_channel", "mxfp8", "fp8_per_tensor_static", "fp8_per_channel_static"),
        lambda shared: Fp8FromFloats(FP8_FORM, shared, None),
    ),
    **dict.fromkeys(("fp8_per_block", "fp8_per_block_static"), lambda shared: BlocksFromFloats(FP8_FORM, shared, None)),
    "mxfp4": Mxfp4FromFloats,
    "nvfp4_per_token": NvFp4FromFloats,
    **dict.fromkeys(
        ("int8_per_channel_weight_only", "int8_per_channel_static"),
        lambda shared: Online(Form(bits=8, digits=2), shared, None),
    ),
}
_CPU_ALONE = ("mxfp8",)


class Named(CheckedMethod):
    """A method that quantizes layers as `linear` says and experts as `moe` says; None leaves them as they are."""

    from_floats = True
    linear: str | None = None
    moe: str | None = None

    @classmethod
    def refuses(cls, config: Mapping[str, Any], caps: DeviceCaps, dtype: torch.dtype) -> str | None:
        reason = super().refuses(config, caps, dtype)
        alone = next((name for name in cls.kinds(config) if name in _CPU_ALONE), None) if reason is None else None
        if alone is not None and "cuda" in caps.features:
            return f"no GPU kernel multiplies {alone}, which fp8_per_channel is nearest to"
        return reason

    @classmethod
    def kinds(cls, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
        """Return the kinds of layers and of experts. Raises ValueError."""
        return cls.linear, cls.moe

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        linear, moe = self.kinds(self.config)
        kind = moe if ".experts." in layer.name else linear
        return None if kind is None or layer.head or chosen(layer, self.left) else _MAKERS[kind](self.shared)


class Fp8Channels(Named):
    linear = moe = "fp8_per_channel"


class Fp8Blocks(Named):
    linear = moe = "fp8_per_block"


class Mxfp8(Named):
    linear = moe = "mxfp8"


class NvFp4PerToken(Named):
    moe = "nvfp4_per_token"


class ByConfig(Named):
    """The method `online`, as the configuration says, or ``--hf-overrides`` for a checkpoint of floats."""

    conformance = {
        "config": {"quant_method": "online", "linear": "fp8_per_channel", "moe": {"weight": "fp8_per_block"}}
    }
    formats = ("online",)
    left_keys = ("ignore",)

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        cls.kinds(config)

    @classmethod
    def kinds(cls, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
        linear, moe = (_kind(key, config.get(key)) for key in ("linear", "moe"))
        if linear is None and moe is None:
            example = '\'{"quantization_config": {"quant_method": "online", "linear": "fp8_per_channel"}}\''
            raise ValueError(f"takes what weights become from a quantization_config: --hf-overrides {example}")
        return linear, moe


def _kind(key: str, stated: Any) -> str | None:
    """Read a name, or an object with one as "weight". Raises ValueError."""
    if isinstance(stated, Mapping):
        if stated.get("activation") is not None:
            raise ValueError(f"reads no 'activation' of {key!r}: it follows from the weights")
        stated = stated.get("weight")
    if stated is None or isinstance(stated, str) and stated in _MAKERS:
        return stated
    raise ValueError(f"reads {', '.join(_MAKERS)} as {key!r}, not {stated!r:.80}")


# ------------------------------------------------------------------------------------------ weights


def blocks_of(weight: torch.Tensor) -> Fp8:
    """Quantize weight [n, k], of any float type, to e4m3 with a scale for each block."""
    n, k = weight.shape
    numbers, scales = torch.empty((n, k), dtype=torch.float8_e4m3fn, device=weight.device), []
    for first in range(0, n, BLOCK):
        rows = weight[first : first + BLOCK].float()
        most = F.pad(rows.abs().amax(0), (0, -k % BLOCK)).view(-1, BLOCK).amax(1) / _E4M3
        scales.append(most)
        spread = most.clamp(min=_TINY).repeat_interleave(BLOCK)[:k]
        numbers[first : first + BLOCK] = (rows / spread).clamp(-_E4M3, _E4M3).to(torch.float8_e4m3fn)
    return Fp8(numbers, torch.stack(scales), BLOCK)


def in_rows(weight: torch.Tensor, group: int, scales_of: Callable[[torch.Tensor], torch.Tensor]) -> Coded:
    """Quantize weight [n, k] to e2m1, with the scales that `scales_of` gives for groups [rows, groups, group]."""
    n, k = weight.shape
    codes, scales = torch.empty((n, k), dtype=torch.uint8, device=weight.device), []
    for first in range(0, n, _ROWS):
        rows = F.pad(weight[first : first + _ROWS].float(), (0, -k % group)).view(-1, -(-k // group), group)
        scales.append(scales_of(rows))
        codes[first : first + _ROWS] = nearest(rows, scales[-1]).flatten(1)[:, :k]
    return Coded(codes, E2M1, torch.cat(scales), group)


def nearest(parts: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the codes of the numbers nearest to groups [rows, groups, group] divided by their scales."""
    table = torch.tensor(E2M1[:8], device=parts.device)
    apart = parts / scales.clamp(min=_TINY).unsqueeze(-1)
    codes = torch.bucketize(apart.abs(), (table[1:] + table[:-1]) / 2)
    return (codes + 8 * (apart < 0)).to(torch.uint8)


def powers(parts: torch.Tensor) -> torch.Tensor:
    """Return the power of two with less error of the two next to a sixth of each group's largest number.

    It is NaN where that number is not finite.
    """
    most = parts.abs().amax(2)
    low = (most.clamp(min=_TINY) / _E2M1).log2().floor().clamp(-126, 126).exp2()
    table, errors = torch.tensor(E2M1, device=parts.device), []
    for scales in (low, 2 * low):
        meant = table[nearest(parts, scales).int()] * scales.unsqueeze(-1)
        errors.append((meant - parts).square().sum(2))
    return torch.where(errors[0] <= errors[1], low, 2 * low).masked_fill(~most.isfinite(), torch.nan)


def small_floats(parts: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return a sixth of each group's largest number, rounded to e4m3 in units of `whole`. NaN stays NaN."""
    stored = (parts.abs().amax(2) / _E2M1 / whole.clamp(min=_TINY)).to(torch.float8_e4m3fn)
    return stored.float() * whole

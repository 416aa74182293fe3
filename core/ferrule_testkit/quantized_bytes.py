"""Encoders of weights of 8 and 6 bits, for `ferrule_testkit.quantized`."""

from __future__ import annotations

import torch

Tensors = dict[str, torch.Tensor]
GROUP = 32
BLOCK = 128


def int8_channels(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Encode with a scale for each output channel that reaches half a step past the range, as the format's makers
    choose it.
    """
    scales = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-8) / 127.5
    numbers = (weight.float() / scales).round().clamp(-128, 127)
    return {"weight": numbers.to(torch.int8), "weight_scale": scales}, numbers * scales


def fp8_channels(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-8) / 448
    numbers = (weight.float() / scales).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales


def fp8_matrix(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Encode with one scale for the matrix, and one that was measured for activations."""
    scale = weight.float().abs().amax() / 448
    numbers = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, numbers.float() * scale


def fp8_blocks(weight: torch.Tensor, scale_name: str = "weight_scale_inv") -> tuple[Tensors, torch.Tensor]:
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    parts = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scales = parts.abs().amax((1, 3)).clamp(min=1e-8) / 448
    numbers = (parts / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    meant = (numbers.float() * scales[:, None, :, None]).reshape(padded.shape)[:n, :k]
    return {"weight": numbers.view(padded.shape)[:n, :k], scale_name: scales}, meant


def fp8_exponents(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Encode blocks whose scales are powers of two, in e8m0."""
    tensors, _ = fp8_blocks(weight)
    powers = tensors["weight_scale_inv"].log2().ceil().exp2()
    spread = powers.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
    numbers = (weight.float() / spread).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale_inv": powers.to(torch.float8_e8m0fnu)}, numbers.float() * spread


def mxfp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Encode as e4m3, with the exponent of a scale for every 32 inputs."""
    parts = weight.float().view(len(weight), -1, GROUP)
    exponents = (parts.abs().amax(2).clamp(min=1e-30) / 448).log2().ceil()
    numbers = (parts / exponents.exp2()[..., None]).to(torch.float8_e4m3fn)
    meant = numbers.float() * exponents.exp2()[..., None]
    return {"weight": numbers.flatten(1), "weight_scale": (exponents + 127).to(torch.uint8)}, meant.flatten(1)


def mxfp6(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Encode as e2m3, four codes in three bytes, with the exponent of a scale for every 32 inputs."""
    parts = weight.float().view(len(weight), -1, GROUP)
    exponents = (parts.abs().amax(2).clamp(min=1e-30) / 7.5).log2().ceil()
    values = torch.tensor([m / 8 for m in range(8)] + [(8 + m) / 8 * 2**e for e in range(3) for m in range(8)])
    codes = ((parts / exponents.exp2()[..., None]).abs()[..., None] - values).abs().argmin(-1)
    meant = values[codes] * exponents.exp2()[..., None] * torch.where(parts < 0, -1.0, 1.0)
    quads = (codes + 32 * (parts < 0)).view(len(weight), -1, 4)
    words = (quads << torch.tensor([0, 6, 12, 18])).sum(-1)
    packed = torch.stack([words >> shift & 255 for shift in (0, 8, 16)], dim=-1).to(torch.uint8).flatten(1)
    return {"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}, meant.flatten(1)


def int8_groups(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    parts = weight.float().view(len(weight), -1, GROUP)
    scales = parts.abs().amax(2).clamp(min=1e-8) / 127
    scales = scales.bfloat16().float()
    numbers = (parts / scales[..., None]).round().clamp(-127, 127)
    meant = (numbers * scales[..., None]).flatten(1)
    return {"weight": numbers.flatten(1).to(torch.int8), "weight_scale": scales}, meant


def int8_zeros(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Encode with a scale and a zero point for each output channel."""
    low, high = weight.float().amin(1, keepdim=True).clamp(max=0), weight.float().amax(1, keepdim=True).clamp(min=0)
    scales = (high - low).clamp(min=1e-8) / 255
    zeros = (-128 - low / scales).round().clamp(-128, 127)
    numbers = (weight.float() / scales + zeros).round().clamp(-128, 127)
    tensors = {"weight": numbers.to(torch.int8), "weight_scale": scales, "weight_zero_point": zeros.to(torch.int8)}
    return tensors, (numbers - zeros) * scales

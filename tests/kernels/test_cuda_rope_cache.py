"""Keys and values go to the paged cache: what is written, what is not, and the pass that turns heads on the way."""

from __future__ import annotations

import itertools

import pytest
import torch

from ferrule_kernels.attention import narrowed
from ferrule_kernels.cuda import rope_cache as kernel
from ferrule_kernels.cuda.attention import cache_shape
from ferrule_kernels.cuda.norms import RMSNorm
from ferrule_kernels.cuda.rope import Heads
from tests.shared import grid

SLOTS = (5, -1, 9, 4, 17)
BLOCK_SIZE = 4
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def numbers(*shape: int, kind: torch.dtype) -> torch.Tensor:
    """Draw numbers that `kind` holds exactly: the device rounds others as torch does, and no interpreter."""
    torch.manual_seed(0)
    return (torch.randn(*shape) * 8).to(kind).float()


def at(cache: torch.Tensor, side: int, slot: int) -> torch.Tensor:
    """Return a cell [kv_heads, dim] as float32."""
    return cache[slot // BLOCK_SIZE, side, :, slot % BLOCK_SIZE].float()


def empty(kv_heads: int, dim: int, kind: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(cache_shape(6, BLOCK_SIZE, kv_heads, dim), device=device).to(kind)


@grid(
    {
        "kind": [None, *FP8],
        "dtype": [torch.float32, torch.float16, torch.bfloat16],
        "kv_heads,dim": [(2, 16), (3, 80), (1, 256), (70, 32)],
    }
)
def test_writes(device: torch.device, kv_heads: int, dim: int, dtype: torch.dtype, kind: torch.dtype | None) -> None:
    x = numbers(5, 2 * kv_heads + 1, dim, kind=kind or dtype).to(dtype).to(device)
    k, v = x[:, 1 : 1 + kv_heads], x[:, 1 + kv_heads :]
    cache, slots = empty(kv_heads, dim, kind or dtype, device), torch.tensor(SLOTS, device=device)
    kernel.write_cache(cache, slots, k, v)
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            assert torch.equal(at(cache, 0, slot), k[token].float())
            assert torch.equal(at(cache, 1, slot), v[token].float())
            cache.view(torch.uint8 if cache.dtype.itemsize == 1 else dtype)[slot // 4, :, :, slot % 4] = 0
    assert not cache.float().any()  # nothing else was written


@pytest.mark.parametrize("kind", FP8)
def test_8_bits_have_scales_and_ends(device: torch.device, on_gpu: bool, kind: torch.dtype) -> None:
    nan = float("nan") if on_gpu else 0.0  # the interpreter has none in these types
    most = torch.finfo(kind).max
    k = torch.tensor([1.0, -6.0, 2 * most, -3 * most, float("inf"), nan, 0.5, 0.0], device=device).view(1, 1, 8)
    cache = empty(1, 8, kind, device)
    kernel.write_cache(cache, torch.tensor([6], device=device), k, 2 * k, scales=(0.5, 2.0))
    for side, entry in ((0, 2 * k), (1, k)):
        torch.testing.assert_close(at(cache, side, 6), narrowed(entry, kind)[0].float(), equal_nan=True, rtol=0, atol=0)


def test_8_bits_are_rounded_as_torch_rounds(device: torch.device, on_gpu: bool) -> None:
    if not on_gpu:
        pytest.skip("the interpreter rounds otherwise")
    torch.manual_seed(0)
    k = torch.randn(5, 2, 64, dtype=torch.bfloat16, device=device) * 30
    for kind in FP8:
        cache = empty(2, 64, kind, device)
        kernel.write_cache(cache, torch.arange(5, device=device) + 4, k, -k)
        for token in range(5):
            assert torch.equal(at(cache, 0, 4 + token), narrowed(k[token], kind).float())


@grid(
    {
        "dtype": [torch.float32, torch.float16, torch.bfloat16],
        "dim,turned,interleaved,normed": [
            (16, 16, False, False),
            (16, 16, True, True),
            (24, 12, False, True),
            (16, 0, False, True),
            (80, 8, True, False),
        ],
    }
)
def test_turned_heads_are_written_as_two_passes_do(
    device: torch.device, dim: int, turned: int, interleaved: bool, normed: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    q_heads, k_heads = 6, 2
    x = torch.randn(5, q_heads + 2 * k_heads, dim).to(dtype).to(device)
    weights = [(torch.rand(dim) + 0.5).to(dtype).to(device) for _ in range(2)]
    for offset in (0.0, 1.0) if normed else (0.0,):
        norms = [RMSNorm(weight, 1e-6, offset) for weight in weights] if normed else []
        angles = torch.rand(5, 1, max(turned // 2, 1), device=device)
        rotation = (angles.cos().to(dtype), angles.sin().to(dtype)) if turned else None
        slots = torch.tensor(SLOTS, device=device)
        wanted, apart = x.clone(), empty(k_heads, dim, dtype, device)
        Heads((q_heads, k_heads), dim, norms, turned, interleaved)(wanted, rotation)
        kernel.write_cache(apart, slots, *wanted.split([q_heads, k_heads, k_heads], 1)[1:])
        got, cache = x.clone(), empty(k_heads, dim, dtype, device)
        kernel.CachedHeads((q_heads, k_heads), dim, norms, turned, interleaved).write(got, rotation, cache, slots)
        exact = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]  # a last bit, on a device
        torch.testing.assert_close(got[:, :q_heads], wanted[:, :q_heads], rtol=exact, atol=exact)
        torch.testing.assert_close(cache, apart, rtol=exact, atol=exact)
        assert torch.equal(got[:, q_heads:], x[:, q_heads:])


@pytest.mark.parametrize("kind", FP8)
def test_turned_heads_in_8_bits(device: torch.device, kind: torch.dtype) -> None:
    """Turn by a quarter, which changes places and signs, and no number."""
    x = numbers(5, 4, 16, kind=kind).to(device)
    rotation = torch.zeros(5, 1, 4, device=device), torch.ones(5, 1, 4, device=device)
    cache, slots = empty(1, 16, kind, device), torch.tensor(SLOTS, device=device)
    kernel.CachedHeads((2, 1), 16, [], 8, False).write(x, rotation, cache, slots, scales=(2.0, 0.5))
    for (token, slot), side in itertools.product(enumerate(SLOTS), (0, 1)):
        if slot >= 0:
            k, v = x[token, 2], x[token, 3]
            entry = torch.cat((-k[4:8], k[:4], k[8:])) / 2 if side == 0 else v * 2
            assert torch.equal(at(cache, side, slot)[0], narrowed(entry, kind).float())

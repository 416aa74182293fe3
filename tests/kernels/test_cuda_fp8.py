"""Products with weights of 8 bits, int8 and fp8, beside torch's in float64."""

from __future__ import annotations

import pytest
import torch

from ferrule_kernels.matmul import Form
from ferrule_kernels.matmul import multiply as defined
from ferrule_kernels.matmul import quantize as defined_numbers

pytest.importorskip("triton")

from ferrule_kernels.cuda import eight_bit, fp8, int8
from ferrule_kernels.cuda.activations import quantize
from tests.shared import grid

SHAPES = [(1, 16, 128), (3, 70, 100), (17, 64, 384), (70, 130, 256)]  # m, n, k
HALVES = [torch.float16, torch.float32]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}


def _drawn(m: int, n: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(m * 1000 + k)
    x, w = torch.randn(m, k, generator=draw), torch.randn(n, k, generator=draw) * 0.05
    return x.to(device), w.to(device), torch.randn(n, generator=draw).to(device)


def _near(y: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Compare within a share of the size of all results: single ones may cancel out."""
    off = (y.double() - expected).abs().max() / expected.abs().max()
    assert off.item() <= tolerance


def _blocks(w: torch.Tensor, tall: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return fp8 numbers, scales of blocks, and the weights that they encode."""
    n, k = w.shape
    padded = torch.nn.functional.pad(w, (0, -k % 128, 0, -n % tall))
    parts = padded.view(padded.shape[0] // tall, tall, -1, 128)
    scales = parts.abs().amax((1, 3)) / 448
    numbers = (parts / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    meant = (numbers.double() * scales.double()[:, None, :, None]).reshape(padded.shape)[:n, :k]
    return numbers.view(padded.shape)[:n, :k].contiguous(), scales.contiguous(), meant


@grid({"dtype": HALVES, "kind,group": [(torch.int8, 0), (torch.float8_e4m3fn, 0), (torch.float8_e4m3fn, 128)]})
def test_activations_become_numbers_and_scales(
    device: torch.device, dtype: torch.dtype, kind: torch.dtype, group: int
) -> None:
    for k in (64, 100, 300, 5000):
        x = _drawn(5, 1, k, device)[0].to(dtype)
        x[1], x[2, 3], x[3, 7] = 0, torch.nan, torch.inf
        numbers, scales = quantize(x, kind, group)
        assert numbers.dtype == kind
        width = group or k
        assert scales.shape == (5, -(-k // width))
        spread = scales.repeat_interleave(width, 1)[:, :k]
        meant = numbers.float() * spread
        assert meant[2, : min(width, k)].isnan().all()
        assert meant[3, : min(width, k)].isnan().all()
        assert not scales[1].any()
        step = 0.5 if kind == torch.int8 else 448 / 16  # half a step, and half the widest of fp8's
        good = x[[0, 1, 4]].float()
        assert ((meant[[0, 1, 4]] - good).abs() <= (step + 1e-3) * spread[[0, 1, 4]] + 1e-6).all()


def test_activations_are_rounded_as_torch_rounds_them(device: torch.device) -> None:
    x = _drawn(4, 1, 256, device)[0]
    numbers, scales = quantize(x, torch.float8_e4m3fn)
    inverse = torch.tensor(448.0, device=device) / x.abs().amax(1)
    expected = (x * inverse[:, None]).to(torch.float8_e4m3fn)
    assert torch.equal(scales[:, 0], x.abs().amax(1) / 448)
    assert (numbers.float() != expected.float()).float().mean() < 0.01  # the product's last bit may differ


@grid({"m,n,k": SHAPES, "dtype": HALVES})
def test_w8a8_of_integers_is_the_definition(device: torch.device, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, w, bias = _drawn(m, n, k, device)
    x, form = x.to(dtype), Form(8)
    quantized = defined_numbers(w, form)
    expected = defined(x, quantized, form, bias)
    numbers = quantized.numbers.flatten(1)[:, :k].contiguous()
    for num_splits in (0, 2):
        y = int8.multiply(x, numbers, quantized.scales[:, 0].contiguous(), bias, torch.float32, num_splits)
        torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
    y = int8.multiply(x, numbers, quantized.scales[:, 0].contiguous())
    assert y.dtype == dtype
    _near(y, expected.double() - bias, TOLERANCE[dtype] + 1e-3)


def test_a_row_of_integers_has_the_same_bits_alone_and_in_any_batch(device: torch.device) -> None:
    x, w, bias = _drawn(70, 66, 256, device)
    x[3], x[5] = torch.nan, 0
    quantized = defined_numbers(w, Form(8))
    weight = quantized.numbers.flatten(1), quantized.scales[:, 0].contiguous()
    whole = int8.multiply(x, *weight, bias)
    for first, last, num_splits in ((0, 1, 2), (4, 20, 0), (6, 70, 1)):
        assert torch.equal(int8.multiply(x[first:last], *weight, bias, num_splits=num_splits), whole[first:last])
    assert whole[3].isnan().all()
    assert torch.equal(whole[5], bias)
    assert whole[4].isfinite().all()


@grid({"m,n,k": SHAPES, "tall": [0, 1, 128]})
def test_w8a8_of_fp8(device: torch.device, on_gpu: bool, m: int, n: int, k: int, tall: int) -> None:
    """Multiply fp8; the interpreter does so as float16, as exactly."""
    if on_gpu and torch.cuda.get_device_capability(device) < fp8.SINCE:
        pytest.skip("this device has no units for fp8")
    x, w, bias = _drawn(m, n, k, device)
    if tall:
        weight, scales, meant = _blocks(w, tall)
    else:
        weight, scales = fp8.quantize_weight(w)
        meant = weight.double() * scales.double()[:, None]
    numbers, x_scales = quantize(x, torch.float8_e4m3fn, 128 if tall else 0)
    given = numbers.double() * x_scales.double().repeat_interleave(128 if tall else k, 1)[:, :k]
    for num_splits in (0, 3):
        y = fp8.multiply(x, weight, scales, bias, tall=tall, num_splits=num_splits)
        _near(y, given @ meant.t() + bias, 2e-3 if on_gpu else 1e-3)


@grid({"m,n,k": SHAPES, "dtype": HALVES, "tall": [0, 1, 128]})
def test_fp8_weights_alone(device: torch.device, m: int, n: int, k: int, dtype: torch.dtype, tall: int) -> None:
    x, w, bias = _drawn(m, n, k, device)
    x = x.to(dtype)
    if tall:
        weight, scales, meant = _blocks(w, tall)
    else:
        weight, scales = fp8.quantize_weight(w)
        meant = weight.double() * scales.double()[:, None]
    expected = x.double() @ meant.t() + bias
    for num_splits in (0, 3):
        _near(fp8.multiply_wide(x, weight, scales, bias, tall=tall, num_splits=num_splits), expected, TOLERANCE[dtype])
    _near(eight_bit.widen(weight, scales, dtype, tall), meant, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", HALVES)
def test_int8_weights_alone(device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for m, n, k in SHAPES:
        x, w, bias = _drawn(m, n, k, device)
        x, quantized = x.to(dtype), defined_numbers(w, Form(8))
        numbers, scales = quantized.numbers.flatten(1)[:, :k].contiguous(), quantized.scales[:, 0].contiguous()
        expected = x.double() @ quantized.weights(k).double().t() + bias
        _near(int8.multiply_wide(x, numbers, scales, bias), expected, TOLERANCE[dtype])
        with monkeypatch.context() as patched:
            patched.setattr(eight_bit, "MANY", 0)
            _near(int8.multiply_wide(x, numbers, scales, bias, torch.float32), expected, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_of_fp8_is_read_exactly(device: torch.device, dtype: torch.dtype) -> None:
    """Read subnormal numbers too; two bytes are NaN and not weights."""
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn)
    every = every[~every.float().isnan()].to(device)[None]
    made = eight_bit.widen(every, torch.ones(1, device=device), dtype)
    assert torch.equal(made.float(), every.float())


def test_no_rows_are_no_result(device: torch.device) -> None:
    weight, scales = fp8.quantize_weight(torch.randn(16, 128, device=device))
    assert fp8.multiply_wide(torch.empty(0, 128, device=device), weight, scales).shape == (0, 16)
    assert fp8.multiply(torch.empty(0, 128, device=device), weight, scales).shape == (0, 16)


def test_bfloat16_on_the_device(device: torch.device, on_gpu: bool) -> None:
    if not on_gpu:
        pytest.skip("the interpreter's products of bfloat16 are wrong")
    for m, n, k in [*SHAPES, (1, 4096, 4096), (600, 512, 1024)]:
        x, w, bias = _drawn(m, n, k, device)
        x = x.bfloat16()
        weight, scales, meant = _blocks(w, 128)
        _near(fp8.multiply_wide(x, weight, scales, bias, tall=128), x.double() @ meant.t() + bias, 3e-2)
        quantized = defined_numbers(w, Form(8))
        numbers, wide = quantized.numbers.flatten(1)[:, :k].contiguous(), quantized.scales[:, 0].contiguous()
        expected = x.double() @ quantized.weights(k).double().t() + bias
        _near(int8.multiply_wide(x, numbers, wide, bias), expected, 3e-2)
        _near(int8.multiply(x, numbers, wide, bias), expected, 5e-2)

"""Numbers of 4 and 8 bits to numbers of 16 in assembly, two or four of them at a time.

A multiprocessor converts 16 numbers in a clock and does 128 simple operations, so a conversion in each number's way
takes longer than reading it from memory. What stands here moves bits instead: a number is set into the mantissa of a
power of two, which is then subtracted, or its exponent is moved to where a wider type has it. Operations on pairs of
16 bits (PTX ISA 9.7.4 and 9.7.3, `fma.rn.bf16x2` and `fma.rn.f16x2`, since compute capability 8.0) do the rest.

Triton's interpreter has no assembly: kernels take `PACKED`, and have their own lines where it is false.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_SINCE = (8, 0)  # compute capability

# Of two words of 16 bits, in one register, each of the four fields: set into the mantissa of 128 (bfloat16) or 1024
# (float16), plus an offset, times a factor. The offsets are -128 or -1024, less the zero point.
_FIELDS = """
{{
  .reg .b32 t, one, none;
  mov.b32 one, {one};
  mov.b32 none, 0x80008000;
  lop3.b32 t, $4, 0x000f000f, {base}, 0xEA;
  fma.rn.{kind} t, t, one, $9;
  fma.rn.{kind} $0, t, $5, none;
  shr.b32 t, $4, 4;
  lop3.b32 t, t, 0x000f000f, {base}, 0xEA;
  fma.rn.{kind} t, t, one, $10;
  fma.rn.{kind} $1, t, $6, none;
  shr.b32 t, $4, 8;
  lop3.b32 t, t, 0x000f000f, {base}, 0xEA;
  fma.rn.{kind} t, t, one, $11;
  fma.rn.{kind} $2, t, $7, none;
  shr.b32 t, $4, 12;
  lop3.b32 t, t, 0x000f000f, {base}, 0xEA;
  fma.rn.{kind} t, t, one, $12;
  fma.rn.{kind} $3, t, $8, none;
}}
"""
_BF16_FIELDS = tl.constexpr(_FIELDS.format(kind="bf16x2", one="0x3f803f80", base="0x43004300"))
_FP16_FIELDS = tl.constexpr(_FIELDS.format(kind="f16x2", one="0x3c003c00", base="0x64006400"))

# Four numbers of fp8 (e4m3): sign, exponent and mantissa to their places in bfloat16, times 2^120, since the exponents'
# biases are 7 and 127. In float16, whose bias is 15, the numbers stay divided by 256.
_BF16_FP8 = tl.constexpr("""
{
  .reg .b32 a, b, t, scale, none;
  mov.b32 scale, 0x7b807b80;
  mov.b32 none, 0x80008000;
  prmt.b32 a, $2, 0, 0x1404;
  prmt.b32 b, $2, 0, 0x3424;
  shr.b32 t, a, 4;
  and.b32 t, t, 0x07f007f0;
  lop3.b32 t, a, 0x80008000, t, 0xEA;
  fma.rn.bf16x2 $0, t, scale, none;
  shr.b32 t, b, 4;
  and.b32 t, t, 0x07f007f0;
  lop3.b32 t, b, 0x80008000, t, 0xEA;
  fma.rn.bf16x2 $1, t, scale, none;
}
""")
_FP16_FP8 = tl.constexpr("""
{
  .reg .b32 a, b, t;
  prmt.b32 a, $2, 0, 0x1404;
  prmt.b32 b, $2, 0, 0x3424;
  shr.b32 t, a, 1;
  and.b32 t, t, 0x3f803f80;
  lop3.b32 $0, a, 0x80008000, t, 0xEA;
  shr.b32 t, b, 1;
  and.b32 t, t, 0x3f803f80;
  lop3.b32 $1, b, 0x80008000, t, 0xEA;
}
""")

# Four integers of 8 bits, plus 128, set into the mantissa of 2^23.
_INT8 = """
{{
  .reg .b32 u, a, b;
  .reg .f32 x, y;
  xor.b32 u, $2, 0x80808080;
  prmt.b32 a, u, 0x4b000000, 0x7440;
  prmt.b32 b, u, 0x4b000000, 0x7441;
  mov.b32 x, a;
  mov.b32 y, b;
  add.f32 x, x, 0fCB000080;
  add.f32 y, y, 0fCB000080;
  cvt.rn.{kind}.f32 $0, y, x;
  prmt.b32 a, u, 0x4b000000, 0x7442;
  prmt.b32 b, u, 0x4b000000, 0x7443;
  mov.b32 x, a;
  mov.b32 y, b;
  add.f32 x, x, 0fCB000080;
  add.f32 y, y, 0fCB000080;
  cvt.rn.{kind}.f32 $1, y, x;
}}
"""
_BF16_INT8 = tl.constexpr(_INT8.format(kind="bf16x2"))
_FP16_INT8 = tl.constexpr(_INT8.format(kind="f16x2"))


def packed(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a kernel on that device may be `PACKED`, for numbers of `dtype`."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(device) >= _SINCE


@triton.jit
def fields(words, s0, s1, s2, s3, z0, z1, z2, z3, like: tl.constexpr):
    """Widen the 4-bit fields of each word, int16, lowest first: four tensors (field - zero) * scale, rounded once.

    Zeros and scales are of the type `like`; zeros are given as -(128 + zero), or -(1024 + zero) in float16.
    """
    given = [words, s0, s1, s2, s3, z0, z1, z2, z3]
    each: tl.constexpr = "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r"
    if like == tl.bfloat16:
        types: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
        found = tl.inline_asm_elementwise(_BF16_FIELDS, each, given, types, is_pure=True, pack=2)
    else:
        halves: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
        found = tl.inline_asm_elementwise(_FP16_FIELDS, each, given, halves, is_pure=True, pack=2)
    return found


@triton.jit
def _four(raw, BF16: tl.constexpr, FP16: tl.constexpr, like: tl.constexpr):
    """Convert bytes, four at a time, by the assembly for the type `like`."""
    if like == tl.bfloat16:
        found = tl.inline_asm_elementwise(BF16, "=r,=r,r", [raw], tl.bfloat16, is_pure=True, pack=4)
    else:
        found = tl.inline_asm_elementwise(FP16, "=r,=r,r", [raw], tl.float16, is_pure=True, pack=4)
    return found


@triton.jit
def from_fp8(raw, like: tl.constexpr):
    """Convert bytes of e4m3, uint8, to numbers: exactly, but in float16 divided by 256. NaN, 0x7f, becomes 480."""
    return _four(raw, _BF16_FP8, _FP16_FP8, like)


@triton.jit
def from_int8(raw, like: tl.constexpr):
    """Convert int8 to numbers, exactly."""
    return _four(raw, _BF16_INT8, _FP16_INT8, like)

"""Every kernel compiles for the GPUs that are common, on a machine that has none: all but running them is tried.

The wrappers of all cases are called with the launch replaced by a compilation for a named target.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

SCRIPT = """
import sys
from collections import Counter
from importlib import import_module

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile as build
from triton.runtime.jit import JITFunction

from ferrule_kernels.cuda import attention, eight_bit, int4
from tools.benchmarks import cuda_kernels as bench

for module in (eight_bit, int4):  # tensors of the CPU stand for a device's
    module.packed = lambda device, dtype: dtype in (torch.bfloat16, torch.float16)
NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
    torch.float64: "fp64",
}
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
MOST = {80: 166912, 90: 232448}  # bytes of shared memory that a program may have
target, most, seen, names = int(sys.argv[1]), int(sys.argv[2]), Counter(), sys.argv[3:] or bench.modules()


def type_of(value):
    if isinstance(value, torch.Tensor):
        return "*" + NAMES[value.dtype]
    return "i1" if isinstance(value, bool) else "i32" if isinstance(value, int) else "fp32"


def launch(kernel, *args, **given):
    options = {name: given.pop(name) for name in OPTIONS if name in given}
    values = dict(zip(kernel.arg_names, args)) | given
    types, constants, hints = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values.get(parameter.name, parameter.default)
        if parameter.is_constexpr or value is None:
            types[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        types[parameter.name] = type_of(value)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if isinstance(value, torch.Tensor) or is_number and value % 16 == 0 and not parameter.do_not_specialize:
            hints[(index,)] = [["tt.divisibility", 16]]
    key = f"{kernel.__name__} {types} {constants} {options}"
    if key not in seen and seen[kernel.__name__] < most:
        seen[key] += 1
        seen[kernel.__name__] += 1
        made = build(ASTSource(kernel, types, constants, hints), target=GPUTarget("cuda", target, 32), options=options)
        if made.metadata.shared > MOST[target]:
            raise MemoryError(f"{key} needs {made.metadata.shared} bytes of shared memory")


JITFunction.__getitem__ = lambda kernel, grid: lambda *args, **given: launch(kernel, *args, **given)
for name in names:
    module = import_module(f"ferrule_kernels.cuda.{name}")
    before = len(seen)
    for half in (torch.float16, torch.bfloat16):
        if hasattr(module, "half"):
            module.half = lambda device: half
        for case in module.cases(torch.device("cpu")) if hasattr(module, "cases") else ():
            try:
                case.run()
            except Exception as error:
                if "not supported in this architecture" not in str(error):  # which the wrappers' callers ask for before
                    print("failed:", name, case.name, type(error).__name__, error)
    print("compiled:", name, len(seen) - before)
if target >= 90:
    for rows in ([(1, 40)] * 2, [(20, 20)]):  # float8 in the cache, which cases for the interpreter do not have
        given = attention._case(rows, (4, 2, 128), torch.bfloat16, torch.float8_e4m3fn, torch.device("cpu"))
        attention.attend(*given, attention._Plain(0.1))
"""


@pytest.mark.parametrize(
    ("target", "most", "modules"),
    [
        pytest.param(80, 1, (), marks=pytest.mark.slow),  # tests of the modules here run them in the interpreter
        (90, 1, ("fp8",)),  # which 80 does not have
        pytest.param(80, 1000, (), marks=pytest.mark.slow),
        pytest.param(90, 1000, (), marks=pytest.mark.slow),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there they run")
def test_every_kernel_compiles(target: int, most: int, modules: tuple[str, ...]) -> None:
    """Compile the named modules, or all; each for at most so many combinations of types and constants."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, str(target), str(most), *modules]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stdout + found.stderr[-2000:]
    assert "failed:" not in found.stdout, found.stdout
    compiled = dict(line.split()[1:] for line in found.stdout.splitlines())
    assert all(int(compiled[name]) > 0 for name in modules or ("norms", "gates", "rope", "moe", "grouped"))

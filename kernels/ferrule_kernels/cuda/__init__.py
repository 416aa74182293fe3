"""Kernels for NVIDIA GPUs, in Triton: importing one of the modules imports Triton, importing this package does not.

Triton comes with torch's builds for CUDA. With TRITON_INTERPRET=1, set before Triton is imported, the kernels run on
CPU tensors under its interpreter: correct and slow, for tests.
"""

from __future__ import annotations

from importlib.util import find_spec

from ferrule_kernels.cpu.library import KernelsUnavailableError

__all__ = ["KernelsUnavailableError", "available"]


def available() -> str | None:
    """Return why the kernels cannot run in this process, or None. Imports torch, and Triton only without a GPU."""
    if find_spec("triton") is None:
        return "the package triton is not installed (torch's builds for CUDA bring it)"
    import torch

    if torch.version.cuda is not None and torch.cuda.is_available():
        return None
    import triton

    if triton.knobs.runtime.interpret:
        return None
    return "there is no CUDA device, and Triton's interpreter is off (TRITON_INTERPRET=1)"

"""The common parts of backends that use other packages' kernels."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from ferrule.interfaces.attention import AttentionLayout
from ferrule.interfaces.platform import DeviceCaps

HALVES = (torch.float16, torch.bfloat16)


def not_installed(module: str, install: str) -> str | None:
    """Return that a package is not installed, and how to install it; None if it is."""
    return None if find_spec(module) is not None else f"the package {module} is not installed ({install})"


def not_for(caps: DeviceCaps, dtype: torch.dtype) -> str | None:
    """Return why 16-bit kernels for NVIDIA GPUs do not support this device or type, or None."""
    if "cuda" not in caps.features:
        return f"runs on NVIDIA GPUs only, not on {caps.platform}"
    if dtype not in HALVES:
        return f"computes in float16 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    return None


def live_table(layout: AttentionLayout) -> torch.Tensor:
    """Return the block table, with blocks that a window has passed replaced by block 0, which is all zeros.

    Kernels that read whole tiles weigh what lies before the window with 0, and 0 * NaN is NaN.
    """
    if not layout.window:
        return layout.block_table
    counts = layout.query_start[1:] - layout.query_start[:-1]
    first = (layout.context_lens - counts - layout.window + 1).unsqueeze(1)
    ends = torch.arange(1, layout.block_table.shape[1] + 1, device=first.device, dtype=torch.int32) * layout.block_size
    return layout.block_table.masked_fill(ends <= first, 0)

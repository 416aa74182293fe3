"""The kernels of a CPU: our own in C++ where they are compiled, and oneDNN."""

from __future__ import annotations

from typing import Any

import torch

from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.sampler import SamplerKernels
from ferrule_kernels.cpu import dense, elementwise, library, routing, sampling, states
from ferrule_kernels.cpu.bank import MatrixBank
from ferrule_kernels.cpu.dense import DenseMatrix
from ferrule_kernels.cpu.low_rank import LowRankSum
from ferrule_kernels.cpu.onednn import Packed
from ferrule_kernels.cpu.pages import weight_memory
from ferrule_nn import LayerKernels
from ferrule_plugins.platform.cpu_products import CpuProducts
from ferrule_plugins.sampler.chooser import CompiledChooser
from ferrule_quant.products import Products


def cpu_kernels() -> Kernels:
    """Return all kernels that this machine has."""
    try:
        library.load()
    except library.KernelsUnavailableError as error:
        return Kernels((LayerKernels(packed=Packed.of, allocate=weight_memory), Products(str(error))))
    layers = LayerKernels(
        dtypes=(torch.float32, torch.bfloat16),
        acts=elementwise.GATES,
        rms_norm=elementwise.RMSNorm,
        heads=elementwise.Heads,
        gate=elementwise.Gate,
        route=routing.route,
        arrange=routing.arrange,
        combine=routing.combine,
        short_conv=states.ShortConv,
        selective=_selective,
        delta=_delta,
        gated_norm=elementwise.GatedNorm,
        matrix=_matrix,
        packed=Packed.of,
        bank=MatrixBank.of,
        low_rank=LowRankSum.of,
        allocate=weight_memory,
        reads_rows=True,
    )
    samplers = SamplerKernels(lambda: CompiledChooser(sampling.Sampling()), sampling.Sampling().surest)
    return Kernels((layers, CpuProducts(), samplers))


def _matrix(weight: torch.Tensor, bias: torch.Tensor | None, in_place: bool) -> DenseMatrix | None:
    if not weight.is_cpu or weight.dtype != torch.bfloat16 or dense.unit() is None:
        return None
    return DenseMatrix(weight, bias, in_place=in_place)


def _selective(a_log: torch.Tensor, skip: torch.Tensor, bias: torch.Tensor, shape: Any, *rest: Any) -> Any:
    if shape[1] % 2 or shape[2] % states.LANES:
        return None
    return states.Selective(a_log, skip, bias, shape, *rest)


def _delta(a_log: torch.Tensor, bias: torch.Tensor, shape: Any, eps: float) -> states.Delta | None:
    if any(size % states.LANES for size in shape[2:]):
        return None
    return states.Delta(a_log, bias, shape, eps)

"""The kernels of an NVIDIA GPU: our own in Triton, which is imported here and not before."""

from __future__ import annotations

import torch

from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.sampler import SamplerKernels
from ferrule_kernels import cuda
from ferrule_nn import LayerKernels
from ferrule_plugins.platform.cuda_products import CudaProducts


def cuda_kernels() -> Kernels:
    """Return all kernels that can run in this process."""
    if cuda.available() is not None:
        return Kernels((LayerKernels(late=True), CudaProducts()))
    from ferrule_plugins.sampler.triton import TritonChooser

    return Kernels((triton_layers(), CudaProducts(), SamplerKernels(TritonChooser)))


def triton_layers() -> LayerKernels:
    """Return the kernels for layers."""
    from ferrule_kernels.cuda import gates, grouped, low_rank, norms, rope_cache, vectors
    from ferrule_kernels.cuda import moe as routers

    return LayerKernels(
        dtypes=(torch.float32, torch.float16, torch.bfloat16),
        acts=gates.GATES,
        rms_norm=norms.RMSNorm,
        heads=rope_cache.CachedHeads,
        gate=gates.Gate,
        layer_norm=norms.LayerNorm,
        activation=gates.Activation,
        route=routers.route,
        combine=grouped.weighted_sum,
        experts=grouped.experts,
        expert_product=grouped.product,
        one_row=vectors.multiply,
        low_rank=low_rank.LowRankSum,
        late=True,
    )

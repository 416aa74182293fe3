"""Choices of experts, the order of their rows, and sums of their results: tensors to the kernels in ``routing.cpp``.

The definitions are the functions of these names in ``ferrule_kernels.moe``. All raise KernelsUnavailableError.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from ferrule_kernels import moe
from ferrule_kernels.cpu import library
from ferrule_kernels.cpu.elementwise import functions

_INT, _AT = ctypes.c_int64, ctypes.c_void_p


class _Routing(ctypes.Structure):
    _fields_ = [
        *((name, _INT) for name in ("experts", "top_k", "groups", "kept_groups", "group_depth")),
        *((name, _INT) for name in ("sigmoid", "renormalise")),
        ("scale", ctypes.c_float),
    ]


@functools.cache
def _route() -> Any:
    call = library.load().ferrule_route
    call.argtypes, call.restype = (_AT, _AT, _INT, _AT, _AT, _AT, _INT), None
    return call


@functools.cache
def _arrange() -> Any:
    call = library.load().ferrule_arrange
    call.argtypes, call.restype = (_AT, _INT, _INT, _INT, _AT, _AT, _AT), ctypes.c_int
    return call


@functools.cache
def _combine() -> dict[torch.dtype, Any]:
    return functions("ferrule_combine", _AT, _AT, _AT, _INT, _INT, _AT, _INT)


@functools.cache
def _constants(r: moe.Routing) -> _Routing:
    kinds = (r.scores == "sigmoid", r.renormalise)
    return _Routing(r.num_experts, r.top_k, r.groups, r.kept_groups, r.group_depth, *kinds, r.scale)


def route(
    logits: torch.Tensor, routing: moe.Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts like `ferrule_kernels.moe.route`, for scores that are a softmax or sigmoids."""
    logits = logits.float().contiguous()
    bias = None if bias is None else bias.float().contiguous()
    tokens, experts = logits.shape
    weights = torch.empty((tokens, routing.top_k), dtype=torch.float32)
    ids = torch.empty((tokens, routing.top_k), dtype=torch.int32)
    at = ctypes.byref(_constants(routing))
    bias_at = None if bias is None else bias.data_ptr()
    _route()(at, logits.data_ptr(), experts, bias_at, weights.data_ptr(), ids.data_ptr(), tokens)
    return weights, ids


def arrange(ids: torch.Tensor, num_experts: int) -> moe.Arranged:
    """Arrange rows by expert like `ferrule_kernels.moe.arrange`.

    Raises IndexError for an id without an expert, but not in a replay.
    """
    ids = ids.int().contiguous()
    made = moe.Arranged(*(torch.empty(count, dtype=torch.int64) for count in (ids.numel(), ids.numel(), num_experts)))
    if not _arrange()(ids.data_ptr(), ids.numel(), ids.shape[1], num_experts, *(each.data_ptr() for each in made)):
        raise IndexError(f"a token has an expert that is none of the {num_experts}")
    return made


def combine(rows: torch.Tensor, weights: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    """Combine rows like `ferrule_kernels.moe.combine`, which is called for types that the kernel does not support."""
    call = _combine().get(rows.dtype)
    if call is None:
        return moe.combine(rows, weights, places)
    tokens, top_k = weights.shape
    size = rows.shape[1]
    rows, weights = rows.contiguous(), weights.float().contiguous()
    out = torch.empty((tokens, size), dtype=rows.dtype)
    places_at = None if places is None else places.data_ptr()
    call(rows.data_ptr(), places_at, weights.data_ptr(), top_k, size, out.data_ptr(), tokens)
    return out

"""A device that there is none of: torch's PrivateUse1, whose tensors lie in the host's memory, and whose operations are
those of the CPU. Torch does not know that: a tensor of the host and one of the device cannot meet, but in a copy.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.dlpack import from_dlpack, to_dlpack

NAME = "acme_npu"
_HOST, _DEVICE = 1, 12  # of DLPack: https://dmlc.github.io/dlpack/latest/c_api.html
_COPIES = (
    torch.ops.aten._copy_from.default,
    torch.ops.aten._copy_from_and_resize.default,
)
_POINTER = ctypes.pythonapi.PyCapsule_GetPointer
_POINTER.restype, _POINTER.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def plugged_in() -> torch.device:
    """Return the device. Torch is told of it once in a process."""
    if not hasattr(torch, NAME):
        _setup_privateuseone_for_python_backend(NAME)
        operations = torch.library.Library("_", "IMPL")
        operations.fallback(_run, "PrivateUse1")
        getattr(torch, NAME).operations = operations  # for as long as the device is there
    return torch.device(NAME, 0)


def _seen_as(tensor: torch.Tensor, kind: int) -> torch.Tensor:
    """Return the same memory as a tensor of the host, or of the device."""
    if tensor.itemsize == 1 and tensor.dtype not in (torch.uint8, torch.int8, torch.bool):  # 8 bits: DLPack has not all
        return _seen_as(tensor.view(torch.uint8), kind).view(tensor.dtype)
    capsule = to_dlpack(tensor)
    place = (ctypes.c_int32 * 2).from_address(_POINTER(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p))
    place[0], place[1] = kind, 0
    with torch.inference_mode(False):  # views of it may be changed in either mode
        return from_dlpack(capsule)


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any operation that gets a tensor of the device, or makes one."""
    given: dict[int, torch.Tensor] = {}  # what the device has of the tensors that the CPU is given

    def to_host(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.type == NAME:
                seen = _seen_as(value, _HOST)
                given[id(seen)] = value
                return seen
            if value.dim() and op not in _COPIES:
                raise RuntimeError(f"{op} is given tensors of the host and of {NAME}")
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def to_device(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return given[id(value)] if id(value) in given else _seen_as(value, _DEVICE)
        return value

    host_args = [_each(value, to_host) for value in args]
    host_kwargs = {name: _each(value, to_host) for name, value in kwargs.items()}
    for place, (value, argument) in enumerate(zip(host_args, op._schema.arguments, strict=False)):
        if type(value) in (bool, int, float) and str(argument.type) == "Tensor":
            host_args[place] = torch.tensor(value)  # torch gives a tensor of a number as the number
    if op in _COPIES:
        host_args[1].copy_(host_args[0])
        return args[1]
    out = kwargs.get("out")
    if out is not None and not out.numel():  # it becomes as large as the result
        out.data = _seen_as(op(*host_args, **{**host_kwargs, "out": torch.empty(0, dtype=out.dtype)}), _DEVICE)
        return out
    return _each(op(*host_args, **host_kwargs), to_device)


def _each(value: Any, function: Any) -> Any:
    """Apply a function to a value, or to each of several."""
    return type(value)(function(each) for each in value) if type(value) in (list, tuple) else function(value)

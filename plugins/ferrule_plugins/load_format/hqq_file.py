"""HQQ's own files, `qmodel.pt`: a dictionary for each module (https://github.com/mobiusml/hqq, hqq/models/base.py).

A quantized layer has its numbers `W_q`, its settings, `scale` and `zero`. These may be quantized themselves: `scale_q`
and `zero_q` are the numbers of matrices that `meta_scale` and `meta_zero` describe, and are made floats here.
`zero_scale` is both in one tensor, zero points first. Files of older versions keep all but numbers and bias under
`meta`. The settings of a layer are nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ferrule.errors import CheckpointError

FILE = "qmodel.pt"
PACKED = {  # what HQQ calls it: bits of a number, and how many numbers one byte has, or one word for 3 bits
    "8bit_u8": (8, 1),
    "4bit_u8": (4, 2),
    "3bit_32": (3, 10),
    "2bit_u8": (2, 4),
    "1bit_u8": (1, 8),
}
_SETTINGS = ("nbits", "group_size", "axis", "channel_wise")


def is_hqq(content: Any) -> bool:
    """Return whether a file has modules in place of tensors, and one of them is quantized."""
    return isinstance(content, Mapping) and any(_quantized(module) for module in content.values())


def tensors(content: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of all modules, by the names that a safetensors file would have. Raises CheckpointError."""
    found: dict[str, torch.Tensor] = {}
    for name, module in content.items():
        if not isinstance(module, Mapping):
            raise _damaged(name, "it is not a module")
        for key, value in (_layer(name, module) if _quantized(module) else module).items():
            if not isinstance(value, torch.Tensor):
                raise _damaged(name, f"{key!r:.80} is not a tensor")
            found[f"{name}.{key}"] = checked(f"{name}.{key}", value)
    return found


def settings(content: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the `quantization_config` of a file, from what its layers state."""
    layers = {str(name): _meta(module) for name, module in content.items() if _quantized(module)}
    stated = {
        name: {"weight_quant_params": {key: meta[key] for key in _SETTINGS if key in meta}}
        for name, meta in layers.items()
    }
    return {"quant_method": "hqq", "quant_config": stated}


def unpacked(words: torch.Tensor, bits: int, per: int) -> torch.Tensor:
    """Unpack words [rows, columns], whose first rows are in the upper bits, to numbers [rows * per, columns]."""
    return torch.cat([words >> (bits * place) & ((1 << bits) - 1) for place in reversed(range(per))])


def checked(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is dense and has all of its bytes. Raises CheckpointError for another."""
    if value.layout != torch.strided or value.is_meta:
        raise _damaged(name, "it is not a dense tensor")
    if value.nbytes > value.untyped_storage().nbytes():
        raise _damaged(name, f"it has fewer bytes than its shape {tuple(value.shape)} needs")
    return value.detach()


def _quantized(module: Any) -> bool:
    return isinstance(module, Mapping) and "W_q" in module


def _meta(module: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object in which a layer describes its numbers."""
    meta = module.get("meta", module)
    return meta if isinstance(meta, Mapping) else module


def _layer(name: Any, module: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a quantized layer."""
    meta = dict(_meta(module))
    both = meta.get("zero_scale")
    if isinstance(both, torch.Tensor):
        if both.ndim == 0 or len(checked(name, both)) != 2:
            raise _damaged(name, "'zero_scale' does not hold two tensors")
        end = "" if both.is_floating_point() else "_q"
        meta[f"zero{end}"], meta[f"scale{end}"] = both.unbind()
    made = {"W_q": module["W_q"], "scale": _floats(name, meta, "scale"), "zero": _floats(name, meta, "zero")}
    return made if module.get("bias") is None else {**made, "bias": module["bias"]}


def _floats(name: Any, meta: Mapping[str, Any], kind: str) -> torch.Tensor:
    """Return scales or zero points, which may be quantized, as floats."""
    if isinstance(meta.get(kind), torch.Tensor):
        return checked(f"{name}.{kind}", meta[kind])
    numbers, own = meta.get(f"{kind}_q"), meta.get(f"meta_{kind}")
    if not isinstance(numbers, torch.Tensor) or not isinstance(own, Mapping):
        raise _damaged(name, f"it has neither {kind!r} nor '{kind}_q' and 'meta_{kind}'")
    packing, shape = own.get("packing"), own.get("shape")
    if not isinstance(packing, str) or packing not in PACKED or numbers.is_floating_point():
        raise _damaged(name, f"'{kind}_q' is packed in another way, {packing!r:.40}")
    if not isinstance(shape, tuple | list) or not all(type(size) is int and size > 0 for size in shape):
        raise _damaged(name, f"'meta_{kind}' has no shape")
    values = [checked(f"{name}.{kind}_q", numbers)]
    for key in ("scale", "zero"):
        value = own.get(key)
        if not isinstance(value, torch.Tensor):
            raise _damaged(name, f"'meta_{kind}' has no {key}")
        values.append(checked(f"{name}.meta_{kind}.{key}", value).float())
    return _dequantized(f"{name}.{kind}_q", values, PACKED[packing], shape)


def _dequantized(name: str, values: list[torch.Tensor], packing: tuple[int, int], shape: Sequence[int]) -> torch.Tensor:
    """Return float32 of `shape`, from `values`: packed numbers, their scales and their zero points."""
    numbers, scale, zero = values
    bits, per = packing
    columns, size = numbers.shape[-1] if numbers.ndim > 1 else 1, math.prod(shape)
    rows = size // max(columns, 1)
    spare = 0 <= len(numbers) * per - rows < per if numbers.ndim else False
    if not spare or rows * columns != size:
        raise _damaged(name, f"its numbers {tuple(numbers.shape)} are not those of {tuple(shape)}")
    cells = unpacked(numbers.reshape(-1, columns), bits, per)[:rows]
    for value in (scale, zero):
        if value.ndim > 2 or any(
            one not in (1, of) for one, of in zip(value.shape[::-1], cells.shape[::-1], strict=False)
        ):
            raise _damaged(name, f"its scales or zero points {tuple(value.shape)} are of another shape")
    return ((cells - zero) * scale).reshape(tuple(shape))


def _damaged(name: Any, why: str) -> CheckpointError:
    return CheckpointError(f"{FILE}: {name!s:.200}: {why}.", "The file may be damaged.")

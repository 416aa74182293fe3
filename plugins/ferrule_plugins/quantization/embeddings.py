"""Embeddings that torchao quantized to integers: floats from here on, since tokens are looked up in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch

from ferrule.errors import CheckpointError

_PART = re.compile(  # of names of embeddings in the library transformers
    r"(?P<module>(?:.*\.)?(?:embed_tokens\w*|tok_embeddings|word_embeddings|embed_in|embeddings?|wte|wpe))"
    r"\._weight_(?P<end>qdata|scale|zero_point)"
)
_ROWS = 4096  # that are made floats at a time


def decode_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `tensors` with ``weight`` in place of the three that an embedding has. Raises CheckpointError."""
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        part = _PART.fullmatch(name)
        if part is None:
            yield name, tensor
            continue
        module = part["module"]
        own = waiting.setdefault(module, {})
        own[part["end"]] = tensor.clone()  # what is read next may take its memory
        if len(own) == 3:
            yield f"{module}.weight", _floats(module, **waiting.pop(module))
    for module, own in waiting.items():
        raise CheckpointError(
            f"The checkpoint has {', '.join(own)} of {module}, and needs qdata, scale and zero_point."
        )


def _floats(module: str, qdata: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> torch.Tensor:
    """Return (numbers - zero points) * scales [n, groups], of the scales' type. Raises CheckpointError."""
    whole = qdata.ndim == 2 and scale.ndim == 2 and scale.shape == zero_point.shape
    if not whole or qdata.dtype != torch.int8 or not scale.is_floating_point() or zero_point.dtype != torch.int8:
        raise CheckpointError(f"The embedding {module} is not of integers with scales and zero points.")
    (n, k), groups = qdata.shape, scale.shape[1]
    if scale.shape[0] != n or not groups or k % groups:
        raise CheckpointError(f"The scales {list(scale.shape)} of {module} are not those of {[n, k]} numbers.")
    if not bool(scale.isfinite().all()):
        raise CheckpointError(f"A scale of {module} is not a finite number.", "The file may be damaged.")
    made = torch.empty((n, k), dtype=scale.dtype)
    for first in range(0, n, _ROWS):  # no second matrix of float32
        part = slice(first, first + _ROWS)
        cells = qdata[part].view(-1, groups, k // groups).float() - zero_point[part].unsqueeze(-1)
        made[part] = (cells * scale[part].float().unsqueeze(-1)).flatten(1).to(scale.dtype)
    return made

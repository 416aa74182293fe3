"""`-O3`: parts of a model without kernels of Ferrule are compiled by torch (Ansel et al. 2024).

The parts of a layer other than attention are compiled: norms and feed-forward blocks of models that run through
transformers or have modules of their own. Modules of `ferrule_nn` call hand-written kernels, which a compiler cannot
optimise. Equal parts share one compilation, which serves any number of tokens. Inductor caches its results on disk by
graph, torch version, device and its own settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ferrule.interfaces.model import AttentionLayer
from ferrule.log import Log

_log = Log("platform")


def compile_parts(model: object, **options: Any) -> int:
    """Have the parts of `model` compiled when they first run; returns their number. `options`: see `torch.compile`.

    Errors of inductor are raised in that first run: it is the rehearsal, so they stop the start.
    """
    found = list(parts_beside_attention(model)) if isinstance(model, nn.Module) else []
    for part in found:
        part.compile(dynamic=True, **options)
    if not found:
        _log.info("level 3: every part of this model has kernels already, nothing is compiled")
    else:
        _log.info("parts are compiled when they first run", parts=len(found))
    return len(found)


def parts_beside_attention(model: nn.Module) -> Iterator[nn.Module]:
    """Return the children of a model's layers that neither attend nor come from `ferrule_nn`."""
    for layers in model.modules():
        for layer in layers if isinstance(layers, nn.ModuleList) else ():
            children = dict(layer.named_children())
            if any(_attends(name, child) for name, child in children.items()):
                yield from (part for name, part in children.items() if not _attends(name, part) and _foreign(part))


def _attends(name: str, part: nn.Module) -> bool:
    """Return whether a part attends, by an attribute or by its name: transformers' attention has no such attribute."""
    said = any(isinstance(inner, AttentionLayer) for inner in part.modules())
    return said or ("norm" not in name and ("attn" in name or "attention" in name))


def _foreign(part: nn.Module) -> bool:
    """Return whether nothing in a part comes from `ferrule_nn`, and something in it computes."""
    ours = any(type(each).__module__.startswith("ferrule_nn") for each in part.modules())
    return not ours and next(part.parameters(), None) is not None

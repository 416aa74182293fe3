"""Whether a model computes numbers at all: found at start, so that it is not found by every request.

Weights are not searched for NaN at the start: the first step computes a token anyway, and only if its logits are not
finite the weights are searched, then the layers. A token that overflows alone, as in float16, is only logged. Weights
that a CPU quantizes are looked at while it does so, because their integers could not tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.model import HasPackedTensors
from ferrule.log import Log

_TRIED = 8  # tokens, over the whole vocabulary
_NAMED = 3  # tensors in an error

_log = Log("worker")


def check_finite(model: object, vocab_size: int, failing: Callable[[int], bool]) -> None:
    """Find out why the outputs for one token were not finite. `failing` returns whether the outputs for another token
    are not finite either. Raises CheckpointError for weights that are not finite, and where no token has logits. A
    model in float16 may overflow for single tokens: that is logged.
    """
    names = list(_bad_tensors(model))
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise CheckpointError(
            f"The weights are not finite: NaN or infinity in {', '.join(names[:_NAMED])}{more}.",
            "The files are damaged, or were written by a conversion that went wrong.",
        )
    tokens = [vocab_size * number // _TRIED for number in range(1, _TRIED)]
    if not all(failing(token) for token in tokens):
        _log.warning("the model computes numbers that are not finite for some tokens", hint="see --dtype")
        return
    first = _first_layer(model, lambda: failing(tokens[0]))
    raise CheckpointError(
        f"The model computes numbers that are not finite{first}, although its weights are finite.",
        "The type may be too small for the model (--dtype bfloat16 or float32), or a number in config.json is wrong.",
    )


def _bad_tensors(model: object) -> Iterator[str]:
    """Yield the names of tensors with weights that are not finite; packed tensors have their module's name."""
    for name, part in model.named_modules() if isinstance(model, torch.nn.Module) else ():
        packed = part.packed_tensors() if isinstance(part, HasPackedTensors) else ()
        named = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        tensors = [(f"{name}.{own}".lstrip("."), tensor) for own, tensor in named]
        yield from dict.fromkeys(
            each for each, tensor in [*tensors, *((name, tensor) for tensor in packed)] if not _is_finite(tensor)
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers of a tensor are finite; also True for types that have no infinite values."""
    if not tensor.is_floating_point() or tensor.itemsize < 2 or tensor.layout != torch.strided:
        return True
    return bool(torch.isfinite(tensor).all())


def _first_layer(model: object, run: Callable[[], Any]) -> str:
    """Return, as the end of a sentence, the first layer whose output is not finite; "" where it is not known."""
    if not isinstance(model, torch.nn.Module):
        return ""
    found: list[str] = []

    def watch(name: str) -> Callable[[torch.nn.Module, Any, Any], None]:
        def look(part: torch.nn.Module, given: Any, output: Any) -> None:
            outputs: Sequence[Any] = output if isinstance(output, (tuple, list)) else (output,)
            if any(isinstance(each, torch.Tensor) and not _is_finite(each) for each in outputs):
                found.append(name)

        return look

    hooks = [part.register_forward_hook(watch(name)) for name, part in model.named_modules() if name]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return f", first behind {found[0]}" if found else ""

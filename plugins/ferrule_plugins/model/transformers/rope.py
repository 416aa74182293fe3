"""Rotations that depend on how long the text is (`dynamic`, `longrope`), by each request's own length.

The library computes their frequencies from the largest position of a call, and remembers them for the next one. Here a
token's frequencies are those of max(prompt length, position + 1) of its own request, whatever else is in the step and
however a prompt is cut. The library's own code computes them: it is called once for each length among the tokens, each
time as if it had seen nothing before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ferrule.types import PromptBorder

_SCALED = ("dynamic", "longrope")


class Lengths:
    """Lengths [tokens] of the requests whose tokens are being computed; None: the library's own are used."""

    def __init__(self) -> None:
        self.of_tokens: torch.Tensor | None = None


def follow_lengths(inner: nn.Module, lengths: Lengths) -> PromptBorder | None:
    """Make all rotations of a model follow `lengths`. Returns the length of a prompt from which on they differ, if
    any.
    """
    borders = []
    for module in list(inner.modules()):
        settings = _scaled(module)
        if settings is not None and hasattr(type(module).forward, "__wrapped__"):
            own = _OwnLengths(module, settings, lengths)
            module.forward = own
            borders.append(own.border)
    if not borders:
        return None
    return PromptBorder(min(each.length for each in borders), exact=any(each.exact for each in borders))


def _scaled(module: nn.Module) -> Mapping[str, Any] | None:
    """Return the settings of a rotation that depends on the length; None for any other."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(module, "rope_type", None)
    given = getattr(config, "rope_parameters", None)
    if not isinstance(given, Mapping) or kinds is None:
        return None
    for settings in (given, *(each for each in given.values() if isinstance(each, Mapping))):
        if settings.get("rope_type") in _SCALED:
            return {"limit": config.max_position_embeddings, **settings}
    return None


class _OwnLengths:
    """The forward pass of a rotation."""

    def __init__(self, module: nn.Module, settings: Mapping[str, Any], lengths: Lengths) -> None:
        self._module = (module,)
        self._forward = type(module).forward
        self._lengths = lengths
        exact = settings["rope_type"] == "dynamic"
        stated = None if exact else settings.get("original_max_position_embeddings")
        self.border = PromptBorder(int(stated or settings["limit"]), exact=exact)
        self._buffers = {key: None if value is None else value.clone() for key, value in module._buffers.items()}
        self._attributes = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in vars(module).items()
            if isinstance(value, (int, float, torch.Tensor))
        }

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the library returns: a tensor, or several, whose second dimension is the tokens."""
        lengths = self._lengths.of_tokens
        if lengths is None:
            return self._fresh(x, position_ids, *args, **kwargs)
        lengths = lengths.clamp(min=self.border.length)
        if not self.border.exact:
            lengths = lengths.clamp(max=self.border.length + 1)
        out: Any = None
        for length in torch.unique(lengths).tolist():
            last = position_ids.new_full((*position_ids.shape[:-1], 1), length - 1)
            mine = lengths == length
            own = position_ids * mine  # the library looks at the largest
            given = self._fresh(x, torch.cat((own, last), -1), *args, **kwargs)
            out = _merged(out, given, mine.view(1, -1, 1))
        return out

    def _fresh(self, *args: Any, **kwargs: Any) -> Any:
        """Forget the lengths of earlier calls, which the library keeps in buffers and attributes; then run."""
        (module,) = self._module
        for key, value in self._buffers.items():
            module._buffers[key] = None if value is None else value.clone()
        for key, kept in self._attributes.items():
            module.__dict__[key] = kept.clone() if isinstance(kept, torch.Tensor) else kept
        return self._forward(module, *args, **kwargs)


def _merged(before: Any, given: Any, mine: torch.Tensor) -> Any:
    """Return `given` without its last token, where `mine`; the values of `before` elsewhere."""
    if isinstance(given, torch.Tensor):
        return given[:, :-1] if before is None else torch.where(mine, given[:, :-1], before)
    olds = [None] * len(given) if before is None else before
    return type(given)(_merged(old, each, mine) for old, each in zip(olds, given, strict=True))

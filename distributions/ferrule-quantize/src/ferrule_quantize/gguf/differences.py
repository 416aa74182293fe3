"""Finds out whether two models compute the same by their numbers, rotations and parts, without their weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch

from ferrule_nn import Decoder, Rope
from ferrule_nn.mlp import ACTIVATIONS

_TOLERANCE = 1e-6  # of a float that is stored with 32 bits
_HOW_STORED = ("qkv_by_group", "sliding", "windows")  # the last two are compared by what follows of them
Difference = tuple[str, Any, Any]


def differences(taken: Any, stated: Decoder, *, rotation: bool = True) -> Iterator[Difference]:
    """Yield the name and both values of each difference. Without `rotation` frequencies are not compared."""
    if type(taken) is not type(stated):
        yield "architectures", type(taken).__name__, type(stated).__name__
        return
    for part in ("spec", "moe"):
        yield from _of_fields(getattr(taken, part, None), getattr(stated, part, None))
    yield from _of_windows(taken, stated)
    if rotation:
        for name in ("rope", "local_rope"):
            yield from _of_rotations(name, getattr(taken, name), getattr(stated, name))
    yield from _of_parts(taken, stated)


def _of_fields(taken: Any, stated: Any) -> Iterator[Difference]:
    if type(taken) is not type(stated):
        yield "num_experts", taken, stated
        return
    for each in fields(stated) if stated is not None else ():
        mine, other = getattr(taken, each.name), getattr(stated, each.name)
        if each.name == "routing":
            yield from _of_fields(mine, other)
        elif each.name == "act":
            if ACTIVATIONS.get(mine) is not ACTIVATIONS.get(other):
                yield "hidden_act", mine, other
        elif each.name not in _HOW_STORED and not _same(mine, other):
            yield each.name, mine, other


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(_same(*both) for both in zip(one, other, strict=True))
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=_TOLERANCE)
    return bool(one == other)


def _of_windows(taken: Decoder, stated: Decoder) -> Iterator[Difference]:
    limit = int(stated.config.get("max_position_embeddings") or 0)
    windows = [[each if each < limit else 0 for each in model.spec.windows] for model in (taken, stated)]
    if windows[0] != windows[1]:
        yield "sliding_window", windows[0], windows[1]
    if stated.local_rope is not None and taken.spec.sliding != stated.spec.sliding:
        yield "layer_types", taken.spec.sliding, stated.spec.sliding


def _of_rotations(name: str, taken: Rope | None, stated: Rope | None) -> Iterator[Difference]:
    if taken is None or stated is None:
        if taken is not stated:
            yield name, taken, stated
        return
    mine, other = (Rope(rope.config, rope.interleaved) for rope in (taken, stated))  # not on the meta device
    if (
        mine.interleaved != other.interleaved
        or mine.inv_freq.shape != other.inv_freq.shape
        or not torch.allclose(mine.inv_freq, other.inv_freq, rtol=1e-5, atol=0)
        or not _same(mine.factor, other.factor)
    ):
        yield name, taken.config, stated.config


def _of_parts(taken: Decoder, stated: Decoder) -> Iterator[Difference]:
    parts = [dict(model.named_modules()) for model in (taken, stated)]
    for name, part in parts[1].items():
        other = parts[0].get(name)
        if type(other) is not type(part):
            yield name, type(other).__name__, type(part).__name__
        elif not isinstance(part, Rope):
            yield from ((f"{name}.{key}", *both) for key, both in _numbers(other, part) if not _same(*both))
    shapes = [{name: tuple(each.shape) for name, each in model.named_parameters()} for model in (taken, stated)]
    yield from (
        (name, shapes[0].get(name), shapes[1].get(name))
        for name in {**shapes[0], **shapes[1]}
        if shapes[0].get(name) != shapes[1].get(name)
    )


def _numbers(taken: Any, stated: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the name and both values of numbers and flags that a part has itself, such as the scale of a residual."""
    for key, value in vars(stated).items():
        if not key.startswith("_") and isinstance(value, (int, float)) and hasattr(taken, key):
            yield key, (getattr(taken, key), value)

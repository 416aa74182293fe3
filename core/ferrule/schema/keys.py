"""Which keys a model knows, at any depth, and which ones of a given value it does not."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from ferrule.schema.values import shaped

Keys = Mapping[str, Any]
"""Key → the keys of the objects in its value, which may lie in lists. ANY: nothing is known about them."""

ANY: Keys = types.MappingProxyType({})
OTHERS = "*"  # in `Keys`: of models that keep keys which they do not name


@lru_cache(maxsize=256)
def known_keys(model: Any) -> Keys:
    """The keys of a model, or of the members of a union of models. Models must not contain themselves."""
    if isinstance(model, type) and issubclass(model, BaseModel):
        fields = model.model_fields
        found = {name: _of_parts([field.annotation], field.metadata) for name, field in fields.items()}
        return found | ({OTHERS: ANY} if model.model_config.get("extra") == "allow" else {})
    if get_origin(model) is Annotated:
        return _of_parts(get_args(model)[:1], get_args(model)[1:])
    if get_origin(model) in (Union, types.UnionType, list):
        return _of_parts(get_args(model), ())
    return ANY


def _of_parts(kinds: Any, metadata: Any) -> Keys:
    """Of a value of one of `kinds`, unless the metadata says better."""
    kinds = [item.kind for item in metadata if isinstance(item, shaped)] or kinds
    merged: dict[str, Keys] = {}
    for kind in kinds:
        for key, below in known_keys(kind).items():
            merged[key] = {**merged.get(key, ANY), **below}
    return merged or ANY


def known_names(model: Any) -> frozenset[str]:
    """All names of keys, at any depth: what a misspelt one may have been meant to be."""
    return frozenset(_names(known_keys(model))) - {OTHERS}


def _names(keys: Keys) -> Iterator[str]:
    for name, below in keys.items():
        yield name
        yield from _names(below)


def unknown_keys(value: Any, keys: Keys, path: str = "") -> Iterator[str]:
    """Paths such as ``a.b[2].c`` of keys of `value` that are not in `keys`, fit to be shown, one after the other."""
    if not keys:
        return
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from unknown_keys(item, keys, f"{path}[{number}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            here = f"{path}.{name}" if path else name
            below = keys.get(name, keys.get(OTHERS))
            if below is None:
                yield printable(here)
            elif below:
                yield from unknown_keys(item, below, here)


def printable(name: str, length: int = 64) -> str:
    """Text from a client, fit for an error, a log line or a header."""
    return "".join(char if char.isascii() and char.isprintable() else "?" for char in name[:length])

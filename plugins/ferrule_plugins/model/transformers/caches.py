"""A cache object of transformers, taken apart into tensors that Ferrule keeps, and put together again.

The library has many kinds of caches: lists of layers with keys and values, convolution and recurrent states, tuples of
tuples, lists of states, objects of one model's own. What they have in common shows when the same class has run over
texts of several lengths. In each place of the object there is

    a tensor with one dimension as long as the text    kept by token, in blocks: keys, values, latents
    a tensor of one shape                              a state, kept by slot
    the length itself                                  a number, which follows from where the request is
    the same value every time                          part of the object's frame

Whatever is none of these (a buffer that is flushed every fourth token) cannot be kept: `CacheForm.of` raises.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Attributes = Mapping[tuple[str, str], Any]  # by path of the module and name: a tensor, or None
Path = tuple[tuple[str, Any], ...]  # how to come to a place: ("attribute", name) or ("item", key), one after another
_DEEPEST = 12
_PLAIN = (int, float, str, bytes, torch.dtype, torch.device, torch.Size, type, type(None))


class CannotKeepError(Exception):
    """The error for a cache whose contents depend on the text's length in a way that blocks and slots do not."""


@dataclass(frozen=True)
class TokenTensor:
    """A tensor with an entry for each token, along dimension `dim`. `shape` is that of a text of one token.

    `window`: the object has the last `window - 1` tokens only; 0: it has all of them.
    """

    path: Path
    dim: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    window: int = 0

    @property
    def size(self) -> int:
        """The numbers of one token."""
        return int(torch.Size(self.shape).numel())

    def entries(self, tensor: torch.Tensor, count: int) -> torch.Tensor:
        """Return the last `count` tokens as [count, size]."""
        return tensor.narrow(self.dim, tensor.shape[self.dim] - count, count).movedim(self.dim, 0).reshape(count, -1)

    def tensor(self, entries: torch.Tensor) -> torch.Tensor:
        """Return the tensor that `entries` [tokens, size] were taken from."""
        rest = (*self.shape[: self.dim], *self.shape[self.dim + 1 :])
        return entries.to(self.dtype).view(len(entries), *rest).movedim(0, self.dim)


@dataclass(frozen=True)
class StateTensor:
    """A tensor of the same shape for every text."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class CacheForm:
    """The contents of a class's cache objects. Names of tensors are `name(path)`."""

    frame: Any  # a cache without its tensors
    tokens: tuple[TokenTensor, ...]
    states: tuple[StateTensor, ...]
    lengths: frozenset[Path]  # where the number of tokens stands

    @classmethod
    def of(cls, caches: Mapping[int, Any]) -> CacheForm:
        """Find the form from caches after texts of several lengths, keyed by these. Raises CannotKeepError."""
        found = {length: _places(cache) for length, cache in caches.items()}
        first, *others = found.values()
        if any(set(other) != set(first) for other in others):
            raise CannotKeepError("the cache of one text has other parts than that of another")
        tokens: list[TokenTensor] = []
        states: list[StateTensor] = []
        lengths: set[Path] = set()
        for path, (value, window) in first.items():
            values = {length: places[path][0] for length, places in found.items()}
            if isinstance(value, torch.Tensor):
                kind = _tensor(path, values, window)
                if isinstance(kind, TokenTensor):
                    tokens.append(kind)
                else:
                    states.append(kind)
            elif not _alike(list(values.values())):
                if any(type(each) is not int or each != length for length, each in values.items()):
                    raise CannotKeepError(f"{name(path)} depends on the text's length")
                lengths.add(path)
        frame = _rebuilt(caches[max(caches)], lambda path, value: None if isinstance(value, torch.Tensor) else value)
        return cls(frame, tuple(tokens), tuple(states), frozenset(lengths))

    def build(self, length: int, tensors: Mapping[Path, torch.Tensor]) -> Any:
        """Build a cache object after `length` tokens, with these tensors."""

        def value(path: Path, framed: Any) -> Any:
            return length if path in self.lengths else tensors.get(path, framed)

        return _rebuilt(self.frame, value)

    def find(self, cache: Any) -> dict[Path, torch.Tensor]:
        """Return the tensors of a cache object. Raises CannotKeepError where it has other tensors than this form
        says.
        """
        found = {path: value for path, (value, _) in _places(cache).items() if isinstance(value, torch.Tensor)}
        known = {each.path for each in self.tokens} | {each.path for each in self.states}
        if set(found) != known:
            raise CannotKeepError(f"the cache has gained or lost {name(next(iter(set(found) ^ known)))}")
        return found


@dataclass(frozen=True)
class OwnState:
    """Tensors that the modules of a class keep from one call to the next, as attributes of their own.

    They become a part of the cache: a mapping with the library's cache object and these tensors.
    """

    places: tuple[tuple[str, nn.Module, str], ...] = ()  # what they are called, where they are
    first: tuple[Any, ...] = ()  # what is there before a text

    @classmethod
    def of(cls, inner: nn.Module, first: Attributes, runs: Iterable[Callable[[], object]]) -> OwnState:
        """Find the state by what passes over several texts change. `first`: the `attributes` before there was any
        text.
        """
        places: dict[tuple[str, str], nn.Module] = {}
        for run in runs:
            before = {(path, attribute): (value, _copied(value)) for path, _, attribute, value in _attributes(inner)}
            run()
            for path, module, attribute, value in _attributes(inner):
                old, copied = before.get((path, attribute), (None, None))
                if isinstance(value, torch.Tensor) and not (value is old and torch.equal(value, copied)):
                    places[path, attribute] = module
        return cls(
            tuple((path, module, attribute) for (path, attribute), module in places.items()),
            tuple(first.get(place) for place in places),
        )

    def restore(self, cache: Any) -> Any:
        """Put the tensors into their modules, and return the library's cache object. `cache` None: a text begins."""
        for (path, module, attribute), first in zip(self.places, self.first, strict=True):
            value = _copied(first) if cache is None else cache["modules"][path]
            (module._buffers if attribute in module._buffers else module.__dict__)[attribute] = value
        return cache["cache"] if self.places and cache is not None else cache

    def save(self, cache: Any) -> Any:
        """Return the cache with the tensors that are in the modules now."""
        if not self.places:
            return cache
        return {"cache": cache, "modules": {path: getattr(module, name) for path, module, name in self.places}}


def attributes(inner: nn.Module) -> Attributes:
    """Copy the tensors that may be states."""
    return {(path, attribute): _copied(value) for path, _, attribute, value in _attributes(inner)}


def _attributes(inner: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield the tensors, and places without a value, that are attributes or buffers of modules and not parameters."""
    for path, module in inner.named_modules():
        for attribute, value in (*vars(module).items(), *module._buffers.items()):
            if attribute[:1] != "_" and (value is None or isinstance(value, torch.Tensor)):
                yield f"{path}.{attribute}", module, attribute, value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def name(path: Path) -> str:
    """Return the name of a place, such as `layers.0.keys`."""
    return ".".join(str(key) for _, key in path) or "cache"


def record_all(cache: Any) -> None:
    """Have the layers with a sliding window keep what a step has written until it was read from them."""
    for layer in getattr(cache, "layers", None) or ():
        if hasattr(layer, "sliding_window") and hasattr(layer, "record_past"):
            layer.record_past = True


def _tensor(path: Path, values: Mapping[int, torch.Tensor], window: int) -> TokenTensor | StateTensor:
    shapes = {length: tuple(tensor.shape) for length, tensor in values.items()}
    length, shape = next(iter(shapes.items()))
    dtype = values[length].dtype
    if len({len(each) for each in shapes.values()}) > 1:
        raise CannotKeepError(f"{name(path)} changes its number of dimensions")
    differing = [dim for dim in range(len(shape)) if len({each[dim] for each in shapes.values()}) > 1]
    if not differing:
        return StateTensor(path, shape, dtype)
    dim = differing[0]
    if len(differing) > 1 or any(each[dim] != length for length, each in shapes.items()):
        raise CannotKeepError(f"{name(path)} has a shape that is not one of each token, and changes")
    if not dtype.is_floating_point:
        raise CannotKeepError(f"{name(path)} holds numbers that are not floats, for each token")
    return TokenTensor(path, dim, (*shape[:dim], 1, *shape[dim + 1 :]), dtype, window)


def _alike(values: list[Any]) -> bool:
    """Return whether all values are the same plain value; values that are not plain (a configuration) are not looked
    at.
    """
    return not isinstance(values[0], _PLAIN) or all(
        type(each) is type(values[0]) and each == values[0] for each in values
    )


# ------------------------------------------------------------------------------------------------ walking


def _children(value: Any) -> dict[tuple[str, Any], Any]:
    """Return what is inside a value: the items of a container, the attributes of an object; none for anything that is
    one value.
    """
    if isinstance(value, dict):
        return {("item", key): each for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return {("item", index): each for index, each in enumerate(value)}
    if isinstance(value, (*_PLAIN, torch.Tensor, nn.Module)) or callable(value) or hasattr(value, "model_type"):
        return {}
    return {("attribute", key): each for key, each in getattr(value, "__dict__", {}).items()}


def _places(cache: Any) -> dict[Path, tuple[Any, int]]:
    """Return every value in a cache that has nothing inside, and the window of the layer that has it."""
    found: dict[Path, tuple[Any, int]] = {}

    def walk(value: Any, path: Path, window: int) -> None:
        if len(path) > _DEEPEST:
            raise CannotKeepError("the cache is nested too deeply")
        if getattr(value, "record_past", False):
            window = int(getattr(value, "sliding_window", 0) or 0)
        inside = {} if isinstance(value, torch.Tensor) else _children(value)
        if not inside:
            found[path] = value, window
        for step, each in inside.items():
            walk(each, (*path, step), window)

    walk(cache, (), 0)
    return found


def _rebuilt(value: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Copy a cache's containers and objects, with `change` applied to their innermost values."""
    inside = {} if isinstance(value, torch.Tensor) else _children(value)
    if not inside:
        changed = change(path, value)
        return copy.copy(changed) if isinstance(changed, (dict, list)) else changed
    made = {step: _rebuilt(each, change, (*path, step)) for step, each in inside.items()}
    plain = {key: each for (_, key), each in made.items()}
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update(plain)
        return copied
    if isinstance(value, tuple):
        return type(value)(*plain.values()) if hasattr(value, "_fields") else tuple(plain.values())
    if isinstance(value, list):
        return list(plain.values())
    twin = copy.copy(value)
    twin.__dict__.update(plain)
    return twin

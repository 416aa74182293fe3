"""A function's work as a list that is done again without Python.

While a function is recorded, each call of a kernel of this package is added to a list in C++, and each operation of
torch is kept with its arguments. Memory that the function asks torch for comes from an `Arena`, where it stays the
function's own; of tensors from elsewhere whose address was asked for, the recording keeps hold. What depends on the
values of tensors in Python cannot be done again, and raises NotRecordableError.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ferrule_kernels.cpu import library

_ALIGNED = 64  # bytes
_CHUNK = 1 << 20  # bytes that an arena grows by at least
_ALLOCATING = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_READING = frozenset(
    {"__array__", "__bool__", "__complex__", "__float__", "__index__", "__int__", "item", "numpy", "tolist"}
)
_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

Function = Callable[[list[torch.Tensor]], torch.Tensor]


class NotRecordableError(Exception):
    """An error for a function that reads values of tensors in Python; the text says with what."""


class _Kernels(NamedTuple):
    new: Any
    free: Any
    set: Any
    length: Any
    replay: Any


@functools.cache
def _kernels() -> _Kernels:
    """Load the kernels and declare their types. Raises KernelsUnavailableError."""
    loaded, at, count = library.load(), ctypes.c_void_p, ctypes.c_int64
    made = _Kernels(*(getattr(loaded, f"ferrule_recording_{name}") for name in _Kernels._fields))
    made.new.restype, made.length.restype = at, count
    made.free.argtypes = made.set.argtypes = made.length.argtypes = (at,)
    made.replay.argtypes = (at, count, count)
    made.free.restype = made.set.restype = made.replay.restype = None
    return made


class Arena:
    """Memory that recordings share, because one of them is replayed at a time: as much as the largest needs."""

    def __init__(self) -> None:
        self._chunks: list[np.ndarray[Any, np.dtype[np.uint8]]] = []

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    def fill(self, byte: int) -> None:
        """Set all of the memory."""
        for chunk in self._chunks:
            chunk.fill(byte)

    def chunk(self, number: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a part of the memory; it is made when first asked for, with at least `size` bytes."""
        if number == len(self._chunks):
            self._chunks.append(np.empty(max(_CHUNK, size), np.uint8))
        return self._chunks[number]


class _Places:
    """The memory of an arena that one recording uses. Memory of tensors that are gone is reused, as replays will do."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._number = 0  # of the chunk that comes next
        self._chunk, self._at = np.empty(0, np.uint8), 0
        self._free: defaultdict[int, list[tuple[Any, int]]] = defaultdict(list)  # chunk and place, by size
        self._places: dict[int, tuple[Any, int]] = {}  # of storages that there are, or were
        self.alive: set[int] = set()  # storages of tensors that are not gone

    def owns(self, storage: int) -> bool:
        return storage in self._places

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """Make a tensor with the type, shape and strides of x."""
        size = x.untyped_storage().nbytes()
        if not size:
            return x
        place = self._take(-(-size // _ALIGNED) * _ALIGNED)
        made, memory = _view(x, *place)
        address = _storage(made)
        self._places[address] = place
        self.alive.add(address)
        weakref.finalize(memory, self._give, address, -(-size // _ALIGNED) * _ALIGNED).atexit = False
        return made

    def alias(self, x: Any) -> Any:
        """Return a view of the memory of x that does not keep it from being reused.

        Anything that is not from the arena is returned as it is.
        """
        place = self._places.get(_storage(x)) if isinstance(x, torch.Tensor) else None
        return x if place is None else _view(x, *place)[0]

    def _take(self, size: int) -> tuple[Any, int]:
        if free := self._free[size]:
            return free.pop()
        while self._chunk.nbytes - self._at < size:
            self._chunk = self._arena.chunk(self._number, size + _ALIGNED)
            self._number += 1
            self._at = -self._chunk.ctypes.data % _ALIGNED
        self._at += size
        return self._chunk, self._at - size

    def _give(self, address: int, size: int) -> None:
        self.alive.discard(address)
        self._free[size].append(self._places[address])


def _view(x: torch.Tensor, chunk: Any, at: int) -> tuple[torch.Tensor, Any]:
    """Make a tensor like x in a part of the chunk.

    Also returns the object that lives as long as the tensor's memory is used.
    """
    memory = (ctypes.c_uint8 * x.untyped_storage().nbytes()).from_buffer(chunk, at)  # it keeps the chunk
    return torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, x.stride(), x.storage_offset()), memory


class Recording:
    """A recording of what `function` did with copies of `inputs` of its own.

    `inputs` and `output` are in the arena: they are valid until another recording in it is made or replayed. Everything
    else that the function makes must be gone when it returns, so it should have been called before, to make what it
    prepares only once. Raises what `function` raises, NotRecordableError, KernelsUnavailableError. After an error the
    arena must not be used again, because the function may have kept tensors in it.
    """

    def __init__(self, arena: Arena, inputs: Sequence[torch.Tensor], function: Function) -> None:
        self._kernels = _kernels()
        self._calls = self._kernels.new()
        weakref.finalize(self, self._kernels.free, self._calls).atexit = False
        self._steps: list[Callable[[], object]] = []
        self._recorded = 0  # calls of kernels that are among the steps
        self._places = _Places(arena)
        self._kept: dict[int, torch.Tensor] = {}  # from elsewhere, by where their storage is
        self.inputs = [self._places.like(values) for values in inputs]
        self.fill(inputs)
        self._kernels.set(self._calls)
        try:
            with _Functions(self), _Operations(self):
                self.output = function(self.inputs)
        finally:
            self._kernels.set(None)
        self._add_calls()
        self._check_lifetimes()

    def fill(self, inputs: Iterable[torch.Tensor]) -> None:
        """Give the inputs other values."""
        for mine, values in zip(self.inputs, inputs, strict=True):
            mine.copy_(values)

    def replay(self) -> torch.Tensor:
        """Run the recording again and return the output for the present values of the inputs."""
        for step in self._steps:
            step()
        return self.output

    def keep(self, x: torch.Tensor) -> None:
        """Keep the memory of x alive as long as the recording, because a kernel reads or writes it."""
        storage = x.untyped_storage().data_ptr()
        if not self._places.owns(storage):
            self._kept.setdefault(storage, x)

    def operate(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operation of torch, and record it unless it only makes views."""
        if func.overloadpacket.__name__ in _ALLOCATING:
            return self._places.like(func(*args, **kwargs))
        if _BY_VALUE & set(func.tags):
            raise NotRecordableError(f"{func} depends on values")
        made = func(*args, **kwargs)
        results = tree_leaves(made)
        if not all(isinstance(x, torch.Tensor) for x in results):
            raise NotRecordableError(f"{func} gives a value to Python")
        given = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        fresh = [x for x in results if _storage(x) not in given]
        if not fresh and not func._schema.is_mutable:
            return made
        if fresh and not isinstance(made, torch.Tensor):
            raise NotRecordableError(f"{func} gives several tensors")
        kept = self._places.like(made) if fresh else None
        self._add_calls()
        args, kwargs = tree_map(self._places.alias, args), tree_map(self._places.alias, kwargs)
        if kept is None:
            self._steps.append(functools.partial(func, *args, **kwargs))
            return made
        self._steps.append(_again(func, args, kwargs, self._places.alias(kept.copy_(made))))
        return kept

    def _check_lifetimes(self) -> None:
        known = {_storage(x) for x in (*self.inputs, self.output)}
        if self._places.alive - known:
            gc.collect()  # a cycle may be all that keeps them
        if self._places.alive - known:
            raise NotRecordableError("a tensor that it made is still in use")

    def _add_calls(self) -> None:
        """Add the kernels that were called since the last step as the next step."""
        first, self._recorded = self._recorded, int(self._kernels.length(self._calls))
        if first < self._recorded:
            self._steps.append(functools.partial(self._kernels.replay, self._calls, first, self._recorded))


def _again(func: Any, args: Sequence[Any], kwargs: dict[str, Any], to: torch.Tensor) -> Callable[[], object]:
    """Return the operation as one that writes its result to a tensor, not to memory of its own, where torch can."""
    if func is torch.ops.aten.to.dtype or func is torch.ops.aten._to_copy.default:
        return functools.partial(to.copy_, args[0])
    writing = _writing(func)
    if writing is not None:
        return functools.partial(writing, *args, **kwargs, out=to)
    return functools.partial(_copy, to, functools.partial(func, *args, **kwargs))


@functools.cache
def _writing(func: Any) -> Any:
    """Return the variant of an operation that has the same arguments and one more, `out`; None if torch has none."""
    wanted = [(each.name, str(each.type)) for each in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        found = getattr(func.overloadpacket, name)
        given = [(each.name, str(each.type)) for each in found._schema.arguments if not each.is_out]
        if given == wanted and [each.name for each in found._schema.arguments if each.is_out] == ["out"]:
            return found
    return None


def _copy(to: torch.Tensor, make: Callable[[], torch.Tensor]) -> None:
    to.copy_(make())


def _storage(x: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 for weights packed by a library of torch's, which have no views."""
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else 0


class _Functions(TorchFunctionMode):
    """A mode that intercepts uses of tensors that are not operations, such as reading a value or an address."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READING:
            raise NotRecordableError(f"Tensor.{name} gives values to Python")
        if name == "data_ptr" and isinstance(args[0], torch.Tensor):
            self._recording.keep(args[0])
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that intercepts torch's operations."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: to be told to skip this mode, torch's compiler must be imported first, which takes seconds."""
        return False

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recording.operate(func, args, kwargs or {})

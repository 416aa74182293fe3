"""The sizes of the tuples in a pickle, counted from its opcodes without building any object.

A tuple that holds another twice, which holds a third twice, and so on, takes a few bytes in a file; to hash it, as the
key of a dictionary, takes twice the time for each level. https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

from pickletools import OpcodeInfo, genops, markobject, stackslice
from typing import IO

LARGEST = 1_000  # numbers and texts in a tuple: those of torch's tensors have 20 at most
_MARK = -1
_TUPLES = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE", "FROZENSET"})
_PUTS, _GETS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"}), frozenset({"GET", "BINGET", "LONG_BINGET"})


def check_tuples(stream: IO[bytes]) -> None:
    """Read one pickle from the stream's position on.

    Raises ValueError for a tuple of more than `LARGEST` objects, and ValueError or LookupError for damaged data.
    """
    stack: list[int] = []  # sizes, and marks
    memo: dict[int, int] = {}
    for opcode, argument, _ in genops(stream):
        if opcode.name in _PUTS:
            memo[_place(argument)] = stack[-1]
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif opcode.name in _GETS:
            stack.append(memo[_place(argument)])
        elif opcode.name == "MARK":
            stack.append(_MARK)
        elif opcode.name == "DUP":
            stack.append(stack[-1])
        else:
            taken = _taken(opcode, stack)
            size = 1 + sum(taken) if opcode.name in _TUPLES else 1
            if size > LARGEST:
                raise ValueError(f"a tuple of more than {LARGEST} objects")
            stack.extend([size] * len(opcode.stack_after))


def _place(argument: object) -> int:
    return argument if isinstance(argument, int) else -1


def _taken(opcode: OpcodeInfo, stack: list[int]) -> list[int]:
    """Pop what an opcode takes from the stack: a fixed number of objects, and with a mark all after it."""
    count, found = len(opcode.stack_before), []
    if stackslice in opcode.stack_before or markobject in opcode.stack_before:
        while (size := stack.pop()) != _MARK:
            found.append(size)
        count -= (stackslice in opcode.stack_before) + (markobject in opcode.stack_before)
    return [*found, *(stack.pop() for _ in range(count))]

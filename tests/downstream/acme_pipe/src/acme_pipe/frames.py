"""What the pipes carry: a length of four bytes, then an `Ask` for the child, or its `Reply`."""

from __future__ import annotations

from typing import Any, BinaryIO

import msgspec

from ferrule import errors
from ferrule.config import WorkerSettings
from ferrule.interfaces.plugins import Plugins
from ferrule.types import ModelInfo, Need, StepPlan, StepResult

Given = tuple[WorkerSettings, Plugins]
# By method: the type of its argument, and of what it returns.
METHODS: dict[str, tuple[Any, Any]] = {
    "check": (Given, None),
    "start": (Given, ModelInfo),
    "init_cache": (int, None),
    "submit": (StepPlan, None),
    "result": (int, StepResult),  # of the step that the Ask with this number has submitted
    "expect": (str, None),
    "prepare": (Need, None),
    "call": (tuple[str, tuple[Any, ...]], Any),
}


class Ask(msgspec.Struct, frozen=True):
    """A call. `submit` and `expect` have no answer."""

    number: int
    method: str
    argument: msgspec.Raw


class Fault(msgspec.Struct, frozen=True):
    """An exception on its way to the other process. `more` is a StartupError's hint or a RequestError's field."""

    kind: str
    message: str
    more: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        if isinstance(error, errors.StartupError):
            return cls(type(error).__name__, error.message, error.hint)
        if isinstance(error, errors.RequestError):
            return cls("RequestError", error.message, error.param)
        known = isinstance(error, (errors.EngineDead, ValueError))
        return cls(type(error).__name__ if known else "", str(error) if known else f"{type(error).__name__}: {error}")

    def exception(self) -> Exception:
        """Return the same exception again; EngineDead for one that is not known here."""
        kind = ValueError if self.kind == "ValueError" else getattr(errors, self.kind, errors.EngineDead)
        return kind(self.message) if self.more is None else kind(self.message, self.more)


class Reply(msgspec.Struct, frozen=True):
    """The result of a call, or the exception that it raised."""

    number: int
    value: msgspec.Raw = msgspec.Raw(msgspec.msgpack.encode(None))
    fault: Fault | None = None


def write(stream: BinaryIO, message: Ask | Reply) -> None:
    """Write one frame. Raises OSError when nobody reads."""
    data = msgspec.msgpack.encode(message)
    stream.write(len(data).to_bytes(4, "big") + data)
    stream.flush()


def read(stream: BinaryIO) -> bytes | None:
    """Read one frame; None at the end, also within a frame."""
    length = stream.read(4)
    data = stream.read(int.from_bytes(length, "big"))
    return data if len(length) == 4 and len(data) == int.from_bytes(length, "big") else None

"""What answers are made of in any protocol: a stream that closes its source, usage, names and numbers."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from typing import Any

import msgspec

from ferrule import __version__
from ferrule.interfaces.parsers import Content, Event, Reasoning
from ferrule.interfaces.service import Output, Service, Usage

_LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity


def fingerprint(service: Service) -> str:
    """Return a name that changes with the version, the model and how it runs."""
    digest = hashlib.sha256(msgspec.json.encode(service.model)).hexdigest()[:10]
    return f"ferrule-{__version__}-{digest}"


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(logprob, _LOWEST_LOGPROB)


def shown(events: Iterable[Event], many_calls: bool) -> Iterator[Event]:
    """Yield the events that a client is shown: no empty texts, and without `many_calls` no call but the first."""
    for event in events:
        if isinstance(event, Content | Reasoning):
            if event.text:
                yield event
        elif many_calls or event.index == 0:
            yield event


class Closing(AsyncIterator[Any]):
    """An iterator over `events`, which reads `source`. `aclose` closes both.

    A generator that was never begun runs no clean-up of its own when it is closed, so the source is closed here.
    """

    def __init__(self, events: AsyncIterator[Any], source: AsyncIterator[Any]) -> None:
        self._events = events
        self._source = source

    async def __anext__(self) -> Any:
        return await anext(self._events)

    async def aclose(self) -> None:
        for part in (self._events, self._source):
            if isinstance(part, AsyncGenerator) or hasattr(part, "aclose"):
                await part.aclose()


class Meter:
    """The usage of all choices so far. `count` choices are expected, `per_prompt` of them for each prompt."""

    def __init__(self, count: int, per_prompt: int) -> None:
        self._usages = [Usage()] * count
        self._per_prompt = per_prompt

    def see(self, output: Output) -> None:
        self._usages[output.index] = output.usage

    def of(self, index: int) -> Usage:
        """Return the usage of one choice, for streams that report it in each chunk."""
        return self._usages[index]

    def total(self) -> Usage:
        """Return the sum over choices; a prompt counts once, however many choices it has."""
        return Usage.total(self._usages, len(self._usages) // self._per_prompt)

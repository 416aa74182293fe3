"""Seconds that tool parsers take for text that is nothing but calls.

    python -m tools.benchmarks.tool_parsers [NAME …]

The calls are those of each parser's samples for the conformance kit, repeated up to `--characters`: first the sample
with the shortest calls, which has the most of them and costs the most, then all calls of all samples. Each text is read
whole, and in deltas of 4 characters, about as long as a token. Seconds are processor time of the best of `--rounds`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from ferrule.interfaces.parsers import ChoiceContext, TextDelta, ToolParser
from ferrule.plugin import discover
from ferrule_testkit.kits.tool_parser import CallText, ToolParserKit

_DELTA = 4  # characters


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="tool parsers; all by default")
    parser.add_argument("--characters", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    plugins = discover()
    print(f"{'parser':18} {'calls':>7} {'whole':>8} {'deltas':>8}   {'mixed, whole':>12} {'deltas':>8}")
    for name in given.names or sorted(plugins.names("tool_parser")):
        kind = plugins.load("tool_parser", name)
        short, mixed = (_repeated(text, given.characters) for text in _texts(kind))
        figures = [_best(kind, text, step, given.rounds) for text in (short, mixed) for step in (len(text), _DELTA)]
        seconds = [f"{found:.2f} s" for found, _ in figures]
        print(f"{name:18} {figures[0][1]:>7,} {seconds[0]:>8} {seconds[1]:>8}   {seconds[2]:>12} {seconds[3]:>8}")


def _texts(kind: Any) -> Iterator[str]:
    """Yield the shortest calls of a sample, and all calls of all samples."""
    module, _, constant = kind.conformance.partition(":")
    samples = getattr(import_module(module), constant)["samples"]
    calls = [[part.text for part in sample if isinstance(part, CallText)] for sample in samples]
    every = ["".join(texts) for texts in calls if texts]
    yield min(every, key=len)
    yield "\n".join(every)


def _repeated(text: str, characters: int) -> str:
    return text * max(1, characters // len(text))


def _best(kind: type[ToolParser], text: str, step: int, rounds: int) -> tuple[float, int]:
    """Return the seconds of the fastest round, and how many calls were read."""
    found = [_read(kind, text, step) for _ in range(rounds)]
    return min(seconds for seconds, _ in found), found[0][1]


def _read(kind: type[ToolParser], text: str, step: int) -> tuple[float, int]:
    tools: Sequence[dict[str, Any]] = ToolParserKit.tools
    parser = kind(tools)
    parser.begin(ChoiceContext(tools=tuple(tools), tool_choice="auto"))
    calls = 0
    began = time.process_time()
    for at in range(0, len(text), step):
        calls += sum(type(event).__name__ == "CallStart" for event in parser.feed(TextDelta(text[at : at + step])))
    parser.finish()
    return time.process_time() - began, calls


if __name__ == "__main__":
    main()

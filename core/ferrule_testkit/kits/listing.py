"""The child process of `ferrule plugins check --list`: the promises of each kit, and its settings, as JSON.

``python -m ferrule_testkit.kits.listing KIND …``. The kits' docstrings are the text.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence

import msgspec

from ferrule_testkit.kits import kit_of
from ferrule_testkit.kits.base import promises


class Promise(msgspec.Struct, frozen=True):
    """A test's name, and the sentence that it proves."""

    name: str
    promise: str


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of plugin with its kit. `about` has a line for each paragraph of the docstring."""

    kind: str
    kit: str
    about: list[str]
    promises: list[Promise]
    settings: list[str]


def listed(kind: str) -> Listed:
    """Return what is to be said of a kind's kit."""
    kit = kit_of(kind)
    paragraphs = (inspect.getdoc(kit) or "").split("\n\n")
    return Listed(
        kind=kind,
        kit=kit.__name__,
        about=[" ".join(paragraph.split()) for paragraph in paragraphs],
        promises=[Promise(name, sentence) for name, sentence in promises(kit)],
        settings=list(kit.settings()),
    )


def main(argv: Sequence[str]) -> None:
    """Print the list of the given kinds."""
    sys.stdout.buffer.write(msgspec.json.encode([listed(kind) for kind in argv]))


if __name__ == "__main__":
    main(sys.argv[1:])

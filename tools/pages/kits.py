"""`docs/conformance.md`: what each kit proves, from the kits' own docstrings.

``python -m tools.pages.kits`` prints it; ``--write FILE`` renews the page, which a test compares.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ferrule.plugin import KINDS
from ferrule_testkit.kits import KVCacheKit, kit_of
from ferrule_testkit.kits.base import Kit, promises

_HEAD = """# Conformance

Each kind of plugin comes with a kit: a class whose test methods are the promises of the kind. The built-in plugins pass
the same kits as yours. This page is written from the kits' docstrings.

## On the command line

```console
$ ferrule plugins check shortest             # one plugin, by name or kind:name, or all of a distribution
$ ferrule plugins check --all --json         # every plugin that can be used here
$ ferrule plugins check mine --plugin policy=mine.py
```

Each plugin is imported and proved in a process of its own, whose output is kept out of the answer and shown when
something is broken. A promise is one line: kept (`ok`), broken (`FAIL`, with the reason and the line of your code) or
not applicable (`-`, with the reason). A crash and a hang are reported like any other failure. `--import-deadline` is
for the import (10 s), `--deadline` for the whole (120 s). What the plugin started ends with its check. The exit status
is 1 when something is broken.

## In a test file

```python title="test_shortest.py"
from ferrule_testkit.kits import PolicyKit

from ferrule_shortest import ShortestFirst


class TestShortestFirst(PolicyKit):
    plugin = ShortestFirst
```

pytest collects the kit's methods. The kits are part of the distribution and need neither pytest nor anything else that
a server does not have.

## Settings

A kit has settings with defaults: sample texts, arguments, a checkpoint. A test file overrides them as class attributes.
For both ways at once the plugin's class says them:

```python
class Hermes(ToolParser):
    conformance = {"samples": (...)}  # or "my_package.samples:CONFORMANCE", imported by a check only
```

Without samples of its own a parser, a model or a load format is proved only as far as no sample is needed; the rest is
listed as not applicable.

Work is counted, not timed, and all randomness has fixed seeds: a kit that passes once passes always. To be trusted
itself, each kit is run on plugins with planted faults, at least three for each kind, and must catch them all.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for kind in KINDS.values():
        parts += ["", f"## `{kind.name}`", "", *_section(kit_of(kind.name))]
    parts += ["", "## The KV cache", "", *_section(KVCacheKit)]
    return "\n".join(parts) + "\n"


def _section(kit: type[Kit]) -> Iterator[str]:
    yield f"`{kit.__name__}`. {_text(kit)}"
    yield ""
    for name, sentence in promises(kit):
        yield f"- **{name.removeprefix('test_').replace('_', ' ')}**: {sentence}"
    names = [name for name in kit.settings() if name != "name"]
    if names:
        yield ""
        yield f"Settings: {', '.join(f'`{name}`' for name in names)}."


def _text(kit: type[Kit]) -> str:
    """The class's docstring as one paragraph per paragraph."""
    return "\n\n".join(" ".join(part.split()) for part in (inspect.getdoc(kit) or "").split("\n\n"))


def main(argv: Sequence[str]) -> int:
    match list(argv):
        case []:
            print(page(), end="")
        case ["--write", file]:
            Path(file).write_text(page(), encoding="utf-8")
        case _:
            print("usage: python -m tools.pages.kits [--write FILE]", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

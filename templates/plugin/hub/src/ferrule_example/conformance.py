"""A shelf for the conformance kit. No server imports this."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def world(revisions: Mapping[str, Mapping[str, bytes]]) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as shelf:
        for revision, files in revisions.items():
            for name, content in files.items():
                file = Path(shelf, revision, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
        yield f"shelf://{shelf}"


SETTINGS = {"world": world}

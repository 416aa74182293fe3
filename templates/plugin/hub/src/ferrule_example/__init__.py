"""Models on a shared disk: ``shelf:///mnt/models/NAME`` is a folder that has one folder for each revision."""

from __future__ import annotations

from pathlib import Path

from ferrule.errors import CheckpointError
from ferrule.interfaces.hub import Choose, ModelHub, Repository

SCHEME = "shelf://"


class ExampleHub(ModelHub):
    conformance = "ferrule_example.conformance:SETTINGS"

    def refuses(self, name: str) -> str | None:
        if name.startswith(SCHEME + "/") and name.isprintable():
            return None
        return f"has names such as {SCHEME}/mnt/models/small"

    def fetch(self, repository: Repository, choose: Choose) -> Path:
        shelf = Path(repository.name.removeprefix(SCHEME))
        try:
            there = sorted(folder.name for folder in shelf.iterdir() if folder.is_dir())
        except OSError as error:
            raise CheckpointError(f"{repository.name!r} cannot be read: {error.strerror}.") from error
        wanted = there[-1] if there and repository.revision is None else repository.revision
        if wanted not in there:
            hint = f"It has {', '.join(there) or 'none'}: say --revision."
            raise CheckpointError(f"{repository.name!r} has no revision {wanted!r}.", hint)
        return shelf / wanted

"""`hub`: where a model that is not a folder on this machine comes from. Entry point name = what `--hub` takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Given the names of all files of a repository, with forward slashes, it gives patterns of those that are needed, for
# `fnmatch`.
Choose = Callable[[Sequence[str]], Sequence[str]]


@dataclass(frozen=True)
class Repository:
    """A repository of which files are to be fetched. Every request to the hub is made from this: none may omit the
    revision.

    `token` is a secret for this hub, and goes to its own host alone; True is the one that is stored on this machine,
    None leaves the choice to the hub's library. `folder` is for downloads, None is the hub's cache. Files that match a
    pattern of `ignore` are not downloaded.
    """

    name: str
    revision: str | None = None  # branch, tag or commit; None is the hub's default
    token: str | bool | None = None
    folder: Path | None = None
    ignore: tuple[str, ...] = ()


class ModelHub(ABC):
    """A store of models, from which files are downloaded.

    Made without arguments, in the process that starts the others, once for each name that is not a folder.
    """

    @abstractmethod
    def refuses(self, name: str) -> str | None:
        """Say why nothing here can have this name, or return None. Asks nobody and does not raise."""

    def files(self, repository: Repository) -> Sequence[str] | None:
        """Return the names of all files of the repository at its revision, as `fetch` offers them; none is downloaded.

        For `--dry-run`. None: they cannot be known now, because the hub cannot be reached or has no listing. Raises
        CheckpointError, as `fetch` does, for a repository or revision that certainly cannot be fetched.
        """
        return None

    @abstractmethod
    def fetch(self, repository: Repository, choose: Choose) -> Path:
        """Return a folder with the chosen files of the repository at its revision, complete and unchanged.

        A download shows its progress on standard error. Raises CheckpointError, which names the repository, what is
        wrong and what to do; never with the token in it.
        """

"""The kit of hubs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatch
from pathlib import Path

from ferrule.errors import CheckpointError
from ferrule.interfaces.hub import Choose, ModelHub, Repository
from ferrule_testkit.kits.base import Kit, does_not_apply, promise, shown

Files = Mapping[str, bytes]
World = Callable[[Mapping[str, Files]], AbstractContextManager[str]]

_CHOSEN = ("*.json", "*.bin")
_IGNORED = "original/*"
_SECRET = "secret-of-the-conformance-kit"
_ODD = (
    "",
    ".",
    "..",
    "a/../b",
    "a b",
    "\0",
    "-x",
    "http://",
    "file:",
    "é",
    "C:\\x",
    "a" * 5000,
    "/" * 50,
    "~",
    "*",
    "a\nb",
)


def _files(mark: bytes) -> Files:
    return {
        "config.json": b'{"made": "' + mark + b'"}',
        "weights.bin": mark * 500 + bytes(range(256)),
        "empty.json": b"",
        "deeper/inner.json": mark,
        "original/old.bin": b"old",
        "notes.md": b"text",
    }


class HubKit(Kit):
    """A hub gives exactly the revision that was asked for, and a refusal that names the place for everything else.

    Settings: `world`, a function that is given files by revision, puts them where the hub finds them, without any
    network beyond this machine, and is the context manager of the repository's name; `revisions`, two of them.
    """

    kind = "hub"
    world: World | None = None
    revisions: Sequence[str] = ("v1", "v2")

    # ------------------------------------------------------------------------------------ promises

    def test_names_are_judged_in_words(self) -> None:
        """Return a reason or None from `refuses` for anything a user may type, the same each time, and never raise."""
        for name in _ODD:
            reason = self.new().refuses(name)
            told = reason is None or (isinstance(reason, str) and bool(reason.strip()))
            promise(told, f"refuses({shown(name)}) gives {shown(reason)}")
            promise(self.new().refuses(name) == reason, f"refuses({shown(name)}) has another answer the second time")

    def test_names_of_repositories_are_not_refused(self) -> None:
        """Do not refuse a repository that can be fetched."""
        with self._repository() as (name, _):
            promise(self.new().refuses(name) is None, f"refuses({name!r}): {shown(self.new().refuses(name))}")

    def test_the_chosen_files_come_unchanged(self) -> None:
        """Put every file that is chosen and not ignored into the folder, under its name, with exactly its bytes."""
        with self._repository() as (name, worlds):
            revision = self.revisions[0]
            self._compare(self._fetch(name, revision), worlds[revision])

    def test_all_names_are_offered(self) -> None:
        """Pass `choose`, if it is called, the name of every file of the revision, and nothing else."""
        with self._repository() as (name, worlds):
            asked: list[Sequence[str]] = []

            def choose(names: Sequence[str]) -> Sequence[str]:
                asked.append(list(names))
                return _CHOSEN

            self._fetch(name, self.revisions[0], choose)
            for names in asked:
                promise(sorted(names) == sorted(worlds[self.revisions[0]]), f"the files are {shown(sorted(names))}")

    def test_files_are_listed_without_being_fetched(self) -> None:
        """Return None from `files`, or the name of every file of the revision, and leave the folder for downloads
        empty.
        """
        with self._repository() as (name, worlds):
            for revision in self.revisions:
                files = self._files(name, revision)
                listed = files is None or sorted(files) == sorted(worlds[revision])
                promise(listed, f"the files of {revision} are {shown(files)}")
            promise(not any(self._downloads.rglob("*.bin")), "files were downloaded")

    def test_files_of_what_is_not_there_are_not_listed(self) -> None:
        """Return None from `files` of an unknown repository or revision, or raise CheckpointError that names it."""
        with self._repository() as (name, _):
            for unknown, revision in ((name, "no-such-revision"), (f"{name}-no-such", None)):
                try:
                    files = self._files(unknown, revision)
                except CheckpointError as error:
                    promise((revision or unknown) in str(error), f"the refusal names neither: {shown(str(error))}")
                else:
                    promise(files is None, f"{unknown!r} at {revision!r} has the files {shown(files)}")

    def test_the_revision_is_the_one_that_was_asked_for(self) -> None:
        """Never mix two revisions that are fetched in either order and again."""
        with self._repository() as (name, worlds):
            for revision in (*self.revisions, *reversed(self.revisions)):
                self._compare(self._fetch(name, revision), worlds[revision])

    def test_a_revision_that_is_not_there_is_refused(self) -> None:
        """Raise CheckpointError that names an unknown revision, and never fetch another one."""
        with self._repository() as (name, _):
            said = self._refusal(name, "no-such-revision")
            promise("no-such-revision" in said, f"the refusal does not name the revision: {shown(said)}")

    def test_a_repository_that_is_not_there_is_refused(self) -> None:
        """Raise CheckpointError that names an unknown repository, without the token."""
        with self._repository() as (name, _):
            said = self._refusal(f"{name}-no-such", None)
            promise("-no-such" in said, f"the refusal does not name the repository: {shown(said)}")
            promise(_SECRET not in said, "the refusal tells the token")

    # ------------------------------------------------------------------------------------ parts

    @contextmanager
    def _repository(self) -> Iterator[tuple[str, Mapping[str, Files]]]:
        world = type(self).world if "world" not in vars(self) else vars(self)["world"]
        if world is None:
            does_not_apply("there is no repository to fetch from: give `world`")
            return
        worlds = {revision: _files(revision.encode()) for revision in self.revisions}
        self._downloads = self.folder()
        with world(worlds) as name:
            yield name, worlds

    def _fetch(self, name: str, revision: str | None, choose: Choose = lambda names: _CHOSEN) -> Path:
        hub: ModelHub = self.new()
        return hub.fetch(Repository(name, revision, _SECRET, self._downloads, (_IGNORED,)), choose)

    def _files(self, name: str, revision: str | None) -> Sequence[str] | None:
        hub: ModelHub = self.plugin()
        return hub.files(Repository(name, revision, _SECRET, self._downloads, (_IGNORED,)))

    def _compare(self, folder: Path, files: Files) -> None:
        wanted = {name for name in files if any(fnmatch(name, pattern) for pattern in _CHOSEN)}
        for name in sorted(wanted - {name for name in files if fnmatch(name, _IGNORED)}):
            found = folder / name
            promise(found.is_file(), f"{name} is not in the folder")
            promise(found.read_bytes() == files[name], f"{name} is not what the revision has")

    def _refusal(self, name: str, revision: str | None) -> str:
        try:
            folder = self._fetch(name, revision)
        except CheckpointError as error:
            return str(error)
        promise(False, f"{name!r} at {revision!r} gives {folder}")
        return ""

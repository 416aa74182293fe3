"""`repository:Q4_K_M`: one of the models that a hub's repository has in files that describe themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from ferrule.errors import CheckpointError

_ENDING = ".gguf"
FORM = (f"*{_ENDING}",)  # patterns of the form of weights in which repositories have several models
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_KIND = re.compile(r"[A-Za-z0-9_]{2,20}")
# Beside the model: encoders of images, and what a quantizer measured.
SKIPPED = ("*mmproj*.gguf", "imatrix*.gguf", "*/imatrix*.gguf", "*imatrix.gguf")


def split(name: str) -> tuple[str, str]:
    """Split a name into repository and kind; a name without a kind is returned with ""."""
    repository, colon, kind = name.rpartition(":")
    return (repository, kind) if colon and _KIND.fullmatch(kind) else (name, "")


def patterns(kind: str) -> tuple[str, ...]:
    """Return the patterns of the files of a kind: hubs write kinds as they like, in large or small letters."""
    forms = dict.fromkeys((kind, kind.upper(), kind.lower()))
    ends = (_ENDING, f"-?????-of-?????{_ENDING}")
    named = [f"{start}{form}{end}" for form in forms for end in ends for start in ("", "*[-._/]")]
    return (*named, *(f"{start}{form}/*{_ENDING}" for form in forms for start in ("", "*/")))


def kinds(names: Sequence[str]) -> list[str]:
    """Return the kinds of which a repository has a model: the endings of the files' names."""
    stems = [PurePosixPath(name).stem for name in names if _is_model(name)]
    return sorted({re.split(r"[-.]", _SHARD.sub("", stem))[-1] for stem in stems})


def only(names: Sequence[str]) -> tuple[str, ...]:
    """Return the files of the only model of a repository; none where it has none. Raises CheckpointError for
    several.
    """
    models = [name for name in names if _is_model(name)]
    if len({_SHARD.sub("", PurePosixPath(name).stem) for name in models}) > 1:
        listed = ", ".join(kinds(names))
        raise CheckpointError(
            "The repository has the model in several kinds.", f"Name one, as :KIND behind it: {listed}."
        )
    return tuple(models)


def file_of(folder: Path, repository: str, kind: str, names: Sequence[str]) -> Path:
    """Return the first file of the model of that kind in a downloaded folder. Raises CheckpointError for none, or
    several.
    """
    wanted = patterns(kind)
    files = folder.rglob(f"*{_ENDING}")
    found = sorted(file for file in files if _matches(file.relative_to(folder).as_posix(), wanted))
    models = {_SHARD.sub("", file.stem): file for file in reversed(found)}
    if len(models) == 1:
        return next(iter(models.values()))
    if models:
        raise CheckpointError(f"The repository {repository!r} has several models of {kind!r}: {', '.join(models)}.")
    raise missing(repository, kind, names)


def missing(repository: str, kind: str, names: Sequence[str]) -> CheckpointError:
    known = ", ".join(kinds(names))
    return CheckpointError(
        f"The repository {repository!r} has no model of the kind {kind!r}.", f"It has {known}." if known else ""
    )


def has(kind: str, names: Sequence[str]) -> bool:
    """Return whether one of the files is a model of that kind."""
    return any(_matches(name, patterns(kind)) for name in names)


def _is_model(name: str) -> bool:
    return name.endswith(_ENDING) and not any(fnmatch(name, pattern) for pattern in SKIPPED)


def _matches(name: str, wanted: Sequence[str]) -> bool:
    return _is_model(name) and any(fnmatch(name, pattern) for pattern in wanted)

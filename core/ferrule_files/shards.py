"""What the formats share: which files hold the weights, and a progress bar over their bytes."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ferrule.errors import CheckpointError, ConfigError
from ferrule.log import Log
from ferrule.small_files import read_json
from ferrule_files.locations import Locations

_log = Log("worker")
_TOLD_SECONDS = 10.0  # from one line to the next
_LONG_SECONDS = 3.0  # of loading that is told when it ends, if not before

# What every format gets, and may have no use for.
_COMMON = frozenset({"use_tqdm_on_load", "ignore_patterns", "pt_load_map_location"})

RANKS = "model-rank-*-part-*.safetensors"  # the state of vLLM's workers

# Files beside the weights that have the same endings: other layouts of the same weights, and a trainer's state.
_OTHERS = (RANKS, "consolidated*", "training_args.*", "optimizer*", "scheduler.*", "rng_state*", "adapter_*")


def weight_files(folder: Path, ending: str, single: str, ignore: Sequence[str] = (), start: str = "") -> list[Path]:
    """Return the files of a folder that hold weights: `single`, else those that `single`.index.json names, else all
    that match. `ignore` are patterns of files not to read; a file that an index names is never ignored. `start` is the
    beginning of the names of another layout than that of transformers.
    """
    names = [file.name for file in sorted(folder.glob("*")) if file.is_file()]
    return [folder / name for name in weight_names(folder, names, ending, single, ignore, start)]


def weight_names(
    folder: Path, names: Sequence[str], ending: str, single: str, ignore: Sequence[str] = (), start: str = ""
) -> list[str]:
    """Return names as `weight_files` does, chosen among `names`, which need not be in the folder. An index must be."""
    others = [form for form in _OTHERS if not start or not form.startswith(start)]

    def ignored(name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in ignore)

    if single in names and not ignored(single):
        return [single]
    index = folder / f"{single}.index.json"
    if index.is_file():
        return sorted(set(weight_map(index).values()))
    return [
        name
        for name in names
        if name.startswith(start) and name.endswith(ending)
        if not ignored(name) and not any(fnmatch(name, other) for other in others)
    ]


def weight_map(index: Path) -> dict[str, str]:
    """Return the file names of a shard index by tensor name. Raises CheckpointError, also for a file outside the
    folder.
    """
    content = read_json(index).get("weight_map")
    if not isinstance(content, dict) or not content:
        raise CheckpointError(f"{index} has no 'weight_map'.")
    for tensor, name in content.items():
        if not is_file_name(name):
            raise CheckpointError(f"{index}: tensor {tensor!r} is said to be in {name!r}, which is not a file name.")
    return content


def is_file_name(name: Any) -> bool:
    """Return whether this names a file of a folder, and can neither lead out of it nor be longer than a file system
    allows.
    """
    plain = isinstance(name, str) and name.isprintable() and "\\" not in name and ".." not in name
    return plain and Path(name).name == name != "" and len(name.encode()) < 256


def check_index(folder: Path, single: str, tensors: Mapping[Path, Iterable[str]]) -> None:
    """Check that each tensor is in one file only, and that an index agrees with the files. Raises CheckpointError."""
    counts = Counter(name for names in tensors.values() for name in names)
    index = folder / f"{single}.index.json"
    for name, count in counts.items():
        if count > 1:
            files = " and ".join(str(file) for file, names in tensors.items() if name in names)
            raise CheckpointError(f"Tensor {name!r} is in {files}; each may be in one file only.")
    if folder / single in tensors or not index.is_file():
        return
    said = weight_map(index)
    for name, shard in said.items():
        if name not in tensors[folder / shard]:
            raise CheckpointError(f"{folder / shard} has no tensor {name!r}, but {index.name} says it has one.")
    for file, names in tensors.items():
        for name in names:
            if name not in said:
                raise CheckpointError(f"{file} holds the tensor {name!r}, which {index.name} does not list.")


def missing_file(file: Path) -> CheckpointError:
    return CheckpointError(f"{file} is missing.", "The download or copy of the folder may be incomplete.")


def known_options(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the options of a format without those that every format gets. Raises ConfigError for an unknown one, and
    for a device that this machine does not have.
    """
    Locations(options)
    own = {key: value for key, value in options.items() if key not in _COMMON}
    for key in own:
        if key not in names:
            known = "takes " + ", ".join(names) if names else "takes no options"
            raise ConfigError(f"--model-loader-extra-config: unknown key {key!r}; this format {known}.")
    return own


class _Told:
    """A display of progress without a terminal: a log line now and then, and one at the end of a load that took
    long.
    """

    def __init__(self, total: int, what: str) -> None:
        self._total, self._done, self._said, self._what = total, 0, -1, what
        self._start = self._last = time.monotonic()

    def update(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._last >= _TOLD_SECONDS:
            self._last = now
            self._tell(now)

    def end(self) -> None:
        """Log the last state, unless it was logged or the load was too short to be worth a line."""
        now = time.monotonic()
        if now - self._start >= _LONG_SECONDS and self._said != self._done:
            self._tell(now)

    def _tell(self, now: float) -> None:
        self._said = self._done
        rate = self._done / max(now - self._start, 1e-9) / 2**20
        _log.info(self._what, done=f"{self._done / max(1, self._total):.0%}", rate=f"{rate:.0f} MiB/s")


@contextmanager
def progress(options: Mapping[str, Any], total: int, what: str = "loading weights") -> Iterator[Any]:
    """Show progress over `total` bytes, counted by `update`: a bar on a terminal, else lines in the log. `what`
    describes the work. ``--no-use-tqdm-on-load`` turns the bar off, and not the lines.
    """
    from tqdm import tqdm

    if not sys.stderr.isatty():
        told = _Told(total, what)
        yield told
        told.end()
        return
    hidden = not options.get("use_tqdm_on_load", True)
    with tqdm(total=total, unit="B", unit_scale=True, desc=what.capitalize(), disable=hidden) as bar:
        yield bar

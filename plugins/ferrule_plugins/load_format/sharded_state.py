"""`sharded_state`: the state of a model's workers as vLLM saves it, ``model-rank-{rank}-part-{part}.safetensors``.

What a worker holds is not what a checkpoint holds, see `ferrule_files.workers`. Here one worker reads the state of
all ranks, and puts the parts of each tensor together.
https://docs.vllm.ai/en/stable/examples/others/save_sharded_state.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ferrule import checkpoint
from ferrule.errors import CheckpointError, ConfigError
from ferrule.interfaces.model import Model
from ferrule_files.safetensors import read_header, shapes
from ferrule_files.shards import RANKS, is_file_name, known_options, missing_file, progress
from ferrule_plugins.load_format.safetensors import Safetensors

if TYPE_CHECKING:
    import torch

PATTERN = "model-rank-{rank}-part-{part}.safetensors"
_MAX_RANKS = 1024


class ShardedState(Safetensors):
    """A reader of the state that vLLM's workers save, which puts the parts of all ranks together.

    Option: `pattern`, the name of a file, with ``{part}`` and, if there can be several ranks, ``{rank}``.
    """

    forms = ("*.safetensors",)
    options: tuple[str, ...] = ("pattern",)
    conformance = "ferrule_testkit.samples.load_format:SHARDED"

    @classmethod
    def refuses(cls, folder: Path | None) -> str | None:
        if folder is None:
            return "the model has no folder"
        return None if any(folder.glob(RANKS)) else f"{folder} has no {RANKS} file"

    def shapes(self, folder: Path | None, options: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]] | None:
        ranks = self._ranks(folder, options)
        if len(ranks) > 1:
            return None  # the model decides how they are put together
        return {name: shape for file in ranks[0] for name, (shape, _) in shapes(file).items()}

    def tensors(
        self, folder: Path | None, model: Model, options: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        from ferrule_files.workers import WorkerState

        own = known_options(options, *self.options)
        ranks = [_Rank(files) for files in self._ranks(folder, options)]
        names = ranks[0].names
        for rank in ranks[1:]:
            rank.check_names(ranks[0])
        plain = len(ranks) == 1 and not hasattr(model, "naming")  # of another implementation, or of none
        state = None if plain else WorkerState(cast("torch.nn.Module", model), names)
        with progress(options, sum(sum(names.values()) for names in (rank.names for rank in ranks))) as bar:
            for name, parts in self._together(ranks, own):
                yield from [(name, parts[0])] if state is None else state.tensors(name, parts)
                bar.update(sum(rank.names[name] for rank in ranks))
        self.place = str(folder)

    def _ranks(self, folder: Path | None, options: Mapping[str, Any]) -> list[list[Path]]:
        """Return the files of each rank. Raises CheckpointError, ConfigError."""
        pattern = known_options(options, *self.options).get("pattern", PATTERN)
        if folder is None:
            raise CheckpointError("The model has no folder.")
        found = _files(folder, _expression(pattern), pattern, options.get("ignore_patterns", ()))
        stated = checkpoint.read(folder) if (folder / "config.json").is_file() else {}
        if stated.get("quantization_config") or stated.get("compression_config"):
            raise CheckpointError(
                f"{folder} has the state of a quantized model, which is laid out for vLLM's kernels.",
                "Serve the checkpoint that it was made from.",
            )
        return found

    def _together(self, ranks: Sequence[_Rank], options: Mapping[str, Any]) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Yield each name with the parts of all ranks, which wait for each other."""
        readers = [self._read_rank(rank, options) for rank in ranks]
        waiting: dict[str, dict[int, torch.Tensor]] = {}
        for _ in ranks[0].names:
            for index, reader in enumerate(readers):
                name, tensor = next(reader)
                parts = waiting.setdefault(name, {})
                parts[index] = tensor
                if len(parts) == len(ranks):
                    del waiting[name]
                    yield name, [parts[each] for each in range(len(ranks))]

    def _read_rank(self, rank: _Rank, options: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        own = {key: value for key, value in options.items() if key != "pattern"}
        for file, sizes in rank.files.items():
            for name, tensor in self.read(file, sizes, own):
                self.place = str(file)
                yield name, tensor


class _Rank:
    """The files of one rank, with the bytes of each tensor; `names` are the tensors of all files."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = {file: read_header(file) for file in files}
        self.names: dict[str, int] = {}
        for file, sizes in self.files.items():
            twice = self.names.keys() & sizes.keys()
            if twice:
                raise CheckpointError(f"{file} holds {min(twice)!r}, which another part of the same rank holds too.")
            self.names.update(sizes)

    def check_names(self, first: _Rank) -> None:
        """Check the names of tensors. Raises CheckpointError where one of this rank and the first has tensors that the
        other lacks.
        """
        if different := self.names.keys() ^ first.names.keys():
            name = min(different)
            one, other = (self, first) if name in first.names else (first, self)
            raise CheckpointError(
                f"{next(iter(one.files))} and the other parts of its rank lack {name!r}, which "
                f"{next(iter(other.files)).name} or a part beside it has."
            )


def _expression(pattern: Any) -> re.Pattern[str]:
    """Return an expression for file names of that pattern, with the groups `part` and, where the pattern has one,
    `rank`.
    """
    fields = re.split(r"\{(rank|part)\}", pattern) if is_file_name(pattern) else []
    if fields[1::2].count("part") != 1 or fields[1::2].count("rank") > 1:
        raise ConfigError(
            f"--model-loader-extra-config: 'pattern' is the name of a file with one {{part}} and at most one {{rank}} "
            f"in it, not {pattern!r}.",
            f"Without it, files are named {PATTERN}.",
        )
    words = (rf"(?P<{field}>\d{{1,9}})" if index % 2 else re.escape(field) for index, field in enumerate(fields))
    return re.compile("".join(words))


def _files(folder: Path, expression: re.Pattern[str], pattern: str, ignore: Sequence[str]) -> list[list[Path]]:
    """Return the parts of each rank, in order. Raises CheckpointError where there are none, or one is missing."""
    names = [file.name for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []
    names = [name for name in names if not any(fnmatch(name, each) for each in ignore)]
    matches = [match for match in map(expression.fullmatch, names) if match]
    if not matches:
        raise CheckpointError(
            f"{folder} has no file {pattern}.", "--model-loader-extra-config '{\"pattern\": ...}' names other files."
        )
    found: dict[int, dict[int, Path]] = {}
    for match in matches:
        parts = found.setdefault(int(match.groupdict().get("rank") or 0), {})
        if int(match["part"]) in parts:
            raise CheckpointError(f"{folder} has files {pattern} with the same number written in two ways.")
        parts[int(match["part"])] = folder / match[0]
    for rank in range(min(max(found) + 1, _MAX_RANKS)):
        parts = found.get(rank, {})
        missing = next((part for part in range(max(1, len(parts))) if part not in parts), None)
        if missing is not None:
            raise missing_file(folder / pattern.replace("{rank}", str(rank)).replace("{part}", str(missing)))
    if len(found) > _MAX_RANKS:
        raise CheckpointError(f"{folder} has files of {len(found)} ranks; {_MAX_RANKS} at most are read.")
    return [[parts[part] for part in sorted(parts)] for _, parts in sorted(found.items())]

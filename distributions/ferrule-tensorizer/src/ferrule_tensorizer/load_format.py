"""`tensorizer`: one file of CoreWeave's tensorizer, which a Hugging Face model, vLLM's worker or `ferrule pack` wrote.

Names are those of the checkpoint, or vLLM's own, with merged projections. Settings are those of vLLM's
TensorizerConfig: https://docs.vllm.ai/en/latest/models/extensions/tensorizer/.
The layout is in `ferrule_tensorizer.layout`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ferrule import checkpoint
from ferrule.env import object_store
from ferrule.errors import CheckpointError, ConfigError
from ferrule.interfaces.load_format import WeightSource, WritesWeights
from ferrule.interfaces.model import Model
from ferrule_files.s3.store import SCHEME, Access
from ferrule_files.shards import known_options, progress, weight_files
from ferrule_tensorizer.crypt import read_key
from ferrule_tensorizer.key import Key
from ferrule_tensorizer.layout import BUFFER, Entry, read_index
from ferrule_tensorizer.read import Reading, read_tensors

if TYPE_CHECKING:
    import torch

    from ferrule_files.workers import WorkerState

SINGLE = "model.tensors"
_OTHERS = ((".safetensors", "model.safetensors"), (".bin", "pytorch_model.bin"), (".pt", "model.pt"))
_ENDING = ".tensors"
_MARKER = "vllm_tensorized_marker"
_KEYFILE = "encryption_keyfile"
_TEXTS = ("tensorizer_uri", "tensorizer_dir", _KEYFILE)
_SECRETS = ("s3_access_key_id", "s3_secret_access_key", "s3_endpoint")
_SWITCHES = ("vllm_tensorized", "verify_hash")
_NUMBERS = ("num_readers",)
_NAMES = (*_TEXTS, *_SECRETS, *_SWITCHES, *_NUMBERS)
_OUTER = "tensorizer_config"  # newer versions of vLLM have the settings in it
_MAX_READERS = 64
_SHARDED = re.compile(r"%0\dd|-rank-\d+\.tensors$")
# Buffers of rotary embeddings, which are made anew.
_DERIVED = re.compile(r"(^|\.)(cos_sin_cache|inv_freq|original_inv_freq|cos_cached|sin_cached)$")


@dataclass(frozen=True)
class _Settings:
    place: str | None  # a file, or an address
    key: str | None
    readers: int
    verify: bool
    of_vllm: bool
    access: Access
    ignore: Sequence[str]


class Tensorizer(WeightSource, WritesWeights):
    """A reader of tensorizer's files, one tensor at a time. Nothing in such a file is run as code or unpickled."""

    forms = ("*.tensors",)
    fetch_order = -1

    @classmethod
    def refuses(cls, folder: Path | None) -> str | None:
        if folder is None:
            return "the model has no folder"
        if not (folder / SINGLE).is_file():
            return f"{folder} has no {SINGLE}"
        others = (weight_files(folder, ending, single) for ending, single in _OTHERS)
        return "the folder has other weights too" if any(others) else None

    def shapes(self, folder: Path | None, options: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]] | None:
        settings = _settings(options)
        if settings.place is not None and settings.place.startswith(SCHEME):
            return None
        file = _file(folder, settings)
        if settings.of_vllm or _is_of_vllm(file):
            return None
        return {_plain(entry.name): entry.shape for entry in read_index(file).entries if not _is_derived(entry)}

    def tensors(
        self, folder: Path | None, model: Model, options: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        settings = _settings(options)
        file = _file(folder, settings)
        key = None if settings.key is None else read_key(_local(settings.key, settings.access))
        entries = [entry for entry in read_index(file).entries if not _is_derived(entry)]
        names = [_plain(entry.name) for entry in entries]
        state = _state(folder, model, names) if settings.of_vllm or _is_of_vllm(file) else None
        self.place = str(file)
        with progress(options, sum(entry.size for entry in entries)) as bar:
            for entry, tensor in read_tensors(file, Reading(settings.readers, settings.verify, key, set(entries))):
                name = _plain(entry.name)
                yield from [(name, tensor)] if state is None else state.tensors(name, [tensor])
                bar.update(entry.size)
        self.place = str(folder or file)

    @classmethod
    def write(
        cls, into: Path, forms: Mapping[str, torch.Tensor], tensors: Iterable[tuple[str, torch.Tensor]], **options: Any
    ) -> Mapping[str, Any]:
        """Write one file, encrypted where `encryption_keyfile` names a file: one that is missing gets a new key."""
        from ferrule_tensorizer.write import supported, write_each

        named = known_options(options, _KEYFILE).get(_KEYFILE)
        key = None if named is None else Key.of(Path(named).expanduser().absolute())
        for name, form in forms.items():
            if not supported(form):
                raise ConfigError(f"--format tensorizer: {name} is of {form.dtype}, which the format does not have.")
        write_each(into / SINGLE, tensors, forms, None if key is None else key.value)
        if key is None:
            return {}
        key.save()
        return {_KEYFILE: str(key.file)}


def _is_of_vllm(file: Path) -> bool:
    return any(_plain(entry.name) == _MARKER for entry in read_index(file).entries)


def _state(folder: Path | None, model: Model, names: Sequence[str]) -> WorkerState | None:
    """Return the mapping from the tensors of vLLM's worker to a checkpoint's, for a native implementation; else None.

    Raises CheckpointError for a quantized model.
    """
    from ferrule_files.workers import WorkerState

    stated = checkpoint.read(folder) if folder and (folder / "config.json").is_file() else {}
    if stated.get("quantization_config") or stated.get("compression_config"):
        raise CheckpointError(
            f"{folder} is a quantized model, whose weights vLLM has laid out for vLLM's kernels.",
            "Serve the checkpoint that they were made from.",
        )
    return WorkerState(cast("torch.nn.Module", model), names) if hasattr(model, "naming") else None


def _plain(name: str) -> str:
    """Return a name without the dot in front that parameters of the model itself, and not of one of its modules,
    have.
    """
    return name.removeprefix(".")


def _is_derived(entry: Entry) -> bool:
    return _plain(entry.name) == _MARKER or (entry.kind == BUFFER and _DERIVED.search(entry.name) is not None)


def _file(folder: Path | None, settings: _Settings) -> Path:
    """Return the path of the file on this machine; a file in a store is downloaded. Raises CheckpointError."""
    if settings.place is not None:
        return _local(settings.place, settings.access)
    found = [] if folder is None else [file for file in sorted(folder.glob(f"*{_ENDING}")) if file.is_file()]
    files = [file for file in found if not any(fnmatch(file.name, pattern) for pattern in settings.ignore)]
    if folder is not None and folder / SINGLE in files:
        return folder / SINGLE
    if any(_SHARDED.search(file.name) for file in files):
        raise CheckpointError(
            f"{folder} has the parts of a model for several GPUs ({files[0].name}), which are not put together.",
            "Write the model with --tensor-parallel-size 1.",
        )
    if len(files) != 1:
        several = f"several {_ENDING} files: {', '.join(file.name for file in files[:3])}"
        raise CheckpointError(
            f"{folder} has {several if files else f'no {_ENDING} file'}.",
            '--model-loader-extra-config \'{"tensorizer_uri": "FILE"}\' names one.',
        )
    return files[0]


def _local(place: str, access: Access) -> Path:
    if _SHARDED.search(place):
        raise CheckpointError(
            f"{place} names the parts of a model for several GPUs, which are not put together.",
            "Write the model with --tensor-parallel-size 1.",
        )
    if place.startswith(SCHEME):
        from ferrule_files.s3.fetch import fetch_one

        return fetch_one(place, access)
    if "://" in place:
        raise ConfigError(f"{place!r}: only files and {SCHEME} addresses are read.", "Download the file, and name it.")
    file = Path(place).expanduser()
    if not file.is_file():
        raise CheckpointError(f"{file} is not a file.")
    return file


def _settings(options: Mapping[str, Any]) -> _Settings:
    """Return the settings in the options.

    Raises ConfigError for an unknown name or value; the message does not repeat values that may be secret.
    """
    own = known_options(options, *_NAMES, _OUTER)
    nested = own.pop(_OUTER, {})
    if not isinstance(nested, Mapping):
        raise ConfigError(f"--model-loader-extra-config: {_OUTER!r} must be an object.")
    own = {**known_options(nested, *_NAMES), **own}
    own = {name: value for name, value in own.items() if value is not None}
    for name, value in own.items():
        _check(name, value)
    said, folder = object_store(), own.get("tensorizer_dir")
    return _Settings(
        place=own.get("tensorizer_uri") or (f"{str(folder).rstrip('/')}/{SINGLE}" if folder else None),
        key=own.get(_KEYFILE),
        readers=own.get("num_readers", 1),
        verify=own.get("verify_hash", False),
        of_vllm=own.get("vllm_tensorized", False),
        access=Access(
            own.get("s3_endpoint") or said.tensorizer_endpoint,
            own.get("s3_access_key_id") or said.tensorizer_key_id,
            own.get("s3_secret_access_key") or said.tensorizer_secret,
        ),
        ignore=options.get("ignore_patterns", ()),
    )


def _check(name: str, value: Any) -> None:
    if name in _SWITCHES:
        valid, expected = isinstance(value, bool), "true or false"
    elif name in _NUMBERS:
        valid = type(value) is int and 1 <= value <= _MAX_READERS
        expected = f"a whole number from 1 to {_MAX_READERS}"
    else:
        valid, expected = isinstance(value, str) and bool(value), "a text"
    if not valid:
        shown = "" if name in _SECRETS else f", not {value!r:.80}"
        raise ConfigError(f"--model-loader-extra-config: {name!r} must be {expected}{shown}.")

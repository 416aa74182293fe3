"""How prompts become vectors: what the files of sentence-transformers in a model's folder say, and the user.

https://sbert.net/docs/sentence_transformer/usage/custom_models.html describes ``modules.json`` and the folders of its
modules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

from ferrule.errors import CheckpointError, ConfigError
from ferrule.interfaces.model import PoolingKind, PoolingSpec
from ferrule.small_files import MAX_BYTES, read_json, read_small

_MODULES = "modules.json"
_KINDS = get_args(PoolingKind)
_FLAGS: Mapping[str, str] = {  # keys of a Pooling module that are true for what it does
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


def read_pooling(folder: Path, options: Mapping[str, Any]) -> PoolingSpec:
    """Read a folder's ``modules.json``, and apply `options`, those of --pooler-config.

    Raises ConfigError for an option that there is not, CheckpointError for modules that are not applied.
    """
    known = {"pooling_type", "normalize"}
    if unknown := sorted(options.keys() - known):
        raise ConfigError(f"--pooler-config has no {unknown[0]!r}.", f"There are {', '.join(sorted(known))}.")
    stated = _stated(folder) if (folder / _MODULES).is_file() else PoolingSpec()
    kind, normalize = options.get("pooling_type"), options.get("normalize")
    if kind is not None and (not isinstance(kind, str) or kind.lower() not in _KINDS):
        raise ConfigError(f"--pooler-config.pooling_type is one of {', '.join(_KINDS)}, not {kind!r:.40}.")
    if normalize is not None and not isinstance(normalize, bool):
        raise ConfigError(f"--pooler-config.normalize is true or false, not {normalize!r:.40}.")
    return PoolingSpec(
        kind=stated.kind if kind is None else cast(PoolingKind, kind.lower()),
        normalize=stated.normalize if normalize is None else normalize,
    )


def _stated(folder: Path) -> PoolingSpec:
    file = folder / _MODULES
    try:
        modules = json.loads(read_small(file, MAX_BYTES, "configuration"))
        if not isinstance(modules, list):
            raise ValueError("an object")
        named = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in modules]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as a list of modules: {error}.") from None
    kind: PoolingKind | None = None
    for name, path in named:
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise CheckpointError(f"{file} has a module in another folder, {path!r:.80}.")
        if name == "Pooling":
            kind = _kind(folder / path / "config.json")
        elif name not in ("Transformer", "Normalize"):
            raise CheckpointError(
                f"{file} has a module {name}, which is not applied here.",
                "Vectors without it would be others. Take a checkpoint of Transformer, Pooling and Normalize.",
            )
    return PoolingSpec(kind=kind, normalize=any(name == "Normalize" for name, _ in named))


def _kind(file: Path) -> PoolingKind:
    """Return the kind of pooling that a Pooling module does, by its one flag that is set, or in newer files by name."""
    config = read_json(file)
    found = [str(config["pooling_mode"])] if "pooling_mode" in config else []
    found = found or [kind for flag, kind in _FLAGS.items() if config.get(flag) is True]
    if len(found) != 1 or found[0] not in _KINDS:
        raise CheckpointError(
            f"{file} pools by {' and '.join(found) or 'nothing'}; there are {', '.join(_KINDS)}.",
            "Choose one with --pooler-config.",
        )
    return cast(PoolingKind, found[0])

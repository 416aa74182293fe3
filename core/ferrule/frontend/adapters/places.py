"""Where adapters may be loaded from while the server runs: only below folders that its operator has named.

A path of a client is compared once symbolic links are followed, and so are the files of the adapter: none of them may
lead out of the folder that was named. What a path leads to is not told to the client.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ferrule.config import ResolvedLoRA
from ferrule.errors import ForbiddenError, RequestError
from ferrule.locate.localise import ADAPTER_CONFIG, ADAPTER_FILES

_HINT = "Folders for adapters are named by --allowed-lora-path and --lora-resolver-cache-dir."


class Places:
    """The folders below which adapters may be loaded from."""

    def __init__(self, section: ResolvedLoRA) -> None:
        named = [module.path for module in section.modules] + list(section.allowed_lora_path)
        if section.lora_resolver_cache_dir:
            named.append(section.lora_resolver_cache_dir)
        self._roots = tuple(Path(os.path.realpath(os.path.expanduser(name))) for name in named)

    def folder(self, path: str) -> Path:
        """Return the folder of an adapter without symbolic links. Blocks. Raises RequestError, ForbiddenError."""
        if "\0" in path or not os.path.isabs(path):
            raise RequestError("lora_path must be the absolute path of a folder on the server.", "lora_path")
        folder = Path(os.path.realpath(path))
        root = next((root for root in self._roots if folder.is_relative_to(root)), None)
        if root is None:
            raise ForbiddenError(f"lora_path is not below a folder for adapters. {_HINT}", "lora_path")
        if not os.path.isfile(folder / ADAPTER_CONFIG):
            raise RequestError(f"lora_path is not a folder with an {ADAPTER_CONFIG}.", "lora_path")
        if any(not file.is_relative_to(root) for file in _real_files(folder)):
            raise ForbiddenError("lora_path has a file that is a link to another folder.", "lora_path")
        return folder


def _real_files(folder: Path) -> Iterator[Path]:
    return (Path(os.path.realpath(file)) for pattern in ADAPTER_FILES for file in folder.glob(pattern))

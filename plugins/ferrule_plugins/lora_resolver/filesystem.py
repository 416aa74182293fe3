"""`filesystem`: adapters in the subfolders of one folder, each under the name of its subfolder."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from ferrule.interfaces.lora_resolver import LoRAResolver
from ferrule_plugins.lora_resolver.base_model import BESIDE, CONFIG, WEIGHTS, is_for


class FilesystemResolver(LoRAResolver):
    def refuses(self) -> str | None:
        return None if self.context.cache_dir is not None else "it needs --lora-resolver-cache-dir."

    async def resolve(self, lora_name: str) -> Path | None:
        return await asyncio.to_thread(self._find, lora_name)

    def _find(self, name: str) -> Path | None:
        """Return the subfolder of this name: itself, and not what a path or a symbolic link leads to. Links of its
        files stay in the resolver's folder.
        """
        parent = self.context.cache_dir
        if parent is None or name.startswith(".") or "\0" in name or os.path.basename(name) != name:
            return None
        try:
            root = parent.resolve(strict=True)
            folder = (root / name).resolve(strict=True)
        except OSError:  # there is none, or the name is too long for one
            return None
        files = (Path(os.path.realpath(file)) for name in (CONFIG, *WEIGHTS, *BESIDE) for file in folder.glob(name))
        if folder != root / name or not all(file.is_relative_to(root) for file in files):
            return None
        return folder if is_for(folder, self.context.base_models) else None

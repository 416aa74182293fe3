"""`hf_hub`: adapters in the repositories of the server's hub that its operator has named, and in no others."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

from ferrule.interfaces.lora_resolver import LoRAResolver
from ferrule_plugins.lora_resolver.base_model import BESIDE, CONFIG, WEIGHTS, is_for

_NAME = re.compile(
    r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(?:/(?P<folder>[\w-][\w.-]*(?:/[\w-][\w.-]*)*))?", re.ASCII
)


class HubResolver(LoRAResolver):
    """A resolver of the names REPOSITORY and REPOSITORY/FOLDER."""

    def refuses(self) -> str | None:
        return None if self.context.repositories else "it needs --lora-resolver-hf-repo-list."

    async def resolve(self, lora_name: str) -> Path | None:
        found = _NAME.fullmatch(lora_name)
        if found is None or not self._named(lora_name):
            return None
        return await asyncio.to_thread(self._fetch, found["repository"], found["folder"] or "")

    def _named(self, name: str) -> bool:
        return any(name == each or name.startswith(f"{each}/") for each in self.context.repositories)

    def _fetch(self, repository: str, folder: str) -> Path | None:
        """Return the folder of an adapter in a repository, None where it has none. Raises CheckpointError."""
        prefix = f"{folder}/" if folder else ""

        def choose(names: Sequence[str]) -> Sequence[str]:
            weights = next((name for name in WEIGHTS if prefix + name in names), WEIGHTS[0])
            return prefix + CONFIG, prefix + weights, *(prefix + pattern for pattern in BESIDE)

        place = self.context.fetch(repository, choose) / folder
        return place if is_for(place, self.context.base_models) else None

"""Adapters of teams: TEAM:NAME is the folder TEAM/NAME on a shared disk."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from ferrule.interfaces.lora_resolver import LoRAResolver, ResolverContext

_NAME = re.compile(r"([a-z0-9-]{1,64}):([a-z0-9-]{1,64})")


@dataclass(frozen=True)
class ShelfOptions:
    shelf: Annotated[str, Meta(description="Folder with a folder for each team.")] = ""


class ExampleResolver(LoRAResolver):
    Options = ShelfOptions
    conformance = "ferrule_example.conformance:SETTINGS"

    def __init__(self, context: ResolverContext, *, options: ShelfOptions) -> None:
        super().__init__(context)
        self._shelf = Path(options.shelf) if options.shelf else context.cache_dir

    def refuses(self) -> str | None:
        return None if self._shelf is not None else "it needs the option shelf."

    async def resolve(self, lora_name: str) -> Path | None:
        found = _NAME.fullmatch(lora_name)
        if found is None or self._shelf is None:
            return None
        folder = self._shelf / found[1] / found[2]
        try:
            config = json.loads((folder / "adapter_config.json").read_bytes()[: 1 << 20])
        except (OSError, ValueError, RecursionError):
            return None
        base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
        return folder if base in self.context.base_models else None

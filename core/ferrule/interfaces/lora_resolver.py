"""`lora_resolver`: where an adapter comes from that a request names and that is not loaded.

Entry point name = what ``--lora-resolvers`` takes. Each API process has its own instances and asks them in their order,
for one name at a time; a name that none of them knows is not asked for again for some seconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ferrule.interfaces.hub import Choose


@dataclass(frozen=True, kw_only=True)
class ResolverContext:
    """The part of the configuration that resolvers need.

    `fetch` downloads the chosen files of a repository by the hub of the server, as `ModelHub.fetch` does, and blocks.
    It raises CheckpointError, whose text is for the log.
    """

    base_models: tuple[str, ...]  # names by which an adapter's configuration may call its base model
    cache_dir: Path | None  # --lora-resolver-cache-dir
    repositories: tuple[str, ...]  # --lora-resolver-hf-repo-list
    fetch: Callable[[str, Choose], Path]


class LoRAResolver(ABC):
    """A finder of adapters by their names."""

    def __init__(self, context: ResolverContext) -> None:
        self.context = context

    def refuses(self) -> str | None:
        """Say why this resolver can find nothing as it is configured, or return None.

        A resolver that --lora-resolvers names and that refuses stops the start; one that is on by default is left out.
        """
        return None

    @abstractmethod
    async def resolve(self, lora_name: str) -> Path | None:
        """Return the folder of an adapter, or None for a name that is not known here.

        The name comes from a client: it is printable, and may be anything else. What is in the folder is checked by
        the server. Called on the event loop, so whatever blocks belongs into a thread. Other names are resolved
        meanwhile. An exception is logged, and counts as None.
        """

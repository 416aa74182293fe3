"""`command`: a sub-command of `ferrule`. Entry point name = what the user types."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ferrule.interfaces.plugins import Plugins


class Command(ABC):
    summary: str = ""  # one line for `ferrule --help`

    @abstractmethod
    def run(self, argv: Sequence[str], plugins: Plugins) -> int:
        """Parse `argv` (what follows the command's name), do the work, return the exit status."""

"""The adapters that a server has from its start."""

from __future__ import annotations

from collections.abc import Callable

from ferrule.config import ResolvedLoRA
from ferrule.config.adapters import first_adapters
from ferrule.errors import ConfigError, RequestError
from ferrule.types import Adapter


def read_first(section: ResolvedLoRA, read: Callable[[Adapter], object]) -> None:
    """Have each adapter of --lora-modules read and checked. Raises ConfigError, one line for each that cannot be
    used.
    """
    problems = []
    for adapter in first_adapters(section):
        try:
            read(adapter)
        except RequestError as error:
            problems.append(f"--lora-modules: {adapter.title}: {error.message}")
    if problems:
        raise ConfigError("\n".join(problems))

"""`EngineArgs` and `AsyncEngineArgs`: the options of an engine, as keyword arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ferrule import env
from ferrule.config import Config
from ferrule.config.parse import Parsed, parse_kwargs
from ferrule.config.unsupported import engine_sections
from ferrule.llm.backend import Backend
from ferrule.plugin import discover

_ALONE = {  # there is no other client, whom a long queue or a template of this one could harm
    "trust_request_chat_template": True,
    "max_waiting_requests": 1 << 31,
    "max_waiting_tokens": 1 << 40,
}


def read_options(model: str, **options: Any) -> Parsed:
    """Read options by name, over those of the environment. Raises ConfigError that names each wrong one."""
    return parse_kwargs(env.read(), engine_sections(), model=model, **{**_ALONE, **options})


class EngineArgs:
    """Options of `ferrule serve` that concern the engine, by name with underscores. Raises ConfigError at once.

    `config` has their values.
    """

    config: Config
    notices: Sequence[str]

    def __init__(self, model: str, **options: Any) -> None:
        parsed = read_options(model, **options)
        self.config = replace(parsed.config, frontend=replace(parsed.config.frontend, disable_log_requests=True))
        self.notices = parsed.notices

    def open(self) -> Backend:
        """Load the model. Raises StartupError."""
        return Backend(self.config, discover(), self.notices)


class AsyncEngineArgs(EngineArgs):
    """The options of `EngineArgs`, and whether each request is logged."""

    def __init__(self, model: str, *, disable_log_requests: bool = False, **options: Any) -> None:
        super().__init__(model, **options)
        frontend = replace(self.config.frontend, disable_log_requests=disable_log_requests)
        self.config = replace(self.config, frontend=frontend)

"""Which plugins a configuration chooses by name, and which are on without one. What `auto` takes is decided later."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ferrule.config.parse import config_schema
from ferrule.config.sections import Config
from ferrule.plugin import Plugins


def chosen_plugins(config: Config, plugins: Plugins) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) of each plugin that the options choose. Nothing is imported.

    Stat loggers that are on only because they are installed are left out: a broken one is a warning, see
    `open_loggers`.
    """
    for spec in config_schema().specs:
        kind = spec.option.kind
        if kind is None or (kind == "tokenizer" and config.model.skip_tokenizer_init):
            continue
        if spec.section == "lora" and not config.lora.enable_lora:
            continue
        value = getattr(getattr(config, spec.section), spec.name)
        for name in plugins.chosen(kind, value) if isinstance(value, tuple) else (value,):
            if name and (name != "auto" or name in plugins.names(kind)):
                yield kind, name
    for name in plugins.defaults("stat_logger"):
        if plugins.is_builtin("stat_logger", name) or plugins.is_named("stat_logger", name):
            yield "stat_logger", name
    yield from (("logits_processor", name) for name in allowed_processors(config, plugins))


def allowed_processors(config: Config, plugins: Plugins) -> list[str]:
    """Return the names of the logits processors that requests may use."""
    pattern = config.model.logits_processor_pattern
    return [name for name in plugins.names("logits_processor") if pattern is not None and re.fullmatch(pattern, name)]

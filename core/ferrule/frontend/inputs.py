"""What the frontend needs beside the engine. It is opened before weights are loaded, so that a fault is found early."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from ferrule.assembly.vocabulary import open_tokenizer
from ferrule.config import Resolved
from ferrule.errors import ConfigError, RequestError
from ferrule.frontend.admission.admit import sampling_defaults
from ferrule.frontend.guided.constraint import Parsers
from ferrule.frontend.text.render import Templates, choose_templates
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.tokenizer import Tokenizer


class Inputs(Struct, frozen=True):
    """The tokenizer (None: without one), the chat templates by name, and the parsers of output."""

    tokenizer: Tokenizer | None
    templates: Templates
    parsers: Parsers


def open_inputs(config: Resolved, plugins: Plugins) -> Inputs:
    """Open all of it, and read the generation config. Model and tokenizer are folders. Raises StartupError."""
    parsers = open_parsers(config, plugins)
    tokenizer = open_tokenizer(config, plugins, Path(config.model.tokenizer))
    templates = choose_templates(config.frontend.chat_template, tokenizer.chat_template if tokenizer else None)
    if config.frontend.chat_template is not None:
        _check_template(templates["default"])
    sampling_defaults(config, Path(config.model.model))
    return Inputs(tokenizer, templates, parsers)


def open_parsers(config: Resolved, plugins: Plugins) -> Parsers:
    """The parsers that the options name. Raises PluginError."""
    reasoning, tools = config.frontend.reasoning_parser, config.frontend.tool_call_parser
    return Parsers(
        reasoning=plugins.load("reasoning_parser", reasoning) if reasoning else None,
        tools=plugins.load("tool_parser", tools) if tools else None,
    )


def _check_template(text: str) -> None:
    """Refuse a template of the operator's that cannot be parsed; that of a checkpoint only fails conversations."""
    from ferrule.frontend.text.template import compile_template  # the template engine, which children alone need else

    try:
        compile_template(text)
    except RequestError as error:
        raise ConfigError(f"--chat-template: {error.message}") from None

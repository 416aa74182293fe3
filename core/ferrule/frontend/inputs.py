"""The parts of the frontend besides the engine, opened before weights are loaded, so that a fault is found early."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from ferrule import log
from ferrule.assembly.vocabulary import open_tokenizer
from ferrule.config import Resolved
from ferrule.config.chosen import chosen_plugins
from ferrule.errors import ConfigError, RequestError
from ferrule.frontend.admission.admit import sampling_defaults
from ferrule.frontend.admission.prompt_adapters import check_prompt_adapters
from ferrule.frontend.output.parse import Parsers
from ferrule.frontend.text.builtin import Templates, builtin_file, choose_templates
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.plugin import Component, check_plugins

_logger = log.get("frontend")


class Inputs(Struct, frozen=True):
    """The tokenizer (None without one), the chat templates by name, and the parsers of output."""

    tokenizer: Tokenizer | None
    templates: Templates
    parsers: Parsers


def open_inputs(config: Resolved, plugins: Plugins) -> Inputs:
    """Open tokenizer, templates and parsers, read the generation config, and look for prompt adapters.

    Model and tokenizer are folders. The plugins that the frontend will use are checked first, including those that are
    made later. Raises StartupError.
    """
    check_plugins(plugins, chosen_plugins(config, plugins), Component.FRONTEND)
    parsers = open_parsers(config, plugins)
    tokenizer = open_tokenizer(config, plugins, Path(config.model.tokenizer))
    templates = choose_templates(config.frontend.chat_template, tokenizer.chat_template if tokenizer else None)
    if config.frontend.chat_template is not None:
        _check_template(config.frontend.chat_template, templates["default"])
    sampling_defaults(config, Path(config.model.model))
    check_prompt_adapters(config.prompt_adapter)
    return Inputs(tokenizer, templates, parsers)


def open_parsers(config: Resolved, plugins: Plugins) -> Parsers:
    """Return the parsers that the options name; make each once, to see that it can be made. Raises PluginError."""
    reasoning, tools = config.frontend.reasoning_parser, config.frontend.tool_call_parser
    parsers = Parsers(
        reasoning=plugins.factory("reasoning_parser", reasoning) if reasoning else None,
        tools=plugins.factory("tool_parser", tools) if tools else None,
        reasoning_title=plugins.title("reasoning_parser", reasoning),
        tools_title=plugins.title("tool_parser", tools),
    )
    if parsers.reasoning is not None:
        parsers.reasoning()
    if parsers.tools is not None:
        parsers.tools([])
    return parsers


def _check_template(option: str, text: str) -> None:
    """Refuse a template of the operator's that cannot be parsed; a checkpoint's template only fails conversations.

    A built-in template that replaces a file of vLLM's examples is logged.
    """
    from ferrule.frontend.text.template import compile_template  # otherwise imported by children alone

    try:
        compile_template(text)
    except RequestError as error:
        raise ConfigError(f"--chat-template: {error.message}") from None
    file = builtin_file(option)
    if file is not None and file.stem != option:
        _logger.info("--chat-template %s is not a file here: the built-in template %s is used", option, file.stem)

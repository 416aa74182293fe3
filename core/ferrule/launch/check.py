"""The checks of a start before it loads weights, in API processes and, with `--dry-run`, in the launcher."""

from __future__ import annotations

from dataclasses import replace

from ferrule import checkpoint, log
from ferrule.api.server import Front, open_front
from ferrule.assembly.engine import open_executor
from ferrule.config import Resolved, WorkerSettings
from ferrule.config.chosen import chosen_plugins
from ferrule.frontend.admission.prompt_adapters import open_prompt_adapters
from ferrule.frontend.inputs import Inputs, open_inputs, open_parsers
from ferrule.hooks import HookRunner, open_hooks
from ferrule.interfaces.plugins import Plugins
from ferrule.locate.localise import check_remote, draft_model, is_path, localise
from ferrule.plugin import Component, check_plugins
from ferrule.shared_memory.board import Board
from ferrule.slow_start import waiting

_logger = log.get("launch")


def open_api(
    config: Resolved, plugins: Plugins, board: Board | None = None, hooks: HookRunner | None = None
) -> tuple[Front, Inputs]:
    """Open everything that an API process needs besides the engine. Model and tokenizer are folders.

    Raises StartupError.
    """
    with waiting("routers, certificates and middleware to be opened"):
        front = open_front(config, plugins, board, hooks)
    with waiting("the tokenizer, the chat template and the parsers to be opened"):
        return front, open_inputs(config, plugins)


_MADE_ALONE = frozenset({"policy", "router"})  # kinds whose plugins need no model, and no arguments


def check_start(config: Resolved, plugins: Plugins) -> Resolved:
    """Raise the StartupError with which a start would end before it loads weights; return the configuration with what
    was found out, such as the method that a draft model is for.

    The check opens what a start opens, reads adapters, and lets the executor check what it would load. A model,
    tokenizer or adapter that is not a folder is not fetched: its hub is asked for its files, and what they contain is
    not checked.
    """
    _check_plugins(config, plugins)
    hooks = open_hooks(plugins, config)
    names = (config.model.model, config.model.tokenizer, *filter(None, draft_model(config.speculative)[:1]))
    if all(map(is_path, names)):
        local = localise(_with_local_adapters(config), plugins)
        checkpoint.configured(local.model, plugins)
        open_api(local, plugins, hooks=hooks)
        info = open_executor(local, plugins).check(WorkerSettings.of(local), plugins)
        if info is not None:
            open_prompt_adapters(local.prompt_adapter, info)
        config = replace(config, speculative=local.speculative)
    else:
        open_front(config, plugins, hooks=hooks)
        open_parsers(config, plugins)
        open_executor(config, plugins)
    for name in check_remote(config, plugins):
        _logger.warning(
            "the hub cannot be asked now: whether it has %s, and what is in its files, was not checked", name
        )
    return config


def _with_local_adapters(config: Resolved) -> Resolved:
    """Return the configuration without the adapters that a hub would be asked for."""
    modules = tuple(module for module in config.lora.modules if is_path(module.path))
    prompts = tuple(adapter for adapter in config.prompt_adapter.modules if is_path(adapter.path))
    lora, prompt_adapter = replace(config.lora, modules=modules), replace(config.prompt_adapter, modules=prompts)
    return replace(config, lora=lora, prompt_adapter=prompt_adapter)


def _check_plugins(config: Resolved, plugins: Plugins) -> None:
    """Import the chosen plugins of other distributions, whichever process would, and make those that need no model.

    Built-in plugins are not imported: many of them bring torch.
    """
    chosen = [(kind, name) for kind, name in chosen_plugins(config, plugins) if not plugins.is_builtin(kind, name)]
    found = check_plugins(plugins, chosen, *Component)
    for (kind, _), make in found.items():
        if kind in _MADE_ALONE:
            make()

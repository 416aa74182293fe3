"""What `--dry-run` checks beside the options themselves: everything that a start needs before it loads weights."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from ferrule import checkpoint
from ferrule.config import Resolved
from ferrule.config.chosen import chosen_plugins
from ferrule.errors import ConfigError
from ferrule.frontend.inputs import open_inputs, open_parsers
from ferrule.interfaces.plugins import Plugins
from ferrule.launch.localise import is_path, localise
from ferrule.plugin import Component, check_plugins

_MADE_ALONE = frozenset({"policy", "router"})  # kinds whose plugins are made before the model is loaded, from nothing


def check_start(config: Resolved, plugins: Plugins) -> None:
    """Raise the StartupError that a start would end with before it loads weights.

    A model or tokenizer that only a hub has is not fetched, and what is read from its folder not checked.
    """
    _check_server(config)
    _check_extension(config.parallel.worker_extension_cls)
    _check_plugins(config, plugins)
    if not (is_path(config.model.model) and is_path(config.model.tokenizer)):
        open_parsers(config, plugins)
        return
    local = localise(config, plugins)
    checkpoint.read(Path(local.model.hf_config_path), local.model.hf_overrides)
    open_inputs(local, plugins)


def _check_plugins(config: Resolved, plugins: Plugins) -> None:
    """Import the plugins of other distributions that are chosen, whichever process would; make those that can be made
    without a model. Built-in ones are not imported: many of them bring torch."""
    chosen = [(kind, name) for kind, name in chosen_plugins(config, plugins) if not plugins.is_builtin(kind, name)]
    found = check_plugins(plugins, chosen, *Component)
    for (kind, _), make in found.items():
        if kind in _MADE_ALONE:
            make()


def _check_server(config: Resolved) -> None:
    """TLS files and middleware. The HTTP server is only imported where an option needs it."""
    front = config.frontend
    if front.ssl_certfile or front.ssl_keyfile or front.ssl_ca_certs or front.ssl_cert_reqs:
        from ferrule.api.tls import context_of

        context_of(front)
    if front.middleware:
        from ferrule.api.middleware import surround

        async def app(scope: object, receive: object, send: object) -> None:
            """Stands for the application."""

        surround(app, front)


def _check_extension(target: str) -> None:
    """Find the class of --worker-extension-cls without importing its module, which may bring torch."""
    if not target:
        return
    module, _, name = target.replace(":", ".").rpartition(".")
    try:
        spec = find_spec(module) if module else None
    except (ImportError, ValueError) as error:
        raise ConfigError(f"--worker-extension-cls {target}: {error}.") from None
    if spec is None:
        raise ConfigError(f"--worker-extension-cls {target}: there is no module {module!r}.")
    if spec.origin and spec.origin.endswith(".py"):
        text = Path(spec.origin).read_text(encoding="utf-8", errors="replace")
        if not re.search(rf"\b{re.escape(name)}\b", text):
            raise ConfigError(f"--worker-extension-cls {target}: module {module} has no {name}.")

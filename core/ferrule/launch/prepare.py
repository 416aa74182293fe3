"""The first steps of every command that runs an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

from ferrule import log
from ferrule.config import Config, Resolved
from ferrule.config.places import placed
from ferrule.config.plugins import configured
from ferrule.config.resolve import check_names, one_worker, remarks, resolve, with_scheduler, with_speculator
from ferrule.errors import ConfigError
from ferrule.launch.resources import check_memory
from ferrule.plugin import KINDS, Component, Plugins, check_plugins

_logger = log.get("launch")


def open_log(config: Config, process: str) -> None:
    """Set up this process's log from options and variables. Raises ConfigError."""
    observability = config.observability
    if not config.env.configure_logging:
        return
    if observability.log_config_file:
        log.setup_from(observability.log_config_file)
    else:
        log.setup(observability.log_level, process, prefix=config.env.logging_prefix)


def reload_log(config: Config) -> None:
    """Apply the log's level, or its file of settings as it is now. Raises ConfigError."""
    observability = config.observability
    if not config.env.configure_logging:
        return
    if observability.log_config_file:
        log.setup_from(observability.log_config_file)
    else:
        log.set_level(observability.log_level)


def prepare(config: Config, notices: Sequence[str], plugins: Plugins, area: str) -> tuple[Resolved, Plugins]:
    """Set up the log, apply the plugin options, fill in open values, and check names.

    Nothing is fetched, and no plugin is loaded except those of the launcher's that have options. Raises ConfigError and
    PluginError, also for options of a plugin that cannot be used, and StartupError where the system gives too little
    memory.
    """
    with placed(config):
        return _prepare(config, notices, plugins, area)


def _prepare(config: Config, notices: Sequence[str], plugins: Plugins, area: str) -> tuple[Resolved, Plugins]:
    open_log(config, area)
    check_memory()
    chosen = configured(plugins, config.plugins, config.env)
    # A command reports its own unused options.
    unused = [sentence for kind in KINDS if kind != "command" for _, sentence in chosen.unused(kind)]
    for notice in (*notices, *chosen.problems, *unused):
        _logger.warning("%s", notice)
    resolved = resolve(config)
    for remark in remarks(resolved, chosen):
        _logger.warning("%s", remark)
    resolved = one_worker(resolved, chosen)
    chosen = with_scheduler(resolved, chosen)
    chosen = replace(chosen, import_timeout=resolved.plugins.plugin_import_timeout)
    check_names(resolved, chosen)
    resolved = with_speculator(resolved, chosen)
    _check_packages(resolved.cache.prefix_caching_hash_algo)
    for id in chosen.options:
        kind, _, name = id.partition(":")
        chosen.find(kind, name)
    check_plugins(chosen, (), Component.LAUNCHER)
    return resolved, chosen


def _check_packages(hash_algo: str) -> None:
    """Raise ConfigError where a package that `--prefix-caching-hash-algo` needs is not installed."""
    needed = [package for part, package in (("cbor", "cbor2"), ("xxhash", "xxhash")) if part in hash_algo]
    missing = " and ".join(package for package in needed if find_spec(package) is None)
    if missing:
        raise ConfigError(
            f"--prefix-caching-hash-algo {hash_algo} needs {missing}, which is not installed.",
            "pip install 'ferrule[hashes]' installs what it needs.",
        )

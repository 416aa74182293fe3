"""`ferrule serve`: one command serves a model over HTTP."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ferrule import log
from ferrule.config import Config
from ferrule.config.help import CommandUsage
from ferrule.config.option import opt
from ferrule.config.parse import Parsed, parse_command
from ferrule.config.places import placed
from ferrule.config.unsupported import engine_sections
from ferrule.env import Environment
from ferrule.errors import ConfigError
from ferrule.interfaces.command import Command
from ferrule.interfaces.plugins import Plugins

_logger = log.get("launch")

USAGE = CommandUsage("ferrule serve", "Serve a model over HTTP.", "model")
EMBEDDED_NAME = "ferrule-tiny"
_EMBEDDED_CACHE = 0.5  # GiB, for 100 requests of its longest: the default would take memory and time for nothing


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Options of the command itself."""

    dry_run: str | None = opt(
        None,
        "Print the resolved configuration, where each value comes from, and the processes, and end. "
        "--dry-run=all: the defaults too; --dry-run=json: for machines.",
        bare=True,
        choices=("changed", "all", "json"),
        server=True,
        common=True,
    )


def sections() -> Mapping[str, type]:
    """Return all sections of options of the command."""
    return {**engine_sections(), "serve": ServeConfig}


class ServeCommand(Command):
    summary = "Serve a model over HTTP."

    def run(self, argv: Sequence[str], plugins: Plugins) -> int:
        """Serve until SIGTERM. Returns 0 after a drain, non-zero when something failed."""
        parsed = parse_command(argv, USAGE, plugins, sections=sections())
        if parsed is None:
            return 0
        with placed(parsed.config):
            return _serve(argv, parsed, plugins) if parsed.extra["serve"].dry_run is None else _dry_run(parsed, plugins)


def _serve(argv: Sequence[str], parsed: Parsed, plugins: Plugins) -> int:
    from ferrule.hooks import open_hooks
    from ferrule.launch.prepare import prepare
    from ferrule.launch.reload import Reloader
    from ferrule.launch.resources import check_limits
    from ferrule.launch.supervisor import Supervisor
    from ferrule.locate.localise import localise
    from ferrule_plugins.command.families import suggestions
    from ferrule_plugins.command.listen import listening, probing

    check_limits()
    config, chosen = prepare(with_model(parsed.config), parsed.notices, plugins, "launch")
    reloader = Reloader(parsed.config, lambda: _reread(argv, plugins))
    with listening(config.frontend) as listener, probing(config.frontend) as probe:
        config = localise(config, chosen)
        for suggestion in suggestions(config, chosen):
            _logger.info("%s", suggestion)
        if config.frontend.disable_frontend_multiprocessing:
            from ferrule.launch.api_main import run_one_process  # brings the HTTP server, which a launcher lacks

            return run_one_process(config, chosen, listener, reloader)
        hooks = open_hooks(chosen, config)
        hooks.process_started("launcher", config)
        status = Supervisor(config, chosen, listener, reloader, hooks, probe).run()
        hooks.process_stopping("launcher", status)
        return status


def _reread(argv: Sequence[str], plugins: Plugins) -> Config:
    """Parse the same command line again: the configuration file may have changed. Raises ConfigError."""
    parsed = parse_command(argv, USAGE, plugins, sections=sections())
    if parsed is None:
        raise ConfigError("The command line asks for help.")
    return parsed.config


def _dry_run(parsed: Parsed, plugins: Plugins) -> int:
    from ferrule.launch.check import check_start
    from ferrule.launch.prepare import prepare
    from ferrule_plugins.command.dry_run import report
    from ferrule_plugins.command.listen import check_address

    config, chosen = prepare(with_model(parsed.config), parsed.notices, plugins, "launch")
    check_address(config.frontend)
    config = check_start(config, chosen)
    print(report(parsed, config, chosen, sections(), parsed.extra["serve"].dry_run))
    return 0


def with_model(config: Config) -> Config:
    """Return the configuration with the embedded model where it names none."""
    if config.model.model:
        return config
    from ferrule_contrib import tiny

    names = config.model.served_model_name or (EMBEDDED_NAME,)
    print(f"No model was named: serving the embedded one as {names[0]}.", file=sys.stderr, flush=True)
    model = dataclasses.replace(config.model, model=str(tiny.path()), served_model_name=names)
    env = config.env
    if env.cpu_kvcache_space == Environment().cpu_kvcache_space:
        env = replace(env, cpu_kvcache_space=_EMBEDDED_CACHE)
    return dataclasses.replace(config, model=model, env=env)

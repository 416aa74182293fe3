"""`ferrule serve`: one command serves a model over HTTP."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from ferrule.config import Config
from ferrule.config.help import Usage
from ferrule.config.parse import parse_command
from ferrule.interfaces.command import Command
from ferrule.interfaces.plugins import Plugins

USAGE = Usage("ferrule serve", "Serve a model over HTTP.", "model")
EMBEDDED_NAME = "ferrule-tiny"


class ServeCommand(Command):
    summary = "Serve a model over HTTP."

    def run(self, argv: Sequence[str], plugins: Plugins) -> int:
        """Serve until SIGTERM. Returns 0 after a drain, non-zero when something failed."""
        parsed = parse_command(argv, USAGE, plugins)
        if parsed is None:
            return 0
        from ferrule.config.hub import localise
        from ferrule.launch.api_main import run_one_process
        from ferrule.launch.listen import bind
        from ferrule.launch.prepare import prepare
        from ferrule.launch.supervisor import Supervisor
        from ferrule.plugin.hooks import open_hooks

        config, chosen = prepare(with_model(parsed.config), parsed.notices, plugins, "launch")
        listener = bind(config.frontend.host, config.frontend.port)
        config = localise(config)
        if config.frontend.disable_frontend_multiprocessing:
            return run_one_process(config, chosen, listener)
        hooks = open_hooks(chosen)
        hooks.process_started("launcher", config)
        status = Supervisor(config, chosen, listener).run()
        hooks.process_stopping("launcher", status)
        return status


def with_model(config: Config) -> Config:
    """Without a model, the embedded one."""
    if config.model.model:
        return config
    from ferrule_contrib import tiny

    names = config.model.served_model_name or (EMBEDDED_NAME,)
    print(f"No model was named: serving the embedded one as {names[0]}.", file=sys.stderr, flush=True)
    model = dataclasses.replace(config.model, model=str(tiny.path()), served_model_name=names)
    return dataclasses.replace(config, model=model)

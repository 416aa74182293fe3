"""`ferrule run-batch`: answer a file of requests as the server would, and write a file of results."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule.config.help import CommandUsage
from ferrule.config.parse import parse_command
from ferrule.config.places import placed
from ferrule.interfaces.command import Command
from ferrule.interfaces.plugins import Plugins
from ferrule_plugins.command.serve import with_model


class RunBatch(Command):
    summary = "Run a file of requests in the format of OpenAI's Batch API."

    def run(self, argv: Sequence[str], plugins: Plugins) -> int:
        """Run a batch. Returns 0 when every row has its result, 1 when the engine died, 130 when the run was
        stopped.
        """
        from ferrule_plugins.command.run_batch import options

        usage = CommandUsage("ferrule run-batch", self.summary, "model")
        parsed = parse_command(argv, usage, plugins, sections=options.sections(), server=False)
        if parsed is None:
            return 0
        batch = parsed.extra["batch"]
        options.check(batch)
        from ferrule.launch.prepare import prepare
        from ferrule_plugins.command.run_batch.run import Batch, run_batch

        config = options.applied(with_model(parsed.config), parsed.extra["served"])
        notices = (*parsed.notices, *options.notices(batch, parsed.origins))
        ready, chosen = prepare(config, notices, plugins, "batch")
        with placed(config):
            return run_batch(Batch(batch, ready, chosen, options.identity(config)))

"""`ferrule bench`: startup, latency, throughput, serve."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from ferrule.config.help import CommandUsage, topic
from ferrule.config.parse import Parsed, parse_command
from ferrule.config.unsupported import engine_sections
from ferrule.errors import ConfigError, nearest
from ferrule.interfaces.command import Command
from ferrule.interfaces.plugins import Plugins
from ferrule_plugins.command.serve import with_model

_SUMMARIES = {
    "startup": "Time from the start of the process until /health is 200, and until the first token.",
    "latency": "One batch, repeated, without a server.",
    "throughput": "Many prompts at once, without a server.",
    "serve": "Send streaming requests to a running server.",
}


class BenchCommand(Command):
    summary = "Measure start-up, latency, throughput, or a running server."

    def run(self, argv: Sequence[str], plugins: Plugins) -> int:
        """Run one benchmark. Returns 1 when a request failed."""
        name = argv[0] if argv else "--help"
        if topic([name]) is not None:
            print("usage: ferrule bench NAME [options]\n")
            for each, summary in _SUMMARIES.items():
                print(f"  {each:<12}{summary}")
            print("\n`ferrule bench NAME --help` lists the options of one.")
            return 0 if argv else 2
        benches: dict[str, Callable[[Sequence[str], Plugins], int]] = {
            "startup": _startup,
            "latency": _latency,
            "throughput": _throughput,
            "serve": _serve,
        }
        if name not in benches:
            raise ConfigError(
                f"Unknown benchmark {name!r}.{nearest(name, benches)}", f"There are {', '.join(benches)}."
            )
        return benches[name](argv[1:], plugins)


def _usage(name: str, positional: str | None = None) -> CommandUsage:
    return CommandUsage(f"ferrule bench {name}", _SUMMARIES[name], positional)


def _told(parsed: Parsed | None) -> Parsed | None:
    """Print the notices about options without effect, before anything is measured; return `parsed`."""
    for notice in parsed.notices if parsed is not None else ():
        print(notice, file=sys.stderr)
    return parsed


def _serve(argv: Sequence[str], plugins: Plugins) -> int:
    from ferrule_plugins.command.bench.load import run
    from ferrule_plugins.command.bench.serve_options import ServeBench

    parsed = _told(parse_command(argv, _usage("serve"), plugins, sections={"bench": ServeBench}))
    return 0 if parsed is None else run(parsed.extra["bench"])


def _startup(argv: Sequence[str], plugins: Plugins) -> int:
    """Run the start-up benchmark: the benchmark's options come first, those after ``--`` are passed to `ferrule
    serve`.
    """
    from ferrule_plugins.command.bench.startup import StartupBench, run

    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    parsed = _told(parse_command(words[:cut], _usage("startup"), plugins, sections={"bench": StartupBench}))
    return 0 if parsed is None else run(parsed.extra["bench"], words[cut + 1 :])


def _latency(argv: Sequence[str], plugins: Plugins) -> int:
    from ferrule_plugins.command.bench.offline import LatencyBench, latency

    sections = {**engine_sections(), "bench": LatencyBench}
    parsed = _told(parse_command(argv, _usage("latency", "model"), plugins, sections=sections, server=False))
    if parsed is None:
        return 0
    return latency(parsed.extra["bench"], with_model(parsed.config), plugins)


def _throughput(argv: Sequence[str], plugins: Plugins) -> int:
    from ferrule_plugins.command.bench.offline import ThroughputBench, throughput

    sections = {**engine_sections(), "bench": ThroughputBench}
    parsed = _told(parse_command(argv, _usage("throughput", "model"), plugins, sections=sections, server=False))
    if parsed is None:
        return 0
    return throughput(parsed.extra["bench"], with_model(parsed.config), plugins)

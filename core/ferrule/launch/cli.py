"""`ferrule`: find the command, run it, and turn its errors into one block of text and an exit status.

Exit status: 0 done; 1 it could not start or failed; 2 the command line, the configuration file or an environment
variable is wrong; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ferrule import __version__, env
from ferrule.errors import ConfigError, FerruleError, nearest

if TYPE_CHECKING:
    from ferrule.config.help import PluginNames

_USAGE_ERROR = 2
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line, without the program's name, and return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(words)
        sys.stdout.flush()
        return status
    except FerruleError as error:
        _report(error, words)
        return _USAGE_ERROR if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # the reader of our output has left (`ferrule --help | head`): nothing more can be told to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(words: list[str]) -> int:
    # what `--version` and errors do not need is imported here
    from ferrule.config import PluginConfig
    from ferrule.config.help import topic
    from ferrule.plugin import discover

    first = words[0] if words else ""
    if first in {"-v", "--version"}:
        print(f"ferrule {__version__}")
        return 0
    plugins = discover(PluginConfig(), env.read())
    wanted = topic(words[:1])
    if wanted:
        print(_options_help(wanted, plugins))
        return 0
    if wanted is not None or not first:
        from ferrule.launch.help import program_help

        print(program_help(plugins), file=sys.stdout if first else sys.stderr)
        return 0 if first else _USAGE_ERROR
    names = plugins.names("command")
    if first.startswith("-"):
        raise ConfigError(
            f"Unknown option {first}.{nearest(first, ('--help', '--version'))} Options follow the command."
        )
    if first not in names and not plugins.offers("command", first):
        raise ConfigError(f"Unknown command {first!r}.{nearest(first, names)}", f"Commands: {', '.join(names)}.")
    return int(plugins.load("command", first)().run(words[1:], plugins))


def _options_help(topic: str, plugins: PluginNames) -> str:
    """`ferrule --help=TOPIC` is about the options of `serve`."""
    from ferrule.config.help import Usage, render
    from ferrule.config.parse import config_sections
    from ferrule.config.schema import Schema

    usage = Usage("ferrule serve", "Serve a model over HTTP.", "model")
    return render(Schema(config_sections()), usage, topic, plugins)


def _report(error: FerruleError, words: Sequence[str]) -> None:
    """One readable block on stderr; the traceback only with --debug."""
    if "--debug" in words:
        import traceback

        traceback.print_exception(error)
    command = words[0] if words and not words[0].startswith("-") else ""
    lines = "\n".join("  " + line for line in str(error).splitlines())
    print(f"{f'ferrule {command}'.strip()}: error:\n{lines}", file=sys.stderr, flush=True)

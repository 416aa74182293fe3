"""`ferrule`: find the command, run it, and turn its errors into one block of text and an exit status.

Exit status: 0 done; 1 it could not start or failed; 2 the command line, the configuration file or an environment
variable is wrong; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ferrule import __version__, env
from ferrule.errors import ConfigError, FerruleError, nearest

if TYPE_CHECKING:
    from ferrule.plugin import PluginSet

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
        # the reader of the output has exited (`ferrule --help | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(words: list[str]) -> int:
    # imported here, because `--version` and errors must not wait for it
    from ferrule.config import PluginConfig
    from ferrule.config.help import load_help, topic
    from ferrule.plugin import discover

    first = words[0] if words else ""
    if first in {"-v", "--version"}:
        print(f"ferrule {__version__}")
        return 0
    plugins = discover(PluginConfig(), env.read())
    wanted = topic(words[:1])
    if wanted:  # `ferrule --help=TOPIC` is about the options of `serve`
        return _command("serve", [f"--help={wanted}"], plugins)
    if wanted is not None or not first:
        with contextlib.redirect_stdout(sys.stdout if first else sys.stderr):
            load_help(plugins).run([], plugins)
        return 0 if first else _USAGE_ERROR
    if first.startswith("-"):
        raise ConfigError(
            f"Unknown option {first}.{nearest(first, ('--help', '--version'))} Options follow the command."
        )
    return _command(first, words[1:], plugins)


def _command(name: str, argv: list[str], plugins: PluginSet) -> int:
    names = plugins.names("command")
    if name not in names and not plugins.offers("command", name):
        raise ConfigError(f"Unknown command {name!r}.{nearest(name, names)}", f"Commands: {', '.join(names)}.")
    return int(plugins.load("command", name)().run(argv, plugins))


def _report(error: FerruleError, words: Sequence[str]) -> None:
    """One readable block on stderr; the traceback only with --debug."""
    if "--debug" in words:
        import traceback

        traceback.print_exception(error)
    command = words[0] if words and not words[0].startswith("-") else ""
    lines = "\n".join("  " + line for line in str(error).splitlines())
    print(f"{f'ferrule {command}'.strip()}: error:\n{lines}", file=sys.stderr, flush=True)

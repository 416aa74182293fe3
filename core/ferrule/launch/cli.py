"""`ferrule`: find the command, run it, and turn its errors into one block of text and an exit status.

Exit status: 0 done; 1 it could not start or failed; 2 the command line, the configuration file or an environment
variable is wrong; 130 interrupted. `ferrule serve` has 128 + other signals, too: docs/http.md has its table.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ferrule import __version__, env
from ferrule.errors import ConfigError, FerruleError, exit_status, nearest
from ferrule.launch.resources import as_startup_error
from ferrule.launch.streams import Exit, usable_streams

if TYPE_CHECKING:
    from ferrule.plugin import Plugins

_USAGE_ERROR = 2
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line, without the program's name, and return the exit status.

    Without `argv`, run the program's own command line and exit with its status.
    """
    if argv is None:
        usable_streams()
        Exit().leave(main(sys.argv[1:]))
    words = list(argv)
    try:
        status = _run(words)
        sys.stdout.flush()
        return status
    except FerruleError as error:
        told = as_startup_error(error) or error
        _report(told, words)
        return exit_status(told)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # the reader of the output has exited (`ferrule --help | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ImportError, MemoryError, OSError, RuntimeError) as error:
        lacking = as_startup_error(error)
        if lacking is None:
            raise
        _report(lacking, words)
        if isinstance(error, OSError):  # of the output, perhaps: then the rest of it cannot be written either
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_status(lacking)


def _run(words: list[str]) -> int:
    # imported here, because `--version` and errors must not wait for it
    from ferrule.config.help import CommandUsage, topic
    from ferrule.config.parse import parse_command
    from ferrule.config.plugins import configured, selection_options
    from ferrule.config.unsupported import engine_sections
    from ferrule.launch.program import program_page
    from ferrule.plugin import discover

    first = words[0] if words else ""
    if first in {"-v", "--version"}:
        print(f"ferrule {__version__}")
        return 0
    environment = env.read()
    plugins = configured(discover(), selection_options((), environment), environment)
    wanted = topic(words[:1])
    if wanted:  # the options of the engine and the server, which several commands take
        parse_command(
            [first],
            CommandUsage("ferrule COMMAND", "Options of commands that run a model."),
            plugins,
            sections=engine_sections(),
        )
        return 0
    if wanted is not None or not first:
        print(program_page(plugins), file=sys.stdout if first else sys.stderr)
        return 0 if first else _USAGE_ERROR
    if first.startswith("-"):
        raise ConfigError(
            f"Unknown option {first}.{nearest(first, ('--help', '--version'))} Options follow the command."
        )
    return _command(first, words[1:], configured(plugins, selection_options(words[1:], environment), environment))


def _command(name: str, argv: list[str], plugins: Plugins) -> int:
    from ferrule.extras import missing

    names = plugins.names("command")
    if name not in names and not plugins.offers("command", name):
        problem = missing("command", name) or f"Unknown command {name!r}.{nearest(name, names)}"
        raise ConfigError(problem, f"Commands: {', '.join(names)}.")
    for other, unused in plugins.unused("command"):
        if other == name:
            print(f"ferrule: warning: {unused}.", file=sys.stderr)
    return int(plugins.make("command", name).run(argv, plugins))


def _report(error: FerruleError, words: Sequence[str]) -> None:
    """Print an error as one readable block on stderr; the traceback only with --debug."""
    from ferrule import log

    if "--debug" in words:
        import traceback

        traceback.print_exception(error)
    command = words[0] if words and not words[0].startswith("-") else ""
    lines = "\n".join("  " + line for line in str(error).splitlines())
    log.last_words(f"{f'ferrule {command}'.strip()}: error:\n{lines}\n")

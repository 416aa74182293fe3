"""Where in a configuration file the options stand that an error names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ferrule.config.sections import Config
from ferrule.errors import StartupError

_FLAG = re.compile(r"--([a-z][a-z0-9-]*)")


@contextmanager
def placed(config: Config) -> Iterator[None]:
    """Wrap a block so that a StartupError in it begins with file and line of the options that it names, if a file has
    them.
    """
    try:
        yield
    except StartupError as error:
        place(error, config.places)
        raise


def place(error: StartupError, places: Mapping[str, str]) -> None:
    """Put the places of options in front of each line of a message that names them. `places`: see `Config`."""
    error.message = "\n".join(_placed(line, places) for line in error.message.split("\n"))
    error.args = (error.message,)


def _placed(line: str, places: Mapping[str, str]) -> str:
    found = dict.fromkeys(
        place for flag in _FLAG.findall(line) for place in _places_of(flag.replace("-", "_"), line, places)
    )
    new = [place for place in found if place not in line]
    return f"{', '.join(new)}: {line}" if new else line


def _places_of(name: str, line: str, places: Mapping[str, str]) -> Iterator[str]:
    """Yield the place of the deepest key of an option's value that the line names, else that of the option; or
    nothing.
    """
    name = name if name in places else name.removeprefix("no_")
    inner = [path for path in places if path.startswith(f"{name}.") and _is_named(path, line)]
    deepest = max(inner, key=lambda path: (path.count("."), -_position(path, line)), default=name)
    if deepest in places:
        yield places[deepest]


def _is_named(path: str, line: str) -> bool:
    return all(_find(key, line) for key in path.split(".")[1:])


def _position(path: str, line: str) -> int:
    found = _find(path.rpartition(".")[2], line)
    return found.start() if found else 0


def _find(key: str, line: str) -> re.Match[str] | None:
    return re.search(rf"(?<![\w-]){re.escape(key)}(?![\w-])", line)

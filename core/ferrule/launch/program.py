"""The page of `ferrule --help`: the commands, described from metadata and source text, without importing one."""

from __future__ import annotations

from collections.abc import Iterator

from ferrule.config.help import columns, terminal_width
from ferrule.plugin import Plugins
from ferrule.plugin.stated import stated


def program_page(plugins: Plugins) -> str:
    """Return the help of the program, as wide as the terminal."""
    return "\n".join(_program(plugins, terminal_width()))


def _program(plugins: Plugins, width: int) -> Iterator[str]:
    yield "usage: ferrule [-h] [-v] COMMAND [options]"
    yield ""
    yield "An LLM inference server in which every piece that varies is a plugin."
    yield ""
    yield "Commands:"
    for name in plugins.names("command"):
        refs = plugins.offers("command", name)
        said = summary(refs[0].target) if len(refs) == 1 else ""
        if not all(ref.builtin for ref in refs):
            said = f"{said} (from {plugins.origin('command', name)})".strip()
        yield from columns("  " + name, said, width, indent=18)
    yield ""
    yield "Options:"
    yield from columns("  -h, --help", "This text; ferrule COMMAND --help tells about a command.", width, 18)
    yield from columns("  --help=WORD", "All options (all), their groups (listgroup), or what has the name.", width, 18)
    yield from columns("  -v, --version", "The version.", width, 18)


def summary(target: str) -> str:
    """Return the `summary` that the class at "module:Class" declares as a plain string; "" where it has no such
    string.
    """
    said = stated(target, "summary")
    return said if isinstance(said, str) else ""

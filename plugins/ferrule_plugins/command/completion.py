"""`ferrule completion SHELL`: a script that completes commands, options, choices and the names of plugins.

The script is written once and contains everything: no key press starts Python. The options of a command are those in
its ``--help=json``.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ferrule.config.help import CommandUsage
from ferrule.config.option import opt
from ferrule.config.parse import parse_command
from ferrule.frontend.text.builtin import builtin_templates
from ferrule.interfaces.command import Command
from ferrule.interfaces.plugins import Plugins

_FILES = frozenset(
    {"config", "log_config_file", "chat_template", "uds", "tool_parser_plugin", "reasoning_parser_plugin"}
)
_FILE_ENDS = ("file", "path", "dir", "certfile", "keyfile", "ca_certs")


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """Options of `ferrule completion`."""

    shell: str = opt("bash", "The shell.", choices=("bash", "zsh", "fish"))


class CompletionCommand(Command):
    summary = "Print a script that completes the command line in a shell."

    def run(self, argv: Sequence[str], plugins: Plugins) -> int:
        """Print the script of a shell, for `source <(ferrule completion bash)`. Returns 0."""
        usage = CommandUsage("ferrule completion", self.summary, "shell")
        parsed = parse_command(argv, usage, plugins, sections={"completion": CompletionOptions})
        if parsed is not None:
            makers = {"bash": bash, "zsh": zsh, "fish": fish}
            print(makers[parsed.extra["completion"].shell](offered(plugins)), end="")
        return 0


@dataclass(frozen=True)
class Completed:
    """One option: its spellings, what may follow, and a sentence."""

    flags: tuple[str, ...]
    values: tuple[str, ...]
    doc: str
    takes_value: bool
    files: bool = False  # a file may follow, too


class _Option(msgspec.Struct):
    """An option as `--help=json` describes it."""

    flags: tuple[str, ...]
    name: str
    takes_value: bool
    values: tuple[str, ...]
    doc: str


class _Page(msgspec.Struct):
    options: tuple[_Option, ...]


def offered(plugins: Plugins) -> Mapping[str, tuple[Completed, ...]]:
    """Return the options of each command, by its name.

    A command that cannot be imported, or does not use `parse_command`, is there without options.
    """
    found: dict[str, tuple[Completed, ...]] = {}
    for name in plugins.names("command"):
        page, why = io.StringIO(), ""
        with contextlib.redirect_stdout(page), contextlib.redirect_stderr(io.StringIO()):
            try:
                plugins.make("command", name).run(["--help=json"], plugins)
            except (Exception, SystemExit) as error:  # of a third party, perhaps; its name is still completed
                why = f"{type(error).__name__}: {error}"
        if why:
            print(f"# ferrule completion: no options of {name}: {why}", file=sys.stderr)
        found[name] = (*_HELP, *map(_completed, _options(page.getvalue())))
    return found


def _options(page: str) -> tuple[_Option, ...]:
    """Return the options in a command's `--help=json`; none where the page is text, as for a command with
    subcommands.
    """
    try:
        return msgspec.json.decode(page, type=_Page).options
    except msgspec.DecodeError:
        return ()


_HELP = (Completed(("-h", "--help"), (), "Tell about this command.", False),)


def _completed(option: _Option) -> Completed:
    if not option.takes_value:
        return Completed(option.flags, (), option.doc, False)
    files = option.name in _FILES or option.name.endswith(_FILE_ENDS)
    if option.name == "chat_template":
        values = tuple(builtin_templates())
    else:
        values = () if files else option.values
    return Completed(option.flags, values, option.doc, True, files)


# ----------------------------------------------------------------------------------------- the scripts


def bash(commands: Mapping[str, tuple[Completed, ...]]) -> str:
    """Return the script for bash from 4 on; it does not need the bash-completion package."""
    return "\n".join(_bash(commands)) + "\n"


def _bash(commands: Mapping[str, tuple[Completed, ...]]) -> Iterator[str]:
    yield "# bash completion of ferrule; load it with: source <(ferrule completion bash)"
    yield "_ferrule() {"
    yield '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" names=""'
    yield '    if [[ "$word" == "=" ]]; then word=""; '
    yield '    elif [[ "$before" == "=" ]]; then before="${COMP_WORDS[COMP_CWORD-2]}"; fi'
    yield "    COMPREPLY=()"
    yield "    if (( COMP_CWORD == 1 )); then"
    yield f"        names={_quoted(' '.join((*commands, '--help', '--version')))}"
    yield "    else"
    yield '        case "${COMP_WORDS[1]} $before" in'
    for name, options in commands.items():
        for each in options:
            if each.takes_value:
                patterns = " | ".join(_quoted(f"{name} {flag}") for flag in each.flags)
                offers = [f"-W {_quoted(' '.join(each.values))}"] if each.values else []
                offers += ["-f"] if each.files else []
                reply = f'COMPREPLY=($(compgen {" ".join(offers)} -- "$word"))' if offers else ":"
                yield f"            {patterns}) {reply}; return ;;"
    yield "        esac"
    yield '        case "${COMP_WORDS[1]}" in'
    for name, options in commands.items():
        flags = " ".join(flag for each in options for flag in each.flags)
        yield f"            {_quoted(name)}) names={_quoted(flags)} ;;"
    yield "        esac"
    yield "    fi"
    yield '    if [[ "$word" == -* || $COMP_CWORD == 1 ]]; then'
    yield '        COMPREPLY=($(compgen -W "$names" -- "$word"))'
    yield "    else"
    yield '        COMPREPLY=($(compgen -f -- "$word"))'
    yield "    fi"
    yield "}"
    yield "complete -o filenames -F _ferrule ferrule"


def zsh(commands: Mapping[str, tuple[Completed, ...]]) -> str:
    """Return the script for zsh; `compinit` must have run."""
    return "\n".join(_zsh(commands)) + "\n"


def _zsh(commands: Mapping[str, tuple[Completed, ...]]) -> Iterator[str]:
    yield "#compdef ferrule"
    yield "# zsh completion of ferrule; load it with: source <(ferrule completion zsh)"
    yield "_ferrule() {"
    yield '    local before="${words[CURRENT-1]}"'
    yield "    if (( CURRENT == 2 )); then"
    yield f"        compadd -- {' '.join(map(_quoted, (*commands, '--help', '--version')))}"
    yield "        return"
    yield "    fi"
    yield '    case "${words[2]} $before" in'
    for name, options in commands.items():
        for each in options:
            if each.takes_value:
                patterns = "|".join(_quoted(f"{name} {flag}") for flag in each.flags)
                values = " ".join(("compadd --", *map(_quoted, each.values)))
                offers = [values] if each.values or not each.files else []
                offers += ["_files"] if each.files else []
                yield f"        {patterns}) {'; '.join(offers)}; return ;;"
    yield "    esac"
    yield '    if [[ "${words[CURRENT]}" != -* ]]; then _files; return; fi'
    yield '    case "${words[2]}" in'
    for name, options in commands.items():
        flags = " ".join(_quoted(flag) for each in options for flag in each.flags)
        yield f"        {_quoted(name)}) compadd -- {flags} ;;"
    yield "    esac"
    yield "}"
    yield "compdef _ferrule ferrule"


def fish(commands: Mapping[str, tuple[Completed, ...]]) -> str:
    """Return the script for fish, which shows the sentence of each option beside it."""
    return "\n".join(_fish(commands)) + "\n"


def _fish(commands: Mapping[str, tuple[Completed, ...]]) -> Iterator[str]:
    yield "# fish completion of ferrule; load it with: ferrule completion fish | source"
    yield f"complete -c ferrule -n __fish_use_subcommand -f -a {_quoted(' '.join(commands))}"
    yield "complete -c ferrule -n __fish_use_subcommand -l help -s h -d 'Tell about the program.'"
    yield "complete -c ferrule -n __fish_use_subcommand -l version -s v -d 'The version.'"
    for name, options in commands.items():
        when = _quoted(f"__fish_seen_subcommand_from {name}")
        for each in options:
            value = "" if not each.takes_value else " -r -F" if each.files else " -x"
            if each.values:
                value += f" -a {_quoted(' '.join(each.values))}"
            for flag in each.flags:
                kind = "-l" if flag.startswith("--") else "-s" if len(flag) == 2 else "-o"
                text = _quoted(each.doc.split(". ")[0].rstrip("."))
                yield f"complete -c ferrule -n {when} {kind} {_quoted(flag.lstrip('-'))}{value} -d {text}"


def _quoted(text: str) -> str:
    """Quote a text as one word for any of the shells: between single quotes, without characters that could end them."""
    return "'" + "".join(c for c in text if c.isprintable() and c not in "'\\") + "'"

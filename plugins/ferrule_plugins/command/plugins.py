"""`ferrule plugins`: the installed plugins, whether each can be used, and why."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ferrule import env
from ferrule.config import PluginConfig
from ferrule.config.help import CommandUsage, columns, terminal_width, topic
from ferrule.config.option import opt
from ferrule.config.parse import parse_command
from ferrule.config.plugins import configured
from ferrule.errors import ConfigError, PluginError, nearest
from ferrule.interfaces.command import Command
from ferrule.plugin import CONTRACT, KINDS, PluginOption, PluginRef, Plugins, State
from ferrule_plugins.command import plugin_new
from ferrule_plugins.command.plugin_check import CheckOptions, Subject, list_promises, run_checks
from ferrule_plugins.command.plugin_probe import probe

_USAGE = """usage: ferrule plugins {list,info,why,check,new} [NAME] [options]

  list [KIND]   every plugin that is installed, and whether it can be used; imports none
  info NAME     where one comes from, what chooses it, and its options; NAME is kind:name, or a name that only one kind
                has. The import is tried in a process of its own
  why NAME      how a name resolves: chosen, denied, conflicting, shadowed or broken; tries the import in a process
                of its own. NAME may also be a distribution
  check NAME    prove that a plugin keeps the promises of its kind: its conformance kit, in a process of its own. With
                --all, every plugin that can be used. With --list [KIND], list what is proved
  new KIND NAME  write a package with a plugin to begin with, and its test

--json prints the same for machines. The options --plugin, --plugins-allow, --plugins-deny and --plugins-prefer of
`ferrule serve` are understood, so that their effect can be seen before a server starts."""

_WIDEST = 40  # characters of a name that others are lined up with
_TRIED = frozenset({State.AVAILABLE, State.CONFLICT})  # states in which it is safe to try an import


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """Options of `ferrule plugins list`."""

    kind: str | None = opt(None, "Only this kind.")
    probe: bool = opt(False, "Try the import of every plugin that is not built in, each in its own process.")
    json: bool = opt(False, "Print JSON.")


@dataclass(frozen=True, kw_only=True)
class NameOptions:
    """Options of `ferrule plugins` actions about one plugin."""

    name: str = opt("", "kind:name, or a name.")
    json: bool = opt(False, "Print JSON.")


class PluginsCommand(Command):
    summary = "List plugins, say how a name resolves, check them, and begin new ones."

    def run(self, argv: Sequence[str], plugins: Plugins) -> int:
        """Run an action. Returns 0; `why` returns 1 for a name that cannot be used. Raises ConfigError, PluginError."""
        actions: dict[str, tuple[Callable[[Plugins, Any], int], type, str]] = {
            "list": (_list, ListOptions, "kind"),
            "info": (_info, NameOptions, "name"),
            "why": (_why, NameOptions, "name"),
            "check": (_check, CheckOptions, "name"),
            "new": (plugin_new.new, plugin_new.NewOptions, "name"),
        }
        if not argv or topic(argv[:1]) is not None:
            print(_USAGE)
            return 0
        action = argv[0]
        if action not in actions:
            raise ConfigError(f"ferrule plugins has no action {action!r}.{nearest(action, actions)}", _USAGE)
        run, section, positional = actions[action]
        usage = CommandUsage(f"ferrule plugins {action}", _summary(action), positional)
        sections = {"action": section, "plugins": PluginConfig}
        words = plugin_new.arguments(argv[1:]) if action == "new" else argv[1:]
        parsed = parse_command(words, usage, plugins, sections=sections)
        if parsed is None:
            return 0
        found = configured(plugins, parsed.config.plugins, env.read())
        return run(found, parsed.extra["action"])


def _summary(action: str) -> str:
    """Return the sentences about an action in the usage text, where they may take several lines."""
    words: list[str] = []
    for line in _USAGE.splitlines()[2:]:
        begins = line[:2] == "  " and line[2:3] != " "
        if words and (begins or not line.strip()):
            break
        if words or (begins and line.split()[0] == action):
            words.append(line.strip())
    return " ".join(words).split("  ", 1)[-1].strip()


# -------------------------------------------------------------------------------------------- actions


def _list(plugins: Plugins, options: ListOptions) -> int:
    if options.kind is not None and options.kind not in KINDS:
        raise ConfigError(f"{options.kind!r} is not a kind of plugin.{nearest(options.kind, KINDS)}", _kinds_hint())
    rows = [
        _row(plugins, ref, tried=options.probe and not ref.builtin)
        for ref in plugins.refs
        if options.kind in (None, ref.kind)
    ]
    if options.json:
        _print_json({"contract": CONTRACT, "plugins": rows, **_reports(plugins)})
        return 0
    kinds = dict.fromkeys([*KINDS, *(row["kind"] for row in rows)])
    for kind in kinds:
        group = [row for row in rows if row["kind"] == kind]
        if group:
            print(f"{kind}: {KINDS[kind].chosen_by}" if kind in KINDS else f"{kind}: unknown to this version")
            width = min(_WIDEST, max(len(row["name"]) for row in group))
            for row in group:
                print(f"  {row['name']:<{width}}  {row['source']}{_remark(row)}")
    _print_reports(plugins)
    return 0


def _info(plugins: Plugins, options: NameOptions) -> int:
    refs = _matching(plugins, options.name)
    ids = list(dict.fromkeys(ref.id for ref in refs))
    if len(ids) != 1:
        listed = ", ".join(ids) or "none"
        raise PluginError(f"'{options.name}' names {len(ids)} plugins.", f"Say kind:name. There are: {listed}.")
    rows = [_row(plugins, ref, tried=True) for ref in refs]
    if options.json:
        _print_json({"id": ids[0], **_kind_facts(refs[0].kind), "plugins": rows})
        return 0
    facts = {"plugin": ids[0], **_kind_facts(refs[0].kind)}
    for row in rows:
        facts |= {key: row[key] for key in ("source", "target", "location", "contract", "sha256") if row[key]}
        facts["state"] = f"{row['state']}{': ' + row['reason'] if row['reason'] else ''}"
        if row["error"] is not None:
            facts["broken"] = row["error"]
        print("\n".join(f"{key + ':':<12} {value}" for key, value in facts.items()))
        print(*_option_lines(row["options"]), sep="\n")
        facts = {"": ""}
    return 0


def _option_lines(options: Sequence[PluginOption]) -> Iterator[str]:
    """Yield lines about the options that a plugin takes, for `--plugin-config`."""
    yield "options:     none" if not options else "options:"
    for option in options:
        yield from columns(f"  {option.name}", option.text, terminal_width())


def _why(plugins: Plugins, options: NameOptions) -> int:
    refs = _matching(plugins, options.name)
    rows = [_row(plugins, ref, tried=True) for ref in refs]
    lost = [str(shadow) for shadow in plugins.shadowed if _concerns(shadow.lost, shadow.distribution, options.name)]
    usable = [row for row in rows if row["state"] == State.AVAILABLE and row["error"] is None]
    problems = [problem for problem in plugins.problems if options.name.rpartition(":")[2] in problem]
    if options.json:
        _print_json({"name": options.name, "candidates": rows, "shadowed": lost, "problems": problems})
        return 0 if usable else 1
    if not rows:
        names = dict.fromkeys([*(ref.name for ref in plugins.refs), *(ref.id for ref in plugins.refs)])
        print(f"No plugin is named '{options.name}'.{nearest(options.name, names)}")
    for row in rows:
        print(f"{row['kind']}:{row['name']} of {row['source']}\n  {row['target']}")
        print(f"  {_fate(row)}")
    for line in [*lost, *problems]:
        print(f"note: {line}")
    return 0 if usable else 1


def _check(plugins: Plugins, options: CheckOptions) -> int:
    if options.list:
        return list_promises(_kinds(plugins, options.name), options)
    if bool(options.name) == options.all:
        raise ConfigError("Say which plugin to check, or --all.", _USAGE)
    refs = list(plugins.refs) if options.all else _matching(plugins, options.name)
    subjects = []
    for ref in refs:
        verdict = plugins.verdict(ref)
        if verdict.state in _TRIED or (verdict.state is State.OFF and options.name in (ref.id, ref.name)):
            subjects.append(Subject(ref))
        elif not options.all:
            subjects.append(Subject(ref, f"{verdict.state}: {verdict.reason}"))
    if not subjects and not options.all:
        raise _unknown(plugins, options.name)
    return run_checks(subjects, options)


# ---------------------------------------------------------------------------------------------- parts


def _kinds(plugins: Plugins, name: str) -> list[str]:
    """Return the kind of that name, else the kinds of the plugins of that name; without a name, all kinds."""
    found = list(KINDS) if not name else [name] if name in KINDS else [ref.kind for ref in _matching(plugins, name)]
    if not found:
        raise _unknown(plugins, name, *KINDS)
    return [kind for kind in dict.fromkeys(found) if kind in KINDS]


def _unknown(plugins: Plugins, name: str, *others: str) -> PluginError:
    names = dict.fromkeys([*(ref.name for ref in plugins.refs), *(ref.id for ref in plugins.refs), *others])
    return PluginError(f"No plugin is named '{name}'.{nearest(name, names)}")


def _matching(plugins: Plugins, name: str) -> list[PluginRef]:
    if not name:
        raise ConfigError("A plugin's name is missing.", _USAGE)
    return [ref for ref in plugins.refs if _concerns((ref.id,), ref.distribution, name)]


def _concerns(ids: Sequence[str], distribution: str, name: str) -> bool:
    return name == distribution or any(name in (entry, entry.partition(":")[2]) for entry in ids)


def _row(plugins: Plugins, ref: PluginRef, *, tried: bool) -> dict[str, Any]:
    """Return the fields of one plugin in the listing.

    `error` is None when the import was not tried, or succeeded; `seconds` is None when it was not tried.
    """
    verdict = plugins.verdict(ref)
    trial = probe(ref) if tried and verdict.state in _TRIED else None
    return {
        "kind": ref.kind,
        "name": ref.name,
        "source": ref.source,
        "target": ref.target,
        "distribution": ref.distribution,
        "version": ref.version,
        "contract": ref.contract,
        "origin": str(ref.origin),
        "location": ref.location,
        "sha256": ref.sha256,
        "builtin": ref.builtin,
        "state": str(verdict.state),
        "reason": verdict.reason,
        "automatic": ref.kind in KINDS and ref.name in plugins.defaults(ref.kind),
        "error": trial and trial.error,
        "seconds": trial and trial.seconds,
        "options": trial.options if trial else (),
    }


def _remark(row: dict[str, Any]) -> str:
    if row["error"] is not None:
        return f"  broken: {row['error']}"
    return "" if row["state"] == State.AVAILABLE else f"  {row['state']}: {row['reason']}"


def _fate(row: dict[str, Any]) -> str:
    told = f" ({row['reason']})" if row["reason"] else ""
    if row["error"] is not None:
        return f"broken: {row['error']}"
    if row["state"] == State.AVAILABLE:
        kind = KINDS.get(row["kind"])
        unnamed = f"; {kind.unnamed}" if kind and kind.unnamed else ""
        automatic = unnamed if row["automatic"] else "; only when it is named, not by default"
        return f"chosen{told}{automatic}; its import works and takes {row['seconds']:.2f} s"
    return f"{row['state']}{told}"


def _reports(plugins: Plugins) -> dict[str, Any]:
    return {"shadowed": msgspec.to_builtins(plugins.shadowed), "problems": plugins.problems}


def _print_reports(plugins: Plugins) -> None:
    for line in [*map(str, plugins.shadowed), *plugins.problems]:
        print(f"warning: {line}", file=sys.stderr)


def _kind_facts(kind: str) -> dict[str, Any]:
    known = KINDS.get(kind)
    return {"chosen by": known.chosen_by, "base class": known.base, "group": known.group} if known else {}


def _kinds_hint() -> str:
    return f"Kinds: {', '.join(KINDS)}"


def _print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())

"""`ferrule serve --dry-run`: the configuration, the origin of each value, what is served beside the model, and the
processes. Nothing is bound, fetched or started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ferrule.config import Resolved
from ferrule.config.parse import Parsed
from ferrule.config.schema import Schema, Spec
from ferrule.env import Environment, variable
from ferrule.plugin import Plugins

_HIDDEN = "(hidden)"
_DEFAULT = "default"
_RESOLVED = "resolved"  # it was open, and is filled from other values
_WIDEST = 44  # columns of a value that origins are lined up with


class Row(NamedTuple):
    """One value of the resolved configuration."""

    name: str  # "--max-num-seqs", or a variable
    value: Any
    origin: str


class Process(NamedTuple):
    """One row of the process table."""

    name: str
    role: str
    runs: str


class Companion(NamedTuple):
    """An adapter, or what guesses tokens."""

    name: str
    kind: str
    place: str  # a folder, a hub id, or how many tokens are guessed


def report(parsed: Parsed, config: Resolved, plugins: Plugins, sections: Mapping[str, type], form: str) -> str:
    """Return the text of a dry run.

    `form` is "" for the values that differ from their defaults, "all" for every value, or "json" (every value, for
    machines).
    """
    rows = list(_rows(parsed, config, Schema(sections)))
    table, beside = list(processes(config, plugins)), list(companions(config))
    if form == "json":
        options = {row.name.lstrip("-"): {"value": row.value, "origin": row.origin} for row in rows}
        found = {"configuration": options, "processes": [process._asdict() for process in table]}
        found["companions"] = [companion._asdict() for companion in beside]
        return msgspec.json.format(msgspec.json.encode(found)).decode()
    shown = rows if form == "all" else [row for row in rows if row.origin != _DEFAULT]
    return "\n".join(_text(shown, table, beside, everything=form == "all"))


def _rows(parsed: Parsed, config: Resolved, schema: Schema) -> Iterator[Row]:
    for spec in schema.specs:
        if spec.name == "dry_run":
            continue
        value = _value(spec, parsed, config)
        origin = parsed.origins.get(spec.name) or (_DEFAULT if value == spec.default else _RESOLVED)
        yield Row(spec.flag, _HIDDEN if spec.option.secret and value else value, origin)
    defaults = Environment()
    for field in Environment.__struct_fields__:
        value = getattr(config.env, field)
        if value != getattr(defaults, field):
            origin = "environment" if value == getattr(parsed.config.env, field) else _RESOLVED
            yield Row(variable(field), _HIDDEN if field.endswith("_key") else value, origin)


def _value(spec: Spec, parsed: Parsed, config: Resolved) -> Any:
    section = parsed.extra[spec.section] if spec.section in parsed.extra else getattr(config, spec.section)
    return getattr(section, spec.name)


def processes(config: Resolved, plugins: Plugins) -> Iterator[Process]:
    """Yield the processes that would run. The launcher is this very process."""
    from ferrule.launch.process import process_table

    device, front = config.device, config.frontend
    address = front.uds or f"{front.host or 'all interfaces'}, port {front.port}"
    engine = f"model on {device.device}, executor {config.parallel.distributed_executor_backend}"
    if front.disable_frontend_multiprocessing:
        yield Process("launcher", "all", f"HTTP on {address}; {engine}")
        return
    yield Process("launcher", "supervisor", "starts the others; ends them all when one ends")
    runs = {"engine": f"scheduler, cache, {engine}", "api": f"HTTP on {address}"}
    for spec in process_table(config, plugins, Path()):
        yield Process(spec.name, spec.role, f"{runs[spec.role]}  (python -m ferrule.launch.child {spec.role})")


def companions(config: Resolved) -> Iterator[Companion]:
    """Yield what is served with the model: adapters, and the method of speculative decoding."""
    for module in config.lora.modules:
        yield Companion(module.name, "LoRA adapter", module.path)
    for adapter in config.prompt_adapter.modules:
        yield Companion(adapter.name, "prompt adapter", adapter.path)
    section = config.speculative
    if section.method:
        most = f"at most {section.num_tokens} guesses" if section.num_tokens else "guesses as is usual for the method"
        yield Companion(section.method, "speculator", ", ".join(filter(None, (section.settings.get("model"), most))))


def _text(
    rows: Sequence[Row], table: Sequence[Process], beside: Sequence[Companion], *, everything: bool
) -> Iterator[str]:
    what = "every value" if everything else "values that are not the default; --dry-run=all shows every one"
    yield f"Configuration ({what})"
    yield from _columns([(row.name, _shown(row.value), row.origin) for row in rows])
    if beside:
        yield ""
        yield "Adapters and speculation"
        yield from _columns(beside)
    yield ""
    yield "Processes"
    yield from _columns(table)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "(none)"
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return msgspec.json.encode(value).decode() if isinstance(value, dict) else str(value) or "(empty)"


def _columns(rows: Sequence[tuple[str, str, str]] | Sequence[Process] | Sequence[Companion]) -> Iterator[str]:
    first = max((len(row[0]) for row in rows), default=0)
    second = min(max((len(row[1]) for row in rows), default=0), _WIDEST)
    for name, value, rest in rows:
        yield f"  {name:<{first}}  {value:<{second}}  {rest}"

"""The reference page of the options: `python -m ferrule.config.reference > docs/reference/cli.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ferrule.config.help import default_text, metavar, spelling
from ferrule.config.parse import config_sections
from ferrule.config.schema import Schema, Spec, title
from ferrule.env import VARIABLES, variable

_HEAD = """# Options

Generated from `ferrule.config.sections` by `python -m ferrule.config.reference`; change the option there.

These are the options of `ferrule serve`. Each can stand in a `--config` file under its name without the leading
dashes, and those without the mark *server* are keyword arguments of `LLM` under their name with underscores. How
values are written, and which of several wins, is told in [Configuration](../configuration.md)."""


def page() -> str:
    """The page as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    schema = Schema(config_sections())
    yield _HEAD
    for key, cls in schema.sections.items():
        yield f"\n## {cls.__name__}\n\n{title(cls)}"
        for spec in schema.group(key):
            yield from _option(spec)
    yield "\n## Environment\n"
    yield "Each variable is also read under its `VLLM_` name, when the one of Ferrule is not set."
    for entry in VARIABLES:
        yield f"\n### {variable(entry.field)}\n\n{entry.doc} Expected: {entry.expects}."


def _option(spec: Spec) -> Iterator[str]:
    option = spec.option
    yield f"\n### {spec.flag}\n\n{_escaped(option.doc)}\n"
    yield f"    {spelling(spec)}{metavar(spec)}"
    facts = {
        "Default": default_text(spec),
        "One of": ", ".join(map(str, option.choices)),
        "Must be": spec.limits,
        "Names a plugin of kind": option.kind,
        "Environment": variable(option.env) if option.env else "",
        "Also key by key": f"{spec.flag}.KEY VALUE" if spec.base is dict else "",
    }
    marks = {"May be given more than once.": option.append, "*server*": option.server}
    rows = [f"- {name}: `{value}`" for name, value in facts.items() if value]
    rows += [f"- {mark}" for mark, holds in marks.items() if holds]
    if rows:
        yield ""
        yield from rows


def _escaped(text: str) -> str:
    """Text whose stars and angle brackets are not markup."""
    return "".join("\\" + c if c in "*_<>" else c for c in text)


if __name__ == "__main__":
    sys.stdout.write(page())

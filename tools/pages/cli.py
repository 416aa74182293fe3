"""The reference page of options and variables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ferrule.config.help import default_text, fate, groups, metavar, spelling, summaries
from ferrule.config.schema import Schema, Spec
from ferrule.env import VARIABLES, variable
from ferrule.env_vllm import FOREIGN, Foreign
from ferrule_plugins.command.serve import sections

_HEAD = """# Options

Generated from `ferrule.config` by `python -m tools.pages`; change the option there.

These are the options of `ferrule serve`. Each can stand in a `--config` file under its name without the leading
dashes, in the environment as `FERRULE_` and its name in capitals, and those without the mark *server* are keyword
arguments of `LLM` under their name with underscores. How values are written, and which of several wins, is told in
[Configuration](../configuration.md)."""


_BUILDS = (
    *("CMAKE_BUILD_TYPE", "MAX_JOBS", "NVCC_THREADS", "VERBOSE", "VLLM_USE_PRECOMPILED"),
    "VLLM_TEST_USE_PRECOMPILED_NIGHTLY_WHEEL",
)
_SYSTEM = (*("CUDA_HOME", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LOCAL_RANK"),)
_CONSTANTS = ("Q_SCALE_CONSTANT", "K_SCALE_CONSTANT", "V_SCALE_CONSTANT")


def page() -> str:
    """Return the page as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    schema = Schema(sections())
    about = summaries(schema)
    yield _HEAD
    yield from _classes(schema)
    for name, specs in groups(schema).items():
        yield f"\n## {name}\n\n{about[name]}"
        for spec in specs:
            yield from _option(spec)
    yield from _environment()


def _classes(schema: Schema) -> Iterator[str]:
    counts = Counter(spec.option.standing for spec in schema.specs)
    yield f"""
## Classes

| class | options | what it means |
|---|--:|---|
| works | {counts["works"]} | it does what its entry says |
| without effect | {counts["without effect"]} | it is understood; a notice at the start says why it changes nothing |
| replaced | {counts["replaced"]} | its value goes to its successor, and a notice names that |
| not in this build | {counts["not in this build"]} | its feature is not in this build: \
any value but the accepted ones stops the start |

| option | group | class | what it means |
|---|---|---|---|"""
    for spec in schema.specs:
        link = f"[`{spec.flag}`](#{spec.flag[1:]})"  # the anchor that Python-Markdown makes of the heading
        yield f"| {link} | {spec.group} | {spec.option.standing} | {_escaped(fate(spec) or spec.option.doc)} |"


def _environment() -> Iterator[str]:
    yield """
## Environment

Each option has a variable: `FERRULE_MAX_NUM_SEQS=8` is `--max-num-seqs 8`; spaces separate the values of a list.
The variables below do not belong to an option, or have a name of their own; each is also read under its `VLLM_` name,
when the one of Ferrule is not set."""
    for entry in VARIABLES:
        yield f"\n### {variable(entry.field)}\n\n{entry.doc} Expected: {entry.expects}."
    yield "\n### Variables of vLLM\n\n| variable | type | default | class | in vLLM | here |\n|---|---|---|---|---|---|"
    for known in FOREIGN:
        default = "any value" if known.default is None else f"`{known.default}`" if known.default else "not set"
        yield f"| `{known.name}` | {known.type} | {default} | {known.standing} | {known.meaning} | {_here(known)} |"
    yield f"""
Not read at all: `VLLM_HOST_IP` and `VLLM_PORT`, which are addresses between nodes there and set by accident in
orchestrators; {", ".join(map(_code, _BUILDS))}, which are for building; {", ".join(map(_code, _SYSTEM))},
which drivers and libraries read themselves; {", ".join(map(_code, _CONSTANTS))}, whose
defaults `--calculate-kv-scales` has."""


def _here(known: Foreign) -> str:
    if known.option:
        return f"the same as `{variable(known.option)}`, `--{known.option.replace('_', '-')}`"
    return known.inert or f"not in this build: {known.missing}; any value but the default stops the start"


def _code(text: str) -> str:
    return f"`{text}`"


def _option(spec: Spec) -> Iterator[str]:
    option = spec.option
    yield f"\n### {spec.flag}\n\n{_escaped(' '.join(filter(None, (option.doc, fate(spec)))))}\n"
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
    """Escape stars, bars and angle brackets, so that they are not markup."""
    return "".join("\\" + c if c in "*_<>|" else c for c in text)

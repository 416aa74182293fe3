"""The documentation is true as far as a program can tell: links, options, variables, commands, code, and written pages.

`make docs` builds the site; nothing here needs mkdocs.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from ferrule import env
from ferrule.api.lifecycle import Lifecycle
from ferrule.config import Config, RouterSettings
from ferrule.config.parse import parse_command
from ferrule.config.schema import Schema
from ferrule.env_vllm import FOREIGN
from ferrule.errors import FerruleError
from ferrule.interfaces.router import RouterContext
from ferrule.launch import cli
from ferrule.launch.program import summary
from ferrule.plugin import discover
from ferrule_kernels import building
from ferrule_plugins.command import serve
from ferrule_plugins.router.absent_routes import absent_routes
from tests.shared import OURS
from tools import ROOT
from tools.architecture.imports import LAYERS
from tools.pages import cli as cli_page
from tools.pages.files import main, stale

PLUGINS = discover()
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
HISTORY = {"plugin-api-changes.md"}
WRITTEN = [page for page in PAGES if page.parent.name not in ("reference", "plugins") and page.name not in HISTORY]

# What pages show as wrong, or as an example of somebody's own.
NO_OPTIONS = {"--enable-chunked-prefil", "--max-num-seq", "--x", "--x.key", "--disable-x", "--no-x", "--no-enable-x"}
NO_COMMANDS = {"ferrule NAME", "ferrule COMMAND --help", "ferrule help COMMAND"}
# Beginnings of code that other programs run.
OTHERS = ("pip ", "python ", "curl ", "make ", "hf ", "lm_eval", "mypy ", "vllm ")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=name)
every_written_page = pytest.mark.parametrize("page", WRITTEN, ids=name)


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Yield language and text of each fenced block, and of each indented one (as "")."""
    text = page.read_text(encoding="utf-8")
    for language, body in re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield language, body
    for body in re.findall(r"(?:^    \S.*\n(?:^ {4}.*\n|^\n(?= {4}))*)+", prose(page, spans=True), re.MULTILINE):
        yield "", "\n".join(line[4:] for line in body.splitlines())


def prose(page: Path, *, spans: bool) -> str:
    """Return the page without fenced blocks, and without code spans unless they are asked for."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return text if spans else re.sub(r"`[^`\n]+`", "`x`", text)


def spans(page: Path) -> list[str]:
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page, spans=True))]


# ----------------------------------------------------------------------------------- navigation and links


def test_every_page_is_in_the_navigation_once() -> None:
    listed: list[str] = []

    def walk(entry: Any) -> None:
        if isinstance(entry, str):
            listed.append(entry)
        else:
            for part in entry if isinstance(entry, list) else entry.values():
                walk(part)

    walk(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(listed) == sorted(str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md"))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as Python-Markdown makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page, spans=True), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("\\", "")
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain, flags=re.ASCII).strip().lower())
        number = 0
        while f"{slug}_{number}" in found or (not number and slug in found):
            number += 1
        found.add(f"{slug}_{number}" if number else slug)
    return found


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(<?([^)\s>]+)>?\)", prose(page, spans=False)):
        if re.match(r"https?://|mailto:", link):
            continue
        target, _, anchor = link.partition("#")
        other = (page.parent / target).resolve() if target else page
        inside = not page.is_relative_to(DOCS) or other.is_relative_to(DOCS)
        if not other.exists() or not inside or (anchor and anchor not in anchors(other)):
            broken.append(link)
    assert broken == []


# ------------------------------------------------------------------------------------------ commands


class Stopped(Exception):
    """The command line was read."""


@pytest.fixture
def surface(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Schema]:
    """Let commands only read their command line, and collect their options."""
    seen: list[Schema] = []

    def read(argv: Sequence[str], usage: Any, plugins: Any, *, sections: Any = None, server: bool = True) -> None:
        assert sections is not None
        seen.append(Schema(sections, server=server))
        parse_command(argv, usage, plugins, sections=sections, server=server)
        raise Stopped

    for ref in PLUGINS.refs:
        if ref.kind == "command" and ref.distribution in OURS:
            module = importlib.import_module(ref.target.partition(":")[0])
            if hasattr(module, "parse_command"):
                monkeypatch.setattr(module, "parse_command", read)
    for variable in [*env.report(), "COLUMNS"]:
        if variable.startswith(("FERRULE_", "VLLM_")):
            monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)
    return seen


def understood(words: Sequence[str]) -> str | None:
    """Return what is wrong with the words after `ferrule`; None when they are a command line."""
    for at, word in enumerate(words[:-1]):
        if word == "--config" and not Path(words[at + 1]).exists():
            Path(words[at + 1]).write_text("port: 8000\n", encoding="utf-8")
    if words[:1] == ["help"] or not words or words[0].startswith("-"):
        return None
    refs = [ref for ref in PLUGINS.refs if ref.kind == "command" and ref.name == words[0] and ref.distribution in OURS]
    if not refs:
        return f"unknown command {words[0]}"
    module, _, cls = refs[0].target.partition(":")
    try:
        getattr(importlib.import_module(module), cls)().run(words[1:], PLUGINS)
    except Stopped:
        return None
    except FerruleError as error:
        return str(error)
    return None


def command_lines(page: Path) -> Iterator[str]:
    """Yield the command lines of ferrule in blocks, joined over line ends, up to where a pipe or a comment begins."""
    for language, body in blocks(page):
        if language not in ("", "bash", "sh", "console"):
            continue
        for line in re.sub(r"\\\n\s*", " ", body).splitlines():
            begun = re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:.*\| )?ferrule(?= )(?! \S+:)(.*)", line.strip())
            if begun and (language != "console" or line.startswith("$ ")):
                yield begun[1]


def words_of(text: str) -> list[str]:
    scan = shlex.shlex(text, posix=True, punctuation_chars="|<>&;")
    scan.whitespace_split = True
    found: list[str] = []
    for word in scan:
        if set(word) <= set("|<>&;"):
            break
        found.append(word)
    return [word for word in found if word not in ("…", "...")]


@every_page
def test_command_lines_are_understood(page: Path, surface: list[Schema]) -> None:
    wrong = [(line, why) for line in command_lines(page) if (why := understood(words_of(line)))]
    assert wrong == []


@every_written_page
def test_commands_within_sentences_are_understood(page: Path, surface: list[Schema]) -> None:
    wrong = []
    for span in spans(page):
        span = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", span)
        if span.startswith("ferrule ") and span not in NO_COMMANDS:
            why = understood(words_of(span.removeprefix("ferrule ")))
            if why:
                wrong.append((span, why))
    assert wrong == []


def test_commands_say_in_help_what_they_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for ref in PLUGINS.refs:
        if ref.kind == "command" and ref.distribution in OURS:
            assert re.fullmatch(r"[A-Z].*\.", summary(ref.target)), ref.name
            assert re.search(rf"^  {ref.name} +[A-Z]", shown, re.MULTILINE)


# --------------------------------------------------------------------------- options, variables, code


def all_options(seen: list[Schema]) -> list[Schema]:
    for command in (
        "serve",
        "run-batch",
        "pack",
        "quantize",
        "chat",
        "complete",
        "collect-env",
        "completion",
        "version",
    ):
        understood([command, "x"])
    for action in ("serve", "startup", "latency", "throughput"):
        understood(["bench", action])
    understood(["templates"])
    understood(["templates", "show", "x"])
    for action in ("list", "info", "why", "check", "new"):
        understood(["plugins", action, "x"])
    return seen


def test_every_option_named_is_one(surface: list[Schema]) -> None:
    schemas = all_options(surface)
    assert len(schemas) >= 15
    wrong = []
    for page in WRITTEN:
        for span in spans(page):
            if span.startswith(OTHERS):
                continue
            for flag in re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", span):
                known = any(schema.find(flag) for schema in schemas)
                if not known and flag not in NO_OPTIONS | {"--help", "--version"}:
                    wrong.append((name(page), flag))
    assert wrong == []


def test_every_variable_named_is_one(surface: list[Schema]) -> None:
    options = {env.variable(spec.name) for schema in all_options(surface)[:1] for spec in schema.specs}
    own = {env.variable(entry.field) for entry in env.VARIABLES}
    documented = (ROOT / "tests/unit/config/data/documented_variables.txt").read_text().split()
    known = {*options, *own, *documented, *(variable.replace("FERRULE_", "VLLM_", 1) for variable in own)}
    known |= {foreign.name for foreign in FOREIGN}
    known |= {"VLLM_PORT", "VLLM_HOST_IP"}  # told about because they are not read
    known.add(building.WANTED)  # read by an installation
    wrong = []
    for page in WRITTEN:
        for variable in re.findall(r"\b(?:FERRULE|VLLM)_[A-Z0-9_]*[A-Z0-9]\b", page.read_text(encoding="utf-8")):
            if variable not in known:
                wrong.append((name(page), variable))
    assert wrong == []


@every_written_page
def test_code_is_well_formed(page: Path) -> None:
    for language, body in blocks(page):
        if language == "python":
            compile(body, name(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        elif language == "json":
            lines = body.splitlines()
            for part in lines if len(lines) > 1 and lines[0].endswith("}") else [body]:
                json.loads(part)
        elif language == "yaml":
            assert yaml.safe_load(body)


# ----------------------------------------------------------------------------------- what is not there

VLLM = (DOCS / "coming-from-vllm.md").read_text(encoding="utf-8")


def test_what_is_not_there_is_what_options_and_variables_lack() -> None:
    by_flag = {spec.flag: spec.option.missing for spec in Schema(serve.sections()).specs if spec.option.missing}
    table = VLLM.partition("| feature | asked for with |")[2].partition("\n\n")[0]
    told = dict([cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:])
    assert set(told) == {*by_flag.values(), *(row.missing for row in FOREIGN if row.missing)}
    for feature, asked in told.items():
        for flag in re.findall(r"--[\w-]+", asked):
            assert by_flag[flag] == feature, flag


def test_routes_that_are_not_there_are_answered_with_advice(surface: list[Schema]) -> None:
    """Advise on the routes of the page, and on all that need another task."""
    table = absent_routes(RouterContext(RouterSettings.of(Config(), PLUGINS), PLUGINS, Lifecycle().service))
    named = set(re.findall(r"`(/[^`]+)`", VLLM.partition("Of the routes")[2]))
    assert {path.rstrip("/") for path, why in table.items() if "needs task" in why} - {"/v2/embed"} <= named
    assert named <= {path.rstrip("/") for path in table}


# ------------------------------------------------------------------------------------- written pages


def test_the_page_lists_every_layer_in_order() -> None:
    section = (DOCS / "architecture.md").read_text(encoding="utf-8").partition("\n## Layers")[2].partition("\n## ")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    assert [tuple(re.findall(r"`(\w+)`", row)) for row in rows] == list(LAYERS[:-1])


def test_files_that_the_architecture_names_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)`", (DOCS / "architecture.md").read_text(encoding="utf-8"))
    assert len(named) > 30
    assert [file for file in named if not any((ROOT / "core" / "ferrule").rglob(file))] == []


def test_pages_that_are_written_from_the_code_are_current() -> None:
    """Run `make reference` when this fails. The pages whose commands must run are compared in tests/e2e."""
    assert [name(file) for file in stale(ROOT, console=False)] == []


def test_stale_pages_are_found_and_renewed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--what"], ROOT) == main([], tmp_path) == 2
    assert "usage" in capsys.readouterr().err
    (tmp_path / "templates").symlink_to(ROOT / "templates")
    (tmp_path / "docs" / "reference" / "plugins").mkdir(parents=True)
    (tmp_path / "docs" / "reference" / "plugins" / "gone.md").write_text("# gone\n")
    plugins = (ROOT / "docs" / "plugins.md").read_text()
    (tmp_path / "docs" / "plugins.md").write_text(plugins.replace("- `ferrule_nn.*`", "- `ferrule_mm.*`"))
    found = stale(tmp_path, console=False)
    assert found[tmp_path / "docs" / "plugins.md"] == plugins
    assert found[tmp_path / "docs" / "reference" / "plugins" / "gone.md"] is None
    assert found[tmp_path / "docs" / "reference" / "cli.md"] == cli_page.page()

"""`docs/tools.md` is true: its parsers load as the page says and keep every promise of the kit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ferrule.config import PluginConfig
from ferrule.config.plugins import configured
from ferrule.env import Environment
from ferrule.interfaces.parsers import TextDelta, ToolParser
from ferrule.interfaces.service import Output
from ferrule.plugin import discover
from ferrule_testkit.kits import CallText, ToolParserKit
from ferrule_testkit.kits.run import OK, run_kit
from tests.fakes.frontend import fold
from tools import ROOT

PAGE = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL))


def load(folder: Path, name: str) -> type[ToolParser]:
    file = folder / f"{name}.py"
    file.write_text(EXAMPLES[file.name])
    found: type[ToolParser] = configured(discover(), PluginConfig(tool_parser_plugin=str(file)), Environment()).load(
        "tool_parser", name
    )
    return found


def answer(parser: ToolParser, text: str) -> tuple[str, list[tuple[str, str]]]:
    events = [*parser.feed(TextDelta(text)), *parser.finish()]
    (folded,) = fold([Output(index=0, events=tuple(events))])
    return folded.text, [(call.name, call.arguments) for call in folded.calls]


def test_the_parser_of_the_page(tmp_path: Path) -> None:
    parser = load(tmp_path, "arrows")
    assert answer(parser([]), 'Now.\n-> add {"a": 1}\nDone.') == ("Now.\nDone.", [("add", '{"a": 1}')])
    kit = type("Kit", (ToolParserKit,), {"samples": _samples()})
    for outcome in run_kit(kit, parser):
        assert outcome.result == OK, outcome


def _samples() -> object:
    """Return the samples that the test file of the page names, without its import of the parser."""
    source = EXAMPLES["test_arrows.py"]
    text = re.search(r"samples = \((.*),\)\n", source)
    assert text is not None
    assert text[1] == r"""["Now. ", CallText('-> add {"a": 1, "b": {}}', "add", {"a": 1, "b": {}}), "\nDone."]"""
    return (["Now. ", CallText('-> add {"a": 1, "b": {}}', "add", {"a": 1, "b": {}}), "\nDone."],)


def test_the_parser_without_methods(tmp_path: Path) -> None:
    parser = load(tmp_path, "square")
    text = 'So [TOOL] {"name": "f", "parameters": {"a": []}} [/TOOL]'
    assert answer(parser([]), text) == ("So", [("f", '{"a": []}')])


def test_the_format_of_the_page(tmp_path: Path) -> None:
    parser = load(tmp_path, "angle")
    function = {"name": "f", "parameters": {"type": "object", "properties": {"b": {"type": "integer"}}}}
    text = "So <call f><set a>x < y</set><set b>2</set></call>."
    assert answer(parser([{"type": "function", "function": function}]), text) == (
        "So.",
        [("f", '{"a": "x < y", "b": 2}')],
    )


@pytest.mark.parametrize("kind", ["tool_parser", "reasoning_parser"])
def test_every_built_in_parser_is_on_the_page(kind: str) -> None:
    reasoning = (ROOT / "docs" / "reasoning.md").read_text().partition("## Parsers")[2].partition("\n## ")[0]
    page, row = (PAGE, "tool: ") if kind == "tool_parser" else (reasoning, "")
    rows = re.findall(rf"^\| {row}(`[^|]+)\|", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w-]+)`", row)}
    assert named == {ref.name for ref in discover().refs if ref.kind == kind and ref.builtin}

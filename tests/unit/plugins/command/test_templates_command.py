"""`ferrule templates`."""

from __future__ import annotations

import json

import pytest

from ferrule.frontend.text.builtin import builtin_templates
from ferrule.launch import cli


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = cli.main(["templates", *argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_list_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys)
    assert status == 0
    lines = [line.split(maxsplit=2) for line in out.splitlines()]
    assert lines == [[t.name, t.parser or "-", t.about] for t in builtin_templates().values()]


def test_the_list_can_be_of_one_parser_and_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--parser", "mistral")
    assert [line.split()[0] for line in out.splitlines()] == ["mistral", "mistral_parallel"]
    _, out, _ = run(capsys, "--json", "--parser", "internlm")
    (row,) = json.loads(out)
    assert row["also"] == ["internlm2_tool"]
    assert row.keys() == {"name", "about", "models", "parser", "also", "format"}
    assert run(capsys, "--parser", "no such") == (0, "", "")


def test_a_template_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = builtin_templates()["deepseek_v3"].text
    for name in ("deepseek_v3", "deepseekv3", "examples/tool_chat_template_deepseekv3.jinja"):
        assert run(capsys, "show", name) == (0, text, "")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["show", "chatmm"], "Did you mean 'chatml'"),
        (["show"], "name is missing"),
        (["shwo", "chatml"], "Did you mean 'show'"),
        (["chatml"], "has no action 'chatml'"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_mistakes_are_explained(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert words in err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert "show NAME" in run(capsys, "--help")[1]
    assert "Print the text" in run(capsys, "show", "--help")[1]

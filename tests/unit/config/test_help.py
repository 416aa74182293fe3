"""`--help` in all its forms."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ferrule.config.help import CommandUsage, groups, render, topic
from ferrule.config.option import opt
from ferrule.config.parse import parse_command
from ferrule.config.schema import Schema, Spec
from ferrule.config.unsupported import engine_sections
from ferrule.plugin import Plugins

_SCHEMA = Schema(engine_sections())
_USAGE = CommandUsage("ferrule serve", "Serve a model over HTTP.", "model")


class _Plugins(Plugins):
    def names(self, kind: str) -> tuple[str, ...]:
        return ("cpu", "strange") if kind == "platform" else ()

    def origin(self, kind: str, name: str) -> str:
        return {"cpu": "ferrule 1.0", "strange": "other 2.0"}[name]


def page(topic: str, width: int = 100) -> str:
    return render(_SCHEMA, _USAGE, topic, _Plugins(), width)


def options(text: str) -> list[str]:
    """Return the option strings that a page describes, in order."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("  -")]
    return [line.split()[0].rstrip(",").replace("[no-]", "") for line in lines]


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["-h"], ""),
        (["m", "--help"], ""),
        (["--port", "1", "--help=max"], "max"),
        (["--", "--help"], None),
        (["--helpful"], None),
        ([], None),
    ],
)
def test_topic(argv: list[str], found: str | None) -> None:
    assert topic(argv) == found


def first(spec: Spec) -> str:
    """Return the first name of an option in a page."""
    return (*spec.option.aliases, spec.flag)[0]


def test_overview() -> None:
    text = page("")
    assert text.startswith("usage: ferrule serve [MODEL] [options]\n\nServe a model over HTTP.\n")
    assert {"--model", "--port", "--dtype", "--help=all"} <= set(options(text))
    assert all(cls.__name__ in text for cls in _SCHEMA.sections.values())
    assert len(text.splitlines()) < 60


def test_all() -> None:
    assert sorted(options(page("all"))) == sorted(first(spec) for spec in _SCHEMA.specs)


def test_listgroup() -> None:
    rows = page("listgroup").splitlines()
    assert [row.split()[0] for row in rows] == list(groups(_SCHEMA))
    count = len(groups(_SCHEMA)["ModelConfig"])
    assert rows[0].endswith(f"The model and what it is used for. ({count} options)")


def test_a_group_by_its_title() -> None:
    text = page("ModelConfig")
    assert text == page("modelconfig")
    assert text.startswith("ModelConfig: The model and what it is used for.\n")
    assert options(text) == [first(spec) for spec in groups(_SCHEMA)["ModelConfig"]]
    assert options(page("LoRAConfig"))[0] == "--enable-lora"


@pytest.mark.parametrize("word", ["max-num-seqs", "max_num_seqs", "--max-num-seqs", "MAX-NUM-SEQS"])
def test_one_option(word: str) -> None:
    assert page(word) == (
        "  --max-num-seqs N        Most requests that run at once. Default: 256. Must be >= 1 and <= 65536."
    )


def test_a_word() -> None:
    text = page("max")
    assert options(text) == [first(spec) for spec in _SCHEMA.specs if any("max" in flag for flag in spec.flags)]
    assert text.endswith("likewise m, g, t.")


def test_no_match() -> None:
    assert page("max-num-seqz").splitlines() == [
        "No group or option matches 'max-num-seqz'. Did you mean 'max-num-seqs'?",
        "See --help=listgroup for the groups and --help=all for every option.",
    ]


def test_what_is_said_about_an_option() -> None:
    assert "Available: cpu (ferrule 1.0), strange (other 2.0). Default: auto." in " ".join(page("device").split())
    assert "--[no-]enable-chunked-prefill [true|false]" in page("enable-chunked-prefill")
    assert "Also key by key: --hf-overrides.KEY VALUE." in " ".join(page("hf-overrides").split())
    assert "--hf-token [TEXT]" in page("hf-token")
    assert "Environment: FERRULE_API_KEY." in page("api-key")
    assert "Default: 32M." in page("max-body-bytes")
    assert "Default: original/**/*." in page("ignore-patterns")


@pytest.mark.parametrize("width", [50, 80, 120])
def test_text_is_wrapped(width: int) -> None:
    long = [line for line in page("all", width).splitlines() if len(line) > width]
    assert all(line.startswith("  -") for line in long)  # an option string is never cut


@dataclass(frozen=True, kw_only=True)
class _Small:
    """A few options."""

    quick: str | None = opt(None, "Ask one thing.", aliases=("-q",))


def test_a_small_command_shows_all_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    usage = CommandUsage("ferrule chat", "Talk.")
    assert parse_command(["--help"], usage, _Plugins(), sections={"small": _Small}) is None
    assert capsys.readouterr().out == (
        "usage: ferrule chat [options]\n\nTalk.\n\n_Small: A few options.\n  -q, --quick TEXT        Ask one thing.\n"
    )
    parsed = parse_command(["-q", "hi"], usage, _Plugins(), sections={"small": _Small})
    assert parsed is not None
    assert parsed.extra["small"] == _Small(quick="hi")

"""`ferrule completion`: scripts that real shells run, made without asking for anything but `--help`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ferrule.launch import cli
from ferrule.plugin import Plugins, discover
from ferrule_plugins.command.completion import bash, fish, offered, zsh

_PLUGINS = discover()


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    return dict(offered(_PLUGINS))


@pytest.fixture
def complete(commands: dict[str, Any], tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that returns what bash offers for the words of a command line, the last of which is being
    written.
    """
    script = tmp_path / "ferrule.bash"
    script.write_text(bash(commands))

    def ask(*words: str) -> list[str]:
        given = " ".join(f"'{word}'" for word in words)
        code = f"source {script}; COMP_WORDS=({given}); COMP_CWORD={len(words) - 1}; _ferrule"
        code += "; printf '%s\\n' \"${COMPREPLY[@]}\""
        done = subprocess.run(
            ["bash", "--norc", "-c", code], capture_output=True, text=True, check=True, timeout=240, cwd=tmp_path
        )
        assert done.stderr == ""
        return done.stdout.split()

    return ask


def test_bash_completes_commands(complete: Callable[..., list[str]]) -> None:
    assert complete("ferrule", "ser") == ["serve"]
    assert {"serve", "bench", "help", "completion", "--help"} <= set(complete("ferrule", ""))


def test_bash_completes_options(complete: Callable[..., list[str]]) -> None:
    assert complete("ferrule", "serve", "--max-num-s") == ["--max-num-seqs"]
    assert complete("ferrule", "serve", "--no-enable-chunked-p") == ["--no-enable-chunked-prefill"]
    assert "--max-num-seqs" not in complete("ferrule", "version", "--")


@pytest.mark.parametrize("words", [["--dtype", "b"], ["--dtype", "=", "b"], ["--port", "1", "--dtype", "b"]])
def test_bash_completes_choices(complete: Callable[..., list[str]], words: Sequence[str]) -> None:
    assert complete("ferrule", "serve", *words) == ["bfloat16"]


def test_bash_completes_names_of_plugins_and_files(complete: Callable[..., list[str]], tmp_path: Path) -> None:
    assert complete("ferrule", "serve", "--scheduling-policy", "pri") == ["priority", "priority_ageing"]
    assert complete("ferrule", "completion", "--shell", "z") == ["zsh"]
    (tmp_path / "serve.yaml").touch()
    assert complete("ferrule", "serve", "--config", "ser") == ["serve.yaml"]
    assert complete("ferrule", "serve", "--port", "") == []
    (tmp_path / "hermes_mine.jinja").touch()
    assert sorted(complete("ferrule", "serve", "--chat-template", "herm")) == ["hermes", "hermes_mine.jinja"]


def test_every_option_of_serve_is_there(commands: dict[str, Any]) -> None:
    flags = {flag for each in commands["serve"] for flag in each.flags}
    assert {"-tp", "--tensor-parallel-size", "--no-enforce-eager", "--dry-run", "--help", "-O"} <= flags
    assert len(flags) > 250


@pytest.mark.parametrize(("shell", "maker"), [("bash", bash), ("zsh", zsh), ("fish", fish)])
def test_a_real_shell_accepts_the_script(
    commands: dict[str, Any], tmp_path: Path, shell: str, maker: Callable[[Any], str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / f"ferrule.{shell}"
    script.write_text(maker(commands))
    done = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")


def test_fish_completes(commands: dict[str, Any], tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    script = tmp_path / "ferrule.fish"
    script.write_text(fish(commands))
    code = f"source {script}; complete -C 'ferrule serve --dtype b'; complete -C 'ferrule serve --max-num-s'"
    done = subprocess.run(["fish", "--no-config", "-c", code], capture_output=True, text=True, timeout=240)
    words = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert words == ["bfloat16", "--max-num-seqs"]


def test_scripts_hold_no_quote_that_could_end_a_word(commands: dict[str, Any]) -> None:
    for maker in (bash, zsh, fish):
        for line in maker(commands).splitlines():
            assert line.count("'") % 2 == 0


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "fish"]) == 0
    out, err = capsys.readouterr()
    assert "complete -c ferrule -n '__fish_seen_subcommand_from serve' -l 'port' -x" in out
    assert err == ""
    assert cli.main(["completion", "tcsh"]) == 2
    assert "one of: bash, zsh, fish" in capsys.readouterr().err


def test_a_command_that_fails_is_named_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(Plugins):
        def names(self, kind: str) -> tuple[str, ...]:
            return ("good", "broken") if kind == "command" else ()

        def origin(self, kind: str, name: str) -> str:
            return ""

        def load(self, kind: str, name: str) -> Any:
            if name == "broken":
                raise SystemExit(3)
            return _PLUGINS.load("command", "version")

    found = offered(Broken())
    assert list(found) == ["good", "broken"]
    assert len(found["broken"]) == 1
    assert "no options of broken: SystemExit: 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("chat", "--api-key --model-name --system-prompt --url -q --quick"),
        ("complete", "--api-key --model-name --url -q --quick"),
        (
            "run-batch",
            "-i --input-file -o --output-file --output-tmp-dir --enable-metrics --url --port --max-log-len"
            " --response-role --disable-log-requests --disable-log-stats --enable-prompt-tokens-details"
            " --use-v2-block-manager",
        ),
    ],
)
def test_documented_options_of_other_commands(commands: dict[str, Any], command: str, flags: str) -> None:
    assert set(flags.split()) - {flag for each in commands[command] for flag in each.flags} == set()

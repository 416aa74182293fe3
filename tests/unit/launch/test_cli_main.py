"""`ferrule`: commands, exit statuses, and what start-up imports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ferrule import __version__
from ferrule.config import PluginConfig
from ferrule.config.plugins import configured
from ferrule.env import Environment
from ferrule.launch import cli
from ferrule.launch.program import summary
from ferrule.plugin import discover


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = cli.main(argv)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("flag", ["-v", "--version", "version"])
def test_version(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert run(capsys, flag) == (0, f"ferrule {__version__}\n", "")


def test_the_module_is_the_program() -> None:
    done = subprocess.run([sys.executable, "-m", "ferrule", "nope"], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ferrule nope: error:\n  Unknown command 'nope'.")


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    status, out, err = run(capsys, flag)
    assert (status, err) == (0, "")
    assert re.search(r"^  version +Print the version\.$", out, re.MULTILINE)
    assert re.search(r"^  serve +Serve a model over HTTP\.$", out, re.MULTILINE)


def test_without_a_command_help_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys)
    assert (status, out) == (2, "")
    assert err.startswith("usage: ferrule")


def test_topics_work_before_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--help=max-num-seqs")[1].startswith("  --max-num-seqs N ")
    assert run(capsys, "serve", "--help=max-num-seqs")[1].startswith("  --max-num-seqs N ")
    status, out, _ = run(capsys, "serve", "--help=qqqq")
    assert (status, len(out.splitlines())) == (0, 2)


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (["serv"], ["ferrule serv: error:", "  Unknown command 'serv'. Did you mean 'serve'?"]),
        (
            ["--vers"],
            ["ferrule: error:", "  Unknown option --vers. Did you mean '--version'? Options follow the command."],
        ),
        (["version", "--x"], ["ferrule version: error:", "  Unknown option --x."]),
        (["serve", "--port", "x"], ["ferrule serve: error:", "  --port: 'x' is not valid; expected a whole number"]),
        (["serve", "--enable-chunked-prefil"], ["ferrule serve: error:", "  Unknown option --enable-chunked-prefil."]),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], argv: list[str], lines: list[str]) -> None:
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    for line, start in zip(err.splitlines(), lines, strict=False):
        assert line.startswith(start)
    assert "Traceback" not in err


def test_the_traceback_comes_with_debug(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Traceback" in run(capsys, "serve", "--port", "x", "--debug")[2]


def test_a_bad_variable_stops_the_start(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERRULE_CPU_KVCACHE_SPACE", "much")
    status, _, err = run(capsys, "serve", "m")
    assert status == 2
    assert "Environment variable FERRULE_CPU_KVCACHE_SPACE: 'much' is not valid" in err


def test_other_failures_to_start_are_status_1(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ferrule", "serve", str(tmp_path / "missing"), "--host", "127.0.0.1", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1
    assert "ferrule serve: error:\n  " in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupt_is_no_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(words: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupt)
    assert run(capsys, "serve") == (130, "", "")


def test_collect_env(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERRULE_API_KEY", "hunter2")
    status, out, err = run(capsys, "collect-env")
    assert (status, err) == (0, "")
    for fact in (f"ferrule: {__version__}", "torch: ", "python: 3.", "cpu: ", "memory: ", "version (ferrule "):
        assert fact in out
    assert "FERRULE_API_KEY: (set, not shown)" in out
    assert "hunter2" not in out


def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from ferrule.launch.cli import main; sys.stdin.read(); sys.exit(main(['--help=all']))",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    child.stdin.close()  # now it may speak
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait(60) == 1


# ----------------------------------------------------------------------------- what start-up imports


def imported(*argv: str) -> list[str]:
    """Return the top names and plugin modules that a process has imported when the command line has run."""
    code = (
        "import sys, json, io, contextlib\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    from ferrule.launch.cli import main\n"
        f"    status = main({list(argv)!r})\n"
        "print(json.dumps([status, sorted(sys.modules)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    status, modules = json.loads(done.stdout)
    assert status == (2 if done.stderr else 0)
    return [str(name) for name in modules]


_HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "zmq",
    "starlette",
    "uvicorn",
    "tokenizers",
    "huggingface_hub",
    "jinja2",
    "yaml",
    "asyncio",
}
_MOST_MODULES = 300  # what the standard library brings included; a start takes about 0.1 s with so many


@pytest.mark.parametrize(
    ("argv", "commands"),
    [
        (["--help"], set()),
        (["version"], {"version"}),
        (["serve", "--help"], {"serve"}),
        (["serve", "--port", "x"], {"serve"}),
        (["collect-env"], {"collect_env"}),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                (["help"], {"help"}),
                (["--help=all"], set()),
                (["--version"], set()),
                (["serve", "--help=all"], {"serve"}),
                (["help", "version"], {"version", "help"}),
                (["serv"], set()),
                (["serve", "--max-num-seq", "1"], {"serve"}),
                (["templates"], {"templates"}),
            )
        ),
    ],
)
def test_nothing_heavy_is_imported(argv: list[str], commands: set[str]) -> None:
    modules = imported(*argv)
    assert _HEAVY.isdisjoint(modules)
    assert len(modules) < _MOST_MODULES
    packages = {"ferrule_plugins", "ferrule_plugins.command"} if commands else set()
    allowed = packages | {f"ferrule_plugins.command.{command}" for command in commands}
    plugins = {
        name for name in modules if name.partition(".")[0] in ("ferrule_plugins", "ferrule_kernels", "ferrule_contrib")
    }
    assert plugins == allowed


def test_a_bad_model_path_is_found_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom ferrule.launch.cli import main\n"
        f"status = main(['serve', {str(tmp_path / 'missing')!r}, '--host', '127.0.0.1', '--port', '0'])\n"
        "print(status, [name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout == "1 []\n"
    assert "is not a folder on this machine" in done.stderr


# ----------------------------------------------------------------------------- help


def test_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "help", "serve")
    assert out == run(capsys, "serve", "--help")[1]
    assert run(capsys, "help")[1] == run(capsys, "--help")[1]
    status, _, err = run(capsys, "help", "serv")
    assert (status, err.splitlines()[1]) == (2, "  There is no command 'serv'. Did you mean 'serve'?")


def test_help_is_there_without_the_command_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Show help without asking a plugin: `ferrule help` is a command like any other."""
    shown = [run(capsys, *argv) for argv in (["--help"], ["serve", "--help"], ["--help=max-num-seqs"])]
    plugins = configured(discover(), PluginConfig(plugins_deny=("command:help",)), Environment())
    monkeypatch.setattr("ferrule.plugin.discover", lambda *args: plugins)
    assert run(capsys, "serve", "--help") == shown[1]
    assert run(capsys, "--help=max-num-seqs") == shown[2]
    assert shown[0][0] == 0


# ----------------------------------------------------------------------------- summaries without import


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class C:\n    summary = 'one line'\n", "one line"),
        ("class C:\n    x = 1\n    summary: str = 'typed'\n", "typed"),
        ("class D:\n    summary = 'another'\nclass C:\n    pass\n", ""),
        ("class C:\n    summary = 'a' + 'b'\n", ""),
        ("raise SystemExit('imported')\nclass C:\n    summary = 'unharmed'\n", "unharmed"),
        ("class C(:\n", ""),
        ("", ""),
    ],
)
def test_a_summary_is_read_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    package = tmp_path / "stranger"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "inner" / "mod.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert summary("stranger.inner.mod:C") == said
    assert "stranger" not in sys.modules


@pytest.mark.parametrize("target", ["no.such:C", "sys:C", "json.decoder.more:C", "json:C", ":", "..:"])
def test_a_summary_that_is_not_there(target: str) -> None:
    assert summary(target) == ""

"""`ferrule plugins`: the command is run as the command line runs it, on real distributions."""

from __future__ import annotations

import json
import sys

import pytest

from ferrule.errors import ConfigError, PluginError
from ferrule.plugin import KINDS, discover
from ferrule_plugins.command.plugins import PluginsCommand
from tools.wheels import Distribution, install

COMMAND = """
from ferrule.interfaces.command import Command

class Mine(Command):
    summary = "nothing much"

    def run(self, argv, plugins):
        return 0
"""


def command_dist(name: str, source: str = COMMAND, entry: str = "mine", group: str = "ferrule.v1.command"):
    module = name.replace("-", "_") + "_module"
    return Distribution(name=name, entry_points={group: {entry: f"{module}:Mine"}}, files={f"{module}.py": source})


@pytest.fixture
def plugins(site, capsys, monkeypatch):
    """Run `ferrule plugins …` and return (exit status, output)."""
    monkeypatch.delenv("FERRULE_PLUGINS", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)

    def run(*argv: str):
        status = PluginsCommand().run(argv, discover())
        return status, capsys.readouterr().out

    return run


def rows(output: str) -> dict[str, dict]:
    return {row["distribution"]: row for row in json.loads(output)["plugins"] if not row["builtin"]}


def test_list_shows_every_plugin_and_its_state_and_imports_none(site, plugins):
    site.install(
        command_dist("good-dist"),
        command_dist("bad-dist", "import sys; sys.exit(1)", entry="bad"),
        command_dist("future-dist", group="ferrule.v3.brain"),
        command_dist("hook-dist", group="ferrule.v1.hooks"),
    )
    status, text = plugins("list")
    assert status == 0
    for part in (
        "good-dist 1.0\n",
        "bad-dist 1.0\n",
        "future-dist 1.0  for a newer contract",
        "brain: unknown to this version",
        "hook-dist 1.0  off: hooks are off until",
    ):
        assert part in text
    found = rows(plugins("list", "--json")[1])
    assert found["good-dist"]["state"] == "available"
    assert found["good-dist"]["seconds"] is None
    assert {name for name in sys.modules if name.endswith("_dist_module")} == set()


def test_list_of_one_kind(site, plugins):
    site.install(command_dist("good-dist"), command_dist("hook-dist", group="ferrule.v1.hooks"))
    found = rows(plugins("list", "hooks", "--json")[1])
    assert set(found) == {"hook-dist"}
    with pytest.raises(ConfigError, match="Did you mean 'hooks'"):
        plugins("list", "hook")


def test_list_reports_shadowed_installs_and_problems(site, plugins, tmp_path, monkeypatch, capsys):
    site.install(command_dist("twice-dist"), command_dist("odd-dist", group="ferrule.v1.comand"))
    install(command_dist("twice-dist", entry="other"), tmp_path / "stale")
    monkeypatch.syspath_prepend(str(tmp_path / "stale"))
    report = json.loads(plugins("list", "--json")[1])
    assert report["shadowed"][0]["lost"] == ["command:mine"]
    assert any("Did you mean 'command'" in problem for problem in report["problems"])
    PluginsCommand().run(["list"], discover())
    assert "warning: twice-dist is installed twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import sys; sys.exit(7)", "sys.exit(7)"),
        ("import os; os._exit(7)", "its import ended the process: exit status 7"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "its import ended the process: signal SIGSEGV"),
        ("raise ValueError('no luck')", "no luck"),
        ("class Mine: pass", "does not derive from"),
    ],
)
def test_why_tells_what_an_import_does(site, plugins, source, told):
    site.install(command_dist("bad-dist", source))
    status, text = plugins("why", "command:mine")
    assert status == 1
    assert "broken: " in text
    assert told in text
    assert told in plugins("list", "--probe")[1]


def test_why_of_a_good_plugin(site, plugins):
    site.install(command_dist("good-dist", "print('noise')\n" + COMMAND))
    for name in ("mine", "command:mine", "good-dist"):
        status, text = plugins("why", name)
        assert status == 0
        assert "command:mine of good-dist 1.0" in text
        assert "chosen; its import works" in text


def test_why_of_a_conflict_a_denial_and_a_preference(site, plugins):
    site.install(command_dist("one-dist"), command_dist("two-dist"))
    status, text = plugins("why", "mine")
    assert status == 1
    assert text.count("conflict (also offered by") == 2
    status, text = plugins("why", "mine", "--plugins-deny", "one-dist")
    assert status == 0
    assert "denied (denied by --plugins-deny one-dist)" in text
    status, text = plugins("why", "mine", "--plugins-prefer", "command:mine=two-dist", "--json")
    states = {row["distribution"]: row["state"] for row in json.loads(text)["candidates"]}
    assert (status, states) == (0, {"one-dist": "passed over", "two-dist": "available"})


def test_why_of_a_shadowed_plugin(site, plugins, tmp_path, monkeypatch):
    site.install(command_dist("twice-dist"))
    install(command_dist("twice-dist", entry="other"), tmp_path / "stale")
    monkeypatch.syspath_prepend(str(tmp_path / "stale"))
    status, text = plugins("why", "mine")
    assert status == 1
    assert "note: twice-dist is installed twice" in text
    assert "which hides command:mine" in text


def test_why_of_nothing(site, plugins):
    site.install(command_dist("good-dist"))
    status, text = plugins("why", "mini")
    assert status == 1
    assert "Did you mean 'mine'" in text


def test_why_of_a_file(site, plugins, tmp_path):
    file = tmp_path / "from_file.py"
    file.write_text(COMMAND)
    status, text = plugins("why", "from_file", "--plugin", f"command={file}")
    assert status == 0
    assert f"file {file} (sha256 " in text


def test_info_names_one_plugin(site, plugins):
    site.install(command_dist("good-dist"), command_dist("hook-dist", group="ferrule.v1.hooks"))
    status, text = plugins("info", "command:mine")
    assert status == 0
    for part in (
        "good_dist_module:Mine",
        "ferrule.interfaces.command:Command",
        KINDS["command"].chosen_by,
        "available",
    ):
        assert part in text
    report = json.loads(plugins("info", "hooks:mine", "--json")[1])
    assert report["id"] == "hooks:mine"
    assert report["plugins"][0]["state"] == "off"
    with pytest.raises(PluginError, match="names 2 plugins"):
        plugins("info", "mine")
    with pytest.raises(PluginError, match="names 0 plugins"):
        plugins("info", "nobody")


def test_the_environments_allow_list_counts(site, plugins, monkeypatch):
    site.install(command_dist("good-dist"))
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert PluginsCommand().run(["why", "mine"], discover()) == 1


def test_usage(plugins):
    for argv in ([], ["--help"]):
        status, text = plugins(*argv)
        assert status == 0
        assert "list,info,why" in text
    assert "probe" in plugins("list", "--help")[1]
    with pytest.raises(ConfigError, match="Did you mean 'list'"):
        plugins("lst")
    with pytest.raises(ConfigError, match="name is missing"):
        plugins("why")


def test_the_command_line_runs_it_and_imports_nothing_heavy(site):
    site.install(command_dist("bad-dist", "raise SystemExit", entry="bad"), command_dist("good-dist"))
    script = (
        "import sys; from ferrule.launch.cli import main; status = main(['plugins', 'list', '--json']); "
        "heavy = {'torch', 'transformers', 'pluggy', 'numpy', 'bad_dist_module', 'good_dist_module'}; "
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr); sys.exit(status)"
    )
    done = site.python("-c", script, FERRULE_PLUGINS="good-dist")
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    found = rows(done.stdout)
    assert found["good-dist"]["state"] == "available"
    assert found["bad-dist"]["reason"] == "not on the allow-list of FERRULE_PLUGINS"


def test_a_command_of_a_stranger_is_run(site):
    site.install(command_dist("good-dist", COMMAND.replace("return 0", "return len(argv)")))
    assert site.python("-m", "ferrule", "mine", "a", "b").returncode == 2


def test_a_command_that_is_broken_is_told_in_one_block(site):
    site.install(command_dist("bad-dist", "raise SystemExit(9)"))
    done = site.python("-m", "ferrule", "mine")
    assert done.returncode == 1
    assert "command:mine of bad-dist 1.0 cannot be imported: it called sys.exit(9)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("guided_decoding:guidance", "chosen; auto asks it in its turn; "),
        ("router:health", "chosen; on by default; "),
        ("tool_parser:hermes", "chosen; its import works"),
    ],
)
def test_why_tells_what_becomes_of_a_plugin_that_no_option_names(plugins, name, told):
    assert told in plugins("why", name)[1]

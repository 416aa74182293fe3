"""`ferrule plugins check`: the same kit as in a test file, in a process of its own, whatever the plugin does there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ferrule.config.plugins import configured, selection_options
from ferrule.env import Environment
from ferrule.errors import ConfigError, PluginError
from ferrule.plugin import KINDS, discover
from ferrule_plugins.command.plugins import PluginsCommand
from ferrule_testkit.server import until
from tests.fakes import bad_wheels
from tests.fakes.bad_wheels import HANGS, PRINTS, policy

# A little random work is enough here, where it matters what is told of it.
POLICY = bad_wheels.POLICY.replace("(SchedulingPolicy):", '(SchedulingPolicy):\n    conformance = {"steps": 60}')
WRONG = POLICY.replace("running[-1].id", "'nobody'")
LATE = """
    def budget(self, running, waiting, limit):
        import time
        time.sleep(600)
"""
GONE = """
    def budget(self, running, waiting, limit):
        import os, signal
        os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.fixture
def check(site, capsys, monkeypatch):
    """Install a policy from its source, check it, and return (status, output)."""
    monkeypatch.delenv("FERRULE_PLUGINS", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)

    def run(source: str, *argv: str, name: str = "mine") -> tuple[int, str]:
        site.install(policy("mine-dist", source))
        status = PluginsCommand().run(["check", name, *argv], discover())
        return status, capsys.readouterr().out

    return run


def test_a_good_plugin_keeps_every_promise(check):
    status, text = check(POLICY)
    assert status == 0
    lines = text.splitlines()
    assert lines[0] == "policy:mine of mine-dist 1.0"
    assert "  ok    the policy is pure" in lines
    assert lines[-1].startswith("  7 kept, 0 broken, 0 do not apply")


def test_a_broken_promise_is_one_line_with_the_reason(check):
    status, text = check(WRONG)
    assert status == 1
    (line,) = [line for line in text.splitlines() if "the victim is one of" in line]
    assert line.startswith("  FAIL  the victim is one of those asked about: victim 'nobody' is none of the 1 that run")
    assert "  ok    keys can be compared" in text
    assert "mine_dist_module" not in sys.modules


def test_a_plugin_of_which_nothing_can_be_proved_fails(site, capsys):
    """Fail for a model that no sample exists for: silence would look like success."""
    from tools.wheels import Distribution

    source = "from ferrule_plugins.model.llama import Llama\nclass Mine(Llama):\n    pass\n"
    points = {"ferrule.v1.model": {"MineForCausalLM": "mine_model:Mine"}}
    site.install(Distribution(name="mine-dist", entry_points=points, files={"mine_model.py": source}))
    assert PluginsCommand().run(["check", "MineForCausalLM"], site.discover()) == 1
    text = capsys.readouterr().out
    assert "FAIL  nothing could be proved" in text
    assert "give `recipes` or `write`" in text


def test_json(check):
    status, text = check(PRINTS + WRONG, "--json")
    assert status == 1
    report = json.loads(text)
    (row,) = report["plugins"]
    assert (report["ok"], row["ok"], row["error"], row["kind"], row["name"]) == (False, False, None, "policy", "mine")
    assert "noise" in row["output"]
    results = {promise["name"]: promise["result"] for promise in row["promises"]}
    assert results["test_the_victim_is_one_of_those_asked_about"] == "failed"
    assert results["test_keys_can_be_compared"] == "ok"
    assert all(promise["promise"].endswith(".") for promise in row["promises"])


def test_what_kits_prove_is_listed_for_a_kind_a_plugin_or_all(capsys):
    assert PluginsCommand().run(["check", "--list", "policy"], discover()) == 0
    of_kind = capsys.readouterr().out
    assert of_kind.startswith("policy: PolicyKit\n  A policy is pure, ")
    assert "\n  - keys can be compared\n      Return every key as a tuple of finite numbers, " in of_kind
    assert "\n  All settings: plugin_options, steps.\n" in of_kind
    assert PluginsCommand().run(["check", "--list", "policy:fcfs"], discover()) == 0
    assert capsys.readouterr().out == of_kind
    assert PluginsCommand().run(["check", "--list", "--json"], discover()) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [kind["kind"] for kind in listed] == list(KINDS)
    assert all(kind["about"] and kind["promises"] for kind in listed)
    with pytest.raises(PluginError, match="No plugin is named 'polcy'. Did you mean 'policy'?"):
        PluginsCommand().run(["check", "--list", "polcy"], discover())


@pytest.mark.parametrize(
    ("source", "options", "told"),
    [
        (HANGS + POLICY, ["--import-deadline", "1"], "FAIL  its import did not end within 1 s"),
        ("import os; os._exit(4)", [], "FAIL  its import ended the process: exit status 4"),
        ("raise SystemExit(4)", [], "cannot be imported: it called sys.exit(4)"),
        ("import nothing_like_it", [], "No module named 'nothing_like_it'"),
        ("class Newest: pass", [], "does not derive from"),
        (POLICY + LATE, ["--deadline", "6"], "did not end within 6 s"),
        (POLICY + GONE, [], "ended the process: signal SIGSEGV"),
    ],
)
def test_whatever_a_plugin_does_is_told(check, source, options, told):
    status, text = check(source, *options)
    assert status == 1
    assert told in text
    assert "Traceback" not in text


def test_what_it_started_ends_with_it(check, tmp_path):
    """End a process that a plugin leaves behind with its check."""
    told = tmp_path / "pid"
    start = "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(900)'])"
    source = f"import pathlib, subprocess, sys\n{start}\npathlib.Path({str(told)!r}).write_text(str(left.pid))\n"
    assert check(source + POLICY)[0] == 0
    assert until(lambda: _has_ended(int(told.read_text())))


def _has_ended(pid: int) -> bool:
    """Return whether a process is gone, or only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_plugin_from_a_file(check, tmp_path):
    file = tmp_path / "from_file.py"
    file.write_text(POLICY)
    status, text = check(POLICY, "--plugin", f"policy={file}", name="policy:from_file")
    assert status == 0
    assert f"policy:from_file of file {file}" in text


def test_what_cannot_be_used_fails_with_its_state(check):
    status, text = check(POLICY, "--plugins-deny", "mine-dist")
    assert status == 1
    assert "FAIL  denied: denied by --plugins-deny mine-dist" in text


def test_a_whole_distribution(check):
    status, text = check(POLICY, name="mine-dist")
    assert status == 0
    assert "policy:mine of mine-dist 1.0" in text


def test_all_checks_what_can_be_used(check):
    deny = ["*:*"]
    status, text = check(POLICY, "--all", "--plugins-deny", *deny, name="--json")
    assert (status, json.loads(text)) == (0, {"ok": True, "plugins": []})


def test_usage(check):
    with pytest.raises(ConfigError, match="or --all"):
        check(POLICY, "--all")
    with pytest.raises(PluginError, match="Did you mean 'mine'"):
        check(POLICY, name="mini")
    with pytest.raises(ConfigError, match="more than 0"):
        check(POLICY, "--deadline", "0")


def test_it_needs_neither_pytest_nor_hypothesis(site):
    """Run the kits with the server alone: they ship with it."""
    site.install(policy("mine-dist", POLICY))
    hidden = "import sys\nsys.modules['pytest'] = sys.modules['hypothesis'] = None\n"
    script = hidden + (
        "import ferrule_testkit.kits as kits\n"
        "from ferrule.plugin import KINDS\n"
        "print(sorted(kits.kit_of(kind).kind for kind in KINDS) == sorted(KINDS))\n"
    )
    done = site.python("-c", script)
    assert (done.stdout.strip(), done.returncode) == ("True", 0), done.stderr


def test_a_class_is_checked_by_its_import_path(tmp_path, monkeypatch, capsys):
    (tmp_path / "acme_paths.py").write_text(POLICY)
    monkeypatch.syspath_prepend(tmp_path)
    name = POLICY.partition("class ")[2].partition("(")[0]
    words = ["check", f"acme_paths.{name}", "--plugin", f"policy=acme_paths.{name}"]
    plugins = configured(discover(), selection_options(words, Environment()), Environment())
    assert PluginsCommand().run(words, plugins) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"policy:acme_paths.{name} of module acme_paths"

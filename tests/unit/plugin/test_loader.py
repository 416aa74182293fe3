"""Discovery, choice and loading, with real distributions in a temporary environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ferrule.config.plugins import configured
from ferrule.errors import ConfigError, PluginError
from ferrule.interfaces.scheduler import SchedulingPolicy
from ferrule.plugin import CONTRACT, KINDS, PluginRef, Plugins, State, discover, load_first
from tools.wheels import Distribution, build_wheel

POLICY = """
from ferrule.interfaces.scheduler import SchedulingPolicy

class Newest(SchedulingPolicy):
    def key(self, view, now):
        return (-view.arrival,)

    def victim(self, running):
        return running[-1].id
"""


def policy_dist(
    name: str,
    entry: str = "newest",
    *,
    source: str = POLICY,
    attribute: str = "Newest",
    version: str = "1.0",
    group: str = "ferrule.v1.policy",
) -> Distribution:
    module = name.replace("-", "_") + "_module"
    return Distribution(
        name=name,
        version=version,
        entry_points={group: {entry: f"{module}:{attribute}"}},
        files={f"{module}.py": source},
    )


def only(plugins: Plugins, kind: str, name: str) -> PluginRef:
    (ref,) = plugins.offers(kind, name)
    return ref


def test_every_kind_has_a_base_class_and_a_group():
    for kind in KINDS.values():
        assert isinstance(kind.load_base(), type), kind
        assert kind.group == f"ferrule.v{CONTRACT}.{kind.name}"


def test_a_good_plugin_is_found_without_its_import_and_then_loaded(site):
    site.install(policy_dist("good-dist", version="2.3"))
    plugins = site.discover()
    assert "newest" in plugins.names("policy")
    assert "good_dist_module" not in sys.modules
    assert plugins.origin("policy", "newest") == "good-dist 2.3"
    policy = plugins.load("policy", "newest")
    assert issubclass(policy, SchedulingPolicy)
    assert policy.__module__ == "good_dist_module"


def test_a_wheel_that_pip_installed_is_found(site, tmp_path):
    wheel = build_wheel(policy_dist("by-pip"), tmp_path)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", str(site.folder), str(wheel)], check=True)
    assert site.discover().load("policy", "newest").__module__ == "by_pip_module"


def test_the_set_crosses_processes(site, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(POLICY)
    site.install(policy_dist("good-dist"), policy_dist("other-dist"))
    plugins = site.discover(
        allowed=["newest"],
        plugin=(f"policy={file}",),
        plugins_deny=("router:x",),
        plugins_prefer=("policy:newest=good-dist",),
    )
    for codec in (msgspec.json, msgspec.msgpack):
        copy = codec.decode(codec.encode(plugins), type=Plugins)
        assert copy == plugins
        assert copy.load("policy", "newest") is plugins.load("policy", "newest")


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import a_module_that_nobody_has", "ModuleNotFoundError"),
        ("raise ValueError('no luck today')", "no luck today"),
        ("import sys; sys.exit(3)", "sys.exit(3)"),
        ("raise BaseException('odd')", "odd"),
        ("def broken(:", "SyntaxError"),
        ("Different = 1", "AttributeError"),
    ],
)
def test_a_broken_plugin_is_listed_and_stops_start_up_only_when_it_is_named(site, source, cause):
    site.install(policy_dist("bad-dist", "bad", source=source, version="0.7"), policy_dist("good-dist"))
    plugins = site.discover()
    assert {"bad", "newest"} <= set(plugins.names("policy"))
    assert plugins.load("policy", "newest")
    with pytest.raises(PluginError) as caught:
        plugins.load("policy", "bad")
    for part in ("policy:bad", "bad-dist 0.7", cause):
        assert part in str(caught.value)


def test_ctrl_c_during_an_import_is_not_swallowed(site):
    site.install(policy_dist("slow-dist", source="raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        site.discover().load("policy", "newest")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("class Newest: pass", "does not derive from ferrule.interfaces.scheduler.SchedulingPolicy"),
        ("def Newest(): pass", "not a class"),
        (POLICY.replace("def victim", "def victin"), "lacks victim"),
    ],
)
def test_what_does_not_fit_the_base_class_is_refused(site, source, reason):
    site.install(policy_dist("odd-dist", source=source))
    with pytest.raises(PluginError, match="odd-dist 1.0") as caught:
        site.discover().load("policy", "newest")
    assert reason in str(caught.value)


def test_two_that_offer_one_name_are_an_error_only_when_it_is_chosen(site):
    site.install(policy_dist("one-dist"), policy_dist("two-dist", version="9"))
    plugins = site.discover()
    assert plugins.names("policy").count("newest") == 1
    with pytest.raises(PluginError) as caught:
        plugins.load("policy", "newest")
    for part in ("one-dist 1.0", "two-dist 9", "--plugins-prefer policy:newest="):
        assert part in str(caught.value)
    for winner in ("one-dist", "Two_Dist"):
        chosen = site.discover(plugins_prefer=(f"policy:newest={winner}",))
        assert chosen.find("policy", "newest").distribution == winner.lower().replace("_", "-")
        assert chosen.origin("policy", "newest").startswith(winner.lower().replace("_", "-"))


BUILT_IN = [
    ("model", "LlamaForCausalLM"),
    ("load_format", "safetensors"),
    ("tokenizer", "auto"),
    ("platform", "cpu"),
    ("executor", "uni"),
    ("scheduler", "default"),
    ("policy", "fcfs"),
    ("sampler", "default"),
    ("router", "openai"),
    ("stat_logger", "prometheus"),
    ("command", "version"),
]


@pytest.mark.parametrize(("kind", "name"), BUILT_IN)
def test_a_stranger_cannot_take_the_name_of_a_built_in(site, kind, name):
    site.install(policy_dist("evil-dist", name, group=f"ferrule.v1.{kind}"))
    plugins = site.discover()
    assert plugins.find(kind, name).builtin
    assert plugins.is_builtin(kind, name)
    ((other, told),) = plugins.unused(kind)
    assert other == name
    assert f"{kind}:{name} of evil-dist 1.0 is not used: the built-in one has its name" in told
    wish = f"{kind}:{name}=evil-dist"
    assert wish in told
    chosen = site.discover(plugins_prefer=(wish,))
    assert chosen.find(kind, name).distribution == "evil-dist"
    assert chosen.unused(kind) == []
    assert name in chosen.defaults(kind)  # in the place of the built-in one
    assert site.discover(plugins_prefer=(f"{kind}:{name}=ferrule",)).unused(kind) == []


def test_a_start_warns_of_what_has_a_built_in_name(site, caplog):
    from ferrule.config.parse import parse
    from ferrule.launch.prepare import prepare

    site.install(policy_dist("evil-dist", "fcfs"))
    parsed = parse(["any", "--disable-log-stats"])
    with caplog.at_level("WARNING"):
        prepare(parsed.config, (), site.discover(), "launch")
    assert "policy:fcfs of evil-dist 1.0 is not used" in caplog.text


def test_a_file_with_the_name_of_a_built_in_is_an_error(site, tmp_path):
    """Refuse the name: the user has named both."""
    site.install(policy_dist("evil-dist", "fcfs"))
    file = tmp_path / "fcfs.py"
    file.write_text(POLICY)
    option = (f"policy={file}",)
    with pytest.raises(PluginError, match="--plugins-prefer policy:fcfs=DISTRIBUTION"):
        site.discover(plugin=option).find("policy", "fcfs")
    chosen = site.discover(plugin=option, plugins_prefer=("policy:fcfs=fcfs.py",))
    assert chosen.find("policy", "fcfs").origin == "file"


def test_a_preference_for_who_does_not_offer_it_is_reported(site):
    site.install(policy_dist("one-dist"), policy_dist("two-dist"))
    plugins = site.discover(plugins_prefer=("policy:newest=three-dist",))
    assert any("three-dist offers no policy:newest" in problem for problem in plugins.problems)
    with pytest.raises(PluginError, match="also offered by"):
        plugins.find("policy", "newest")


def test_a_plugin_for_a_future_contract_is_listed_and_refused_by_name(site):
    site.install(policy_dist("future-dist", group=f"ferrule.v{CONTRACT + 1}.policy"))
    plugins = site.discover()
    ref = only(plugins, "policy", "newest")
    assert plugins.verdict(ref).state is State.NEWER
    assert "newest" not in plugins.names("policy")
    reason = f"made for contract v{CONTRACT + 1}; this Ferrule reads v{CONTRACT}"
    with pytest.raises(PluginError, match=f"future-dist 1.0: {reason}"):
        plugins.load("policy", "newest")


def test_a_plugin_may_serve_two_contracts(site):
    module = "both_module"
    groups = {f"ferrule.v{version}.policy": {"newest": f"{module}:Newest"} for version in (1, 2, 3)}
    site.install(Distribution(name="both-dist", entry_points=groups, files={f"{module}.py": POLICY}))
    plugins = site.discover()
    assert plugins.find("policy", "newest").contract == CONTRACT
    assert plugins.load("policy", "newest")


def test_a_stale_install_that_shadows_another_is_reported(site, tmp_path, monkeypatch):
    site.install(policy_dist("twice-dist", "new", version="2.0"))
    stale = tmp_path / "stale"
    stale.mkdir()
    monkeypatch.syspath_prepend(str(stale))
    from tools.wheels import install

    install(policy_dist("twice-dist", "old", version="1.0"), stale)
    plugins = site.discover()
    assert "old" in plugins.names("policy")
    assert "new" not in plugins.names("policy")
    (shadow,) = plugins.shadowed
    assert (shadow.version, shadow.hidden_version, shadow.lost) == ("1.0", "2.0", ("policy:new",))
    assert str(stale) in str(shadow)
    assert str(site.folder) in str(shadow)


def test_equal_installs_are_not_reported(site, tmp_path, monkeypatch):
    from tools.wheels import install

    site.install(policy_dist("twice-dist"))
    install(policy_dist("twice-dist"), tmp_path / "copy")
    monkeypatch.syspath_prepend(str(tmp_path / "copy"))
    plugins = site.discover()
    assert plugins.shadowed == ()
    assert plugins.find("policy", "newest")


@pytest.mark.parametrize("item", ["policy:newest", "one-dist", "One.Dist", "policy:*", "*:newest"])
def test_deny_wins(site, item):
    site.install(policy_dist("one-dist"))
    plugins = site.discover(plugins_allow=("one-dist",), plugins_deny=(item,))
    assert "newest" not in plugins.names("policy")
    with pytest.raises(PluginError, match="denied by --plugins-deny"):
        plugins.load("policy", "newest")


def test_a_denied_rival_is_no_conflict(site):
    site.install(policy_dist("one-dist"), policy_dist("two-dist"))
    assert site.discover(plugins_deny=("one-dist",)).find("policy", "newest").distribution == "two-dist"


def test_an_allow_list_hides_strangers_and_not_built_ins(site):
    site.install(
        policy_dist("ferrule", "own", version="0"), policy_dist("one-dist", "one"), policy_dist("two-dist", "two")
    )
    assert site.discover().names("policy") == ("own", "one", "two")
    assert site.discover(plugins_allow=("policy:two",)).names("policy") == ("own", "two")
    assert site.discover(plugins_deny=("ferrule",)).names("policy") == ("one", "two")
    with pytest.raises(PluginError, match="not on the allow-list of --plugins-allow"):
        site.discover(plugins_allow=("policy:two",)).find("policy", "one")


@pytest.mark.parametrize("item", ["one", "policy:one", "one-dist"])
def test_the_environments_list_takes_entry_names_too(site, item):
    site.install(policy_dist("one-dist", "one"), policy_dist("two-dist", "two"))
    assert set(site.discover(allowed=[item]).names("policy")) & {"one", "two"} == {"one"}
    assert set(site.discover(allowed=[]).names("policy")) & {"one", "two"} == set()
    assert set(site.discover(allowed=[item], plugins_allow=("two-dist",)).names("policy")) & {"one", "two"} == {"two"}


def test_a_wish_that_concerns_nothing_is_reported(site):
    site.install(policy_dist("one-dist"))
    plugins = site.discover(allowed=["onedist"], plugins_deny=("policy:newst",))
    assert "FERRULE_PLUGINS: 'onedist' matches no plugin" in plugins.problems
    assert "--plugins-deny: 'policy:newst' matches no plugin" in plugins.problems


def test_other_options_need_no_second_walk(site):
    site.install(policy_dist("one-dist"))
    first = site.discover(allowed=["onedist"])
    from ferrule.config import PluginConfig
    from ferrule.env import Environment

    again = configured(first, PluginConfig(plugins_deny=("policy:newest",)), Environment())
    assert "newest" not in again.names("policy")
    assert again.problems == ()
    assert again.refs == first.refs


@pytest.mark.parametrize("wish", ["newest=one-dist", "policy:newest", "policy:newest="])
def test_a_malformed_preference_stops_start_up(site, wish):
    with pytest.raises(ConfigError, match="kind:name=distribution"):
        site.discover(plugins_prefer=(wish,))


def test_unknown_names_and_kinds_get_the_nearest(site):
    site.install(policy_dist("one-dist"))
    plugins = site.discover()
    with pytest.raises(PluginError, match=r"Did you mean 'newest'\?[^$]*newest \(one-dist 1.0\)"):
        plugins.load("policy", "newst")
    with pytest.raises(PluginError, match="Did you mean 'policy'"):
        plugins.load("polcy", "newest")
    assert plugins.origin("policy", "newst") == ""


def test_metadata_that_cannot_be_used_is_a_problem_and_no_error(site):
    site.install(
        policy_dist("good-dist"),
        policy_dist("kind-dist", group="ferrule.v1.polcy"),
        policy_dist("group-dist", group="ferrule.policy"),
        Distribution(name="target-dist", entry_points={"ferrule.v1.policy": {"x": "no colon"}}),
    )
    bytes_dist = site.folder / "bytes_dist-1.0.dist-info"
    bytes_dist.mkdir()
    (bytes_dist / "entry_points.txt").write_bytes(b"[ferrule.v1.policy]\n\xff\xfe = x:y\n")
    lines_dist = site.folder / "lines_dist-1.0.dist-info"
    lines_dist.mkdir()
    text = "; a comment\n[ferrule.v1.policy]\njust words\nx = a:b [extra]\nx = c:d\n[console_scripts]\nstray\n"
    (lines_dist / "entry_points.txt").write_text(text)
    plugins = site.discover()
    assert plugins.load("policy", "newest")
    assert only(plugins, "policy", "x").target == "a:b"
    assert only(plugins, "policy", "x").version == "unknown"
    problems = "\n".join(plugins.problems)
    for part in (
        "kind-dist 1.0: 'polcy' is not a kind of plugin. Did you mean 'policy'?",
        "group-dist 1.0: 'ferrule.policy' is not a group",
        "target-dist 1.0: policy:x = 'no colon'",
        "metadata of a distribution in",
        "entry point 'just words' has no target",
        "lines-dist: policy:x is listed twice",
    ):
        assert part in problems
    assert "stray" not in problems


def test_the_walk_parses_no_metadata_of_others(site, monkeypatch):
    """Parse METADATA, the slow part of a walk, only of distributions that offer plugins."""
    site.install(policy_dist("good-dist"))
    for number in range(100):
        site.install(Distribution(name=f"other-{number}", entry_points={"console_scripts": {"x": "y:z"}}))
    from ferrule.plugin import scan

    parsed = []
    original = scan._read

    def read(dist, name, limit):
        if name == "METADATA":
            parsed.append(str(dist._path))
        return original(dist, name, limit)

    monkeypatch.setattr(scan, "_read", read)
    assert site.discover().find("policy", "newest").version == "1.0"
    assert any("good_dist" in path for path in parsed)
    assert not any("other_" in path for path in parsed)


def test_discovery_imports_no_plugin_torch_or_pluggy(site):
    site.install(policy_dist("bad-dist", source="raise SystemExit"))
    script = (
        "import sys; from ferrule.plugin import discover; found = discover(); "
        "assert 'newest' in found.names('policy'); "
        "print([m for m in sys.modules if m.split('.')[0] in "
        "{'torch', 'transformers', 'pluggy', 'ferrule_plugins', 'ferrule_contrib', 'bad_dist_module'}])"
    )
    done = site.python("-c", script)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


# ------------------------------------------------------------------------------------------------ auto


def test_auto_takes_the_first_that_does_not_refuse_and_tells_of_the_others(site):
    site.install(
        policy_dist("broken-dist", "broken", source="import nothing_like_this"),
        policy_dist("picky-dist", "picky"),
        policy_dist("rude-dist", "rude"),
        policy_dist("good-dist", "good"),
    )

    def refuses(policy: type) -> str | None:
        if policy.__module__ == "rude_dist_module":
            raise RuntimeError("no manners")
        return None if policy.__module__ == "good_dist_module" else "it is Tuesday"

    chosen = load_first(site.discover(), "policy", ["broken", "picky", "rude", "good", "never"], refuses)
    assert chosen.name == "good"
    assert [name for name, _ in chosen.refusals] == ["broken", "picky", "rude"]
    reasons = " | ".join(reason for _, reason in chosen.refusals)
    for part in ("broken-dist 1.0", "nothing_like_this", "it is Tuesday", "no manners"):
        assert part in reasons


def test_auto_with_no_candidate_left_lists_every_refusal(site):
    site.install(policy_dist("picky-dist", "picky"))
    with pytest.raises(PluginError) as caught:
        load_first(site.discover(), "policy", ["picky"], lambda policy: "it is Tuesday")
    assert "picky (picky-dist 1.0): it is Tuesday" in str(caught.value)
    with pytest.raises(PluginError, match="None is installed"):
        load_first(site.discover(), "policy", [], lambda policy: None)


@pytest.mark.parametrize("file", ["entry_points.txt", "METADATA"])
def test_a_pipe_in_the_metadata_is_not_waited_for(site, file):
    site.install(policy_dist("good-dist"), policy_dist("pipe-dist", "piped"))
    path = site.folder / "pipe_dist-1.0.dist-info" / file
    path.unlink()
    os.mkfifo(path)
    plugins = site.discover()
    assert plugins.find("policy", "newest").version == "1.0"
    if file == "METADATA":
        assert only(plugins, "policy", "piped").version == "unknown"
    else:
        assert plugins.offers("policy", "piped") == ()
        assert any("not a regular file" in problem for problem in plugins.problems)


def test_metadata_of_absurd_size_is_not_read(site):
    site.install(policy_dist("good-dist"), policy_dist("huge-dist", "huge"), policy_dist("many-dist"))
    huge = site.folder / "huge_dist-1.0.dist-info" / "entry_points.txt"
    with huge.open("a") as file:
        file.write("#" * (1 << 20))
    many = site.folder / "many_dist-1.0.dist-info" / "entry_points.txt"
    with many.open("a") as file:
        file.writelines(f"p{number} = m:C\n" for number in range(5000))
    plugins = site.discover()
    assert plugins.find("policy", "p7")
    assert len(plugins.names("policy")) < 4200
    assert plugins.offers("policy", "huge") == ()
    problems = "\n".join(plugins.problems)
    assert "entry_points.txt of huge-dist has more than 1048576 bytes" in problems
    assert "many-dist 1.0: only the first 4096 plugins are looked at" in problems


# ------------------------------------------------------------------------------------------------ files

NAMED = POLICY + "    name = 'last-in'\n"


def test_a_file_becomes_a_plugin_under_its_stem(site, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(POLICY)
    plugins = site.discover(allowed=[], plugin=(f"policy={file}",))
    ref = only(plugins, "policy", "mine")
    assert len(ref.sha256) == 64
    assert str(file) in plugins.origin("policy", "mine")
    policy = plugins.load("policy", "mine")
    assert issubclass(policy, SchedulingPolicy)
    assert ref.sha256 in policy.__module__
    assert plugins.load("policy", "mine") is policy
    assert not list(tmp_path.rglob("*.pyc"))


def test_a_file_is_not_run_by_discovery(site, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("raise RuntimeError('ran')\n" + POLICY)
    plugins = site.discover(plugin=(f"policy={file}",))
    with pytest.raises(PluginError, match="RuntimeError: ran"):
        plugins.load("policy", "mine")
    with pytest.raises(PluginError, match="RuntimeError: ran"):
        plugins.load("policy", "mine")


def test_classes_of_a_file_are_told_by_their_names(site, tmp_path):
    file = tmp_path / "several.py"
    file.write_text(NAMED + "\nclass Oldest(Newest):\n    name: str = 'oldest'\n\nclass Helper:\n    name = 'no'\n")
    plugins = site.discover(plugin=(f"policy={file}",))
    assert {"last-in", "oldest"} <= set(plugins.names("policy"))
    assert "no" not in plugins.names("policy")
    assert plugins.load("policy", "oldest").__name__ == "Oldest"
    assert plugins.load("policy", "last-in").__name__ == "Newest"


@pytest.mark.parametrize(
    ("source", "count"), [("x = 1\n", "no"), (POLICY + "\nclass Two(Newest): pass\n", "more than one")]
)
def test_a_file_without_one_clear_class_is_refused(site, tmp_path, source, count):
    file = tmp_path / "vague.py"
    file.write_text(source)
    with pytest.raises(PluginError, match=f"holds {count} complete class for policy:vague"):
        site.discover(plugin=(f"policy={file}",)).load("policy", "vague")


def test_a_file_with_two_classes_of_one_name_is_refused(site, tmp_path):
    file = tmp_path / "vague.py"
    file.write_text(NAMED + "\nclass Two(Newest): pass\n")
    with pytest.raises(PluginError, match="holds more than one complete class for policy:last-in"):
        site.discover(plugin=(f"policy={file}",)).load("policy", "last-in")


def test_a_file_that_changed_is_refused(site, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(POLICY)
    plugins = site.discover(plugin=(f"policy={file}",))
    file.write_text(POLICY + "\n# a different file\n")
    with pytest.raises(PluginError, match="has changed since it was discovered"):
        plugins.load("policy", "mine")
    file.unlink()
    with pytest.raises(PluginError, match="cannot be read"):
        plugins.load("policy", "mine")


def test_a_file_and_a_distribution_of_one_name_conflict(site, tmp_path):
    site.install(policy_dist("one-dist"))
    file = tmp_path / "newest.py"
    file.write_text(POLICY)
    option = (f"policy={file}",)
    with pytest.raises(PluginError, match="also offered by"):
        site.discover(plugin=option).load("policy", "newest")
    chosen = site.discover(plugin=option, plugins_prefer=("policy:newest=newest.py",))
    assert chosen.find("policy", "newest").origin == "file"


@pytest.mark.parametrize(
    ("option", "error", "part"),
    [
        ("mine.py", ConfigError, "kind=file.py"),
        ("policy=", ConfigError, "kind=file.py"),
        ("policy=nowhere.module.Mine", PluginError, "there is no module nowhere to import"),
        ("polcy=mine.py", ConfigError, "Did you mean 'policy'"),
        ("policy=/nowhere/mine.py", PluginError, "cannot be read"),
    ],
)
def test_a_wrong_file_option_stops_start_up(site, option, error, part):
    with pytest.raises(error, match=part):
        site.discover(plugin=(option,))


def test_a_file_that_is_not_python_stops_start_up(site, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def broken(:\n")
    with pytest.raises(PluginError, match="is not Python"):
        site.discover(plugin=(f"policy={file}",))


def test_a_relative_path_is_kept_absolute(site, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(POLICY)
    monkeypatch.chdir(tmp_path)
    ref = only(discover_file("mine.py"), "policy", "mine")
    monkeypatch.chdir(os.sep)
    assert Path(ref.target) == tmp_path / "mine.py"


def discover_file(path: str) -> Plugins:
    from ferrule.config import PluginConfig
    from ferrule.env import Environment

    return configured(discover(), PluginConfig(plugin=(f"policy={path}",)), Environment())


def test_a_file_knows_where_it_is(site, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(POLICY + "    where = __file__\n")
    assert site.discover(plugin=(f"policy={file}",)).load("policy", "mine").where == str(file)


# ------------------------------------------------------------------------------------------ which one wins

COMMAND = """
from ferrule.interfaces.command import Command

class Serve(Command):
    summary = "not the server"

    def run(self, argv, plugins):
        print("the other serve")
        return 0
"""


def command_dist(name: str, entry: str) -> Distribution:
    return policy_dist(name, entry, source=COMMAND, attribute="Serve", group="ferrule.v1.command")


def test_a_built_in_command_keeps_its_name_and_the_other_is_told(site, capsys):
    from ferrule.launch import cli

    site.install(command_dist("greedy-dist", "version"))
    assert cli.main(["version"]) == 0
    out, err = capsys.readouterr()
    assert "the other" not in out
    assert "command:version of greedy-dist 1.0 is not used" in err
    assert "--plugins-prefer command:version=greedy-dist" in err


@pytest.mark.parametrize("by", ["option", "variable", "file"])
def test_selection_options_work_for_commands(site, capsys, monkeypatch, tmp_path, by):
    from ferrule.launch import cli

    site.install(command_dist("greedy-dist", "version"))
    argv = ["version"]
    if by == "option":
        argv += ["--plugins-prefer", "command:version=greedy-dist"]
    elif by == "file":
        file = tmp_path / "serve.yaml"
        file.write_text("option-of-the-command: 5\nplugins-prefer: [command:version=greedy-dist]\n")
        argv.append(f"--config={file}")
    else:
        monkeypatch.setenv("FERRULE_PLUGINS_PREFER", "command:version=greedy-dist")
    assert cli.main(argv) == 0
    assert capsys.readouterr().out == "the other serve\n"


def test_the_command_line_wins_over_the_file(site, capsys, tmp_path):
    from ferrule.launch import cli

    site.install(command_dist("one-dist", "mine"))
    file = tmp_path / "serve.yml"
    file.write_text("plugins-deny: [one-dist]\n")
    assert cli.main(["mine", "--config", str(file)]) == 1
    assert "denied by --plugins-deny one-dist" in capsys.readouterr().err
    assert cli.main(["mine", "--config", str(file), "--plugins-deny", "command:other"]) == 0


@pytest.mark.parametrize("text", ["{", "plugins-deny: {a: 1}\n"])
def test_a_file_that_is_wrong_or_another_commands_is_left_to_the_command(site, tmp_path, text):
    from ferrule.launch import cli

    site.install(command_dist("one-dist", "mine"))
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    assert cli.main(["mine", "--config", str(file)]) == 0
    assert cli.main(["mine", "--config", "no such file"]) == 0


def test_a_denied_command_is_not_run(site, capsys):
    from ferrule.launch import cli

    site.install(command_dist("one-dist", "mine"))
    assert cli.main(["mine", "--plugins-deny", "one-dist"]) == 1
    assert "denied by --plugins-deny one-dist" in capsys.readouterr().err
    assert cli.main(["mine"]) == 0


PLATFORM = "from ferrule_plugins.platform.cpu import CpuPlatform as Newest\n"


def platform_dist(name: str) -> Distribution:
    return policy_dist(name, "npu", source=PLATFORM, group="ferrule.v1.platform")


def test_a_platform_of_others_is_not_taken_by_auto_until_it_is_allowed(site):
    site.install(platform_dist("npu-dist"))
    plugins = site.discover()
    assert "npu" not in plugins.defaults("platform")
    assert plugins.load("platform", "npu")  # named by --device
    for item in ("platform:npu", "npu-dist"):
        assert "npu" in site.discover(plugins_allow=(item,)).defaults("platform")


def test_naming_what_is_off_does_not_switch_off_others(site):
    site.install(platform_dist("npu-dist"), policy_dist("one-dist", "one"))
    for item in ("platform:npu", "npu-dist"):
        assert "one" in site.discover(plugins_allow=(item,)).names("policy")
    assert "one" not in site.discover(plugins_allow=("platform:npu", "policy:two")).names("policy")


def test_several_names_add_to_the_defaults_or_replace_them(site):
    plugins = site.discover()
    defaults = plugins.defaults("router")
    assert plugins.chosen("router", ()) == defaults
    assert plugins.chosen("router", ("mine",)) == ("mine",)
    assert plugins.chosen("router", ("+mine",)) == (*defaults, "mine")
    assert plugins.chosen("router", ("mine", "+more")) == ("mine", "more")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("def key(self, view, now)", "def key(self, view)"), r"Newest.key\(self, view\) cannot be called with"),
        (("def victim(self, running)", "def victim(self)"), r"Newest.victim\(self\) cannot be called with"),
        (("    def key", "    def __init__(self, x): pass\n\n    def key"), r"is made with \(\), and its constructor"),
        (("    def victim", "    budget = 3\n\n    def victim"), "Newest.budget is not a method"),
    ],
)
def test_signatures_are_checked_when_a_plugin_is_chosen(site, change, told):
    site.install(policy_dist("odd-dist", source=POLICY.replace(*change)))
    with pytest.raises(PluginError, match=f"policy:newest of odd-dist 1.0: .*{told}"):
        site.discover().load("policy", "newest")


def test_two_classes_without_names_are_listed(site, tmp_path):
    file = tmp_path / "two.py"
    file.write_text(POLICY + POLICY.replace("Newest", "Oldest"))
    with pytest.raises(PluginError, match="holds more than one complete class for policy:two: Newest, Oldest"):
        site.discover(plugin=(f"policy={file}",)).load("policy", "two")


def test_a_file_is_preferred_by_the_path_that_is_shown(site, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(POLICY)
    site.install(policy_dist("one-dist", "mine"))
    chosen = site.discover(plugin=(f"policy={file}",), plugins_prefer=(f"policy:mine={file}",))
    assert chosen.find("policy", "mine").target == str(file)
    assert chosen.problems == ()

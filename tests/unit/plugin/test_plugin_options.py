"""Options of plugins: declared by the class, checked before the plugin is made, the same way for every kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from ferrule.config.parse import parse
from ferrule.config.plugins import configured
from ferrule.env import Environment, read
from ferrule.errors import ConfigError, PluginError
from ferrule.interfaces.plugins import Plugins
from ferrule.plugin import Component, check_plugins
from ferrule.plugin.options import PluginOption, describe_options, read_options
from tools.wheels import Distribution

POLICY = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Annotated
from msgspec import Meta
from ferrule.interfaces.scheduler import SchedulingPolicy

class Mine(SchedulingPolicy):
    @dataclass(frozen=True)
    class Options:
        longest: Annotated[int, Meta(ge=1, description="Tokens of a short prompt.")] = 100
        mode: str = "a"

    {constructor}

    def key(self, view, now):
        return (0.0,)

    def victim(self, running):
        return running[-1].id
"""
TAKES = "def __init__(self, options: Options) -> None:\n        self.options = options"


def distribution(constructor: str = TAKES, name: str = "mine-dist") -> Distribution:
    module = name.replace("-", "_")
    return Distribution(
        name=name,
        entry_points={"ferrule.v1.policy": {"mine": f"{module}:Mine"}},
        files={f"{module}.py": POLICY.format(constructor=constructor)},
    )


def with_options(site: Any, *argv: str, **variables: str) -> Plugins:
    parsed = parse(argv, env=read(variables))
    return configured(site.discover(), parsed.config.plugins, Environment())


@dataclass(frozen=True)
class Keyed:
    weights: dict[int, float] = field(default_factory=lambda: {1: 2.0})
    nested: dict[float, dict[int, list[int]]] = field(default_factory=lambda: {0.5: {3: [4]}})
    either: dict[Literal[1, 2], str] = field(default_factory=lambda: {1: "a"})
    unique: frozenset[int] = frozenset({7})
    pair: tuple[int, str] = (1, "b")
    binary: bytes = b"c"


@pytest.mark.parametrize("option", describe_options(Keyed), ids=lambda option: option.name)
def test_the_default_that_is_shown_can_be_given(option: PluginOption) -> None:
    assert option.default is not None
    given = {option.name: msgspec.json.decode(option.default)}
    assert read_options(Keyed, given) == Keyed()


def test_a_key_of_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match="weights: Expected int, got str - at key"):
        read_options(Keyed, {"weights": {"one": 2.0}})


@dataclass(frozen=True)
class Every:
    size: Annotated[int, Meta(ge=1, le=9)]
    share: float = 0.5
    mode: Literal["a", "b"] = "a"
    names: list[str] | None = None

    def __post_init__(self) -> None:
        if self.mode == "b" and self.share > 0.9:
            raise ValueError("mode b goes with a share up to 0.9")


class Words(msgspec.Struct, frozen=True):
    words: tuple[str, ...] = ("x",)


def test_what_is_told_of_options() -> None:
    assert describe_options(Every) == (
        PluginOption(name="size", expects="a whole number >= 1 and <= 9", default=None),
        PluginOption(name="share", expects="a number", default="0.5"),
        PluginOption(name="mode", expects="one of: a, b", default='"a"'),
        PluginOption(name="names", expects="a list, each a text or null", default="null"),
    )
    assert describe_options(Words) == (PluginOption(name="words", expects="a list, each a text", default='["x"]'),)


def test_values_are_checked_all_at_once_and_not_repeated() -> None:
    assert read_options(Every, {"size": 3, "names": ["x"]}) == Every(3, names=["x"])
    assert read_options(Words, {"words": ["a", "b"]}) == Words(("a", "b"))
    with pytest.raises(ValueError, match="must be given") as caught:
        read_options(Every, {"szie": 3, "share": "secret", "mode": "c"})
    assert str(caught.value).splitlines() == [
        "There is no option 'szie'. Did you mean 'size'?",
        "size must be given.",
        "share: Expected float, got str.",
        "mode: Invalid enum value 'c'.",
    ]
    with pytest.raises(ValueError, match=r"size: Expected int <= 9\."):
        read_options(Every, {"size": 10})
    with pytest.raises(ValueError, match=r"mode b goes with"):
        read_options(Every, {"size": 3, "mode": "b", "share": 1.0})


def test_a_plugin_gets_its_options_when_it_is_made(site: Any) -> None:
    site.install(distribution())
    assert site.discover().make("policy", "mine").options.longest == 100
    plugins = with_options(
        site, "--plugin-config", 'policy:mine={"longest": 5}', "--plugin-config.policy:mine.mode", "b"
    )
    options = plugins.make("policy", "mine").options
    assert (options.longest, options.mode) == (5, "b")
    assert [option.name for option in plugins.options_of("policy", "mine")] == ["longest", "mode"]
    assert plugins.options_of("policy", "fcfs") == ()


def test_every_source_of_options_adds_to_the_others(site: Any, tmp_path: Any) -> None:
    site.install(distribution())
    file = tmp_path / "serve.yaml"
    file.write_text("plugin-config:\n  policy:mine:\n    longest: 7\n    mode: file\n")
    plugins = with_options(site, "--config", str(file), "--plugin-config", 'policy:mine={"mode": "line"}')
    assert plugins.options == {"policy:mine": {"longest": 7, "mode": "line"}}
    plugins = with_options(site, FERRULE_PLUGIN_CONFIG='{"policy:mine": {"longest": 9}}')
    assert plugins.make("policy", "mine").options.longest == 9


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (
            'policy:mine={"longst": 5}',
            "There is no option 'longst'. Did you mean 'longest'?\nIts options: longest, mode.",
        ),
        ('policy:mine={"longest": 0}', "policy:mine of mine-dist 1.0:\nlongest: Expected int >= 1."),
        ("policy:fcfs={}", "policy:fcfs of ferrule "),
        ("policy:mine=5", "options are a JSON object"),
        ("policy={}", "takes kind:name={...}, not 'policy'"),
        ("policy:mine={5", "not JSON"),
        ("policy:mine", "expected KEY={JSON}"),
    ],
)
def test_wrong_options_say_what_is_wrong(site: Any, written: str, told: str) -> None:
    site.install(distribution())
    with pytest.raises(ConfigError) as caught:
        check_plugins(with_options(site, "--plugin-config", written), (), Component.ENGINE)
    assert told in str(caught.value)


@pytest.mark.parametrize("constructor", ["", "def __init__(self) -> None: ..."])
def test_a_constructor_without_options_is_refused(site: Any, constructor: str) -> None:
    site.install(distribution(constructor))
    with pytest.raises(PluginError, match=r"Mine is made with \(options\), and its constructor takes"):
        site.discover().load("policy", "mine")


def test_options_that_are_no_dataclass_are_refused(site: Any) -> None:
    site.install(distribution(f"{TAKES}\n    Options = 5"))
    with pytest.raises(PluginError, match=r"Mine\.Options does not declare options"):
        site.discover().load("policy", "mine")


def test_a_client_cannot_give_options(site: Any) -> None:
    source = (
        "from dataclasses import dataclass\nfrom ferrule.interfaces.sampler import LogitsProcessor\n"
        "class Mine(LogitsProcessor):\n"
        "    @dataclass\n    class Options:\n        top: int = 3\n"
        "    def __init__(self, *, options, by=1):\n        self.told = (options.top, by)\n"
        "    def apply(self, known_ids, num_prompt, logits):\n        return logits\n"
    )
    site.install(
        Distribution(
            name="proc-dist",
            entry_points={"ferrule.v1.logits_processor": {"p": "proc:Mine"}},
            files={"proc.py": source},
        )
    )
    plugins = with_options(site, "--plugin-config", 'logits_processor:p={"top": 8}')
    assert plugins.make("logits_processor", "p", by=2).told == (8, 2)
    with pytest.raises(ValueError, match="not an argument of requests"):
        plugins.make("logits_processor", "p", options={"top": 1})


def test_variables_of_plugins_are_not_unknown() -> None:
    names = {"FERRULE_PLUGIN_MINE_TOKEN": "x", "FERRULE_PLUGN_MINE": "x"}
    assert [told.split()[2] for told in read(names).unknown(())] == ["FERRULE_PLUGN_MINE"]

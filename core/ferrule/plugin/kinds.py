"""The table of plugin kinds: the one place that says what can be plugged in, and what chooses it.

When a base class changes in a new contract, the new one gets a new name and the old one stays. The kind's `Earlier`
names the old class and a function that adapts it to the new one, and nothing else of the server knows of two versions.
No kind has one yet; `tests/contracts/test_versions.py` proves the mechanism with an invented version.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from enum import StrEnum
from functools import reduce
from types import MappingProxyType
from typing import Any

from msgspec import Struct

CONTRACT = 1  # version of `ferrule.interfaces` that this Ferrule implements
READABLE = frozenset({1})  # versions whose plugins it can use

_GROUP = re.compile(r"ferrule\.v([0-9]{1,6})\.([a-z_]{1,64})")


class Earlier(Struct, frozen=True):
    """A way to read a kind's plugins of an earlier contract. Both fields are module:name.

    `base` is the class that they derive from: it stays where they import it, and the new one has a new name. `adapt` is
    a function that is given their class and returns one of this contract.
    """

    base: str
    adapt: str


class Automatic(StrEnum):
    """A choice of the plugins that are used, or tried by `auto`, where no option names one."""

    ALL = "every plugin"
    ALLOWED = "built-in plugins, and those that an allow-list or --plugin names"
    BUILTIN = "built-in plugins"


class Component(StrEnum):
    """A part of a server, as far as plugins are concerned."""

    LAUNCHER = "launcher"
    ENGINE = "engine"
    MODEL = "model"  # within the engine, where the executor runs one
    FRONTEND = "frontend"
    HTTP = "http"


class Kind(Struct, frozen=True):
    """A kind of plugin. `base` is the class that a plugin derives from, as module:Class, imported when a plugin is
    loaded.

    `made_with` says what the constructor is given, in order; None: keyword arguments that a client names, whose faults
    are the client's. `on_device`: the constructor allocates on a device. `off_until_named`: an item of an allow-list
    that is about such kinds only switches on, and leaves plugins of other kinds alone. `used_in` is the component that
    checks the chosen ones before weights are loaded: the one that uses them, or one of several. `ordered`: classes may
    state a literal `auto_order`, by which `auto` asks them, the lowest first; without one it is 0. `earlier` has an
    entry for each contract in READABLE in which the kind was another; without one, nothing changed.
    """

    name: str
    base: str
    chosen_by: str  # the whole rule, one line
    made_with: tuple[str, ...] | None = ()
    on_device: bool = False
    automatic: Automatic = Automatic.ALL
    unnamed: str = ""  # what becomes of such a plugin when no option names one
    off_until_named: bool = False
    used_in: Component = Component.ENGINE
    ordered: bool = False
    earlier: dict[int, Earlier] = {}

    @property
    def group(self) -> str:
        """The entry-point group in this contract's version."""
        return f"ferrule.v{CONTRACT}.{self.name}"

    @property
    def kit(self) -> str:
        """The conformance kit, as module:Class. Servers never import it."""
        return f"ferrule_testkit.kits:{''.join(part.capitalize() for part in self.name.split('_'))}Kit"

    def make(self, plugin: Callable[..., Any], options: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of a plugin's class; `options` is an instance of its `Options`, None where it has none.

        Raises TypeError for arguments that are not those of the kind, ValueError where a client names ``options``.
        """
        expected = ("**kwargs",) if self.made_with is None else self.made_with
        if len(args) != len(self.made_with or ()) or (kwargs and self.made_with is not None):
            raise TypeError(f"a {self.name} plugin is made with ({', '.join(expected)})")
        if options is None:
            return plugin(*args, **kwargs)
        if "options" in kwargs:
            raise ValueError("'options' is not an argument of requests")
        return plugin(*args, options=options, **kwargs)

    def load_base(self, contract: int | None = None) -> type:
        """Import the base class that plugins of a contract derive from; by default, of this one."""
        earlier = None if contract is None else self.earlier.get(contract)
        base = load_object(earlier.base if earlier else self.base)
        if not isinstance(base, type):
            raise TypeError(f"{self.base} is not a class")
        return base


def load_object(target: str) -> Any:
    """Import the object that module:name, or module:name.name, stands for."""
    module, _, path = target.partition(":")
    return reduce(getattr, path.split("."), importlib.import_module(module))


def _table(*kinds: Kind) -> MappingProxyType[str, Kind]:
    return MappingProxyType({kind.name: kind for kind in kinds})


_I = "ferrule.interfaces."

KINDS = _table(
    Kind(
        "model",
        _I + "model:Model",
        "the checkpoint's `architectures`, --model-impl",
        made_with=("context",),
        on_device=True,
        used_in=Component.MODEL,
    ),
    Kind(
        "quantization",
        _I + "quantization:QuantizationMethod",
        "--quantization; else the checkpoint's `quantization_config`",
        made_with=("config",),
        used_in=Component.MODEL,
    ),
    Kind("hub", _I + "hub:ModelHub", "--hub, for a model that is not a local folder", used_in=Component.LAUNCHER),
    Kind("load_format", _I + "load_format:WeightSource", "--load-format", used_in=Component.MODEL),
    Kind("tokenizer", _I + "tokenizer:TokenizerSource", "--tokenizer-mode", used_in=Component.FRONTEND),
    Kind(
        "tool_parser",
        _I + "parsers:ToolParser",
        "--tool-call-parser",
        made_with=("tools",),
        used_in=Component.FRONTEND,
    ),
    Kind("reasoning_parser", _I + "parsers:ReasoningParser", "--reasoning-parser", used_in=Component.FRONTEND),
    Kind(
        "guided_decoding",
        _I + "guided_decoding:GrammarBackend",
        "a request's `guided_decoding_backend`, --guided-decoding-backend; auto asks each in turn",
        made_with=("vocabulary",),
        used_in=Component.MODEL,
        unnamed="auto asks it in its turn",
        ordered=True,
    ),
    Kind(
        "attention",
        _I + "attention:AttentionBackend",
        "--attention-backend, FERRULE_ATTENTION_BACKEND; else the platform's order",
        used_in=Component.MODEL,
        unnamed="auto asks it in its turn",
    ),
    Kind(
        "platform",
        _I + "platform:Platform",
        "--device; auto takes the first that does not refuse; those of others only when allowed",
        automatic=Automatic.ALLOWED,
        off_until_named=True,
        used_in=Component.MODEL,
        unnamed="auto asks it in its turn",
        ordered=True,
    ),
    Kind("executor", _I + "executor:Executor", "--distributed-executor-backend"),
    Kind("scheduler", _I + "scheduler:Scheduler", "--scheduler-cls", made_with=("limits", "policy", "plugins")),
    Kind("policy", _I + "scheduler:SchedulingPolicy", "--scheduling-policy"),
    Kind("sampler", _I + "sampler:Sampler", "--sampler", made_with=("plugins",), used_in=Component.MODEL),
    Kind(
        "logits_processor",
        _I + "sampler:LogitsProcessor",
        "a request, within --logits-processor-pattern",
        made_with=None,
        used_in=Component.FRONTEND,
    ),
    Kind(
        "router",
        _I + "router:Router",
        "--routers; the built-in ones are on",
        automatic=Automatic.BUILTIN,
        used_in=Component.HTTP,
        unnamed="on by default",
    ),
    Kind(
        "response_store",
        _I + "response_store:ResponseStore",
        "--response-store; auto is `memory`, and `sqlite` with several API processes",
        made_with=("folder",),
        used_in=Component.HTTP,
    ),
    Kind(
        "adapter_bank",
        _I + "adapters:AdapterBank",
        "--adapter-bank, with --enable-lora",
        made_with=("context",),
        on_device=True,
        used_in=Component.MODEL,
    ),
    Kind(
        "lora_resolver",
        _I + "lora_resolver:LoRAResolver",
        "--lora-resolvers; the built-in ones that are configured are on",
        made_with=("context",),
        automatic=Automatic.BUILTIN,
        used_in=Component.FRONTEND,
        unnamed="on where it is configured",
    ),
    Kind(
        "stat_logger",
        _I + "stats:StatLogger",
        "on when discovered",
        made_with=("config", "info"),
        used_in=Component.FRONTEND,
        unnamed="on by default",
    ),
    Kind("command", _I + "command:Command", "`ferrule NAME`", used_in=Component.LAUNCHER),
    Kind(
        "hooks",
        _I + "hooks:Hooks",
        "off until named by --plugins-allow or FERRULE_PLUGINS; then all are told",
        off_until_named=True,
        used_in=Component.LAUNCHER,
    ),
)


def parse_group(group: str) -> tuple[int, str] | None:
    """Return (contract version, kind) of an entry-point group, or None when the group is not one of Ferrule's."""
    match = _GROUP.fullmatch(group)
    return (int(match[1]), match[2]) if match else None

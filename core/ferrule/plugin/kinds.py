"""The table of plugin kinds: the one place that says what can be plugged in, and what chooses it."""

from __future__ import annotations

import importlib
import re
from functools import reduce
from types import MappingProxyType
from typing import Any

from msgspec import Struct

CONTRACT = 2  # version of `ferrule.interfaces` that this Ferrule implements
READABLE = frozenset({1, 2})  # versions whose plugins it can use

_GROUP = re.compile(r"ferrule\.v([0-9]{1,6})\.([a-z_]{1,64})")


class Earlier(Struct, frozen=True):
    """How a kind's plugins of an earlier contract are read. Both are module:name.

    `base` is the class that they derive from: it stays where they import it, and the new one has a new name. `adapt` is
    a function that is given their class and returns one of this contract.
    """

    base: str
    adapt: str


class Kind(Struct, frozen=True):
    """`base` is the class that a plugin derives from, as module:Class, imported when a plugin is loaded.

    `earlier` has an entry for each contract in READABLE in which the kind was another; without one, nothing changed.
    """

    name: str
    base: str
    options: tuple[str, ...]  # flags that choose one by name
    chosen_by: str  # the whole rule, one line
    earlier: dict[int, Earlier] = {}

    @property
    def group(self) -> str:
        """The entry-point group in this contract's version."""
        return f"ferrule.v{CONTRACT}.{self.name}"

    def load_base(self, contract: int | None = None) -> type:
        """Import the base class that plugins of a contract derive from; by default, of this one."""
        earlier = None if contract is None else self.earlier.get(contract)
        base = load_object(earlier.base if earlier else self.base)
        if not isinstance(base, type):
            raise TypeError(f"{self.base} is not a class")
        return base


def load_object(target: str) -> Any:
    """Import what module:name, or module:name.name, stands for."""
    module, _, path = target.partition(":")
    return reduce(getattr, path.split("."), importlib.import_module(module))


def _table(*kinds: Kind) -> MappingProxyType[str, Kind]:
    return MappingProxyType({kind.name: kind for kind in kinds})


_I = "ferrule.interfaces."

KINDS = _table(
    Kind("model", _I + "model:Model", ("--model-impl",), "the checkpoint's `architectures`, --model-impl"),
    Kind(
        "quantization",
        _I + "quantization:QuantizationMethod",
        ("--quantization",),
        "--quantization; else the checkpoint's `quantization_config`",
    ),
    Kind("hub", _I + "hub:ModelHub", ("--hub",), "--hub, for a model that is no folder"),
    Kind("load_format", _I + "load_format:WeightSource", ("--load-format",), "--load-format"),
    Kind("tokenizer", _I + "tokenizer:TokenizerSource", ("--tokenizer-mode",), "--tokenizer-mode"),
    Kind("tool_parser", _I + "parsers:ToolParser", ("--tool-call-parser",), "--tool-call-parser"),
    Kind("reasoning_parser", _I + "parsers:ReasoningParser", ("--reasoning-parser",), "--reasoning-parser"),
    Kind(
        "attention",
        _I + "attention:AttentionBackend",
        ("--attention-backend",),
        "--attention-backend, FERRULE_ATTENTION_BACKEND; else the platform's order",
    ),
    Kind(
        "platform",
        _I + "platform:Platform",
        ("--device",),
        "--device; auto takes the first that does not refuse, cpu last",
    ),
    Kind(
        "executor",
        _I + "executor:Executor",
        ("--distributed-executor-backend",),
        "--distributed-executor-backend",
    ),
    Kind("scheduler", _I + "scheduler:Scheduler", ("--scheduler-cls",), "--scheduler-cls"),
    Kind("policy", _I + "scheduler:SchedulingPolicy", ("--scheduling-policy",), "--scheduling-policy"),
    Kind("sampler", _I + "sampler:Sampler", ("--sampler",), "--sampler"),
    Kind(
        "logits_processor",
        _I + "sampler:LogitsProcessor",
        ("--logits-processor-pattern",),
        "a request, within --logits-processor-pattern",
    ),
    Kind(
        "router",
        _I + "http:Router",
        ("--routers",),
        "--routers; the built-in ones are on",
        {1: Earlier(_I + "router:Router", "ferrule.api.earlier:adapt")},
    ),
    Kind("stat_logger", _I + "stats:StatLogger", (), "on when discovered"),
    Kind("command", _I + "command:Command", (), "`ferrule NAME`"),
    Kind("hooks", _I + "hooks:Hooks", (), "off until named by --plugins-allow or FERRULE_PLUGINS; then all are told"),
)


def parse_group(group: str) -> tuple[int, str] | None:
    """(contract version, kind) of an entry-point group, or None when it is not one of ours."""
    match = _GROUP.fullmatch(group)
    return (int(match[1]), match[2]) if match else None

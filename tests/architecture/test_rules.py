"""The repository keeps the rules of `tools.architecture`; a fault is planted for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from ferrule.plugin import KINDS
from tools import ROOT
from tools.architecture import RULES, Module, read_modules
from tools.architecture.imports import LAYERS, NO_TORCH
from tools.architecture.shape import (
    BUDGETS,
    MAX_CLASS,
    MAX_FILE,
    MAX_FUNCTION,
    MAX_SERVING,
    SERVING,
    TABLES,
    code_lines,
)

REPOSITORY = ROOT


@cache
def repository() -> tuple[Module, ...]:
    return tuple(read_modules(REPOSITORY))


@pytest.mark.advisory(
    "CVE-2025-32434",
    "CVE-2025-47277",
    "CVE-2026-27893",
    "CVE-2026-41523",
    "CVE-2025-9141",
    "CVE-2026-114052",
    "CVE-2026-15976",
    "CVE-2026-61539",
)
@pytest.mark.parametrize("name", RULES)
def test_the_repository_keeps(name: str) -> None:
    violations = RULES[name](repository())
    if violations:
        pytest.fail(f"{name}:\n" + "\n".join(f"  {violation}" for violation in violations), pytrace=False)


def test_the_walk_sees_the_repository() -> None:
    packages = {module.package for module in repository()}
    assert packages >= {
        "ferrule",
        "ferrule_testkit",
        "ferrule_plugins",
        "ferrule_kernels",
        "ferrule_contrib",
        "ferrule_quantize",
    }
    named = {part for layer in LAYERS for part in layer}
    parts = {module.name.partition(".")[2].partition(".")[0] for module in repository() if module.core}
    assert parts <= named
    assert {module.path for module in repository()} >= TABLES


def test_every_layer_has_a_budget_or_is_part_of_serving() -> None:
    named = [part for layer in LAYERS[:-1] for part in layer]
    budgets = [name.removeprefix("ferrule.") for name in BUDGETS if name.startswith("ferrule.")]
    assert sorted([*budgets, *SERVING]) == sorted(named)
    assert {*named, *LAYERS[-1]} > NO_TORCH


def test_every_interface_is_a_kind_or_known_not_to_be() -> None:
    """Check that a kind names every base class: others could not be plugged in."""
    shared = {"dialect", "kernels", "plugins", "ranks", "service"}  # what a plugin is handed, not what it is
    shared |= {"speculator", "adapters"}  # not chosen by an option yet: a runner is given one
    modules = {module.name for module in repository() if module.name.startswith("ferrule.interfaces.")}
    bases = {kind.base.partition(":")[0] for kind in KINDS.values()}
    bases |= {earlier.base.partition(":")[0] for kind in KINDS.values() for earlier in kind.earlier.values()}
    assert modules == bases | {f"ferrule.interfaces.{name}" for name in shared}


# -------------------------------------------------------------------------------------- planted faults


def planted() -> Iterator[tuple[str, str, str, int]]:
    """Yield (rule, path, source, line of the fault)."""
    engine = "core/ferrule/engine/x.py"
    yield "layer-order", engine, "from ferrule.types import Chunk\nimport ferrule.runner\n", 2
    yield "layer-order", engine, "def f():\n    from ferrule.api.app import x\n", 2
    yield "layer-order", "core/ferrule/config/x.py", _typing("from ferrule.interfaces.model import Model"), 3
    yield "layer-order", "core/ferrule/plugin/x.py", "from ..launch import cli\n", 1
    yield "layer-order", engine, "from ferrule import LLM\n", 1
    yield "layer-order", "core/ferrule/stray.py", "import ferrule.types\n", 1
    yield "core-stands-alone", engine, "def f():\n    import ferrule_plugins.policy\n", 2
    yield "core-stands-alone", engine, "import importlib\nimportlib.import_module('ferrule_contrib.tiny')\n", 2
    yield "core-stands-alone", "kernels/ferrule_kernels/x.py", "from ferrule import types\n", 1
    yield "core-stands-alone", "plugins/ferrule_plugins/x.py", "def f():\n    import ferrule_quantize.run\n", 2
    other = "distributions/ferrule-quantize/src/ferrule_quantize/x.py"
    yield "core-stands-alone", other, "import ferrule_tensorizer\n", 1
    yield "public-imports", other, "from ferrule_plugins.command import pack\n", 1
    yield "public-imports", other, "from ferrule_files import shards\nfrom ferrule.assembly import model\n", 2
    yield "no-torch", "core/ferrule/frontend/x.py", "def f():\n    import torch\n", 2
    yield "no-torch", "core/ferrule/api/x.py", _typing("import torch"), 3
    yield "no-torch", "core/ferrule/launch/x.py", "from safetensors.torch import load\n", 1
    yield "no-torch", "core/ferrule/interfaces/x.py", "import torch.nn\n", 1
    yield "engine-is-pure", engine, "from time import monotonic\n", 1
    yield "one-place-each", "plugins/ferrule_plugins/x.py", "import pluggy\n", 1
    yield "public-imports", "plugins/ferrule_plugins/x.py", "from ferrule.engine import queue\n", 1
    yield "public-imports", "plugins/ferrule_plugins/x.py", "from ferrule.env import FOREIGN\n", 1
    yield "public-imports", "plugins/ferrule_plugins/x.py", "from ferrule import llm, log\n", 1
    yield (
        "public-imports",
        "plugins/ferrule_plugins/scheduler/default.py",
        "import ferrule.runner\n",
        1,
    )
    yield "no-http-client-in-core", "core/ferrule/config/x.py", "import httpx\n", 1
    yield "function-length", engine, "def f():\n" + "    x = 1\n" * MAX_FUNCTION, 1
    yield "class-length", engine, "class A:\n" + "    x = 1\n" * MAX_CLASS, 1
    yield "file-length", engine, "x = 1\n" * (MAX_FILE + 1), MAX_FILE + 1
    yield "parameters", engine, "class A:\n    def f(self, a, b, c, d, /, e, f, *, g, h): ...\n", 2
    yield "budgets", engine, "x = 1\n" * (MAX_SERVING + 1), 1
    yield "budgets", "core/ferrule/config/x.py", "x = 1\n" * (BUDGETS["ferrule.config"] + 1), 1
    yield "budgets", "core/ferrule_nn/x.py", "x = 1\n" * (BUDGETS["ferrule_nn"] + 1), 1
    yield "module-docstring", engine, "x = 1\n", 1
    for head in (
        "What x takes.",
        "The next x.",
        "`x` as bytes.",
        "Rows of x.",
        "Returns x.",
        "Called once.",
        "Being x.",
    ):
        yield "docstring-heads", engine, f'def f(x):\n    """{head}"""\n', 1
    yield "docstring-heads", engine, 'class A:\n    """What is known of x."""\n', 1
    yield "docstring-heads", engine, 'class A:\n    @property\n    def x(self):\n        """Of all rows."""\n', 3
    yield "core-names-no-plugin", engine, "FIRST = ('xgrammar',)\n", 1
    yield "core-names-no-plugin", "core/ferrule/assembly/x.py", "def f(x):\n    return x == 'transformers'\n", 2
    yield "no-global", "plugins/ferrule_plugins/x.py", "def f():\n    global x\n", 2
    for value in ("[]", "{}", "{1}", "dict(a=1)", "collections.defaultdict(list)", "[x for x in y]"):
        yield "no-module-state", engine, f"_seen = {value}\n", 1
    yield "no-module-state", engine, "if x:\n    cache: dict[str, int] = {}\n", 2
    yield "no-module-state", engine, "try:\n    pass\nexcept OSError:\n    found = []\n", 4
    for change in ("NAMES.append(1)", "NAMES[0] = 1", "del NAMES[0]"):
        yield "no-module-state", engine, f"NAMES = [2]\ndef f():\n    {change}\n", 3
    yield "no-pickle-or-eval", engine, "import pickle\n", 1
    yield "no-pickle-or-eval", engine, "def f():\n    from cloudpickle import dumps\n", 2
    yield "no-pickle-or-eval", engine, "x = eval('1')\n", 1
    yield "no-pickle-or-eval", engine, "exec(code)\n", 1
    yield "no-pickle-or-eval", engine, "from multiprocessing import Queue\n", 1
    yield "no-pickle-or-eval", "plugins/ferrule_plugins/x.py", "torch.load(f)\n", 1
    yield "no-pickle-or-eval", "plugins/ferrule_plugins/x.py", "torch.load(f, weights_only=False)\n", 1
    yield "no-assert", "plugins/ferrule_plugins/x.py", "def f(x):\n    assert x\n", 2
    for read in ("os.environ['X']", "os.getenv('X')", "x = dict(os.environ)"):
        yield "environment-in-one-file", engine, f"import os\n{read}\n", 2
    yield "environment-in-one-file", engine, "from os import environ\n", 1
    yield "no-remote-code", engine, "load(name, trust_remote_code=True)\n", 1
    for address in ("0.0.0.0", "tcp://*:5555", "::"):
        yield "no-wide-bind", engine, f"bind('{address}')\n", 1
    for asked in ("x.device.type", "device.type", "torch.get_default_device().type", "platform.device().type"):
        yield "device-kinds-in-platforms", "core/ferrule_nn/x.py", f"if {asked}:\n    pass\n", 1
    yield "device-kinds-in-platforms", "plugins/ferrule_plugins/attention/x.py", "x = t.is_cuda\n", 1
    for asked in ('device == "cuda"', 'caps.platform in ("cpu", "cuda")', 'x.device != torch.device("cpu")'):
        yield "device-kinds-in-platforms", "core/ferrule/runner/x.py", f"x = {asked}\n", 1
    for orphan in ("asyncio.create_task(f())", "loop.create_task(f())", "_ = asyncio.create_task(f())"):
        yield "tasks-have-owners", engine, f"{orphan}\n", 1
    for decorator in ("cache", "functools.cache", "lru_cache(maxsize=None)", "functools.lru_cache(None)"):
        yield "bounded-caches", engine, f"@{decorator}\ndef f(x): ...\n", 1
    yield "exceptions-are-told", engine, "try:\n    f()\nexcept:\n    g()\n", 3
    for silent in ("Exception", "BaseException", "(ValueError, Exception) as e"):
        yield "exceptions-are-told", engine, f"try:\n    f()\nexcept {silent}:\n    pass\n", 3
    yield "exceptions-are-told", engine, "with contextlib.suppress(Exception):\n    f()\n", 1


def _typing(statement: str) -> str:
    return f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {statement}\n"


@pytest.mark.parametrize(("rule", "path", "source", "line"), list(planted()))
def test_a_planted_fault_is_found(rule: str, path: str, source: str, line: int) -> None:
    violations = RULES[rule]([Module(path, source)])
    assert [violation.line for violation in violations] == [line]
    assert violations[0].path in path


def test_every_rule_has_a_planted_fault() -> None:
    elsewhere = {"no-cycles", "package-cycles", "no-torch-on-import"}  # these need more than one module
    assert {rule for rule, *_ in planted()} | elsewhere == set(RULES)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("import ferrule.engine.b", "from ferrule.engine import a"),
        (_typing("from .b import x"), "def f():\n    from ferrule.engine.a import y"),
    ],
)
def test_a_planted_cycle_is_found(a: str, b: str) -> None:
    modules = [
        Module("core/ferrule/engine/__init__.py", ""),
        Module("core/ferrule/engine/a.py", a),
        Module("core/ferrule/engine/b.py", b),
        Module("core/ferrule/engine/c.py", "import ferrule.engine.a"),
    ]
    (violation,) = RULES["no-cycles"](modules)
    assert "ferrule.engine.a → ferrule.engine.b → ferrule.engine.a" in violation.what


def test_a_planted_cycle_of_packages_is_found() -> None:
    """Find cycles of packages, and of a module and a package beside it, though no module is in a cycle."""
    modules = [
        Module("core/ferrule/api/__init__.py", "from ferrule.api.a import x"),
        Module("core/ferrule/api/a.py", "import ferrule.engine.b"),
        Module("core/ferrule/api/c.py", "import ferrule.api.deep.d"),
        Module("core/ferrule/api/deep/d.py", ""),
        Module("core/ferrule/api/deep/e.py", "import ferrule.api.c"),
        Module("core/ferrule/engine/b.py", "import ferrule.types"),
        Module("core/ferrule/engine/f.py", "def f():\n    import ferrule.api.c"),
        Module("core/ferrule/types.py", ""),
    ]
    found = [violation.what for violation in RULES["package-cycles"](modules)]
    assert RULES["no-cycles"](modules) == []
    assert found == [
        "cycle of packages: ferrule.api → ferrule.engine → ferrule.api → …",
        "cycle of packages: ferrule.api.c → ferrule.api.deep → ferrule.api.c → …",
    ]


def test_torch_through_another_module_is_found() -> None:
    modules = [
        Module("core/ferrule/launch/a.py", "import ferrule.assembly.b\ndef f():\n    import ferrule.assembly.c"),
        Module("core/ferrule/assembly/b.py", "from ferrule.runner import d"),
        Module("core/ferrule/assembly/c.py", "import torch"),
        Module("core/ferrule/runner/__init__.py", ""),
        Module("core/ferrule/runner/d.py", "import torch"),
    ]
    (violation,) = RULES["no-torch-on-import"](modules)
    assert (violation.path, violation.line) == ("core/ferrule/launch/a.py", 1)
    assert "ferrule.assembly.b → ferrule.runner.d" in violation.what


GOOD = '''"""A module that keeps every rule."""

from __future__ import annotations

import os
from functools import cache, lru_cache
from multiprocessing.shared_memory import SharedMemory
from types import MappingProxyType
from typing import TYPE_CHECKING

from ferrule import __version__, log
from ferrule.types import Chunk

if TYPE_CHECKING:
    from ferrule.config import Config

NAMES = ["a", "b"]
table = MappingProxyType({"a": 1})
__all__ = ["f"]


@cache
def f() -> int:
    """Listen on "0.0.0.0": a docstring may say so."""
    return os.getpid()


@lru_cache(maxsize=8)
def g(x: int) -> int:
    try:
        model.eval()
    except Exception as error:
        log.get("x").warning("%s", error)
    except ValueError:
        pass
    return len(NAMES)


async def h(self, group) -> None:
    task = asyncio.create_task(k())
    group.create_task(k())
    torch.load(x, weights_only=True)
'''


def test_a_good_module_breaks_no_rule() -> None:
    modules = [Module("core/ferrule/engine/good.py", GOOD), Module("core/ferrule/types.py", '"""Types."""\n')]
    modules += [Module(f"core/ferrule/{name}.py", '"""Low."""\n') for name in ("log", "config")]
    assert [str(violation) for rule in RULES.values() for violation in rule(modules)] == []


COUNTED = '''"""Module.

More.
"""

# a comment
x = (
    1,  # one
)


def f():
    """Doc."""
    return "a"
'''


def test_lines_of_code_are_counted_without_comments_and_docstrings() -> None:
    assert code_lines(Module("core/ferrule/x.py", COUNTED)) == 5

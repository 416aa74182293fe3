"""The modules that a plugin may import, and a check of sources that are to import nothing else."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType


class Shown(Enum):
    """The way in which the snapshot of the contract shows a module."""

    WHOLE = "every public name with its signature and promises"
    PARTS = "what it names in `__all__`, wherever that is defined, with signatures and promises"
    NAMES = "names alone: they have snapshots of their own, or promise no more"
    NOT = "not at all"


@dataclass(frozen=True)
class Public:
    """The public contents of a module, in words, and the way in which the snapshot shows them."""

    what: str
    shown: Shown


# `.*` is every module of the package. The snapshot of the contract, the list in docs/plugins.md and the rule of what
# built-in plugins import follow from this table.
PUBLIC: Mapping[str, Public] = MappingProxyType(
    {
        "ferrule": Public("the version, and the offline API", Shown.NAMES),
        "ferrule.types": Public("values that cross processes", Shown.WHOLE),
        "ferrule.forms": Public("what output may look like", Shown.WHOLE),
        "ferrule.errors": Public("exceptions", Shown.WHOLE),
        "ferrule.sampling_params": Public("`SamplingParams` and `Beam`", Shown.WHOLE),
        "ferrule.interfaces.*": Public("base classes and the types of their arguments; the contract", Shown.WHOLE),
        "ferrule.config": Public("the sections of the configuration that a plugin gets", Shown.NAMES),
        "ferrule.env": Public("settings of the environment that plugins share", Shown.WHOLE),
        "ferrule.log": Public('`Log("area")`', Shown.NAMES),
        "ferrule.slow_start": Public("says in the log what a start waits for", Shown.WHOLE),
        "ferrule.small_files": Public("reads files of configuration, which are small", Shown.WHOLE),
        "ferrule.checkpoint": Public("reads the configuration of a model's folder", Shown.WHOLE),
        "ferrule.schema": Public(
            "the base class of request bodies (`Body`), field types, and the marks `no_effect` and `not_here`",
            Shown.NAMES,
        ),
        "ferrule.structured_outputs": Public("fields of bodies that state the form of outputs", Shown.NAMES),
        "ferrule.frontend.text.detokenize": Public("text of token ids as they come, for tokenizers", Shown.WHOLE),
        "ferrule.assembly.memory": Public("the tensors of a model, wherever its submodules keep them", Shown.WHOLE),
        "ferrule.wire.functions": Public("functions as import paths", Shown.WHOLE),
        "ferrule.runner.logprobs": Public("log-probabilities and ranks of tokens, for samplers", Shown.WHOLE),
        "ferrule.execution": Public("the worker that loads a model and runs its steps, for executors", Shown.PARTS),
        "ferrule_nn.*": Public("building blocks of models", Shown.PARTS),
        "ferrule_quant.*": Public("building blocks of quantization methods", Shown.PARTS),
        "ferrule_parsing.*": Public("building blocks of tool and reasoning parsers", Shown.PARTS),
        "ferrule_files.*": Public(
            "building blocks of load formats, and of commands that read one checkpoint and write another", Shown.NAMES
        ),
        "ferrule_protocol.*": Public("building blocks of routers that generate", Shown.PARTS),
        "ferrule_testkit.kits": Public("the conformance kits", Shown.NAMES),
        "ferrule_testkit.*": Public("what else tests need", Shown.NOT),
    }
)
_PACKAGES = frozenset(name.partition(".")[0] for name in PUBLIC) | {
    "ferrule_plugins",
    "ferrule_kernels",
    "ferrule_contrib",
}


def is_public(module: str) -> bool:
    return any(
        module == entry or (entry.endswith(".*") and f"{module}.".startswith(entry.removesuffix("*")))
        for entry in PUBLIC
    )


def private_imports(folder: Path) -> Iterator[str]:
    """Yield ``file:line: name`` of everything private of Ferrule that a project's sources import.

    Names that begin with an underscore are private, and so are names that a public module with ``__all__`` leaves out
    there.
    """
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for module, name in _imported(node):
                if module.partition(".")[0] in _PACKAGES and not may_import(module, name):
                    yield f"{file.relative_to(folder)}:{node.lineno}: {module}{name and '.' + name}"  # type: ignore[attr-defined]


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from ((node.module, alias.name) for alias in node.names)


def may_import(module: str, name: str) -> bool:
    """Return whether a plugin may write ``from module import name``; without a name, ``import module``."""
    if is_public(f"{module}.{name}"):  # a module, or below a package that is public as a whole
        return not name.startswith("_")
    if not is_public(module):
        return False
    offered = getattr(importlib.import_module(module), "__all__", None)
    return not name or (name in offered if offered is not None else not name.startswith("_"))


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        print("usage: python -m ferrule_testkit.public FOLDER", file=sys.stderr)
        return 2
    found = list(private_imports(Path(argv[0])))
    print("\n".join(found) or "Only public names are imported.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

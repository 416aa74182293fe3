"""The plugin contract as text: every name, signature and promise that a plugin's author sees.

``python -m tools.contract`` prints it. ``--write SNAPSHOT CHANGES`` renews the snapshot that tests/contracts
compares, if the page CHANGES has a new entry about it, and, once the version is released, if no plugin breaks by it.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from ferrule.plugin import CONTRACT, KINDS
from ferrule_testkit.public import PUBLIC, Shown

_PROMISE = "| "


def contract() -> str:
    """Return one line for each thing that a change could break. Lines of promises begin with a bar: docstrings, and the
    comments behind fields and parameters, which say units and shapes.
    """
    lines = [f"contract {CONTRACT}", ""]
    lines += [f"{kind.group} = {kind.base}" for kind in KINDS.values()]
    for module in shown(Shown.WHOLE):
        lines += ["", f"module {module.__name__}", *describe(_source(module)), *_lent(module)]
    for module in shown(Shown.PARTS):
        lines += ["", f"names of {module.__name__}", *_parts(module)]
    for module in shown(Shown.NAMES):
        names = getattr(module, "__all__", None) or [name for name in vars(module) if _is_own(module, name)]
        lines += ["", f"names of {module.__name__}", *sorted(names)]
    return "\n".join(lines) + "\n"


def shown(how: Shown) -> Iterator[ModuleType]:
    """Yield the public modules that are shown in one way; of packages that are public as a whole, all modules if shown
    whole.
    """
    for name, public in PUBLIC.items():
        if public.shown is how:
            module = importlib.import_module(name.removesuffix(".*"))
            yield module
            if how in (Shown.WHOLE, Shown.NAMES) and name.endswith(".*"):
                folder = Path(module.__file__ or "").parent
                for file in sorted(folder.rglob("[a-z]*.py")):
                    inner = ".".join(file.relative_to(folder).with_suffix("").parts)
                    yield importlib.import_module(f"{module.__name__}.{inner}")


def describe(source: str) -> Iterator[str]:
    """Describe public classes, functions and names of one module's source, and their promises.

    Where the module has ``__all__``, only the names in it are described.
    """
    lines = source.splitlines()
    tree = ast.parse(source)
    yield from _promise(tree, "")
    offered = _offered(tree)
    for node in tree.body:
        if offered is None or _name(node) in offered:
            yield from _described(node, "", lines)


def breaking(old: str, new: str) -> list[str]:
    """Return what in a change from `old` to `new` breaks plugins: any line that is gone or has changed, a new thing
    that a plugin must define. Promises may get other words; people judge whether they still promise the same.
    """
    found = []
    for line in difflib.ndiff(_signatures(old), _signatures(new)):
        if line.startswith("- ") or (line.startswith("+ ") and "@abstractmethod" in line):
            found.append(line)
    return found


def recorded(page: str, version: int) -> tuple[bool, int]:
    """Return (released, entries) that the page of changes has for a version. Raises ValueError when it has no such
    heading.
    """
    heading = re.search(rf"^## Version {version}\b(.*)$", page, re.MULTILINE)
    if heading is None:
        raise ValueError(f"there is no heading '## Version {version}' in the page of changes")
    section = page[heading.end() :].partition("\n## ")[0]
    return "not released" not in heading[1], len(re.findall(r"^- ", section, re.MULTILINE))


def snapshot(page: str) -> str:
    """Return the text of the snapshot's file: how many entries the page of changes has, and the contract."""
    return f"entries in plugin-api-changes.md: {recorded(page, CONTRACT)[1]}\n{contract()}"


def refusal(old: str, new: str, page: str) -> str | None:
    """Return why a snapshot may not be renewed, or None."""
    released, _ = recorded(page, CONTRACT)
    broken = breaking(old, new)
    if released and broken:
        return "Version {} is released, and plugins that were written for it would break:\n{}".format(
            CONTRACT, "\n".join(broken)
        )
    if _entries(new) <= _entries(old):
        return f"Say first, in an entry of plugin-api-changes.md under version {CONTRACT}, what changes for whom."
    return None


# ---------------------------------------------------------------------------------------------- parts


def _described(node: ast.stmt, indent: str, lines: Sequence[str]) -> Iterator[str]:
    deeper = indent + "    "
    match node:
        case ast.ClassDef() if _public(node.name):
            head = [ast.unparse(base) for base in node.bases] + [ast.unparse(word) for word in node.keywords]
            yield from (f"{indent}@{ast.unparse(decorator)}" for decorator in node.decorator_list)
            yield f"{indent}class {node.name}({', '.join(head)})"
            yield from _promise(node, deeper)
            for child in node.body:
                yield from _described(child, deeper, lines)
        case ast.FunctionDef() | ast.AsyncFunctionDef() if _public(node.name) or node.name == "__init__":
            yield from (f"{indent}@{ast.unparse(decorator)}" for decorator in node.decorator_list)
            word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            yield f"{indent}{word} {node.name}({ast.unparse(node.args)}){returns}"
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                yield from _comment(argument, deeper, lines, f"{argument.arg}: ")
            yield from _promise(node, deeper)
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]) if _public(name):
            yield f"{indent}{ast.unparse(node)}"
            yield from _comment(node, deeper, lines)


def _promise(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, indent: str) -> Iterator[str]:
    for line in (ast.get_docstring(node) or "").splitlines():
        yield f"{indent}{_PROMISE}{line}".rstrip()


def _comment(node: ast.stmt | ast.arg, indent: str, lines: Sequence[str], prefix: str = "") -> Iterator[str]:
    """Yield the comment behind a field or a parameter."""
    rest = lines[(node.end_lineno or 1) - 1].encode()[node.end_col_offset or 0 :].decode()
    before, hash_sign, text = rest.partition("#")
    if hash_sign and before.strip() in {"", ",", ")", "):"}:
        yield f"{indent}{_PROMISE}{prefix}{text.strip()}"


def _is_own(module: ModuleType, name: str) -> bool:
    """Say whether a name is public and that of a class or function which the module defines."""
    return not name.startswith("_") and getattr(vars(module)[name], "__module__", None) == module.__name__


def _parts(module: ModuleType) -> Iterator[str]:
    """Describe what a package names in `__all__`, as it is defined."""
    wanted = set(module.__all__)
    for file in homes(module):
        source = file.read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if _name(node) in wanted:
                yield from _described(node, "", source.splitlines())


def _name(node: ast.stmt) -> str | None:
    """Return the name that a statement defines."""
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    name: str | None = getattr(node, "name", getattr(target, "id", None))
    return name


def _offered(tree: ast.Module) -> frozenset[str] | None:
    found = next((node.value for node in tree.body if isinstance(node, ast.Assign) and _name(node) == "__all__"), None)
    return None if found is None else frozenset(ast.literal_eval(found))


def homes(package: ModuleType) -> list[Path]:
    """Return the files that define what a package names in `__all__`: all of its own, then those of others."""
    own = sorted(Path(package.__file__ or "").parent.glob("*.py"))
    names = {getattr(getattr(package, name), "__module__", "") for name in package.__all__}
    core = [importlib.import_module(name) for name in sorted(names) if name.startswith("ferrule")]
    return list(dict.fromkeys([*own, *(Path(module.__file__ or "") for module in core)]))


def _lent(module: ModuleType) -> Iterator[str]:
    """Describe classes that a module names in `__all__` and another one defines."""
    for name in getattr(module, "__all__", ()):
        home = importlib.import_module(getattr(module, name).__module__)
        if home is not module:
            source = _source(home)
            node = next(node for node in ast.parse(source).body if getattr(node, "name", None) == name)
            yield from _described(node, "", source.splitlines())


def _source(module: ModuleType) -> str:
    return Path(module.__file__ or "").read_text(encoding="utf-8")


def _signatures(text: str) -> list[str]:
    """Return the lines without promises, each with the names that it stands under, so that equal lines are told
    apart.
    """
    found: list[str] = []
    scope: list[str] = []
    for line in text.splitlines():
        plain = line.strip()
        if not plain or plain.startswith((_PROMISE.strip(), "entries in ")):
            continue
        if header := re.match(r"(?:module|names of) ([\w.]+)", line):
            scope = [header[1]]
        else:
            del scope[1 + (len(line) - len(plain)) // 4 :]
        found.append(f"{'.'.join(scope)}: {plain}")
        if named := re.match(r"(?:class|def|async def) (\w+)", plain):
            scope.append(named[1])
    return found


def _entries(text: str) -> int:
    number = re.match(r"entries in [\w.-]+: (\d+)$", text.partition("\n")[0])
    return int(number[1]) if number else -1


def _public(name: str) -> bool:
    return not name.startswith("_")


def main(argv: Sequence[str]) -> int:
    match list(argv):
        case []:
            print(contract(), end="")
        case ["--write", file, changes]:
            page, target = Path(changes).read_text(encoding="utf-8"), Path(file)
            new = snapshot(page)
            why = refusal(target.read_text(encoding="utf-8"), new, page) if target.exists() else None
            if why is not None:
                print(why, file=sys.stderr)
                return 1
            target.write_text(new, encoding="utf-8")
        case _:
            print("usage: python -m tools.contract [--write SNAPSHOT CHANGES]", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

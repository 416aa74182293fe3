"""YAML with the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema), which is JSON's values.

PyYAML parses, and knows YAML 1.1: there `yes` is true, 0512 is 330 and 12:30 is 750, while 1e6 is a text. Here plain
scalars are null, true and false, integers (512, 0o17, 0x1F), numbers (1e6, .inf), or else texts. Keys are texts as they
are written, and none is given twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ferrule.small_files import read_small

MAX_BYTES = 1 << 20
_MAX_NODES = 100_000  # with each alias counted as what it stands for
_TAG = "tag:yaml.org,2002:"
NULL, BOOL, INT, FLOAT, STR = (_TAG + name for name in ("null", "bool", "int", "float", "str"))
_MAP, _SEQ = _TAG + "map", _TAG + "seq"
_PATTERNS = {  # the first that matches a plain scalar counts
    NULL: r"null|Null|NULL|~|",
    BOOL: r"true|True|TRUE|false|False|FALSE",
    INT: r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    FLOAT: r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    _TAG + "merge": r"<<",  # YAML 1.1: better refused than read as a key like any other
}
_SCALARS = {tag: re.compile(rf"(?:{pattern})\Z", re.ASCII) for tag, pattern in _PATTERNS.items()}


class YamlError(ValueError):
    """A fault of a text that is not YAML as it is read here. `problem` never repeats the text; `detail` may."""

    def __init__(self, problem: str, line: int | None = None, detail: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.line = line
        self.detail = detail


class _Loader(yaml.SafeLoader):
    """A loader of PyYAML with its own table: libraries in this process may have changed the shared one."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.yaml_implicit_resolvers = {None: list(_SCALARS.items())}


def read_yaml(file: Path, what: str) -> yaml.Node | None:
    """Return the document in a small file, checked as a whole; None for an empty one. `what` names the file in errors.

    Raises OSError, CheckpointError (too large, or a pipe) and YamlError.
    """
    try:
        text = read_small(file, MAX_BYTES, what).decode()
        root = _Loader(text).get_single_node()
        if root is not None:
            _Check().visit(root, ())
        return root
    except UnicodeDecodeError as error:
        raise YamlError("not UTF-8 text", detail=f"{error.reason} at byte {error.start}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise YamlError("not YAML", line, error.problem or "") from None
    except yaml.YAMLError:
        raise YamlError("not YAML", detail="it holds characters that YAML does not allow") from None
    except RecursionError:
        raise YamlError("nested too deeply") from None


def value_of(node: yaml.Node) -> Any:
    """Return the value of a checked node: a dict with texts as keys, a list, or a scalar."""
    if isinstance(node, yaml.MappingNode):
        return {key.value: value_of(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [value_of(item) for item in node.value]
    return _READ[node.tag](node.value)


def line_of(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def keys_of(node: yaml.Node, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield (path of a key, its line) of every key in a checked node."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, str(key.value))
            yield inner, line_of(key)
            yield from keys_of(value, inner)


class _Check:
    """A walk over a document as `value_of` will do it. Raises YamlError."""

    def __init__(self) -> None:
        self._nodes = 0

    def visit(self, node: yaml.Node, above: tuple[yaml.Node, ...]) -> None:
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            raise YamlError(f"more than {_MAX_NODES} values, of which aliases may be the most", line_of(node))
        if any(node is outer for outer in above):
            raise YamlError("a recursive alias", line_of(node))
        if isinstance(node, yaml.ScalarNode):
            _check_scalar(node)
            return
        if node.tag != (_MAP if isinstance(node, yaml.MappingNode) else _SEQ):
            raise _unknown_tag(node)
        above = (*above, node)
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
            for _, value in node.value:
                self.visit(value, above)
        else:
            for item in node.value:
                self.visit(item, above)


def _check_keys(node: yaml.MappingNode) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise YamlError("a key is not a text", line_of(key))
        _check_scalar(key)
        if key.value in lines:
            raise YamlError(f"a key is given twice, first in line {lines[key.value]}", line_of(key), repr(key.value))
        lines[key.value] = line_of(key)


def _check_scalar(node: yaml.ScalarNode) -> None:
    if node.tag not in _READ:
        raise _unknown_tag(node)
    pattern = _SCALARS.get(node.tag)
    if pattern is not None and not pattern.match(node.value):
        raise YamlError("the value is not what its YAML tag says", line_of(node))
    if node.tag == INT and len(node.value) > 100:
        raise YamlError("an integer has more than 100 digits", line_of(node))


def _unknown_tag(node: yaml.Node) -> YamlError:
    name = str(node.tag).replace(_TAG, "!!")
    if name == "!!merge":
        return YamlError("YAML 1.2 has no merge key '<<'", line_of(node))
    return YamlError("a tag that is not in YAML 1.2's core schema", line_of(node), name)


def _integer(text: str) -> int:
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


_READ: Mapping[str, Callable[[str], Any]] = {
    NULL: lambda text: None,
    BOOL: lambda text: text.lower() == "true",
    INT: _integer,
    FLOAT: _float,
    STR: str,
}

"""`--config FILE.yaml`: the same options, with the place of each value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from yaml import MappingNode, Node, ScalarNode, SequenceNode

from ferrule.config.schema import Item, Schema, Spec
from ferrule.errors import CheckpointError, ConfigError
from ferrule.yaml_text import BOOL, INT, NULL, YamlError, keys_of, line_of, read_yaml, value_of


def read_file(path: str, schema: Schema) -> list[Item]:
    """Read the options in a YAML file. Raises ConfigError that names file, line and key."""
    if Path(path).suffix not in {".yaml", ".yml"}:
        raise ConfigError(f"--config: {path!r} is not a .yaml or .yml file.")
    try:
        root = read_yaml(Path(path), "configuration file")
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path!r}: {error.strerror}.") from None
    except CheckpointError as error:
        raise ConfigError(f"--config: {error.message}") from None
    except YamlError as error:
        line = "" if error.line is None else f":{error.line}"
        detail = f": {error.detail}" if error.detail else ""
        raise ConfigError(f"{path}{line}: {error.problem}{detail}.") from None
    if root is None:
        return []
    if not isinstance(root, MappingNode):
        raise ConfigError(f"{path}:{line_of(root)}: expected option names with values.")
    return _items(path, schema, root)


def _items(path: str, schema: Schema, root: MappingNode) -> list[Item]:
    items: list[Item] = []
    problems: list[str] = []
    lines: dict[str, int] = {}  # where a key stood first
    for key_node, node in root.value:
        line, key = line_of(key_node), str(key_node.value)
        place = f"{path}:{line}"
        match = schema.find("--" + key)
        name = key.replace("_", "-")
        if name in lines:
            problems.append(f"{place}: {key} is given twice, first in line {lines[name]}.")
        elif match is None and schema.partial:
            continue
        elif match is None:
            hint = " Keys have no dashes in front." if key.startswith("-") else schema.suggest("--" + key)
            problems.append(f"{place}: unknown option {key!r}.{hint}")
        elif match.spec.name == "config":
            problems.append(f"{place}: a configuration file cannot name another.")
        else:
            inner = {keys: f"{path}:{at}" for keys, at in keys_of(node, match.path)}
            items.append(Item(match, _raw(match.spec, node), place, f"{place}: {key}", {match.path: place, **inner}))
        lines.setdefault(name, line)
    if problems:
        raise ConfigError("\n".join(problems))
    return items


def _raw(spec: Spec, node: Node) -> Any:
    """Return scalars, alone or in a list, as they were written, so that YAML and the command line read a value
    alike.
    """
    if spec.base is not dict and isinstance(node, SequenceNode):
        return [_scalar(spec, item) for item in node.value]
    return _scalar(spec, node)


def _scalar(spec: Spec, node: Node) -> Any:
    is_switch = node.tag == BOOL and (spec.base is bool or spec.option.bare)
    is_number = node.tag == INT and spec.base in (int, float)  # 0x1F
    if spec.base is dict or not isinstance(node, ScalarNode) or node.tag == NULL or is_switch or is_number:
        return value_of(node)
    return node.value

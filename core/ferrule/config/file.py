"""`--config FILE.yaml`: the same options, with the place of each value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ferrule.config.schema import Item, Schema, Spec
from ferrule.errors import ConfigError

_NULL = "tag:yaml.org,2002:null"
_BOOL = "tag:yaml.org,2002:bool"
_DATE = "tag:yaml.org,2002:timestamp"


def read_file(path: str, schema: Schema) -> list[Item]:
    """The options in a YAML file. Raises ConfigError that names file, line and key."""
    # yaml is imported here: most starts have no file
    import yaml

    if Path(path).suffix not in {".yaml", ".yml"}:
        raise ConfigError(f"--config: {path!r} is not a .yaml or .yml file.")
    try:
        # Libraries in this process may have changed what yaml's own loader makes of a date.
        constructors: dict[Any, Any] = dict(yaml.SafeLoader.yaml_constructors)
        constructors[_DATE] = yaml.constructor.SafeConstructor.construct_yaml_timestamp
        kind = type("Loader", (yaml.SafeLoader,), {"yaml_constructors": constructors})
        loader = kind(Path(path).read_text(encoding="utf-8"))
        loader.yaml_implicit_resolvers = {  # JSON has no dates: 2020-01-01 is a text
            first: [entry for entry in entries if entry[0] != _DATE]
            for first, entries in loader.yaml_implicit_resolvers.items()
        }
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}:{root.start_mark.line + 1}: expected option names with values.")
        return _items(path, schema, loader, root)
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path!r}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config: {path!r} is not UTF-8 text: {error.reason} at byte {error.start}.") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not YAML: {error.problem}.") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply.") from None
    except yaml.YAMLError:
        raise ConfigError(f"{path}: not YAML: it holds characters that YAML does not allow.") from None


def _items(path: str, schema: Schema, loader: Any, root: Any) -> list[Item]:
    items: list[Item] = []
    problems: list[str] = []
    lines: dict[str, int] = {}  # where a key stood first
    for key_node, node in root.value:
        line, key = key_node.start_mark.line + 1, str(key_node.value)
        place = f"{path}:{line}"
        match = schema.find("--" + key)
        name = key.replace("_", "-")
        if name in lines:
            problems.append(f"{place}: {key} is given twice, first in line {lines[name]}.")
        elif match is None and schema.partial:
            continue
        elif match is None:
            problems.append(f"{place}: unknown option {key!r}.{schema.suggest('--' + key)}")
        elif match.spec.name == "config":
            problems.append(f"{place}: a configuration file cannot name another.")
        else:
            try:
                items.append(Item(match, _raw(match.spec, loader, node), place, f"{place}: {key}"))
            except ValueError:  # a tag such as !!int on something else
                problems.append(f"{place}: {key}: the value is not what its YAML tag says.")
        lines.setdefault(name, line)
    if problems:
        raise ConfigError("\n".join(problems))
    return items


def _raw(spec: Spec, loader: Any, node: Any) -> Any:
    """Scalars, alone or in a list, as they were written, so that YAML and the command line read a value alike."""
    if spec.base is not dict and node.id == "sequence":
        return [_scalar(spec, loader, item) for item in node.value]
    return _scalar(spec, loader, node)


def _scalar(spec: Spec, loader: Any, node: Any) -> Any:
    is_switch = node.tag == _BOOL and (spec.base is bool or spec.option.bare)
    if spec.base is dict or node.id != "scalar" or node.tag == _NULL or is_switch:
        return loader.construct_object(node, deep=True)
    return node.value

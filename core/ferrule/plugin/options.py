"""Options of a plugin: its class declares them, and `--plugin-config` gives them values.

A class of any kind may have an attribute ``Options``: a dataclass, or a `msgspec.Struct`, with a field for each option.
Types, bounds and descriptions are those that msgspec reads (``Annotated[int, Meta(ge=1, description="…")]``). The
constructor is then given an instance of it, as the keyword argument ``options``, behind what its kind is made with.

Every plugin is made by `Plugins.make`, so all kinds have options. msgspec, which messages need anyway, checks their
values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from ferrule.errors import nearest

_TYPES = {"integer": "a whole number", "number": "a number", "string": "a text", "boolean": "true or false"}
_BOUNDS = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
    "minLength": "length >=",
    "maxLength": "length <=",
}


class PluginOption(msgspec.Struct, frozen=True, kw_only=True):
    """The description of an option. `default` is None for an option that must be given, else the default as JSON."""

    name: str
    expects: str  # "a whole number >= 1"
    default: str | None
    doc: str = ""

    @property
    def text(self) -> str:
        """The whole description but the name, in sentences."""
        expects = self.expects[:1].upper() + self.expects[1:]
        default = "Must be given." if self.default is None else f"Default: {self.default}."
        return f"{self.doc} {expects}. {default}".strip()


def declared_options(plugin: Any) -> Any:
    """Return the class `Options` of a plugin's class; None for a plugin that takes no options."""
    return getattr(plugin, "Options", None)


def describe_options(declared: Any) -> tuple[PluginOption, ...]:
    """Return the options in the order of the fields. Raises TypeError where `declared` is not a class as described
    above.
    """
    info = msgspec.inspect.type_info(declared)
    if not isinstance(info, msgspec.inspect.DataclassType | msgspec.inspect.StructType):
        raise TypeError("it must be a dataclass or a msgspec.Struct")
    schemas, definitions = msgspec.json.schema_components([declared], ref_template="#{name}")
    schema = _resolved(schemas[0], definitions)
    required = schema.get("required", ())
    fields = {field.name: schema["properties"][field.encode_name] for field in info.fields}
    order = [name for name in getattr(declared, "__annotations__", fields) if name in fields]
    return tuple(
        PluginOption(
            name=name,
            expects=_expects(fields[name], definitions),
            default=None if name in required else msgspec.json.encode(_default(info, name)).decode(),
            doc=_resolved(fields[name], definitions).get("description", ""),
        )
        for name in dict.fromkeys([*order, *fields])
    )


def read_options(declared: Any, values: Mapping[str, Any]) -> Any:
    """Return an instance of `declared` with these values. Raises ValueError with a line for each value that is wrong.

    Wrong values are not repeated: they may be secret.
    """
    hints = get_type_hints(declared, include_extras=True)
    known = {option.name: option for option in describe_options(declared)}
    problems = [f"There is no option '{name}'.{nearest(name, known)}" for name in values if name not in known]
    problems += [f"{name} must be given." for name in known if known[name].default is None and name not in values]
    read: dict[str, Any] = {}
    for name in (name for name in known if name in values):
        try:
            read[name] = msgspec.convert(values[name], hints[name], str_keys=True)  # as JSON has no others
        except msgspec.ValidationError as error:
            problems.append(f"{name}: {str(error).replace('`', '')}.")
    if not problems:
        try:
            return declared(**read)
        except ValueError as error:  # its own check, of values that do not go together
            problems.append(str(error))
    raise ValueError("\n".join(problems))


def _default(info: Any, name: str) -> Any:
    field = next(field for field in info.fields if field.name == name)
    return field.default_factory() if field.default is msgspec.NODEFAULT else field.default


def _resolved(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema that a JSON schema's reference stands for, merged with what stands beside the reference."""
    if "$ref" not in schema:
        return schema
    return {**definitions[schema["$ref"].removeprefix("#")], **schema}


def _expects(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Describe a JSON schema in words."""
    if "$ref" in schema:
        return "a JSON object"
    if "enum" in schema:
        return "one of: " + ", ".join(map(str, schema["enum"]))
    if "anyOf" in schema:
        return " or ".join(_expects(option, definitions) for option in schema["anyOf"])
    kind = schema.get("type")
    if kind == "array":
        items = schema.get("items")
        inner = _expects(items, definitions) if isinstance(items, dict) and items else ""
        return f"a list, each {inner}" if inner else "a list"
    noun = {**_TYPES, "object": "a JSON object", "null": "null"}.get(str(kind), "any value")
    bounds = " and ".join(f"{sign} {schema[bound]}" for bound, sign in _BOUNDS.items() if bound in schema)
    return f"{noun} {bounds}".rstrip()

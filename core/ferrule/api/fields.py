"""Which fields a body has that its model does not declare, at any depth. The model is read as JSON schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

from ferrule.schema import printable

_MAX_NAMED = 16  # unknown fields that are named
_MAX_NESTING = 16  # of lists in lists, when a type refers to itself

Schema = Mapping[str, Any]


class Shape:
    """What a value may be by any of some schemas: the fields of an object, the items of a list.

    Shapes of fields and items are made when they are asked for, as types may refer to themselves. `definitions` are
    what ``$ref`` refers to, by the last part of its path.
    """

    def __init__(self, schemas: Iterable[Schema], definitions: Mapping[str, Schema]) -> None:
        self._definitions = definitions
        self._fields: dict[str, list[Schema]] = {}
        self._others: list[Schema] = []  # of fields that are not listed, when there may be some
        self._items: list[Schema] = []
        self._children: dict[str, Shape | None] = {}
        self.anything = False
        for schema in schemas:
            self._read(schema)

    @classmethod
    def of(cls, schema: Schema) -> Shape:
        """The shape of a whole schema, with its ``$defs`` wherever they are."""
        definitions: dict[str, Schema] = {}
        for part in _parts(schema):
            definitions.update(part.get("$defs", {}))
        return cls([schema], definitions)

    def _read(self, schema: Schema) -> None:
        if "$ref" in schema:
            self._read(self._definitions[schema["$ref"].rpartition("/")[2]])
            return
        unions = [part for name in ("anyOf", "oneOf", "allOf") for part in schema.get(name, ())]
        for part in unions:
            self._read(part)
        kinds = schema.get("type", ())
        kinds = (kinds,) if isinstance(kinds, str) else kinds
        if "properties" in schema or "additionalProperties" in schema or "object" in kinds:
            for name, field in schema.get("properties", {}).items():
                self._fields.setdefault(name, []).append(field)
            others = schema.get("additionalProperties", "properties" not in schema)
            if others is not False:
                self._others.append({} if others is True else others)
        elif "array" in kinds:
            self._items += [*schema.get("prefixItems", ()), schema.get("items", {})]
        elif not (kinds or unions or "enum" in schema or "const" in schema):
            self.anything = True

    @cached_property
    def items(self) -> Shape:
        return Shape(self._items, self._definitions)

    @property
    def declared(self) -> tuple[str, ...]:
        """Names of an object's own fields."""
        return tuple(self._fields)

    def field(self, name: str) -> Shape | None:
        """Of a field; None when an object may not have it."""
        schemas = self._fields.get(name, self._others)
        if not schemas:
            return None
        if name not in self._fields:
            name = ""  # all others share one shape
        if name not in self._children:
            self._children[name] = Shape(schemas, self._definitions)
        return self._children[name]

    @cached_property
    def _plain(self) -> frozenset[str]:
        """Fields that may be and whose values need no look: there may be very many objects that have no others."""
        return frozenset(name for name in self._fields if (field := self.field(name)) and not field.has_rules)

    @cached_property
    def has_rules(self) -> bool:
        """Whether a value may hold a field that is not declared."""
        return self._has_rules(_MAX_NESTING)

    def _has_rules(self, depth: int) -> bool:
        if self.anything:
            return False
        if depth == 0 or self._fields:
            return True
        others = self.field("") if self._others else None
        inner = others is not None and others._has_rules(depth - 1)
        return inner or bool(self._items) and self.items._has_rules(depth - 1)

    def unknown(self, value: Any) -> tuple[str, ...]:
        """Places of a value's undeclared fields, such as ``a.b[2].c``, fit to be shown; the first few of them."""
        return tuple(islice(self._unknown(value, ""), _MAX_NAMED)) if self.has_rules else ()

    def _unknown(self, value: Any, place: str) -> Iterator[str]:
        if isinstance(value, list) and self.items.has_rules:
            plain = self.items._plain
            for number, item in enumerate(value):
                if isinstance(item, list) or isinstance(item, dict) and not item.keys() <= plain:
                    yield from self.items._unknown(item, f"{place}[{number}]")
        elif isinstance(value, dict) and (self._fields or self._others) and not value.keys() <= self._plain:
            for name, item in value.items():
                path = f"{place}.{name}" if place else name
                field = self.field(name)
                if field is None:
                    yield printable(path)
                elif field.has_rules and isinstance(item, (dict, list)):
                    yield from field._unknown(item, path)

    @property
    def names(self) -> frozenset[str]:
        """Of all fields that are declared at any depth."""
        schemas: Sequence[Any] = [*self._fields.values(), *self._definitions.values()]
        inner = {name for part in _parts(schemas) for name in part.get("properties", ())}
        return frozenset(self._fields) | inner


def _parts(schema: Any) -> Iterator[Schema]:
    """A schema and all those inside it."""
    if isinstance(schema, Mapping):
        yield schema
        for part in schema.values():
            yield from _parts(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from _parts(part)

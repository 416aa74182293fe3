"""Constraints as bodies and Python callers state them, and the `GrammarSpec` that each of them means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from msgspec.structs import replace
from pydantic import ConfigDict, Field, Tag, model_validator

from ferrule.config.suffixes import split_backend
from ferrule.forms import Fixed, Form, GrammarSpec, Json, OneOf, Regex, Rules
from ferrule.schema import Arguments, Body, Strict, Text, by_field, problem
from ferrule.structured_outputs.sources import Backend, Choices, GrammarText, JsonSchema, Pattern
from ferrule.structured_outputs.tags import Strictly, StructuralTag, StructuralTagOrText, bounded

_OBJECT = Json({"type": "object"})
_FORMS: Mapping[str, Callable[[Any], Form | None]] = MappingProxyType(
    {
        "json": Json,
        "regex": Regex,
        "choice": lambda texts: OneOf(tuple(map(Fixed, dict.fromkeys(texts)))),
        "grammar": Rules,
        "json_object": lambda asked: _OBJECT if asked else None,
        "structural_tag": StructuralTag.form,
    }
)
_JSON = "JSON Schema of the output: an object, true or false, or the JSON text of one."
_REGEX = "Regular expression that matches the whole output."
_CHOICE = "The output is one of these texts."
_GRAMMAR = "Context-free grammar of the output, in EBNF (GBNF) or in Lark's syntax."
_JSON_OBJECT = "The output is a JSON object."
_WHITESPACE = "Regular expression of the white space between the parts of JSON."


# ------------------------------------------------------------------------------------------------ one constraint


class Constraint(Strict):
    """The form of the output, said in one of six ways, and options of JSON."""

    model_config = ConfigDict(extra="forbid")

    json_: JsonSchema | None = Field(default=None, alias="json", description=_JSON)
    regex: Annotated[Pattern | None, Field(description=_REGEX)] = None
    choice: Annotated[Choices | None, Field(description=_CHOICE)] = None
    grammar: Annotated[GrammarText | None, Field(description=_GRAMMAR)] = None
    json_object: Annotated[bool | None, Field(description=_JSON_OBJECT)] = None
    structural_tag: Annotated[
        StructuralTagOrText | None, Field(description="Text with parts of a given form, or the JSON text of that.")
    ] = None
    whitespace_pattern: Annotated[Pattern | None, Field(description=_WHITESPACE)] = None
    disable_any_whitespace: Annotated[bool, Field(description="JSON without optional white space. Default: false.")] = (
        False
    )
    unbounded_whitespace: Annotated[
        bool,
        Field(
            description="JSON with any white space, and not just one space, or one line break with an "
            "indentation. Default: false."
        ),
    ] = False
    disable_additional_properties: Annotated[
        bool, Field(description="JSON without properties that the schema does not name. Default: false.")
    ] = False

    @model_validator(mode="after")
    def _states_one(self) -> Self:
        if not _only_one(self._forms()):
            raise problem(f"is required, or one of {', '.join(list(_FORMS)[1:])}", "json")
        return self

    def _forms(self) -> dict[str, Form]:
        return _forms({"json": self.json_, **{name: getattr(self, name) for name in _FORMS if name != "json"}})

    def spec(self) -> GrammarSpec:
        """Return the constraint as the grammar service takes it."""
        (form,) = self._forms().values()
        return GrammarSpec(
            form=form,
            any_whitespace=not self.disable_any_whitespace,
            whitespace_pattern=self.whitespace_pattern,
            bounded_whitespace=not self.unbounded_whitespace,
            additional_properties=not self.disable_additional_properties,
        )


class StructuredOutputs(Constraint, Body):
    """The form of the output."""


class StructuredOutputsParams(Constraint, Arguments):
    """The form of the output, for `SamplingParams.structured_outputs`. ``from ferrule import StructuredOutputsParams``.

    `json` takes a JSON Schema, its text, or a pydantic class. Wrong values are a RequestError that names the field.
    """


class GuidedDecodingParams(Constraint, Arguments):
    """The form of the output, for `SamplingParams.guided_decoding`, with a choice of the backend. ``from ferrule import
    …``.
    """

    backend: Annotated[
        Backend | None, Field(description="Name of a backend, also as `xgrammar:no-fallback`. Default: the engine's.")
    ] = None
    disable_fallback: Annotated[
        bool, Field(description="Ask no other backend when this one cannot enforce the constraint. Default: false.")
    ] = False

    def spec(self) -> GrammarSpec:
        spec = _under_backend(super().spec(), self.backend)
        return replace(spec, fallback=spec.fallback and not self.disable_fallback)


# ------------------------------------------------------------------------------------------------ response_format


class TextFormat(Strictly):
    """Any text."""

    type: Annotated[Literal["text"], Field(description="`text`.")]

    def form(self) -> Form | None:
        return None


class JsonObjectFormat(Strictly):
    """A JSON object."""

    type: Annotated[Literal["json_object"], Field(description="`json_object`.")]

    def form(self) -> Form | None:
        return _OBJECT


class NamedSchema(Strictly):
    """A JSON Schema with a name."""

    name: Annotated[Text | None, Field(description="Of the schema; it changes nothing.")] = None
    description: Annotated[Text | None, Field(description="Of the schema; the model does not see it.")] = None
    schema_: JsonSchema = Field(alias="schema", description=_JSON)
    strict: Annotated[bool | None, Field(description="The schema is enforced in any case.")] = None


class JsonSchemaFormat(Strictly):
    """JSON that follows a schema."""

    type: Annotated[Literal["json_schema"], Field(description="`json_schema`.")]
    json_schema: Annotated[NamedSchema, Field(description="The schema.")]

    def form(self) -> Form | None:
        return Json(self.json_schema.schema_)


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")]
    | Annotated[StructuralTag, Tag("<structural_tag>")],
    by_field("type", ("text", "json_object", "json_schema", "structural_tag")),
    bounded,
]


# ------------------------------------------------------------------------------------------------ fields of a body


class ConstraintFields(Strict):
    """The fields of a body that say which form its output has. At most one may be given; `grammar_of` reads them."""

    response_format: Annotated[
        ResponseFormat | None,
        Field(description="The form of the output: `text`, `json_object`, `json_schema` or `structural_tag`."),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, Field(description="The form of the output, with options of JSON.")
    ] = None
    guided_json: Annotated[JsonSchema | None, Field(description=_JSON)] = None
    guided_regex: Annotated[Pattern | None, Field(description=_REGEX)] = None
    guided_choice: Annotated[Choices | None, Field(description=_CHOICE)] = None
    guided_grammar: Annotated[GrammarText | None, Field(description=_GRAMMAR)] = None
    guided_json_object: Annotated[bool | None, Field(description=_JSON_OBJECT)] = None
    guided_decoding_backend: Annotated[
        Backend | None,
        Field(description="The backend that enforces the form, also as `xgrammar:no-fallback`. Default: the server's."),
    ] = None
    guided_whitespace_pattern: Annotated[Pattern | None, Field(description=_WHITESPACE)] = None

    @model_validator(mode="after")
    def _state_one(self) -> Self:
        _only_one(_stated(self))
        own = self.structured_outputs
        if self.guided_whitespace_pattern is not None and own is not None and own.whitespace_pattern is not None:
            raise problem("cannot be combined with structured_outputs.whitespace_pattern", "guided_whitespace_pattern")
        return self


_STATING = frozenset({"response_format", "structured_outputs", *(f"guided_{name}" for name in _FORMS)})


def constraint_of(fields: ConstraintFields) -> str:
    """Return the field that says what the output looks like; empty where none does."""
    return next(iter(_stated(fields)), "")


def grammar_of(fields: ConstraintFields) -> GrammarSpec | None:
    """Return the constraint of a body, or None."""
    own, pattern = fields.structured_outputs, fields.guided_whitespace_pattern
    for form in _stated(fields).values():
        spec = GrammarSpec(form=form) if own is None else own.spec()
        if pattern is not None:
            spec = replace(spec, whitespace_pattern=pattern)
        return _under_backend(spec, fields.guided_decoding_backend)
    return None


def _stated(fields: ConstraintFields) -> dict[str, Form]:
    """Return the forms of the fields that state one, by field."""
    found: dict[str, Form] = {}
    if not _STATING & fields.model_fields_set:
        return found
    if fields.response_format is not None and (form := fields.response_format.form()) is not None:
        found["response_format"] = form
    if fields.structured_outputs is not None:
        found["structured_outputs"] = fields.structured_outputs.spec().form
    guided = _forms({name: getattr(fields, f"guided_{name}", None) for name in _FORMS})
    return found | {f"guided_{name}": form for name, form in guided.items()}


def _forms(given: Mapping[str, Any]) -> dict[str, Form]:
    """Return the forms of the values that are given, by the way in which each is stated."""
    found = {name: _FORMS[name](value) for name, value in given.items() if value is not None}
    return {name: form for name, form in found.items() if form is not None}


def _only_one(forms: Mapping[str, Form]) -> bool:
    """Return whether there is a form. Raises the problem for more than one."""
    if len(forms) > 1:
        first, second, *_ = forms
        raise problem(f"cannot be combined with {first}: both say what the output looks like", second)
    return bool(forms)


def _under_backend(spec: GrammarSpec, backend: str | None) -> GrammarSpec:
    """Return the constraint for a backend that may have suffixes, as in ``xgrammar:no-fallback``."""
    if backend is None:
        return spec
    name, off = split_backend(backend)
    return replace(
        spec,
        backend=name,
        fallback=spec.fallback and "disable_fallback" not in off,
        any_whitespace=spec.any_whitespace and "disable_any_whitespace" not in off,
        bounded_whitespace=spec.bounded_whitespace and "unbounded_whitespace" not in off,
        additional_properties=spec.additional_properties and "disable_additional_properties" not in off,
    )

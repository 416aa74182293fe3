"""Structural tags: text with parts of a given form. Source: https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html

Each format is one model, with the form that it stands for. What our forms cannot express is refused where it stands.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic import Tag as Named

from ferrule.forms import Anything, Fixed, Form, Json, OneOf, Regex, Repeated, Rules, Series, Tag, Triggered, Until
from ferrule.schema import Size, SizeOrAll, SomeText, Strict, Text, by_field, by_type, problem, rule
from ferrule.structured_outputs.sources import GrammarText, JsonSchema, Pattern, plain_json

_EXCLUDES = Annotated[
    list[Any],
    Field(strict=False, max_length=0, description="Must be empty."),
    rule("must be empty: texts cannot be excluded here"),
]
_NO_LIMIT = Annotated[None, Field(description="Must be null."), rule("must be null: this limit is not available here")]


class Strictly(Strict):
    """A part of a constraint: a key that is not known would loosen it, so it is an error."""

    model_config = ConfigDict(extra="forbid")


class ConstString(Strictly):
    """A fixed text."""

    type: Annotated[Literal["const_string"], Field(description="`const_string`.")]
    value: Annotated[SomeText, Field(description="The text.")]

    def form(self) -> Form:
        return Fixed(self.value)


class JsonValue(Strictly):
    """A JSON value."""

    type: Annotated[Literal["json_schema"], Field(description="`json_schema`.")]
    json_schema: Annotated[JsonSchema, Field(description="The schema that it follows.")]
    style: Annotated[Literal["json"], Field(description="`json`.")] = "json"
    any_order: Annotated[
        Literal[False],
        rule("must be false: properties come in the order of the schema"),
        Field(description="Must be false."),
    ] = False
    max_whitespace_cnt: _NO_LIMIT = None
    excludes: _EXCLUDES = []

    def form(self) -> Form:
        return Json(self.json_schema)


class AnyText(Strictly):
    """Any text; before the end of a tag, up to its first occurrence."""

    type: Annotated[Literal["any_text"], Field(description="`any_text`.")]
    excludes: _EXCLUDES = []
    max_tokens: _NO_LIMIT = None
    max_chars: _NO_LIMIT = None

    def form(self) -> Form:
        return Anything()


class RegexText(Strictly):
    """A text that a whole pattern matches."""

    type: Annotated[Literal["regex"], Field(description="`regex`.")]
    pattern: Annotated[Pattern, Field(description="The pattern.")]

    def form(self) -> Form:
        return Regex(self.pattern)


class GrammarTextFormat(Strictly):
    """A text of a context-free grammar."""

    type: Annotated[Literal["grammar"], Field(description="`grammar`.")]
    grammar: Annotated[GrammarText, Field(description="The grammar, in EBNF or in Lark's syntax.")]

    def form(self) -> Form:
        return Rules(self.grammar)


class Elements(Strictly):
    """`sequence`: one after the other. `or`: one of them."""

    type: Annotated[Literal["sequence", "or"], Field(description="`sequence`, `or`.")]
    elements: Annotated[list[Format], Field(strict=False, min_length=1, description="Formats.")]

    def form(self) -> Form:
        forms = tuple(element.form() for element in self.elements)
        return Series(forms) if self.type == "sequence" else OneOf(forms)


class Repetition(Strictly):
    """The same again: `optional` at most once, `star` any number of times, `plus` once or more."""

    type: Annotated[Literal["optional", "star", "plus"], Field(description="`optional`, `star`, `plus`.")]
    content: Annotated[Format, Field(description="A format.")]

    def form(self) -> Form:
        least, most = int(self.type == "plus"), 1 if self.type == "optional" else None
        return Repeated(self.content.form(), least=least, most=most)


class Repeat(Strictly):
    """The same again, `min` to `max` times."""

    type: Annotated[Literal["repeat"], Field(description="`repeat`.")]
    content: Annotated[Format, Field(description="A format.")]
    min: Annotated[Size, Field(description="How often at least.")]
    max: Annotated[SizeOrAll, Field(description="How often at most; −1: any number of times.")]

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if 0 <= self.max < self.min:
            raise problem("must be at least min", "max")
        return self

    def form(self) -> Form:
        return Repeated(self.content.form(), least=self.min, most=None if self.max < 0 else self.max)


class TagFormat(Strictly):
    """A part with a beginning and an end."""

    type: Annotated[Literal["tag"], Field(description="`tag`.")] = "tag"
    begin: Annotated[Text, Field(description="What it begins with.")]
    content: Annotated[Format, Field(description="A format: what is inside.")]
    end: Annotated[
        Annotated[Text, Named("<a string>")]
        | Annotated[list[Text], Field(strict=False, min_length=1), Named("<a list>")],
        by_type,
        Field(description="What it ends with; several: one of them."),
    ]

    @model_validator(mode="after")
    def _ends_clearly(self) -> Self:
        if isinstance(self.content, AnyText) and isinstance(self.end, list) and len(self.end) > 1:
            raise problem("can have one entry only behind any_text", "end")
        return self

    def tag(self) -> Tag:
        ends = [self.end] if isinstance(self.end, str) else self.end
        if len(ends) > 1:
            return Tag(self.begin, Series((self.content.form(), OneOf(tuple(map(Fixed, ends))))))
        if isinstance(self.content, AnyText) and ends[0]:
            return Tag(self.begin, Until(ends[0]))
        return Tag(self.begin, self.content.form(), ends[0])

    def form(self) -> Form:
        tag = self.tag()
        begin, end = ((Fixed(text),) if text else () for text in (tag.begin, tag.end))
        return Series((*begin, tag.content, *end))


_TAGS = Annotated[list[TagFormat], Field(strict=False, min_length=1, description="Tags.")]
_TRIGGERS = Annotated[
    list[SomeText],
    Field(strict=False, min_length=1, max_length=64, description="Texts. Each tag begins with one of them."),
]
_AT_LEAST_ONE = Annotated[bool, Field(description="The text begins with a tag. Default: false.")]
_STOP_AFTER_FIRST = Annotated[bool, Field(description="The text ends with the first tag. Default: false.")]


class TriggeredTags(Strictly):
    """Any text in which each trigger is the beginning of a tag."""

    type: Annotated[Literal["triggered_tags"], Field(description="`triggered_tags`.")]
    triggers: _TRIGGERS
    tags: _TAGS
    at_least_one: _AT_LEAST_ONE = False
    stop_after_first: _STOP_AFTER_FIRST = False
    excludes: _EXCLUDES = []

    @model_validator(mode="after")
    def _begin_with_it(self) -> Self:
        _check_begins(self.triggers, [tag.begin for tag in self.tags], "tags")
        return self

    def form(self) -> Form:
        first = OneOf(tuple(tag.form() for tag in self.tags))
        if self.at_least_one and self.stop_after_first:
            return first
        tags = tuple(tag.tag() for tag in self.tags)
        after = Triggered(tuple(self.triggers), tags, most=1 if self.stop_after_first else None)
        return Series((first, after)) if self.at_least_one else after


class SeparatedTags(Strictly):
    """Tags with a separator between them, and no other text."""

    type: Annotated[Literal["tags_with_separator"], Field(description="`tags_with_separator`.")]
    tags: _TAGS
    separator: Annotated[Text, Field(description="What stands between two tags.")]
    at_least_one: Annotated[bool, Field(description="There is a tag at least. Default: false.")] = False
    stop_after_first: _STOP_AFTER_FIRST = False

    def form(self) -> Form:
        tag = OneOf(tuple(tag.form() for tag in self.tags))
        return Repeated(tag, self.separator, int(self.at_least_one), 1 if self.stop_after_first else None)


Format = Annotated[
    Annotated[ConstString, Named("<const_string>")]
    | Annotated[JsonValue, Named("<json_schema>")]
    | Annotated[AnyText, Named("<any_text>")]
    | Annotated[RegexText, Named("<regex>")]
    | Annotated[GrammarTextFormat, Named("<grammar>")]
    | Annotated[Elements, Named("<sequence>")]
    | Annotated[Elements, Named("<or>")]
    | Annotated[Repetition, Named("<optional>")]
    | Annotated[Repetition, Named("<star>")]
    | Annotated[Repetition, Named("<plus>")]
    | Annotated[Repeat, Named("<repeat>")]
    | Annotated[TagFormat, Named("<tag>")]
    | Annotated[TriggeredTags, Named("<triggered_tags>")]
    | Annotated[SeparatedTags, Named("<tags_with_separator>")],
    by_field(
        "type",
        ("const_string", "json_schema", "any_text", "regex", "grammar", "sequence", "or", "optional", "star", "plus")
        + ("repeat", "tag", "triggered_tags", "tags_with_separator"),
    ),
    # Formats contain formats: a document with the whole recursion is of no use to readers and tools.
    WithJsonSchema({"type": "object", "description": "A format: an object whose `type` says which."}),
]


class Structure(Strictly):
    """A tag of the older form."""

    begin: Annotated[SomeText, Field(description="What it begins with.")]
    schema_: JsonSchema = Field(alias="schema", description="JSON Schema of what is inside.")
    end: Annotated[Text, Field(description="What it ends with.")]


class StructuralTag(Strictly):
    """Text with parts of a given form: `format`, or the older `structures` with `triggers`."""

    type: Annotated[Literal["structural_tag"], Field(description="`structural_tag`.")] = "structural_tag"
    format: Annotated[Format | None, Field(description="A format.")] = None
    structures: Annotated[
        Annotated[list[Structure], Field(strict=False, min_length=1)] | None, Field(description="Tags.")
    ] = None
    triggers: Annotated[_TRIGGERS | None, Field(description="Texts that begin a tag.")] = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.format is not None:
            for name in ("structures", "triggers"):
                if getattr(self, name) is not None:
                    raise problem("cannot be combined with format", name)
        elif self.structures is None:
            raise problem("is required, or structures with triggers", "format")
        elif self.triggers is None:
            raise problem("is required with structures", "triggers")
        else:
            _check_begins(self.triggers, [tag.begin for tag in self.structures], "structures")
        return self

    def form(self) -> Form:
        if self.format is not None:
            return self.format.form()
        tags = [Tag(tag.begin, Json(tag.schema_), tag.end) for tag in self.structures or ()]
        return Triggered(tuple(self.triggers or ()), tuple(tags))


def _check_begins(triggers: list[str], begins: list[str], name: str) -> None:
    for number, begin in enumerate(begins):
        if not begin.startswith(tuple(triggers)):
            raise problem("must begin with a trigger", f"{name}[{number}].begin")
    for number, trigger in enumerate(triggers):
        if trigger.startswith(tuple(triggers[:number] + triggers[number + 1 :])):
            raise problem("must not begin with another trigger", f"triggers[{number}]")
        if not any(begin.startswith(trigger) for begin in begins):
            raise problem("must be the beginning of a tag", f"triggers[{number}]")


for _model in (Elements, Repetition, Repeat, TagFormat, TriggeredTags, SeparatedTags, StructuralTag):
    _model.model_rebuild()


def _plain(value: Any) -> Any:
    return value if isinstance(value, StructuralTag) else plain_json(value)


# The bounds of a source hold for the whole, so that nothing deep or large is read part by part.
bounded = BeforeValidator(_plain)
StructuralTagOrText = Annotated[StructuralTag, BeforeValidator(_plain, json_schema_input_type=StructuralTag | str)]

"""Bodies of the routes: each field once, with its type, its bounds, and its effect, if any."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from ferrule.forms import Form, Json, Regex
from ferrule.sampling_params import Texts
from ferrule.schema import Body, Count, Number, Size, SomeText, by_field, no_effect, not_here
from ferrule.structured_outputs import JsonSchema, Pattern


class JsonGrammar(Body):
    """The answer is JSON of a schema."""

    type: Annotated[Literal["json"], Field(description="`json`.")]
    value: Annotated[JsonSchema, Field(description="The JSON schema, as an object or as a text.")]

    def form(self) -> Form:
        return Json(self.value)


class NamedSchema(Body):
    """A JSON schema that may have a name."""

    name: Annotated[Any, Field(description="It is not read.")] = None
    schema_: Annotated[JsonSchema, Field(alias="schema", description="The JSON schema.")]


class JsonSchemaGrammar(Body):
    """The answer is JSON of a schema that has a name."""

    type: Annotated[Literal["json_schema"], Field(description="`json_schema`.")]
    value: Annotated[NamedSchema, Field(description="The schema and its name.")]

    def form(self) -> Form:
        return Json(self.value.schema_)


class RegexGrammar(Body):
    """The whole answer matches a pattern."""

    type: Annotated[Literal["regex"], Field(description="`regex`.")]
    value: Annotated[Pattern, Field(description="The pattern.")]

    def form(self) -> Form:
        return Regex(self.value)


Grammar = Annotated[
    Annotated[JsonGrammar, Tag("<json>")]
    | Annotated[JsonSchemaGrammar, Tag("<json_schema>")]
    | Annotated[RegexGrammar, Tag("<regex>")],
    by_field("type", ("json", "json_schema", "regex")),
]


class Parameters(Body):
    """Parameters of the generation. null means the same as an absent field."""

    max_new_tokens: Annotated[Count, Field(description="Most tokens to generate. Default: 100.")] = 100
    do_sample: Annotated[
        bool,
        Field(
            description="Draw tokens. Default: false, always the likeliest one, unless temperature, top_k or top_p say "
            "otherwise."
        ),
    ] = False
    temperature: Annotated[Number | None, Field(ge=0, le=1e6, description="Above 1: more varied. 0: likeliest.")] = None
    top_k: Annotated[Size | None, Field(description="Draw from so many likeliest tokens. 0: all.")] = None
    top_p: Annotated[
        Number | None, Field(gt=0, le=1, description="Draw from the likeliest tokens that make up this share.")
    ] = None
    repetition_penalty: Annotated[
        Number | None, Field(ge=1e-6, le=1e6, description="Above 1: against tokens of the prompt and the answer.")
    ] = None
    frequency_penalty: Annotated[
        Number | None, Field(ge=-2, le=2, description="Against tokens of the answer, for each time that they occur.")
    ] = None
    seed: Annotated[Size | None, Field(description="The same seed and request draw the same tokens.")] = None
    stop: Annotated[Texts | None, Field(description="Texts that end the answer, and are part of it.")] = None
    truncate: Annotated[Count | None, Field(description="Keep so many of the prompt's last tokens.")] = None
    best_of: Annotated[
        Count, Field(description="Generate so many, and answer with the likeliest. Not with a stream. Default: 1.")
    ] = 1
    grammar: Annotated[Grammar | None, Field(description="The form of the answer.")] = None
    return_full_text: Annotated[bool, Field(description="Put the prompt before the text. Default: false.")] = False
    details: Annotated[bool, Field(description="Tell of tokens and of the end. Default: false.")] = False
    decoder_input_details: Annotated[
        bool, Field(description="Tell of the prompt's tokens. Needs `details`; not with a stream.")
    ] = False
    top_n_tokens: Annotated[Size | None, Field(description="With so many likeliest tokens each.")] = None
    adapter_id: Annotated[SomeText | None, Field(description="Name of an adapter. Default: none.")] = None
    # known, of features that this build does not have
    typical_p: Annotated[Any, no_effect("typical sampling is not in this build", 1, 1.0)] = None
    watermark: Annotated[Any, not_here("watermarks", False)] = None


class GenerateBody(Body):
    """``POST /generate`` and ``POST /generate_stream``."""

    inputs: Annotated[SomeText, Field(description="The prompt.")]
    parameters: Annotated[Parameters | None, Field(description="How the answer is generated.")] = None


class EitherBody(GenerateBody):
    """``POST /``: one of the two."""

    stream: Annotated[bool, Field(description="Answer with events. Default: false.")] = False

"""What a request says about the form of its output: one declaration for HTTP bodies and for Python callers.

Every way of saying it ends as a `GrammarSpec`: `grammar_of` makes it of a body's fields, `Constraint.spec` of the
parameters of a Python caller. Bounds hold for what a client sends; whether a schema, pattern or grammar is valid is
found out by the backend that compiles it.
"""

from ferrule.structured_outputs.params import (
    Constraint,
    ConstraintFields,
    GuidedDecodingParams,
    StructuredOutputs,
    StructuredOutputsParams,
    constraint_of,
    grammar_of,
)
from ferrule.structured_outputs.sources import MAX_CHOICES, MAX_NESTING, MAX_SOURCE_BYTES, JsonSchema, Pattern
from ferrule.structured_outputs.tags import StructuralTag

__all__ = [
    "MAX_CHOICES",
    "MAX_NESTING",
    "MAX_SOURCE_BYTES",
    "Constraint",
    "ConstraintFields",
    "GuidedDecodingParams",
    "JsonSchema",
    "Pattern",
    "StructuralTag",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "constraint_of",
    "grammar_of",
]

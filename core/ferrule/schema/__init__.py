"""Declarations of bodies, parameters and prompts: each field once, as a field of a pydantic model.

A declaration has the field's type and bounds, what the field does, and whether this build does anything with it.
Validation, the OpenAPI document, the search for unknown keys and the wording of refusals all read the declaration.
Bounds that depend on the model or on the server's options are in `ferrule.frontend.admission.validate`.
"""

from ferrule.schema.keys import known_names, printable
from ferrule.schema.marks import Mark, check_marks, marks_of, no_effect, not_here
from ferrule.schema.models import Arguments, Body, Strict
from ferrule.schema.refusal import checked, refusal_of
from ferrule.schema.undeclared import Undeclared
from ferrule.schema.values import (
    REQUEST_ID,
    CacheSalt,
    Count,
    Int,
    Milliseconds,
    Number,
    Priority,
    RequestId,
    Size,
    SizeOrAll,
    SomeText,
    Text,
    TokenId,
    TokenIds,
    by_field,
    by_type,
    problem,
    rule,
    shaped,
)

__all__ = [
    "REQUEST_ID",
    "Arguments",
    "Body",
    "CacheSalt",
    "Count",
    "Int",
    "Mark",
    "Number",
    "Milliseconds",
    "Priority",
    "RequestId",
    "Size",
    "SizeOrAll",
    "SomeText",
    "Strict",
    "Text",
    "TokenId",
    "TokenIds",
    "Undeclared",
    "by_field",
    "by_type",
    "check_marks",
    "checked",
    "known_names",
    "marks_of",
    "no_effect",
    "not_here",
    "printable",
    "problem",
    "refusal_of",
    "rule",
    "shaped",
]

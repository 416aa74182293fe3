"""Parts for tool and reasoning parsers, free for plugins of others to use.

Reader, Tags        text that arrives in parts, read up to tags; what may begin a tag is held back
ObjectReader        one JSON object that arrives in parts: the values of its members while they come
CallWriter          content and calls to events, with the rule about white space next to calls
FormatParser        a whole tool parser, of a format that is described
ToolFormat          the description: what surrounds calls, and which of these ways they are written in:
JsonCall              one JSON object; NamedJson: a name and the JSON object of its arguments
Parameters            a name and arguments between tags; LiteralCall: ``f(a=1, b='x')`` and what looks like it
CallHead            the name in such a call, and the markup around it
TaggedJsonParser    a whole tool parser: ``<tag>{"name": …, "arguments": …}</tag>``
enforced            the functions that a tool choice enforces, with the schemas of their arguments
ThinkingParser      a whole reasoning parser: ``<think>…</think>``
HarmonyReader       OpenAI's Harmony format, split into messages

All of it takes time linear in the text, whatever the text and its cut into deltas.
"""

from ferrule.structured_outputs.calls import EnforcedFunction, enforced
from ferrule_parsing.calls import CallWriter
from ferrule_parsing.format_parser import FormatParser
from ferrule_parsing.formats import CallReader, CallSyntax, ToolFormat
from ferrule_parsing.harmony import HarmonyReader
from ferrule_parsing.heads import CallHead
from ferrule_parsing.json_calls import JsonCall, NamedJson
from ferrule_parsing.json_object import MemberText, ObjectReader
from ferrule_parsing.literal_calls import LiteralCall
from ferrule_parsing.literals import Literals
from ferrule_parsing.parameters import Parameters
from ferrule_parsing.reader import Reader, Tags
from ferrule_parsing.tagged_json import TaggedJsonParser
from ferrule_parsing.thinking import ThinkingParser

__all__ = [
    "CallHead",
    "CallReader",
    "CallSyntax",
    "CallWriter",
    "EnforcedFunction",
    "FormatParser",
    "HarmonyReader",
    "JsonCall",
    "LiteralCall",
    "Literals",
    "MemberText",
    "NamedJson",
    "ObjectReader",
    "Parameters",
    "Reader",
    "TaggedJsonParser",
    "Tags",
    "ThinkingParser",
    "ToolFormat",
    "enforced",
]

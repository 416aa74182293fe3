"""Parts for tool and reasoning parsers, free for plugins of others to use.

Reader, Tags        text that arrives in parts, read up to tags; what may begin a tag is held back
ObjectReader        one JSON object that arrives in parts: the values of its members while they come
CallWriter          content and calls to events, with the rule about white space next to calls
TaggedJsonParser    a whole tool parser: ``<tag>{"name": …, "arguments": …}</tag>``
enforced            the functions that a tool choice enforces, with the schemas of their arguments
ThinkingParser      a whole reasoning parser: ``<think>…</think>``
HarmonyReader       OpenAI's Harmony format, split into messages
markup, until       forms of a format's own texts, of which special tokens of the model may be parts

All of it takes time linear in the text, whatever the text and its cut into deltas.
"""

from ferrule_parsing.calls import CallWriter
from ferrule_parsing.choice import EnforcedFunction, enforced
from ferrule_parsing.harmony import HarmonyReader
from ferrule_parsing.json_object import MemberText, ObjectReader
from ferrule_parsing.markup import markup, until
from ferrule_parsing.reader import Reader, Tags
from ferrule_parsing.tagged_json import TaggedJsonParser
from ferrule_parsing.thinking import ThinkingParser

__all__ = [
    "CallWriter",
    "EnforcedFunction",
    "HarmonyReader",
    "ObjectReader",
    "MemberText",
    "Reader",
    "TaggedJsonParser",
    "Tags",
    "ThinkingParser",
    "enforced",
    "markup",
    "until",
]

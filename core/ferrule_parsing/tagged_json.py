"""Tool calls between tags, each a JSON object with a name and arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ferrule_parsing.format_parser import FormatParser
from ferrule_parsing.formats import ToolFormat
from ferrule_parsing.json_calls import JsonCall


class TaggedJsonParser(FormatParser):
    """A parser of ``<open>{"name": "f", "arguments": {…}}<close>``, the most common format, by two tags and two
    keys.
    """

    open_tag: str
    close_tag: str
    name_key: str = "name"
    arguments_key: str = "arguments"

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        calls = (JsonCall(self.name_key, (self.arguments_key,)),)
        self.format = ToolFormat(calls=calls, open=(self.open_tag,), close=(self.close_tag,), padding=("\n", "\n"))
        super().__init__(tools)

"""Calls as ``[[call]]{"name": "f", "arguments": {…}}[[/call]]``."""

from __future__ import annotations

from ferrule_parsing import TaggedJsonParser


class ExampleToolParser(TaggedJsonParser):
    """A parser of tagged JSON: a call starts when its name is there, arguments follow while they come."""

    open_tag = "[[call]]"
    close_tag = "[[/call]]"

    conformance = "ferrule_example.conformance:SETTINGS"

"""Answers of the model, for the conformance kit. No server imports this."""

from __future__ import annotations

from ferrule_testkit.kits import CallText

_WEATHER = CallText(
    '[[call]]{"name": "get_weather", "arguments": {"city": "Lisbon", "unit": "C"}}[[/call]]',
    "get_weather",
    {"city": "Lisbon", "unit": "C"},
)
_ADD = CallText('[[call]] {"name": "add", "arguments": {"a": 1, "b": -2.5}} [[/call]]', "add", {"a": 1, "b": -2.5})
_NOW = CallText('[[call]]{"name": "now", "arguments": {}}[[/call]]', "now", {})

SETTINGS = {
    "samples": (
        (_WEATHER,),
        ("Let me look. ", _WEATHER),
        (_ADD, "\n", _NOW),
        ("One [[moment]]: ", _NOW, " and then ", _ADD, " done."),
    ),
}

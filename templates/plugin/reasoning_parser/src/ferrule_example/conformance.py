"""Answers of the model, for the conformance kit. No server imports this."""

from __future__ import annotations

from ferrule_testkit.kits import Thought

SETTINGS = {
    "samples": (
        Thought("[[thoughts]]They greet me.[[/thoughts]]Hello!", "They greet me.", "Hello!"),
        Thought("[[thoughts]]\nTwo\n\nlines\n[[/thoughts]]\n\nA [[b]] c", "Two\n\nlines", "A [[b]] c"),
        Thought("[[thoughts]]only thoughts [[/", "only thoughts [[/", ""),
        Thought("no thoughts", "", "no thoughts"),
    ),
}

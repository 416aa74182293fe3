"""Grammars that clients write, in Lark's syntax or EBNF."""

from __future__ import annotations

import re

_LITERALS = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|\[(?:\\.|[^\]\\\n])*\]|#.*|//.*')
# Special tokens, and schemas and options of the libraries' own, which nothing would check.
_FOREIGN = re.compile(r"<|\b\w*Tokens?\s*\(|\w*Dispatch\s*\(|%(?!import\b|ignore\b|declare\b|override\b|extend\b)\w+")


def foreign(source: str) -> str | None:
    """Return the first part of a grammar that says something else than which texts are right, or None."""
    found = _FOREIGN.search(_LITERALS.sub(" ", source))
    return f"{found[0]!r} in a grammar" if found else None

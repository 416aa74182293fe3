"""The list of what a plugin may import, in docs/plugins.md: from `ferrule_testkit.public`."""

from __future__ import annotations

from pathlib import Path

from ferrule_testkit.public import PUBLIC

_BEFORE = "and of them the names without an underscore (where a module has `__all__`, the names in it):\n\n"


def renewed(page: Path) -> str:
    """Return the page with the current list. Raises ValueError where the sentence before it is missing."""
    head, sentence, rest = page.read_text(encoding="utf-8").partition(_BEFORE)
    if not sentence:
        raise ValueError(f"{page} has no sentence {_BEFORE.strip()!r}")
    _, end, tail = rest.partition("\n\n")
    return head + sentence + "\n".join(f"- `{name}`: {public.what}" for name, public in PUBLIC.items()) + end + tail

"""Parser files that tests write, and what their parsers make of a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ferrule.config import PluginConfig
from ferrule.config.plugins import configured
from ferrule.env import Environment
from ferrule.frontend.output.parse import ParseChain, Parsers
from ferrule.interfaces.parsers import CallEnd, ChoiceContext
from ferrule.interfaces.service import Output
from ferrule.plugin import Plugins, discover
from ferrule_testkit.tokenizers import ByteTokenizer
from tests.fakes.frontend import fold

ADAPTER = "ferrule_plugins.compat_vllm"
TOOLS: tuple[dict[str, Any], ...] = (
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
)


def plugins_of(folder: Path, kind: str, name: str, text: str, adapter: str = ADAPTER) -> Plugins:
    """Return the installed plugins and those of a file with this text."""
    file = folder / f"{name}.py"
    file.write_text(text)
    return configured(discover(), PluginConfig(**{f"{kind}_plugin": str(file)}, plugin_adapter=adapter), Environment())


class Characters(ByteTokenizer):
    """A tokenizer whose vocabulary spells ASCII as itself."""

    def token(self, token_id: int) -> str | None:
        return chr(token_id) if token_id < 128 else super().token(token_id)


def answer(parsers: Parsers, text: str, size: int, **context: Any) -> Output:
    """Return the answer that the chain makes of a text in pieces of `size`; every character is a token."""
    given = ChoiceContext(**{"tools": TOOLS, "tokenizer": Characters(), **context})
    chain = ParseChain(parsers, TOOLS, given)
    events = []
    for at in range(0, len(text), size):
        piece = text[at : at + size]
        events += chain.feed(piece, tuple(piece.encode()))
    events += chain.finish()
    (folded,) = fold([Output(index=0, events=tuple(events))])
    assert len(folded.calls) == sum(isinstance(event, CallEnd) for event in events)
    return folded


def calls(found: Output) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in found.calls]

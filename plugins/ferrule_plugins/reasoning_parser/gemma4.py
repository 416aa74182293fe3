"""`gemma4`: reasoning of Gemma 4, in a channel of its own.

`enable_thinking` puts ``<|think|>`` into the system turn. Without it the template of some sizes ends the prompt with an
empty channel. https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4, chat template of google/gemma-4-E2B-it
"""

from __future__ import annotations

from ferrule_parsing import ThinkingParser


class Gemma4(ThinkingParser):
    """``<|channel>thought\n…<channel|>`` and the answer; the channel is optional."""

    conformance = "ferrule_plugins.reasoning_parser.samples:GEMMA4"
    open_tag = "<|channel>thought"
    close_tag = "<channel|>"

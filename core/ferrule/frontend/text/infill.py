"""Prompts to be filled in between a prefix and a suffix, for models that were trained to."""

from __future__ import annotations

import re

from ferrule.errors import RequestError
from ferrule.interfaces.tokenizer import Tokenizer

_FORMS = (  # in each, the model goes on with the middle
    "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",  # Qwen Coder, CodeGemma
    "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",  # StarCoder, Granite
    "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>",  # SantaCoder
    "\u2581<PRE>{prefix}\u2581<SUF>{suffix}\u2581<MID>",  # Code Llama
    "<\uff5cfim\u2581begin\uff5c>{prefix}<\uff5cfim\u2581hole\uff5c>{suffix}<\uff5cfim\u2581end\uff5c>",  # DeepSeek
    "[SUFFIX]{suffix}[PREFIX]{prefix}",  # Codestral
)


def infill(tokenizer: Tokenizer, prefix: str, suffix: str) -> str:
    """Return the text that asks the model for what stands between. Raises RequestError where the tokenizer has no
    tokens for that.
    """
    for form in _FORMS:
        marks = [mark for mark in re.split(r"\{\w+\}", form) if mark]
        if all(_is_token(tokenizer, mark) for mark in marks):
            return form.format(prefix=prefix, suffix=suffix)
    raise RequestError("suffix: this model's tokenizer has no tokens to fill in the middle with.", "suffix")


def _is_token(tokenizer: Tokenizer, text: str) -> bool:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return len(ids) == 1 and tokenizer.token(ids[0]) == text

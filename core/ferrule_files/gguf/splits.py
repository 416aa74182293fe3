"""Expressions by which byte-level BPE cuts a text before it merges: llama.cpp's names, and the models' own
expressions.
"""

from __future__ import annotations

from collections.abc import Mapping

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_CASED_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


def _words(digits: str) -> str:
    return rf"{_CONTRACTION}|{_WORD}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (_words(r"\p{N}{1,3}"),)
_QWEN2 = (_words(r"\p{N}"),)
_STARCODER = (r"\p{N}", GPT2)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK3 = (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _PUNCTUATED)
_GPT4O = ("|".join((f"{_CASED[0]}{_CONTRACTION}?", f"{_CASED[1]}{_CONTRACTION}?", r"\p{N}{1,3}", _CASED_REST)),)
_GROUPS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "gigachat", "mellum"), (GPT2,)),
    (("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    (("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3),
    (("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "grok-2", "solar-open"), _QWEN2),
    (("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), _STARCODER),
    (("falcon",), (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    (("default",), (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    (("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
    (("viking",), (_BLOOM, r"\p{N}")),
    (("deepseek-coder",), (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    (("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    (("tekken",), ("|".join((*_CASED, r"\p{N}", _CASED_REST)),)),
    (("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    (("seed-coder",), (rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    (
        ("bailingmoe", "bailingmoe2"),
        (rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",),
    ),
)
SPLITS: Mapping[str, tuple[str, ...]] = {name: cuts for names, cuts in _GROUPS for name in names}
WHOLE_WORDS = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
)
"""Those in which a word that is a token is that token, whatever the merges make of it."""

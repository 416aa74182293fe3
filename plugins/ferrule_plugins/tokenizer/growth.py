"""How many characters a ``tokenizer.json`` may make of one: what a hostile file could end the process with.

The libraries' normalizers replace texts by longer ones, and a sequence of them multiplies: nine steps that write ten
letters for one make 10^9 of one letter. `read_growth` reads a bound off the file when it is opened, which takes
microseconds, and refuses what no model needs. `Growth.check` refuses long texts that would grow too much.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from ferrule.errors import RequestError

_MOST = 8192  # characters for one, from a normalizer: NFKD, lower case and SentencePiece's table together are 972
_MOST_WRITTEN = 64  # from a pre-tokenizer (bytes as characters, marks of words), or a decoder
_MOST_STEPS = 256
_MOST_AFFIX = 1024  # characters that a model puts before or behind pieces of a word
_FREE = 1 << 20  # characters that any text may become
_USUAL = 4  # times its length that a longer one may grow: bytes written as characters are four for one
_FORMS = {
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Lowercase": 3,
    "BertNormalizer": 12,
    "ByteLevel": 4,
}  # Unicode 16
_STILL = frozenset({"Nmt", "Strip", "StripAccents"})

# Regular expressions each of whose matches has a character at least: characters, escapes of classes and simple classes,
# which may be repeated but not left out. Of all others it is not known.
_WIDE = re.compile(
    r"(?:(?:\\[dDhHnrsStwW]|[^\\\[\](){}|?*+.^$]|\.|\[\^?(?:\\.|[^\\\[\]])+\])(?:\+|\{[1-9]\d*,?\d*\})?)+"
)


class Growth(Struct, frozen=True):
    """A bound on the growth of texts. `most`: characters that a normalizer makes of one. `local`: the parts of a text
    grow, but for a factor of two, as the whole does.
    """

    most: float = 1.0
    local: bool = True

    @property
    def free(self) -> int:
        """The number of characters of the longest text that need not be checked."""
        return 1 << 62 if self.most <= _USUAL else int(_FREE / self.most)

    def check(self, text: str, normalize: Callable[[str], str]) -> None:
        """Raise RequestError where the tokenizer would write much more than the text has, part by part."""
        limit = max(_FREE, _USUAL * len(text))
        length = 0.0
        if not self.local:
            length = len(text) * self.most
        else:
            width = max(1, int(_FREE / self.most))
            for start in range(0, len(text), width):
                length += len(normalize(text[start : start + width]))
                if length > limit:
                    break
        if length > limit:
            raise RequestError(
                f"The model's tokenizer may write more than {limit} characters for this text of {len(text)}."
            )


class _Step(Struct, frozen=True):
    """One step of a normalizer. `reads` and `writes` are characters, None where they may be any."""

    grows: float
    reads: frozenset[str] | None = None
    writes: frozenset[str] | None = None
    local: bool = True


def read_growth(stated: Mapping[str, Any], affixes: tuple[str | None, ...] = ()) -> Growth:
    """Return the bound for a whole ``tokenizer.json``. Raises ValueError that says which part of the file may write too
    much.
    """
    growth = _growth(stated.get("normalizer"), "normalizers")
    if growth.most > _MOST:
        raise ValueError(f"its normalizer may write {growth.most:.3g} characters for one; the most is {_MOST}")
    cut = math.prod(_cut_growth(part) for part in _parts(stated.get("pre_tokenizer"), "pretokenizers"))
    if cut > _MOST_WRITTEN:
        raise ValueError(f"its pre_tokenizer may write {cut:.3g} characters for one; the most is {_MOST_WRITTEN}")
    decoded = _growth(stated.get("decoder"), "decoders", forms=False).most
    if decoded > _MOST_WRITTEN:
        raise ValueError(f"its decoder may write {decoded:.3g} characters for one; the most is {_MOST_WRITTEN}")
    for part in _parts(stated.get("post_processor"), "processors"):
        single = part.get("single")
        if isinstance(single, list) and sum("Sequence" in piece for piece in single if isinstance(piece, Mapping)) > 1:
            raise ValueError("its post_processor repeats the text")
    if any(len(affix) > _MOST_AFFIX for affix in affixes if affix):
        raise ValueError(f"its model puts more than {_MOST_AFFIX} characters beside a piece of a word")
    return growth


def _growth(whole: Any, key: str, *, forms: bool = True) -> Growth:
    """Return the growth of the longest chain of steps: what one step writes counts for another only if that one reads a
    character of it.
    """
    steps = [_step(part, forms) for part in _parts(whole, key)]
    after: list[float] = []  # for each step, last one first: what the following ones make of a character that it writes
    for place in reversed(range(len(steps))):
        later = zip(steps[place + 1 :], reversed(after), strict=True)
        after.append(max([1.0, *(step.grows * grown for step, grown in later if _meets(steps[place], step))]))
    each = [step.grows * grown for step, grown in zip(steps, reversed(after), strict=True)]
    local = all(step.local or grown <= 2 for step, grown in zip(steps, each, strict=True))
    return Growth(max([1.0, *each]), local)


def _meets(earlier: _Step, later: _Step) -> bool:
    return earlier.writes is None or later.reads is None or not earlier.writes.isdisjoint(later.reads)


def _parts(whole: Any, key: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a part of the file, with sequences in sequences opened. Raises ValueError for too many."""
    left, count = [whole], 0
    while left:
        part = left.pop()
        if not isinstance(part, Mapping):
            continue
        count += 1
        if count > _MOST_STEPS:
            raise ValueError(f"its {key} are more than {_MOST_STEPS}")
        inner = part.get(key)
        if isinstance(inner, list):
            left += reversed(inner)
        else:
            yield part


def _step(part: Mapping[str, Any], forms: bool) -> _Step:
    kind = part.get("type")
    if kind == "Replace":
        return _replacement(part)
    if not forms or kind in _STILL:
        return _Step(1.0)
    if kind == "Prepend":  # to every part of the text between added tokens, each of which has a character
        prepended = str(part.get("prepend"))
        return _Step(1.0 + len(prepended), None, None, False)
    if kind == "Precompiled":
        return _Step(_longest(str(part.get("precompiled_charsmap") or "")))
    return _Step(float(_FORMS.get(str(kind), max(_FORMS.values()))))


def _replacement(part: Mapping[str, Any]) -> _Step:
    content, pattern = str(part.get("content")), part.get("pattern")
    text = pattern.get("String") if isinstance(pattern, Mapping) else None
    if isinstance(text, str) and text:
        return _Step(len(content) / len(text), frozenset(text), frozenset(content))
    regex = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    wide = isinstance(regex, str) and _WIDE.fullmatch(regex) is not None
    return _Step(len(content) + (0.0 if wide else 1.0), None, frozenset(content) if wide else None, False)


def _longest(encoded: str) -> float:
    """Return the length of the longest text in SentencePiece's table: the size of its trie, the trie, and texts that
    end in a null.
    """
    data = base64.b64decode(encoded)
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return float(max(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0")))


def _cut_growth(part: Mapping[str, Any]) -> int:
    return {"ByteLevel": 4, "Metaspace": 2}.get(str(part.get("type")), 1)

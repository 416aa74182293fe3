"""Which bytes a token adds to a text, read from the `decoder` part of a ``tokenizer.json``.

Most decoders of the tokenizers library treat each token alone, or differ only for the first one; those are here. A
decoder that looks at neighbours (BPEDecoder's end of word, CTC) is not, and `make_token_bytes` returns None for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

TokenBytes = Callable[[str, bool], bytes]
"""(vocabulary entry, nothing stands before it) → bytes."""

_Step = Callable[["str | bytes", bool], "str | bytes"]


def byte_alphabet() -> dict[str, int]:
    """Return the printable stand-ins that byte-level BPE uses for bytes (the GPT-2 table): character → byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    return table | {chr(256 + number): byte for number, byte in enumerate(others)}


def make_token_bytes(decoder: Mapping[str, Any] | None) -> TokenBytes | None:
    """Return the function for a decoder, or None when tokens cannot be decoded one by one."""
    if decoder is None:
        return lambda token, first: (token if first else " " + token).encode()
    steps: list[_Step] = []
    fused = False
    for part in decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]:
        if part.get("type") == "Fuse":
            fused = True
            continue
        step = _step(part, fused)
        if step is None:
            return None
        steps.append(step)

    def token_bytes(token: str, first: bool) -> bytes:
        value: str | bytes = token
        for step in steps:
            value = step(value, first)
        return value if isinstance(value, bytes) else value.encode("utf-8", "replace")

    return token_bytes


def _step(part: Mapping[str, Any], fused: bool) -> _Step | None:
    match part.get("type"):
        case "ByteLevel":
            return _byte_level()
        case "ByteFallback":
            return _byte_fallback
        case "Replace":
            return _replace(part)
        case "Strip":
            return _strip(part, fused)
        case "Metaspace":
            return _metaspace(part)
        case "WordPiece":
            return _word_piece(part)
    return None


def _byte_level() -> _Step:
    table = byte_alphabet()

    def step(value: str | bytes, first: bool) -> str | bytes:
        if isinstance(value, bytes):
            return value
        try:
            return bytes([table[character] for character in value])
        except KeyError:  # not written in the alphabet: an added token, which stands for itself
            return value

    return step


def _byte_fallback(value: str | bytes, first: bool) -> str | bytes:
    if isinstance(value, str) and len(value) == 6 and value.startswith("<0x") and value[5] == ">":
        try:
            return bytes([int(value[3:5], 16)])
        except ValueError:
            return value
    return value


def _replace(part: Mapping[str, Any]) -> _Step | None:
    old, new = part["pattern"].get("String"), part["content"]
    if not old:  # a regular expression
        return None
    return lambda value, first: value.replace(old, new) if isinstance(value, str) else value


def _strip(part: Mapping[str, Any], fused: bool) -> _Step | None:
    """Strip characters at the start of the text (after Fuse) or of each token (before)."""
    content, count, at_end = part["content"], int(part["start"]), int(part["stop"])
    if at_end and fused:
        return None

    def step(value: str | bytes, first: bool) -> str | bytes:
        if fused and not first:
            return value
        if isinstance(value, bytes):  # of one byte token; after Fuse it is text like any other
            return value.removeprefix(content.encode()) if fused and count else value
        head = len(value) - len(value.lstrip(content))
        value = value[min(head, count) :]
        tail = len(value) - len(value.rstrip(content))
        return value[: len(value) - min(tail, at_end)]

    return step


def _metaspace(part: Mapping[str, Any]) -> _Step:
    mark = part["replacement"]
    prepended = part.get("prepend_scheme", "always") != "never" and part.get("add_prefix_space", True)

    def step(value: str | bytes, first: bool) -> str | bytes:
        if isinstance(value, bytes):
            return value
        return value.replace(mark, "" if first and prepended else " ")

    return step


_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def _word_piece(part: Mapping[str, Any]) -> _Step:
    prefix, cleanup = part["prefix"], part["cleanup"]

    def step(value: str | bytes, first: bool) -> str | bytes:
        if isinstance(value, bytes):
            return value
        if not first:
            value = value[len(prefix) :] if value.startswith(prefix) else " " + value
        for old, new in _CLEANUP if cleanup else ():
            value = value.replace(old, new)
        return value

    return step

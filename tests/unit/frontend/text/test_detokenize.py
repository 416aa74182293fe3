"""Detokenizers: the deltas join to the text that the library decodes, and none holds a broken character."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule.frontend.text.detokenize import decode, open_detokenizer
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule_plugins.tokenizer.auto import AutoTokenizers
from ferrule_testkit.tokenizers import ByteTokenizer, write_tokenizer
from tests.fakes.tokenizers import KINDS

TEXTS = (
    "The quick brown fox isn't lazy, is it? Two  spaces.",
    " leading and trailing ",
    "你好，世界 and 🙂🙃 emoji, naïve café",
    "line\nbreaks\n\n\tand tabs",
    "",
    "a",
    "\u200d\u0301🏳️‍🌈",
)


@functools.cache
def opened(kind: str, folder: Path) -> tuple[Tokenizer, Any]:
    core = KINDS[kind]()
    return AutoTokenizers().open(write_tokenizer(folder / kind, core), {}), core


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


def deltas(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, **options: bool) -> list[str]:
    detokenizer = open_detokenizer(tokenizer, prompt or (), **options)
    return [*(detokenizer.feed(token) for token in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_deltas_join_to_the_library_s_own_text(kind: str, text: str, folder: Path) -> None:
    tokenizer, core = opened(kind, folder)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == core.encode(text, add_special_tokens=False).ids
    parts = deltas(tokenizer, ids)
    assert "".join(parts) == core.decode(ids)
    assert "".join(parts) == tokenizer.decode(ids)
    if "\ufffd" not in core.decode(ids):
        assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "gemma", "metaspace", "word_piece", "no_decoder"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_ids_give_what_decode_gives(kind: str, data: st.DataObject, folder: Path) -> None:
    tokenizer, core = opened(kind, folder)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    text = "".join(deltas(tokenizer, ids, skip_special_tokens=False))
    assert text == decode(tokenizer, ids, skip_special_tokens=False)
    expected = core.decode(ids, skip_special_tokens=False)
    if kind == "byte_level" and any(token in tokenizer.encode("añadido") for token in ids):
        return  # the library reads an added token as if it were written in the alphabet of bytes
    if "\ufffd" not in expected:  # in a run of byte tokens with one invalid byte the library loses the valid ones too
        assert text == expected


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40))
def test_bytes_decode_as_one_text_however_they_arrive(content: bytes) -> None:
    tokenizer = ByteTokenizer()
    parts = deltas(tokenizer, list(content))
    assert "".join(parts) == content.decode("utf-8", "replace")
    arrived = 0
    for token_number, part in enumerate(parts[:-1], 1):  # at most three bytes are held back
        arrived += len(part)
        assert arrived >= len(content[: max(0, token_number - 3)].decode("utf-8", "ignore"))


class _Windowed(ByteTokenizer):
    """The same bytes without `piece`: text must be decoded in windows."""

    def piece(self, token_id: int, first: bool) -> None:  # type: ignore[override]
        return None

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        shown = [token for token in ids if not (skip_special_tokens and token in self.all_special_ids)]
        parts = (bytes([t]) if t < 256 else self.names[t - 256].encode() for t in shown if 0 <= t < self.vocab_size)
        return b"".join(parts).decode("utf-8", "replace")


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_windows_give_the_same_text(text: str) -> None:
    tokenizer = _Windowed()
    ids = list(text.encode("utf-8", "replace"))
    assert "".join(deltas(tokenizer, ids)) == bytes(ids).decode()


@given(st.lists(st.integers(0, 257), max_size=200))
@settings(max_examples=100, deadline=None)
def test_windows_survive_any_bytes(ids: list[int]) -> None:
    parts = deltas(_Windowed(), ids)
    kept = bytes(token for token in ids if token < 256)
    assert "".join(parts).replace("\ufffd", "") == kept.decode("utf-8", "replace").replace("\ufffd", "")


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_text_never_comes_out(kind: str, folder: Path) -> None:
    tokenizer, core = opened(kind, folder)
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog", add_special_tokens=False)
    for cut in range(1, len(ids)):
        prompt, output = ids[:cut], ids[cut:]
        whole, head = core.decode(ids), core.decode(prompt)
        text = "".join(deltas(tokenizer, output, prompt))
        assert text.strip() == whole[len(head) :].strip()
        if kind not in {"end_of_word"}:
            assert text == whole[len(head) :]


def test_the_first_space_is_dropped_only_at_the_start_of_a_text(folder: Path) -> None:
    tokenizer, _ = opened("byte_fallback", folder)
    ids = tokenizer.encode("the ox", add_special_tokens=False)
    assert "".join(deltas(tokenizer, ids)) == "the ox"
    assert "".join(deltas(tokenizer, ids, prompt=[1])) == "the ox"  # <s> has no text
    assert "".join(deltas(tokenizer, ids, prompt=[1, ids[-1]])) == " the ox"


def test_special_tokens_are_left_out_or_shown() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("<s>a<|tag|></s>b", add_special_tokens=False)
    assert "".join(deltas(tokenizer, ids)) == "ab"
    assert "".join(deltas(tokenizer, ids, skip_special_tokens=False)) == "<s>a<|tag|></s>b"


@pytest.mark.parametrize("windows", [False, True])
def test_spaces_between_special_tokens(windows: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, core = opened("no_decoder", folder)
    core.add_special_tokens(["<x>", "<y>"])
    tokenizer = AutoTokenizers().open(write_tokenizer(folder / "spaced", core), {})
    if windows:
        monkeypatch.setattr(tokenizer, "piece", lambda token_id, first: None)
        monkeypatch.setattr(tokenizer, "decode", lambda ids, skip_special_tokens: core.decode(ids, skip_special_tokens))
    ids = tokenizer.encode("fox <x><y> dog", add_special_tokens=False)
    spaced = "".join(deltas(tokenizer, ids, skip_special_tokens=False))
    tight = "".join(deltas(tokenizer, ids, skip_special_tokens=False, spaces_between_special_tokens=False))
    assert (spaced, tight) == ("fox <x> <y> dog", "fox <x><y> dog")


def test_ids_out_of_range_add_nothing(folder: Path) -> None:
    for kind in KINDS:
        tokenizer, _ = opened(kind, folder)
        assert "".join(deltas(tokenizer, [tokenizer.vocab_size, tokenizer.vocab_size + 7])) == ""


def test_characters_leave_as_soon_as_they_are_whole() -> None:
    tokenizer = ByteTokenizer()
    assert deltas(tokenizer, list("é🙂".encode())) == ["", "é", "", "", "", "🙂", ""]
    assert deltas(tokenizer, list("é".encode())[:1]) == ["", "\ufffd"]


def test_a_window_never_grows() -> None:
    """Decode thousands of invalid bytes: the work per token stays bounded, though no character is ever whole."""

    class Counting(_Windowed):
        decoded = 0

        def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
            self.decoded += len(ids)
            return super().decode(ids, skip_special_tokens=skip_special_tokens)

    tokenizer = Counting()
    deltas(tokenizer, list(itertools.islice(itertools.cycle([0x80, 0xE4, 0xBD]), 3000)))
    assert tokenizer.decoded < 3000 * 140

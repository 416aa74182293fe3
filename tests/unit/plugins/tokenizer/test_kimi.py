"""Folders with a ``tiktoken.model`` alone: texts are cut as Kimi's published tokenizer cuts them, or not at all."""

from __future__ import annotations

import base64
import builtins
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from ferrule.errors import CheckpointError
from ferrule_plugins.tokenizer import kimi
from ferrule_plugins.tokenizer.auto import AutoTokenizers
from ferrule_plugins.tokenizer.kimi import KimiTokenizer

CONFIG = {
    "tokenizer_class": "TikTokenTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
    "chat_template": "{{ messages }}",
}
ADDED = {
    0: {"content": "[BOS]", "special": True},
    1: {"content": "[EOS]", "special": True},
    11: {"content": "<|tool_calls_section_begin|>", "special": False},
}
MERGED = [b"th", b"the", b" the", b"in", b"ing", b"'s", b"12", b"123", "人".encode()[:2], "人".encode(), b"\n\n", b"  "]
RANKS = {**{bytes([byte]): byte for byte in range(256)}, **{token: 256 + i for i, token in enumerate(MERGED)}}
# As published: https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/tokenization_kimi.py
PUBLISHED = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write(folder: Path, config: dict[str, Any] | None = None) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in RANKS.items()]
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {str(len(RANKS) + place): value for place, value in ADDED.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, **(config or CONFIG)}))
    return folder


def opened(folder: Path) -> KimiTokenizer:
    tokenizer = AutoTokenizers().open(folder, {})
    assert isinstance(tokenizer, KimiTokenizer)
    return tokenizer


def text(draw: random.Random) -> str:
    parts = [
        "the ",
        "thing's",
        " 12345",
        "人工智能 the",
        "\r\n\n",
        "   x",
        "ÀÉ ß",
        "e\u0301",
        "😀!?\n",
        "\t",
        "THE'S",
        "１２",
    ]
    return "".join(draw.choice(parts) for _ in range(draw.randrange(1, 12)))


def test_texts_are_cut_as_published(tmp_path: Path) -> None:
    tokenizer, draw = opened(write(tmp_path)), random.Random(5)
    plain = tiktoken.Encoding("plain", pat_str=PUBLISHED, mergeable_ranks=RANKS, special_tokens={})
    for _ in range(300):
        said = text(draw)
        assert tokenizer.encode(said) == plain.encode(said)
        assert tokenizer.decode(tokenizer.encode(said)) == said
        pieces = [tokenizer.piece(token, place == 0) for place, token in enumerate(tokenizer.encode(said))]
        assert b"".join(pieces) == said.encode()


def test_the_pattern_is_not_one_of_another_family(tmp_path: Path) -> None:
    """Split a text in which a run of Han characters and one of letters meet: others keep them together."""
    assert opened(write(tmp_path)).encode("人the") == [RANKS["人".encode()], RANKS[b"the"]]


def test_special_tokens(tmp_path: Path) -> None:
    tokenizer, first = opened(write(tmp_path)), len(RANKS)
    assert tokenizer.vocab_size == first + 256
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (first, first + 1)
    assert tokenizer.encode("[BOS]the<|tool_calls_section_begin|>") == [first, RANKS[b"the"], first + 11]
    assert tokenizer.encode("<|reserved_token_300|>") == [300]
    assert tokenizer.token(300) == "<|reserved_token_300|>"
    assert tokenizer.token(first + 256) is None
    assert tokenizer.decode([first, RANKS[b"the"], first + 11, 10**6]) == "the<|tool_calls_section_begin|>"
    assert tokenizer.chat_template == "{{ messages }}"


@pytest.mark.parametrize("part", ["a", " ", "ab", "人"])
def test_long_texts_are_cut_where_the_published_tokenizer_cuts_them(part: str) -> None:
    said = part * 410_000 + " x" * 30_000
    assert list(kimi._cut(said)) == list(_published(said))


def _published(said: str) -> list[str]:
    """Split as `_split_whitespaces_or_nonwhitespaces` is documented to do, character by character."""
    found = []
    for start in range(0, len(said), 400_000):
        begun, length, blank = start, 0, None
        for place in range(start, min(len(said), start + 400_000)):
            length, blank = (length + 1 if said[place].isspace() == blank else 1), said[place].isspace()
            if length > 25_000:
                found.append(said[begun:place])
                begun, length = place, 1
        found.append(said[begun : start + 400_000])
    return found


@pytest.mark.parametrize(
    "config",
    [
        {"bos_token": "[BOS]"},
        {**CONFIG, "tokenizer_class": "QWenTokenizer"},
        {**CONFIG, "auto_map": {"AutoTokenizer": ["tokenization_other.TikTokenTokenizer", None]}},
    ],
)
def test_a_file_of_another_family_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="how texts are cut"):
        opened(write(tmp_path, config))


@pytest.mark.parametrize("line", ["dGhl", "??? 5", "dGhl five", "dGhl 3"])
def test_damaged_files(line: str, tmp_path: Path) -> None:
    file = write(tmp_path) / "tiktoken.model"
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(CheckpointError, match="base64|one number"):
        opened(tmp_path)


def test_added_tokens_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="added_tokens_decoder"):
        opened(write(tmp_path, {**CONFIG, "added_tokens_decoder": {"x": 5}}))
    with pytest.raises(CheckpointError, match="added_tokens_decoder"):
        opened(write(tmp_path, {**CONFIG, "added_tokens_decoder": {"9" * 5000: {}}}))


def test_every_byte_has_a_token(tmp_path: Path) -> None:
    file = write(tmp_path) / "tiktoken.model"
    *lines, last = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:7], last.split()[0] + " 7", *lines[8:]]))
    with pytest.raises(CheckpointError, match="a token for each byte"):
        opened(tmp_path)


def test_without_the_library_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "tiktoken":
            raise ImportError(name)
        return whole(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(CheckpointError, match="tiktoken") as found:
        opened(write(tmp_path))
    assert "ferrule[tiktoken]" in found.value.hint

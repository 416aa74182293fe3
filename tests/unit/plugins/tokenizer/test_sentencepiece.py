"""A SentencePiece ``tokenizer.model`` alone gives the ids that the sentencepiece library gives."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mistral_common
import pytest
import sentencepiece

from ferrule.errors import CheckpointError
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule_plugins.tokenizer.auto import AutoTokenizers, FastTokenizer, _is_plain
from ferrule_plugins.tokenizer.sentencepiece import read_file

WORDS = ["Hello", "there", "façade", "ﬁne", "人工", "x" * 9, "12345", "it's"]
OTHERS = [" ", "  ", "\n", "\t", "ＡＢ", "😀", ".", " Hello"]


def trained(**options: Any) -> bytes:
    """Train a small model."""
    draw, model = random.Random(1), io.BytesIO()
    lines = (" ".join(draw.choice(WORDS) for _ in range(9)) for _ in range(300))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, minloglevel=2, num_threads=1, hard_vocab_limit=False, **options
    )
    return model.getvalue()


MODELS: Mapping[str, Callable[[], bytes]] = {
    "of Mistral": (Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1").read_bytes,
    "BPE with bytes": lambda: trained(
        model_type="bpe",
        vocab_size=310,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<mark>"],
    ),
    "BPE with a normalization": lambda: trained(model_type="bpe", vocab_size=60),
    "unigram": lambda: trained(model_type="unigram", vocab_size=50),
    "unigram without a prefix": lambda: trained(model_type="unigram", vocab_size=50, add_dummy_prefix=False, pad_id=3),
}


def opened(folder: Path, data: bytes, **settings: Any) -> FastTokenizer:
    (folder / "tokenizer.model").write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = AutoTokenizers().open(folder, {})
    assert isinstance(tokenizer, FastTokenizer)
    return tokenizer


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    data = MODELS[name]()
    ours, theirs, draw = (
        opened(tmp_path, data),
        sentencepiece.SentencePieceProcessor(model_proto=data),
        random.Random(2),
    )
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_id) == (theirs.vocab_size(), 1, 2)
    for _ in range(200):
        text = "".join(draw.choice(WORDS + OTHERS) for _ in range(draw.randrange(1, 9)))
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.encode(text) == [1, *ids]
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids)


def test_what_is_stated_wins(tmp_path: Path) -> None:
    data = MODELS["BPE with bytes"]()
    ours = opened(tmp_path, data, add_bos_token=False, eos_token="<mark>", chat_template="x")
    assert ours.encode("Hello") == ours.encode("Hello", add_special_tokens=False)
    assert (ours.token(ours.eos_token_id or 0), ours.chat_template) == ("<mark>", "x")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"dGhl 0\n",
        b"\x0a\xff",
        b"\x0a\x03abc",
        b"\xff" * 40,
        b"\x0b\x00",
        b"\x0a\x00" * (1 << 21),
        b"\x0a\x04\x0a\x02\xff\xfe",
    ],
)
def test_files_that_are_none(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a SentencePiece model"):
        opened(tmp_path, data)


def test_cut_and_changed_files_are_clear_errors(tmp_path: Path) -> None:
    data, draw = MODELS["unigram"](), random.Random(3)
    for _ in range(200):
        changed = bytearray(data[: draw.randrange(len(data))])
        for _ in range(draw.randrange(4) if changed else 0):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        try:
            opened(tmp_path, bytes(changed)).encode("Hello there")
        except CheckpointError:
            continue


def test_damaged_normalizations_are_errors_that_can_be_caught(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(MODELS["unigram"]())
    whole, _ = read_file(tmp_path / "tokenizer.model")
    (step,) = [each for each in whole["normalizer"]["normalizers"] if each["type"] == "Precompiled"]
    mapping = base64.b64decode(step["precompiled_charsmap"])

    def opened_with(mapping: bytes) -> Tokenizer:
        step["precompiled_charsmap"] = base64.b64encode(mapping).decode()
        (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
        return AutoTokenizers().open(tmp_path, {})

    with pytest.raises(CheckpointError, match="files are damaged"):
        opened_with(mapping[:9])
    without_texts = opened_with(mapping[: 4 + int.from_bytes(mapping[:4], "little")])
    with pytest.raises(CheckpointError, match="files are damaged"):
        without_texts.encode("ＡＢ")
    added = {"added_tokens_decoder": {str(without_texts.vocab_size): {"content": "ＡＢ", "normalized": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(added))
    with pytest.raises(CheckpointError, match="files are damaged"):
        AutoTokenizers().open(tmp_path, {})


@pytest.mark.advisory("CVE-2023-6730")
def test_merges_of_endless_tokens_are_not_looked_for(tmp_path: Path) -> None:
    data, endless = MODELS["BPE with bytes"](), b"x" * 600
    piece = b"\x0a" + _length(endless) + endless
    with pytest.raises(CheckpointError, match="a token has 600 characters"):
        opened(tmp_path, data + b"\x0a" + _length(piece) + piece)


def _length(data: bytes) -> bytes:
    """Return the length as a protobuf number of two bytes."""
    return bytes((len(data) & 127 | 128, len(data) >> 7))


def test_classes_that_add_to_the_model_are_left_to_their_library(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    own = {"auto_map": {"AutoTokenizer": ["x.InternLM2Tokenizer", None]}, "tokenizer_class": "InternLM2Tokenizer"}
    assert _is_plain(tmp_path, {}, {})
    assert _is_plain(tmp_path, own, {})
    assert not _is_plain(tmp_path, own, {"trust_remote_code": True})
    assert not _is_plain(tmp_path, {"tokenizer_class": "ChatGLMTokenizer"}, {})

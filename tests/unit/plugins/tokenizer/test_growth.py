"""What a ``tokenizer.json`` makes of a text is bounded: what may end the process is refused when the file is opened."""

from __future__ import annotations

import base64
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from ferrule.errors import CheckpointError, RequestError
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule_plugins.tokenizer import growth
from ferrule_plugins.tokenizer.auto import AutoTokenizers
from ferrule_plugins.tokenizer.growth import Growth, read_growth
from ferrule_testkit.tokenizers import byte_level, write_tokenizer
from tests.fakes.tokenizers import KINDS

LLAMA = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
TABLE = base64.b64encode((4).to_bytes(4, "little") + bytes(4) + "a\0ab\0صلى الله عليه وسلم\0".encode()).decode()
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
BEGIN = {"SpecialToken": {"id": "<|end|>", "type_id": 0}}


def replacing(old: str, new: str, form: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {form: old}, "content": new}


def sequence(*steps: dict[str, Any], key: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", key: list(steps)}


def framing(single: list[Any], count: int = 1) -> dict[str, Any]:
    ids = [360] * count
    special = {"<|end|>": {"id": "<|end|>", "ids": ids, "tokens": ["<|end|>"] * count}}
    pair = [TEXT, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def opened(folder: Path, **parts: Any) -> Tokenizer:
    file = write_tokenizer(folder, byte_level()) / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | parts), "utf-8")
    return AutoTokenizers().open(folder, {})


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"normalizer": sequence(*[replacing("o", "o" * 10)] * 9)}, "its normalizer may write 1e\\+09"),
        ({"normalizer": sequence(*[sequence(replacing("o", "xo" * 10))] * 9)}, "its normalizer"),
        ({"normalizer": sequence(*[replacing("o(?=.)", "o" * 10, "Regex")] * 9)}, "its normalizer"),
        ({"normalizer": sequence(*[replacing("", "o")] * 20)}, "its normalizer"),
        ({"normalizer": sequence(*[replacing("", "o", "Regex")] * 20)}, "its normalizer"),
        ({"normalizer": replacing("h", "h" * 100_000_000)}, "its normalizer"),
        ({"normalizer": sequence(*[{"type": "NFKC"}, {"type": "ByteLevel"}] * 5)}, "its normalizer"),
        ({"normalizer": {"type": "Prepend", "prepend": "o" * 10_000}}, "its normalizer"),
        ({"normalizer": sequence(*[{"type": "Precompiled", "precompiled_charsmap": TABLE}] * 8)}, "its normalizer"),
        ({"normalizer": sequence(*[{"type": "NFC"}] * 100_000)}, "more than 256"),
        (
            {"pre_tokenizer": sequence(*[json.loads('{"type": "ByteLevel"}')] * 20, key="pretokenizers")},
            "its pre_tokenizer",
        ),
        ({"post_processor": framing([TEXT, TEXT])}, "repeats the text"),
        ({"post_processor": framing([BEGIN] * 1000 + [TEXT], 1000)}, "adds 1000000 special tokens"),
        ({"decoder": sequence(*[replacing("o", "o" * 10)] * 9, key="decoders")}, "its decoder"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_no_memory_holds_is_refused_when_it_is_opened(parts: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        opened(tmp_path, **parts)
    assert "tokenizer.json" in str(caught.value)


def test_an_affix_of_a_model_is_short(tmp_path: Path) -> None:
    stated = json.loads((write_tokenizer(tmp_path, byte_level()) / "tokenizer.json").read_text("utf-8"))
    stated["model"]["end_of_word_suffix"] = "w" * 5000
    with pytest.raises(CheckpointError, match="beside a piece of a word"):
        opened(tmp_path, model=stated["model"])


@pytest.mark.parametrize(
    ("normalizer", "most", "local"),
    [
        (None, 1, True),
        ({"type": "NFC"}, 3, True),
        (sequence(*LLAMA), 2, True),
        (replacing(" {2,}", "▁", "Regex"), 1, True),
        (replacing(r"\s+", " ", "Regex"), 1, True),
        (replacing("[^\\n\\t ]", "xx", "Regex"), 2, True),
        (replacing("a|", "xx", "Regex"), 3, False),
        (sequence({"type": "Precompiled", "precompiled_charsmap": TABLE}, replacing(" {2,}", "▁", "Regex")), 18, True),
        # nothing of what one writes is read by another
        (sequence(replacing("&", " and "), replacing("%", " percent "), replacing("``", '"')), 9, True),
        (sequence(replacing("&", "%%"), replacing("%", "xyz")), 6, True),
        (sequence(replacing("%", "xyz"), replacing("&", "%%")), 3, True),
    ],
)
def test_the_bound_follows_from_the_file(normalizer: Any, most: float, local: bool) -> None:
    assert read_growth({"normalizer": normalizer}) == Growth(most, local)


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_forms_of_unicode_grow_by_no_more_than_is_said(form: Any) -> None:
    most = max(len(unicodedata.normalize(form, chr(code))) for code in range(0x2FFFF) if not 0xD800 <= code < 0xE000)
    assert most <= growth._FORMS[form]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_usual_tokenizers_are_not_checked_at_run_time(kind: str, tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path, KINDS[kind]()) / "tokenizer.json"
    assert read_growth(json.loads(file.read_text("utf-8"))).free > 1 << 40


def test_a_long_text_that_grows_is_refused_and_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "_FREE", 1000)
    tokenizer = opened(tmp_path, normalizer={"type": "NFKC"})
    assert len(tokenizer.encode("ﷺ" * 10)) > 100
    assert tokenizer.encode("a" * 5000)
    with pytest.raises(RequestError, match="4000 characters for this text of 1000"):
        tokenizer.encode("ﷺ" * 1000)


def test_where_parts_say_nothing_of_the_whole_the_bound_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "_FREE", 1000)
    tokenizer = opened(tmp_path, normalizer=replacing("o(?=.{400})", "o" * 20, "Regex"))
    assert tokenizer.encode("o" * 40)
    with pytest.raises(RequestError, match="4000 characters"):
        tokenizer.encode("o" * 1000)

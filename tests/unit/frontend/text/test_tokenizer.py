"""Tokenizer plugins: what a folder's files say is what the tokenizer does, as transformers reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ferrule.errors import CheckpointError
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule_plugins.tokenizer.auto import AutoTokenizers
from ferrule_plugins.tokenizer.slow import SlowTokenizers
from ferrule_plugins.tokenizer.token_bytes import byte_alphabet, make_token_bytes
from ferrule_testkit.tokenizers import byte_level, write_tokenizer
from tests.fakes.tokenizers import KINDS, byte_fallback
from tools import ROOT

TINY = ROOT / "contrib_models/ferrule_contrib/tiny/checkpoint"
TEXT = "The fox's café 你好 🙂\n\n  two <|end|> spaces"


def auto(folder: Path, **options: Any) -> Tokenizer:
    return AutoTokenizers().open(folder, options)


def test_the_embedded_model_s_tokenizer() -> None:
    tokenizer = auto(TINY)
    assert tokenizer.eos_token_id == tokenizer.encode("<|im_end|>")[0]
    assert tokenizer.bos_token_id is None
    assert tokenizer.token(tokenizer.vocab_size) is None
    assert tokenizer.token(-1) is None
    assert tokenizer.token(tokenizer.eos_token_id) == "<|im_end|>"
    assert tokenizer.eos_token_id in tokenizer.all_special_ids
    assert isinstance(tokenizer.chat_template, str)
    assert tokenizer.decode(tokenizer.encode("Hi <|im_end|>there")) == "Hi there"
    assert tokenizer.decode(tokenizer.encode("Hi <|im_end|>there"), skip_special_tokens=False) == "Hi <|im_end|>there"


def test_auto_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from pathlib import Path; from ferrule_plugins.tokenizer.auto import AutoTokenizers;"
        f"t = AutoTokenizers().open(Path({str(TINY)!r}), {{}}); print(t.decode(t.encode('ok')));"
        "print([m for m in ('torch', 'transformers', 'numpy', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.split("\n")[:2] == ["ok", "[]"]


@pytest.mark.parametrize("source", [AutoTokenizers, SlowTokenizers])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}},
        {"add_bos_token": False, "bos_token": "<s>", "additional_special_tokens": ["<|end|>"]},
    ],
)
@pytest.mark.parametrize("template", [None, "<s>:0 $A:0", "<s>:0 $A:0 </s>:0"])
def test_both_sources_agree_with_transformers(
    source: type, kind: str, settings: dict[str, Any], template: str | None, tmp_path: Path
) -> None:
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    core = KINDS[kind]()
    core.add_special_tokens(["<s>", "</s>"])
    if template is not None:
        ends = [(token, core.token_to_id(token)) for token in ("<s>", "</s>")]
        core.post_processor = processors.TemplateProcessing(single=template, special_tokens=ends)
    folder = write_tokenizer(tmp_path, core, tokenizer_class="PreTrainedTokenizerFast", **settings)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = source().open(folder, {})
    for special in (True, False):
        ids = ours.encode(TEXT, add_special_tokens=special)
        assert ids == theirs.encode(TEXT, add_special_tokens=special)
        assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(
            ids, skip_special_tokens=special, clean_up_tokenization_spaces=False
        )
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.all_special_ids >= set(theirs.all_special_ids)


def test_stated_ends_are_added_where_tokenizer_json_adds_none(tmp_path: Path) -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    for number, (bos, eos) in enumerate([(True, False), (False, True), (True, True), (False, False)]):
        settings = {"add_bos_token": bos, "add_eos_token": eos, **tokens}
        tokenizer = auto(write_tokenizer(tmp_path / str(number), byte_fallback(), **settings))
        inner = tokenizer.encode("the ox", add_special_tokens=False)
        assert tokenizer.encode("the ox") == [*([1] if bos else []), *inner, *([2] if eos else [])]


def test_special_tokens_come_from_the_older_file_too(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, byte_fallback())
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}, "bos_token": "<s>"}))
    tokenizer = auto(folder)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_tokens_that_only_the_settings_know_are_added(tmp_path: Path) -> None:
    core = byte_level()
    size = core.get_vocab_size()
    added = {str(size): {"content": "<|tool|>", "special": True}, str(size + 1): {"content": "<x>", "special": False}}
    tokenizer = auto(write_tokenizer(tmp_path / "a", core, added_tokens_decoder=added))
    assert tokenizer.encode("<|tool|><x>") == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<x>"
    assert tokenizer.vocab_size == size + 2
    wrong = {str(size + 5): {"content": "<|tool|>", "special": True}}
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        auto(write_tokenizer(tmp_path / "b", byte_level(), added_tokens_decoder=wrong))


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    core = byte_level()
    core.enable_truncation(4)
    core.enable_padding(length=8)
    assert len(auto(write_tokenizer(tmp_path, core)).encode("abc " * 20)) > 8
    assert len(auto(tmp_path).encode("a")) == 1


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"model": 5}', '{"version": "1.0", "model": {"type": "Nothing"}}']
)
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="tokenizer.json"):
        auto(tmp_path)


def test_chat_templates_come_from_every_documented_place(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, byte_level(), chat_template="A")
    assert auto(folder).chat_template == "A"
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}, {"name": 5}]
    write_tokenizer(tmp_path, byte_level(), chat_template=named)
    assert auto(folder).chat_template == {"default": "D", "tool_use": "T"}
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert auto(folder).chat_template == {"default": "J", "tool_use": "T", "rag": "R"}
    (folder / "chat_template.jinja").write_text("F é", "utf-8")
    assert auto(folder).chat_template == {"default": "F é", "tool_use": "T", "rag": "R"}
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="chat_template.jinja"):
        auto(folder)


def test_a_folder_without_tokenizer_json_goes_to_transformers(tmp_path: Path) -> None:
    alphabet = {character: number for number, character in enumerate(sorted(byte_alphabet()))}
    (tmp_path / "vocab.json").write_text(json.dumps({**alphabet, "ab": 256, "</s>": 257}), "utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "</s>", "unk_token": "</s>"})
    )
    tokenizer = auto(tmp_path)
    ids = tokenizer.encode("ab é", add_special_tokens=False)
    assert ids[0] == 256
    assert tokenizer.decode([*ids, 257, 5000]) == "ab é"
    assert tokenizer.eos_token_id == 257
    assert tokenizer.piece(0, False) is None
    assert tokenizer.token(256) == "ab"
    assert tokenizer.token(5000) is None


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        auto(tmp_path)
    with pytest.raises(CheckpointError):
        auto(tmp_path / "none")


@pytest.mark.advisory("CVE-2025-66448")
def test_code_of_a_checkpoint_does_not_run_unasked(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "tokenization_evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass Evil: pass\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]}})
    )
    with pytest.raises(CheckpointError):
        auto(tmp_path, trust_remote_code=False)
    assert not canary.exists()


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "CTC"},
        {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "CTC"}]},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]},
    ],
)
def test_decoders_that_look_at_neighbours_have_no_pieces(decoder: dict[str, Any]) -> None:
    assert make_token_bytes(decoder) is None

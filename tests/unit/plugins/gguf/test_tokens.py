"""Tokenizers of GGUF files give the ids of the tokenizers that they were made from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ferrule.errors import CheckpointError, RequestError
from ferrule.frontend.text.messages import read_messages
from ferrule.frontend.text.template import RenderJob, render
from ferrule_files.gguf.reader import GgufModel
from ferrule_files.gguf.splits import SPLITS
from ferrule_files.gguf.tokens import Vocabulary, read_tokenizer
from ferrule_plugins.tokenizer.auto import AutoTokenizers

TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock, WE'LL see!",
    "def f(x):\n    return x + 1  # 3.14\n\n\n",
    "  leading and trailing  ",
    "Größe, naïve, Ελλάδα, Русский, 日本語テキスト, 한국어, العربية 😀\u200d",
    "a\tb\r\nc   d",
    "<s>special</s> and <|user|> words",
    "",
)
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


def opened(metadata: Mapping[str, Any], folder: Path) -> Any:
    """Return the tokenizer of a file with this metadata, as the server opens it."""
    content, settings = read_tokenizer(Vocabulary(described(metadata)))
    (folder / "tokenizer.json").write_bytes(msgspec.json.encode(content))
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))
    return AutoTokenizers().open(folder, {})


def described(metadata: Mapping[str, Any]) -> GgufModel:
    return GgufModel((Path("model.gguf"),), {f"tokenizer.{key}": value for key, value in metadata.items()}, {})


def in_order(vocabulary: Mapping[str, int]) -> list[str]:
    return sorted(vocabulary, key=lambda token: vocabulary[token])


def byte_level(cuts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Split(__import__("tokenizers").Regex(cut), "isolated") for cut in cuts]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>", "<|user|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def of_bpe(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    tokens = in_order(tokenizer.get_vocab())
    merges = msgspec.json.decode(tokenizer.to_str())["model"]["merges"]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": [CONTROL] * 2 + [USER] + [NORMAL] * (len(tokens) - 3),
        "ggml.merges": [" ".join(merge) for merge in merges],
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 1,
        "ggml.add_bos_token": False,
    }


@pytest.mark.parametrize("pre", SPLITS)
def test_bpe_gives_the_ids_of_its_model(pre: str, tmp_path: Path) -> None:
    theirs = byte_level(SPLITS[pre])
    ours = opened(of_bpe(theirs, pre), tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    assert ours.bos_token_id == 0
    assert ours.all_special_ids == {0, 1}


# What published tokenizers are known to cut: the expressions above would agree with themselves however wrong they were.
CUTS = {
    "gpt-2": ("I've 1234  apples!!", ["I", "'ve", " 1234", " ", " apples", "!!"]),
    "qwen2": ("I'VE 1234\n\n x", ["I", "'VE", " ", "1", "2", "3", "4", "\n\n", " x"]),
    "llama3": ("I'VE 1234567 x", ["I", "'VE", " ", "123", "456", "7", " x"]),
    "starcoder": ("ab12 c", ["ab", "1", "2", " c"]),
    "falcon": ("a==b 12345", ["a", "==", "b", " ", "123", "45"]),
    "tekken": ("camelCase HTTPServer 12", ["camel", "Case", " HTTPServer", " ", "1", "2"]),
    "gpt-4o": ("Don't 1234", ["Don't", " ", "123", "4"]),
    "deepseek-v3": ("x1234 日本 (a", ["x", "123", "4", " ", "日本", " (", "a"]),
    "bloom": ("one,two three", ["one", ",", "two", " three"]),
}


@pytest.mark.parametrize("pre", CUTS)
def test_texts_are_cut_as_the_published_models_do(pre: str, tmp_path: Path) -> None:
    text, wanted = CUTS[pre]
    content, _ = read_tokenizer(Vocabulary(described(of_bpe(byte_level(SPLITS[pre]), pre))))
    core = Tokenizer.from_buffer(msgspec.json.encode(content))
    spans = [span for _, span in core.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[start:end] for start, end in spans] == wanted


def of_spm(prefix: bool) -> tuple[Tokenizer, dict[str, Any]]:
    """Return SentencePiece's BPE as transformers writes it, and the same as a file has it."""
    pieces = ["\u2581", *"abcdefghijklmnopqrstuvwxyz.,!?'0123456789TIW"]
    merged = [
        "\u2581t",
        "he",
        "\u2581the",
        "in",
        "er",
        "\u2581a",
        "\u2581the\u2581",
        "quick",
        "qu",
        "ick",
        "ck",
        "ic",
        "ro",
        "own",
    ]
    special, octets = ["<unk>", "<s>", "</s>"], [f"<0x{value:02X}>" for value in range(256)]
    tokens = [*special, "<|user|>", *octets, *merged, *pieces]
    scores = (
        [0.0] * 260 + [-float(index + 1) for index in range(len(merged))] + [-1000.0 - n for n in range(len(pieces))]
    )
    ids = {token: index for index, token in enumerate(tokens)}
    merges = [
        (token[:at], token[at:])
        for token in merged
        for at in range(1, len(token))
        if token[:at] in ids and token[at:] in ids
    ]
    core = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend("\u2581")] if prefix else []
    core.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    from tokenizers import AddedToken

    core.add_special_tokens([AddedToken(each, normalized=False) for each in special])
    core.add_tokens([AddedToken("<|user|>", normalized=False)])
    kinds = [UNKNOWN, CONTROL, CONTROL, USER] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 260)
    metadata = {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.scores": scores,
        "ggml.token_type": kinds,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        "ggml.add_space_prefix": prefix,
    }
    return core, metadata


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_gives_the_ids_of_its_model(prefix: bool, tmp_path: Path) -> None:
    theirs, metadata = of_spm(prefix)
    ours = opened(metadata, tmp_path)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text).ids
        assert ours.encode(text) == [1, *theirs.encode(text).ids]  # where a file does not say, a text begins with bos
    assert ours.decode(ours.encode(TEXTS[3])) == TEXTS[3]


def test_unigram_gives_the_ids_of_its_model(tmp_path: Path) -> None:
    theirs = Tokenizer(models.Unigram())
    theirs.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    theirs.train_from_iterator(TEXTS * 3, trainer)
    scored = msgspec.json.decode(theirs.to_str())["model"]["vocab"]
    metadata = {
        "ggml.model": "t5",
        "ggml.tokens": [token for token, _ in scored],
        "ggml.scores": [float(score) for _, score in scored],
        "ggml.token_type": [UNKNOWN] + [NORMAL] * (len(scored) - 1),
        "ggml.unknown_token_id": 0,
        "ggml.add_eos_token": False,
    }
    ours = opened(metadata, tmp_path)
    for text in TEXTS[:5]:
        assert ours.encode(text) == theirs.encode(text).ids


def test_word_pieces_give_the_ids_of_their_model(tmp_path: Path) -> None:
    theirs = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    theirs.normalizer = normalizers.BertNormalizer()
    theirs.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    theirs.train_from_iterator(
        TEXTS * 3, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    )
    tokens = in_order(theirs.get_vocab())
    marked = [
        each.removeprefix("##") if each.startswith("##") else each if each in special else f"\u2581{each}"
        for each in tokens
    ]
    metadata = {
        "ggml.model": "bert",
        "ggml.tokens": marked,
        "ggml.token_type": [CONTROL] * 4 + [NORMAL] * (len(tokens) - 4),
        "ggml.unknown_token_id": 1,
        "ggml.seperator_token_id": 3,
    }
    ours = opened(metadata, tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == [2, *theirs.encode(text).ids, 3]


def test_roles_ends_and_templates_are_those_of_the_file(tmp_path: Path) -> None:
    metadata = of_bpe(byte_level(SPLITS["gpt-2"]), "gpt-2")
    metadata["ggml.tokens"] = [*metadata["ggml.tokens"], "<|im_end|>", "[PAD]"]
    metadata["ggml.token_type"] = [*metadata["ggml.token_type"], CONTROL, 5]
    last = len(metadata["ggml.tokens"]) - 1
    metadata |= {"ggml.padding_token_id": last, "ggml.eot_token_id": 2, "ggml.add_bos_token": True}
    metadata |= {"chat_template": "{{ 1 }}", "chat_templates": ["tool_use"], "chat_template.tool_use": "{{ 2 }}"}
    ours = opened(metadata, tmp_path)
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "[PAD]"}
    assert ours.chat_template == {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    assert ours.encode("a")[0] == 0
    assert ours.vocab_size == last + 1
    assert Vocabulary(described(metadata)).ends() == [1, 2, last - 1]


def test_of_tokens_that_are_there_twice_the_first_counts() -> None:
    vocabulary = Vocabulary(described({"ggml.tokens": ["a", "b", "a", "c", "b", "a"]}))
    assert list(vocabulary.ids.items()) == [("a", 0), ("b", 1), ("c", 3)]


@pytest.mark.advisory("CVE-2026-5760")
def test_templates_of_files_run_in_the_sandbox(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    evil = f"{{{{ cycler.__init__.__globals__.os.mkdir('{canary}') }}}}"
    metadata = {**of_bpe(byte_level(SPLITS["gpt-2"]), "gpt-2"), "chat_template": evil}
    found = [opened(metadata, tmp_path).chat_template]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": evil}))
    found.append(AutoTokenizers().open(tmp_path, {}).chat_template)
    (tmp_path / "chat_template.jinja").write_text(evil)
    found.append(AutoTokenizers().open(tmp_path, {}).chat_template)
    assert found == [evil] * 3
    for template in found:
        messages = read_messages([{"role": "user", "content": "hi"}], 100)
        settings = {"variables": {}, "extra": {}, "content_format": "auto", "max_characters": 99}
        with pytest.raises(RequestError, match="SecurityError"):
            render(RenderJob(template=template, messages=messages, **settings))
    assert not canary.exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ggml.model": "rwkv"}, "kind 'rwkv'"),
        ({"ggml.pre": "llama2"}, "'llama2' is not known. Did you mean 'llama[34]'"),
        ({"ggml.merges": ["ab"]}, "'ab', which is not two parts"),
        ({"ggml.merges": [1]}, "not two parts"),
        ({"ggml.tokens": []}, "not a list of texts"),
        ({"ggml.tokens": [1, 2]}, "not a list of texts"),
        ({"ggml.token_type": [1]}, "value for each token"),
        ({"ggml.tokens": "text"}, "has a str"),
    ],
)
def test_what_cannot_be_a_tokenizer_is_refused(changes: dict[str, Any], said: str) -> None:
    metadata = {**of_bpe(byte_level(SPLITS["gpt-2"]), "gpt-2"), **changes}
    with pytest.raises(CheckpointError, match=said):
        read_tokenizer(Vocabulary(described(metadata)))

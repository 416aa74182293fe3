"""Converts the tokenizer of a GGUF file into a ``tokenizer.json`` and a ``tokenizer_config.json``."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ferrule.errors import CheckpointError, nearest
from ferrule_files.gguf.reader import GgufModel
from ferrule_files.gguf.splits import SPLITS, WHOLE_WORDS

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6  # types of tokens
SPACE = "\u2581"  # what SentencePiece writes for a space
_ROLES = {
    "bos": "bos",
    "eos": "eos",
    "unknown": "unk",
    "seperator": "sep",
    "padding": "pad",
    "cls": "cls",
    "mask": "mask",
}
_ENDS = ("eos", "eot", "eom")
# Control tokens that end a turn in all models that have them, for files that do not say so.
_KNOWN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>")
_BERT_ENDS = (("cls", "[CLS]"), ("seperator", "[SEP]"))
_LONGEST_WORD = 100  # characters, of WordPiece
_LONGEST_TOKEN = 512  # characters, of SentencePiece: each place of it may be that of a merge
Json = dict[str, Any]


class Vocabulary:
    """The tokens of a file. Raises CheckpointError for one without tokens."""

    def __init__(self, model: GgufModel) -> None:
        self.model = model
        self.tokens: list[str] = model.need("tokenizer.ggml.tokens", list)
        count = len(self.tokens)
        if not count or not isinstance(self.tokens[0], str):
            raise CheckpointError(f"{model.file}: 'tokenizer.ggml.tokens' is not a list of texts.")
        self.kinds = self._each("token_type", int) or [NORMAL] * count
        self.scores = self._each("scores", float) or [0.0] * count
        self.ids = dict(zip(self.tokens, range(count), strict=True))
        if len(self.ids) < count:  # of tokens that are there twice, the first
            for index in range(count - 1, -1, -1):
                self.ids[self.tokens[index]] = index

    def _each(self, name: str, kind: type) -> list[Any]:
        values: list[Any] = self.model.get(f"tokenizer.ggml.{name}", list, [])
        if values and (len(values) != len(self.tokens) or not isinstance(values[0], kind)):
            raise CheckpointError(f"{self.model.file}: 'tokenizer.ggml.{name}' does not have a value for each token.")
        return values

    def role(self, name: str) -> int | None:
        """Return the id of the token with a role, such as bos."""
        keys = [f"tokenizer.ggml.{name}_token_id"]
        if name == "seperator":
            keys.append("tokenizer.ggml.separator_token_id")
        found = next((value for key in keys if (value := self.model.get(key, int)) is not None), None)
        return found if found is not None and 0 <= found < len(self.tokens) else None

    def flag(self, name: str, default: bool) -> bool:
        found: bool = self.model.get(f"tokenizer.ggml.{name}", bool, default)
        return found

    def of(self, *kinds: int) -> Iterable[tuple[int, str]]:
        return ((index, token) for index, token in enumerate(self.tokens) if self.kinds[index] in kinds)

    def ends(self) -> list[int]:
        """Return the ids that end a text or a turn."""
        stated = [self.role(name) for name in _ENDS]
        known = [
            self.ids[token]
            for token in _KNOWN_ENDS
            if self.kinds[self.ids.get(token, 0)] == CONTROL and token in self.ids
        ]
        return list(dict.fromkeys(id for id in (*stated, *known) if id is not None))


def read_tokenizer(vocabulary: Vocabulary) -> tuple[Json, Json]:
    """Return ``tokenizer.json`` and ``tokenizer_config.json``. Raises CheckpointError for an unknown kind."""
    model = vocabulary.model
    kind = model.need("tokenizer.ggml.model", str)
    if kind not in _KINDS:
        raise CheckpointError(
            f"{model.file}: tokenizers of the kind {kind!r} are not read from GGUF files.",
            "Name a folder that has the tokenizer with --tokenizer.",
        )
    made = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(index, token, vocabulary) for index, token in vocabulary.of(UNKNOWN, CONTROL, USER)],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        **_KINDS[kind](vocabulary),
    }
    return made, _settings(vocabulary, kind)


def _added(index: int, token: str, vocabulary: Vocabulary) -> Json:
    special = vocabulary.kinds[index] != USER
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, **flags, "special": special}


def _settings(vocabulary: Vocabulary, kind: str) -> Json:
    model = vocabulary.model
    found: Json = {"clean_up_tokenization_spaces": False}
    for name, role in _ROLES.items():
        index = vocabulary.role(name)
        if index is not None:
            found[f"{role}_token"] = vocabulary.tokens[index]
    found["add_bos_token"] = vocabulary.flag("add_bos_token", kind == "llama" or _splits(model) in WHOLE_WORDS)
    found["add_eos_token"] = vocabulary.flag("add_eos_token", kind == "t5")
    templates = _templates(model)
    if templates:
        found["chat_template"] = templates
    return found


def _templates(model: GgufModel) -> str | list[Json] | None:
    default: str | None = model.get("tokenizer.chat_template", str)
    names = [name for name in model.get("tokenizer.chat_templates", list, []) if isinstance(name, str)]
    if not names:
        return default
    texts = {"default": default, **{name: model.get(f"tokenizer.chat_template.{name}", str) for name in names}}
    return [{"name": name, "template": text} for name, text in texts.items() if text]


# ------------------------------------------------------------------------------------------------ BPE


def _splits(model: GgufModel) -> str:
    found: str = model.get("tokenizer.ggml.pre", str, "default")
    return found


def _bpe(vocabulary: Vocabulary) -> Json:
    """Byte-level BPE."""
    model, name = vocabulary.model, _splits(vocabulary.model)
    if name not in SPLITS:
        raise CheckpointError(
            f"{model.file}: the pre-tokenizer {name!r} is not known.{nearest(name, SPLITS)}",
            "Name a folder that has the tokenizer with --tokenizer.",
        )
    merges = []
    for merge in model.need("tokenizer.ggml.merges", list):
        left, _, right = merge[1:].partition(" ") if isinstance(merge, str) else ("", "", "")
        if not right:
            raise CheckpointError(f"{model.file}: 'tokenizer.ggml.merges' has {merge!r}, which is not two parts.")
        merges.append((merge[0] + left, right))
    cuts: list[Json] = [_cut(expression) for expression in SPLITS[name]]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if name == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, level]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _merging(vocabulary.ids, merges, ignore_merges=name in WHOLE_WORDS),
    }


def _cut(expression: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def _merging(ids: Mapping[str, int], merges: Sequence[Sequence[str]], **changes: Any) -> Json:
    unset = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    flags = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    return {"type": "BPE", **unset, **flags, **changes, "vocab": ids, "merges": merges}


# ------------------------------------------------------------------------------------------------ SentencePiece


def _spm(vocabulary: Vocabulary) -> Json:
    """Describe SentencePiece's BPE, whose merges are the pairs of tokens that make a token, the best score first."""
    prefix = vocabulary.flag("add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps = [{"type": "Prepend", "prepend": SPACE}, spaces] if prefix else [spaces]
    back: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((token for _, token in vocabulary.of(UNKNOWN)), None)
    has_bytes = any(True for _ in vocabulary.of(BYTE))
    merging = _merging(
        vocabulary.ids, _scored_merges(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes
    )
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*_cleaning(vocabulary), *steps]},
        "decoder": {"type": "Sequence", "decoders": back},
        "model": merging,
    }


def _scored_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    normal = {token: index for index, token in vocabulary.of(NORMAL)}
    found = []
    for token, index in normal.items():
        if len(token) > _LONGEST_TOKEN:
            raise CheckpointError(f"{vocabulary.model.file}: a token has {len(token)} characters.")
        for at in range(1, len(token)):
            left, right = normal.get(token[:at]), normal.get(token[at:])
            if left is not None and right is not None:
                found.append((-vocabulary.scores[index], index, left, right))
    found.sort()
    tokens = vocabulary.tokens
    return [(tokens[left], tokens[right]) for _, _, left, right in found]


def _unigram(vocabulary: Vocabulary) -> Json:
    """Describe SentencePiece's unigram model, with the normalization that the file has."""
    unknown = vocabulary.role("unknown")
    prefix = vocabulary.flag("add_space_prefix", True)
    space = {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": "always" if prefix else "never",
        "split": True,
    }
    steps = _cleaning(vocabulary)
    scored = [[token, score] for token, score in zip(vocabulary.tokens, vocabulary.scores, strict=True)]
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps} if steps else None,
        "pre_tokenizer": space,
        "decoder": space,
        "model": {"type": "Unigram", "unk_id": unknown, "vocab": scored, "byte_fallback": False},
    }


def _cleaning(vocabulary: Vocabulary) -> list[Json]:
    """Return the normalization steps of a text before its spaces are marked."""
    steps: list[Json] = []
    mapping = vocabulary.model.get("tokenizer.ggml.precompiled_charsmap", list)
    if mapping:
        data = bytes(value & 255 for value in mapping if isinstance(value, int))
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()})
    if vocabulary.flag("remove_extra_whitespaces", False):
        steps += [
            {"type": "Strip", "strip_left": True, "strip_right": True},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        ]
    return steps


# ------------------------------------------------------------------------------------------------ WordPiece


def _word_piece(vocabulary: Vocabulary) -> Json:
    """Describe BERT's WordPiece.

    A file marks the first piece of each word, where the model's own vocabulary marks all others.
    """
    special = {index for index, _ in vocabulary.of(UNKNOWN, CONTROL, USER)}
    ids: dict[str, int] = {}
    for index, token in enumerate(vocabulary.tokens):
        own = token if index in special else token[1:] if token.startswith(SPACE) else f"##{token}"
        ids.setdefault(own, index)
    unknown = vocabulary.role("unknown")
    lower = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
    return {
        "normalizer": {"type": "BertNormalizer", **lower},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _bert_ends(vocabulary),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]" if unknown is None else vocabulary.tokens[unknown],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": _LONGEST_WORD,
            "vocab": ids,
        },
    }


def _bert_ends(vocabulary: Vocabulary) -> Json | None:
    ends = []
    for role, usual in _BERT_ENDS:
        index = vocabulary.role(role)
        index = vocabulary.ids.get(usual) if index is None else index
        if index is None:
            return None
        ends.append([vocabulary.tokens[index], index])
    return {"type": "BertProcessing", "sep": ends[1], "cls": ends[0]}


_KINDS: Mapping[str, Callable[[Vocabulary], Json]] = {
    "gpt2": _bpe,
    "llama": _spm,
    "t5": _unigram,
    "bert": _word_piece,
}

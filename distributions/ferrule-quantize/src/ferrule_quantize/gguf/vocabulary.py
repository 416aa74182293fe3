"""The description of a tokenizer in a GGUF file, made from a ``tokenizer.json``: the reverse of
`ferrule_files.gguf.tokens`.

The result is read back, and must give the same ids: the name of a way to cut texts says little about other steps.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ferrule.checkpoint import eos_ids, read
from ferrule.errors import CheckpointError
from ferrule.interfaces.tokenizer import Tokenizer, TokenizerSource
from ferrule.small_files import read_json
from ferrule_files.gguf.reader import GgufModel
from ferrule_files.gguf.splits import GPT2, SPLITS, WHOLE_WORDS
from ferrule_files.gguf.tokens import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, USER, Vocabulary, read_tokenizer

_UNUSED = 5
_FILE = "tokenizer.json"
_BYTES = frozenset(f"<0x{value:02X}>" for value in range(256))
_UNMERGED = -1e6  # the score of a token that no merge makes
_ROLES = {
    "bos_token": "bos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "cls_token": "cls",
    "sep_token": "seperator",
    "mask_token": "mask",
}
_CONTINUED = "##"
_LEFT_OUT = "--skip-tokenizer leaves it out of the file."
_SAMPLES = (
    "The quick brown fox can't jump over 1234567 lazy dogs!?  (It is 3.14 m high.)",
    "  def f(x):\n\treturn x[0] + 'a'  # WE'LL see\r\n\n\n   end ",
    "Größe, nai\u0308ve, Ελλάδα, Русский, 日本語テキスト, 한국어, العربية 😀\u200d.",
    "",
)
Json = Mapping[str, Any]


def describe(folder: Path, size: int, tokenizers: TokenizerSource) -> dict[str, Any]:
    """Return the metadata of the folder's tokenizer and of its chat template; `size` is how many rows the embedding
    has, and `tokenizers` opens tokenizers.

    Raises CheckpointError for a tokenizer that a file cannot state, or that is not one of the tokenizers library.
    """
    file = folder / _FILE
    if not file.is_file():
        raise CheckpointError(f"{folder} has no {_FILE}, by which a tokenizer is written to GGUF files.", _LEFT_OUT)
    content, tokenizer = read_json(file), tokenizers.open(folder, {})
    model = content.get("model")
    model = model if isinstance(model, dict) else {}
    kind = str(model.get("type"))
    if kind not in _KINDS or not isinstance(model.get("vocab"), (dict, list)):
        raise CheckpointError(f"{file}: tokenizers of the kind {kind!r} are not written to GGUF files.", _LEFT_OUT)
    found = {**_tokens(file, content, size), **_ends(folder, tokenizer)}
    found |= _KINDS[kind](file, content, found)
    if isinstance(tokenizer.chat_template, Mapping):
        raise CheckpointError(f"{folder} has several chat templates, which are not written to GGUF files.")
    metadata = {f"tokenizer.ggml.{key}": value for key, value in found.items()}
    if tokenizer.chat_template:
        metadata["tokenizer.chat_template"] = tokenizer.chat_template
    _compare(file, tokenizer, metadata, tokenizers)
    return metadata


def _tokens(file: Path, content: Json, size: int) -> dict[str, Any]:
    """Return tokens and their types, in the order of ids.

    Raises CheckpointError for ids that the embedding does not have.
    """
    tokens = [f"[PAD{index}]" for index in range(size)]
    kinds = [_UNUSED] * size
    added = {entry["content"]: entry for entry in content.get("added_tokens") or ()}
    vocabulary = _vocabulary(content)
    unknown = content["model"].get("unk_token")
    if isinstance(content["model"]["vocab"], list):
        unknown = next((token for token, index in vocabulary.items() if index == content["model"].get("unk_id")), None)
    numbers = {**vocabulary, **{text: entry["id"] for text, entry in added.items()}}
    for token, index in numbers.items():
        if not isinstance(index, int) or not 0 <= index < size:
            raise CheckpointError(
                f"{file}: the token {token!r:.80} has the id {index!r}, of {size} that the model has."
            )
        tokens[index] = token
        special = CONTROL if token in added and added[token].get("special") else USER if token in added else NORMAL
        fallback = content["model"].get("byte_fallback") and token in _BYTES
        kinds[index] = UNKNOWN if token == unknown else BYTE if fallback else special
    return {"tokens": tokens, "token_type": kinds}


def _vocabulary(content: Json) -> Mapping[str, int]:
    """Return tokens and their ids; a unigram model lists its tokens in order, with scores."""
    stated = content["model"]["vocab"]
    return stated if isinstance(stated, dict) else {entry[0]: index for index, entry in enumerate(stated)}


def _ends(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the ids of tokens with roles, and which of these are put around each text.

    Raises CheckpointError where further tokens are put around texts.
    """
    roles = {role: getattr(tokenizer, "special_tokens", {}).get(name) for name, role in _ROLES.items()}
    found: dict[str, Any] = {
        f"{role}_token_id": tokenizer.encode(token, add_special_tokens=False)[0]
        for role, token in roles.items()
        if token
    }
    ends = eos_ids(read(folder), folder)
    ends = tuple(dict.fromkeys((*(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)), *ends)))
    found |= {f"{role}_token_id": index for role, index in zip(("eos", "eot", "eom"), ends, strict=False)}
    around = tokenizer.encode("")
    found["add_bos_token"] = bool(around) and around[0] == found.get("bos_token_id")
    found["add_eos_token"] = bool(around) and around[-1] == found.get("eos_token_id")
    return found


def _merges(content: Json) -> list[Sequence[str]]:
    merges = content["model"].get("merges") or ()
    return [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges]


def _bpe(file: Path, content: Json, found: Mapping[str, Any]) -> dict[str, Any]:
    """Describe byte-level BPE, or SentencePiece's. Raises CheckpointError where texts are cut in an unnamed way."""
    if content["model"].get("byte_fallback"):
        return _spm(content, found)
    cuts, composed = _cuts(content.get("pre_tokenizer")), (content.get("normalizer") or {}).get("type") == "NFC"
    whole = bool(content["model"].get("ignore_merges"))
    for name, known in SPLITS.items():
        if known == cuts and (name in WHOLE_WORDS) == whole and (name == "qwen2") == composed:
            return {"model": "gpt2", "pre": name, "merges": [" ".join(merge) for merge in _merges(content)]}
    why = "GGUF files have no name that is known here for how this tokenizer cuts texts."
    raise CheckpointError(f"{file}: {why}", _LEFT_OUT)


def _cuts(stated: Any) -> tuple[str, ...] | None:
    """Return the expressions by which texts are cut, one after the other; None where other steps cut them, too."""
    found: list[str] = []
    for step in _steps(stated, "pretokenizers"):
        match step:
            case {"type": "Split", "pattern": {"Regex": str(expression)}, "behavior": "Isolated", "invert": False}:
                found.append(expression)
            case {"type": "Digits", "individual_digits": True}:
                found.append(r"\p{N}")
            case {"type": "ByteLevel", "add_prefix_space": False}:
                found += [GPT2] if step.get("use_regex", True) else []
            case _:
                return None
    return tuple(found)


def _steps(stated: Any, several: str) -> Sequence[Any]:
    return stated.get(several, [stated]) if isinstance(stated, dict) else ()


def _spm(content: Json, found: Mapping[str, Any]) -> dict[str, Any]:
    """Describe SentencePiece's BPE: the earlier the merge that makes a token, the better its score."""
    scores: dict[str, float] = {}
    for rank, (left, right) in enumerate(_merges(content)):
        scores.setdefault(left + right, -float(rank))
    every = [scores.get(token, _UNMERGED) for token in found["tokens"]]
    return {"model": "llama", "pre": "default", "scores": every, "add_space_prefix": _prefix(content)}


def _prefix(content: Json) -> bool:
    """Return whether a space is put before each text."""
    steps = [*_steps(content.get("normalizer"), "normalizers"), *_steps(content.get("pre_tokenizer"), "pretokenizers")]
    return any(step.get("type") == "Prepend" or step.get("prepend_scheme", "never") != "never" for step in steps)


def _unigram(file: Path, content: Json, found: Mapping[str, Any]) -> dict[str, Any]:
    """Describe SentencePiece's unigram model and the steps before it. `_compare` finds steps that are left out."""
    unknown = content["model"].get("unk_id")
    if not isinstance(unknown, int):
        raise CheckpointError(f"{file}: a unigram model without an unknown token is not written.", _LEFT_OUT)
    scores = {entry[0]: float(entry[1]) for entry in content["model"]["vocab"]}
    made = {
        "model": "t5",
        "pre": "default",
        "unknown_token_id": unknown,
        "scores": [scores.get(token, 0.0) for token in found["tokens"]],
        "add_space_prefix": _prefix(content),
    }
    for step in _steps(content.get("normalizer"), "normalizers"):
        match step:
            case {"type": "Precompiled", "precompiled_charsmap": str(charsmap)}:
                made["precompiled_charsmap"] = list(base64.b64decode(charsmap))
            case {"type": "Replace", "pattern": {"Regex": str(expression)}} if "{2,}" in expression:
                made["remove_extra_whitespaces"] = True
    return made


def _word_piece(file: Path, content: Json, found: Mapping[str, Any]) -> dict[str, Any]:
    """Describe BERT's WordPiece.

    A file marks the first piece of each word, where the model's own vocabulary marks all others.
    """
    tokens = [
        token
        if kind != NORMAL
        else token.removeprefix(_CONTINUED)
        if token.startswith(_CONTINUED)
        else f"{SPACE}{token}"
        for token, kind in zip(found["tokens"], found["token_type"], strict=True)
    ]
    return {"model": "bert", "tokens": tokens}


_KINDS: Mapping[str, Callable[[Path, Json, Mapping[str, Any]], dict[str, Any]]] = {
    "BPE": _bpe,
    "Unigram": _unigram,
    "WordPiece": _word_piece,
}


def _compare(file: Path, tokenizer: Tokenizer, metadata: Mapping[str, Any], tokenizers: TokenizerSource) -> None:
    """Raise CheckpointError where readers of the file would make other ids of a text."""
    content, settings = read_tokenizer(Vocabulary(GgufModel((file,), metadata, {})))
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / _FILE).write_bytes(msgspec.json.encode(content))
        (Path(place) / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))
        read_back = tokenizers.open(Path(place), {})
    specials = [tokenizer.decode([index], skip_special_tokens=False) for index in sorted(tokenizer.all_special_ids)[:8]]
    for text in (*_SAMPLES, "a" + " b".join(specials)):
        for special in (False, True):
            if read_back.encode(text, add_special_tokens=special) != tokenizer.encode(text, add_special_tokens=special):
                raise CheckpointError(
                    f"{file}: readers of a GGUF file would make other tokens of {text!r:.60}.", _LEFT_OUT
                )

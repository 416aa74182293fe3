"""`mistral`: tokenizers in Mistral's own form, ``tekken.json`` or ``tokenizer.model.vN``, by mistral-common.

It writes conversations too, in Mistral's instruct format and without a chat template: text in a message that looks like
a control token stays text. https://github.com/mistralai/mistral-common
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ferrule.errors import CheckpointError, RequestError
from ferrule.frontend.text.detokenize import decode
from ferrule.interfaces.tokenizer import ChatTokenizer, Tokenizer, TokenizerSource
from ferrule_plugins.tokenizer.files import panics_as_errors
from ferrule_plugins.tokenizer.token_bytes import TokenBytes, make_token_bytes

TEKKEN = "tekken.json"
_SENTENCEPIECE = re.compile(r"^tokenizer\.(?:mm\.)?model\.v(\d+)(?:m\d+)?$")
_MAX_BYTES = 256 << 20
_MOST_SPECIAL = 1 << 16  # the library makes a name for each; published ones have 1,000
_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_CALL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_WORDS = {  # how the pieces of a sentencepiece model become text
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


class _Config(msgspec.Struct):
    default_vocab_size: int
    default_num_special_tokens: int


class _Tekken(msgspec.Struct):
    """The fields of a ``tekken.json`` that are checked before the library reads it."""

    config: _Config


def find_file(folder: Path) -> Path | None:
    """Return the tokenizer of Mistral's form in a folder: tekken before sentencepiece, the highest version first."""
    if (folder / TEKKEN).is_file():
        return folder / TEKKEN
    versions = [
        (int(found[1]), file) for file in folder.glob("tokenizer*") if (found := _SENTENCEPIECE.search(file.name))
    ]
    return max(versions)[1] if versions else None


class MistralTokenizer(ChatTokenizer):
    """A tokenizer of mistral-common. `outer` is the library's `MistralTokenizer`, whose parts keep no state between
    calls.
    """

    def __init__(self, outer: Any) -> None:
        inner = outer.instruct_tokenizer.tokenizer
        self._outer, self._inner = outer, inner
        self._bytes = _tekken_bytes(inner) if hasattr(inner, "id_to_byte_piece") else _sentencepiece_bytes(inner)
        self._known: dict[tuple[int, bool], bytes] = {}  # at most two per vocabulary entry
        self._special = {str(inner.id_to_piece(token)): int(token) for token in sorted(inner.special_ids)}
        self._split = re.compile("(" + "|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) + ")")
        self.vocab_size = int(inner.n_words)
        self.bos_token_id, self.eos_token_id = int(inner.bos_id), int(inner.eos_id)
        self.all_special_ids = frozenset(self._special.values())
        self.special_tokens = {role: text for role, text in _ROLES.items() if text in self._special}
        self.chat_template = None
        self._thinks = "[THINK]" in self._special
        settings = {"reasoning_effort"} if inner.version.supports_model_settings else set()
        self.reads = frozenset({"tools"} | settings)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        for part in self._split.split(text):
            special = self._special.get(part)
            if special is not None:
                ids.append(special)
            elif part:
                with panics_as_errors():
                    ids += self._inner.encode(part, bos=False, eos=False)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return decode(self, ids, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        return str(self._inner.id_to_piece(token_id)) if 0 <= token_id < self.vocab_size else None

    def piece(self, token_id: int, first: bool) -> bytes | None:
        key = (token_id, first)
        known = self._known.get(key)
        if known is not None:
            return known
        if not 0 <= token_id < self.vocab_size:
            return b""
        made: bytes = self._bytes(token_id, first)
        self._known[key] = made
        return made

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, continued: bool
    ) -> list[int]:
        from mistral_common.exceptions import MistralCommonException
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        said = [_message(message, self._thinks) for message in messages]
        tools = [_tool(tool) for tool in variables.get("tools") or ()]
        others = {name: value for name, value in variables.items() if name != "tools"}
        try:
            request = ChatCompletionRequest.from_openai(said, tools or None, continued, **others)
            ids: list[int] = list(self._outer.encode_chat_completion(request).tokens)
        except (MistralCommonException, ValueError, TypeError, AssertionError) as error:
            cause = " ".join(str(getattr(error, "message", error)).split())
            raise RequestError(f"Mistral's format does not have this conversation: {cause:.500}", "messages") from None
        if continued and ids and ids[-1] == self.eos_token_id:  # some versions end a message that is to go on
            ids.pop()
        return ids


def _tekken_bytes(inner: Any) -> Any:
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

    keep = SpecialTokenPolicy.KEEP
    return lambda token_id, first: bytes(inner.id_to_byte_piece(token_id, keep))


def _sentencepiece_bytes(inner: Any) -> Any:
    words: TokenBytes | None = make_token_bytes(_WORDS)
    return lambda token_id, first: words(inner.id_to_piece(token_id), first) if words else b""


def _message(message: Mapping[str, Any], thinks: bool) -> dict[str, Any]:
    """Return the fields that mistral-common knows of a message, with ids of calls in the only form that it accepts."""
    role = message["role"]
    known: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": message["content"]}
    if role == "assistant" and message.get("tool_calls"):
        known["tool_calls"] = [
            {"id": _call_id(call.get("id")), "type": "function", "function": _called(call["function"])}
            for call in message["tool_calls"]
        ]
        known["content"] = known["content"] or None
    if role == "assistant" and thinks and message.get("reasoning_content"):
        known["reasoning_content"] = message["reasoning_content"]
    if role == "tool":
        known["tool_call_id"] = _call_id(message.get("tool_call_id"))
        if message.get("name"):
            known["name"] = message["name"]
    return known


def _called(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "arguments": function["arguments"]}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {key: value for key, value in tool["function"].items() if value is not None and key != "strict"}
    return {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, **function}}


def _call_id(given: Any) -> str:
    """Return an id of nine letters and digits, as the format has them: the same for the same id of another form."""
    text = str(given or "")
    return text if _CALL_ID.fullmatch(text) else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:9]


class MistralTokenizers(TokenizerSource):
    """Tokenizers of Mistral's own files. Options: none."""

    conformance = "ferrule_testkit.samples.tokenizer:MISTRAL"

    def open(self, folder: Path, options: dict[str, Any]) -> Tokenizer:
        file = find_file(folder) or folder / "tokenizer.model"
        if not file.is_file():
            raise CheckpointError(
                f"{folder} has no tokenizer in Mistral's form: no {TEKKEN} and no tokenizer.model.vN.",
                "--tokenizer-mode auto opens those of other forms.",
            )
        if file.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{file} is larger than {_MAX_BYTES} bytes.")
        try:
            from mistral_common.protocol.instruct.validator import ValidationMode
            from mistral_common.tokens.tokenizers.mistral import MistralTokenizer as Outer

            if file.name == TEKKEN:
                _check_sizes(file)
            with panics_as_errors():
                return MistralTokenizer(Outer.from_file(file, ValidationMode.test))
        except ImportError as error:
            raise CheckpointError(
                f"{file} is a tokenizer in Mistral's own form, and what reads it is not installed: {error}.",
                "Install it: pip install 'ferrule[mistral]'",
            ) from None
        except CheckpointError:
            raise
        except Exception as error:  # the library has no common class for a file that it cannot use
            cause = " ".join(str(error).split()) or type(error).__name__
            raise CheckpointError(f"{file} is not a tokenizer that can be used: {cause:.200}.") from None


def _check_sizes(file: Path) -> None:
    """Raise ValueError for numbers of tokens that take all memory, or leave a byte without one: the library panics."""
    config = msgspec.json.decode(file.read_bytes(), type=_Tekken).config
    special, others = config.default_num_special_tokens, config.default_vocab_size - config.default_num_special_tokens
    if not 0 <= special <= _MOST_SPECIAL or others < 256:
        raise ValueError(f"it has {others} tokens and {special} special ones")

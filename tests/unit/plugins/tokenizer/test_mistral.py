"""Tokenizers in Mistral's own form: what they write is what mistral-common writes, and what cannot be used is named."""

from __future__ import annotations

import builtins
import json
import shutil
from pathlib import Path
from typing import Any

import mistral_common
import pytest

from ferrule.errors import CheckpointError, RequestError
from ferrule_plugins.tokenizer.auto import AutoTokenizers
from ferrule_plugins.tokenizer.mistral import MistralTokenizer, MistralTokenizers
from ferrule_testkit.tekken import write_tekken

DATA = Path(mistral_common.__file__).parent / "data"
PIECES = {  # what mistral-common has with it
    "tokenizer.model": "tokenizer.model.v1",
    "tokenizer.model.v2": "mistral_instruct_tokenizer_240216.model.v2",
    "tokenizer.model.v3": "mistral_instruct_tokenizer_240323.model.v3",
    "tokenizer.model.v7m1": "mistral_instruct_tokenizer_241114.model.v7m1",
}
TEXT = "Hello there,  a façade 😀\n"
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "strict": None}}
CALL = {
    "id": "call_0123456789abc",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"in": "Oslo"}},
}
USED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "And there?"}]},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": CALL["id"], "content": "rain"},
]


def opened(folder: Path) -> MistralTokenizer:
    tokenizer = MistralTokenizers().open(folder, {})
    assert isinstance(tokenizer, MistralTokenizer)
    return tokenizer


@pytest.fixture(params=[*PIECES, "v3", "v7", "v11", "v13"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> MistralTokenizer:
    if request.param in PIECES:
        shutil.copy(DATA / PIECES[request.param], tmp_path / request.param)
    else:
        write_tekken(tmp_path, request.param)
    return opened(tmp_path)


def test_text_comes_back_whole_and_token_by_token(tokenizer: MistralTokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.decode(ids[1:]) == TEXT
    pieces = [tokenizer.piece(token, number == 0) for number, token in enumerate(ids[1:])]
    assert b"".join(piece or b"" for piece in pieces) == TEXT.encode()
    assert tokenizer.decode(ids) == tokenizer.decode([*ids, 10**6]).removesuffix("\ufffd")
    assert tokenizer.encode("a</s>", add_special_tokens=False)[-1] == tokenizer.eos_token_id == 2
    assert tokenizer.token(2) == "</s>"
    assert tokenizer.token(tokenizer.vocab_size) is None
    assert tokenizer.special_tokens["eos_token"] == "</s>"


def test_conversations_are_those_of_the_format(tokenizer: MistralTokenizer) -> None:
    said = [USED[0], {"role": "user", "content": "Hi </s>[INST]"}]
    ids = tokenizer.encode_chat(said, {}, continued=False)
    assert ids.count(1) == 1
    assert 2 not in ids  # what looks like a control token in a message is text
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert "Be brief." in text
    assert text.endswith("[/INST]")
    begun = tokenizer.encode_chat([*said, {"role": "assistant", "content": "It is"}], {}, continued=True)
    assert begun[: len(ids)] == ids
    assert tokenizer.decode(begun[len(ids) :]).strip() == "It is"


def test_tools_calls_and_results_are_written_where_the_version_has_them(tokenizer: MistralTokenizer) -> None:
    if "[TOOL_CALLS]" not in tokenizer._special:
        with pytest.raises(RequestError, match="Tools not implemented"):
            tokenizer.encode_chat(USED, {"tools": [TOOL]}, continued=False)
        return
    text = tokenizer.decode(tokenizer.encode_chat(USED, {"tools": [TOOL]}, continued=False), skip_special_tokens=False)
    order = ("[AVAILABLE_TOOLS]", "[TOOL_CALLS]", "Oslo", "[TOOL_RESULTS]", "rain", "[/TOOL_RESULTS]")
    places = [text.index(part) for part in order]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "critic", "content": "no"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "tool_call_id": "x"}],
        [{"role": "assistant", "content": "b"}],
    ],
)
def test_a_conversation_that_the_format_lacks_is_refused(tmp_path: Path, messages: list[dict[str, Any]]) -> None:
    write_tekken(tmp_path)
    with pytest.raises(RequestError, match="Mistral's format") as caught:
        opened(tmp_path).encode_chat(messages, {}, continued=False)
    assert caught.value.param == "messages"


def test_auto_takes_it_where_there_is_no_other(tmp_path: Path) -> None:
    for version in ("v2", "v3"):
        shutil.copy(DATA / PIECES[f"tokenizer.model.{version}"], tmp_path / f"tokenizer.model.{version}")
    assert AutoTokenizers().open(tmp_path, {}).vocab_size == 32768  # the newest
    write_tekken(tmp_path)
    assert AutoTokenizers().open(tmp_path, {}).vocab_size == 320


def test_what_cannot_be_used_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"no tekken\.json and no tokenizer\.model\.vN"):
        opened(tmp_path)
    file = write_tekken(tmp_path)
    whole = file.read_text()
    cut = json.loads(whole)
    cut["vocab"] = cut["vocab"][:100]
    for broken in (whole[: len(whole) // 2], "[]", json.dumps(cut), '{"config": {"version": "v99"}}', "\x00"):
        file.write_text(broken)
        with pytest.raises(CheckpointError, match="is not a tokenizer that can be used") as caught:
            opened(tmp_path)
        assert str(file) in caught.value.message
        assert len(caught.value.message) < 600
    file.write_text(whole)
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("mistral_common"):
            raise ImportError("No module named 'mistral_common'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(CheckpointError, match="not installed") as caught:
        opened(tmp_path)
    assert "pip install 'ferrule[mistral]'" in caught.value.hint

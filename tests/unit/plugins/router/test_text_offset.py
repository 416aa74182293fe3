"""`text_offset` of completions: where each token begins in the very text of the answer, however characters are cut."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ferrule.interfaces.tokenizer import Tokenizer, TokenizerSource
from ferrule.types import EngineRequest, RequestDelta
from ferrule_testkit.tokenizers import ByteTokenizer
from tests.fakes.engine import FakeEngine, Script, tokens
from tests.fakes.frontend import FakePlugins, model_folder, serving
from tests.fakes.http import Site, chunks

ALPHABET = "ab \n<>éß中文🙂🏳️‍🌈\u200d\u0301\ufffd"
BOS = 0
LOST = "\ufffd"  # which a text may have, too


class Cuts(ByteTokenizer):
    """A tokenizer whose tokens are any bytes: a text is cut anywhere, which `random` decides. Id 0 is ``<s>``, put in
    front of texts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pieces = [b"<s>", b"", b"", b""]  # the folder's ends of sequences
        self.vocab_size, self.bos_token_id, self.eos_token_id = 2048, BOS, None
        self.all_special_ids = frozenset({BOS})
        self.random = random.Random(1)

    def cut(self, data: bytes, longest: int = 5) -> list[int]:
        """Cut bytes into pieces, each of which is a new id."""
        ids = []
        while data:
            size = self.random.randint(1, longest)
            self.pieces.append(data[:size])
            ids.append(len(self.pieces) - 1)
            data = data[size:]
        return ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        first, *rest = text.split("<s>")
        ids = [BOS] * add_special_tokens + self.cut(first.encode())
        return ids + [id for part in rest for id in (BOS, *self.cut(part.encode()))]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        shown = (token for token in ids if not (skip_special_tokens and token in self.all_special_ids))
        return b"".join(self.pieces[token] for token in shown).decode("utf-8", "replace")

    def token(self, token_id: int) -> str:
        return self.pieces[token_id].decode("utf-8", "replace")

    def piece(self, token_id: int, first: bool) -> Any:
        return self.pieces[token_id]


class InWindows(Cuts):
    """A tokenizer that says nothing of the bytes of its tokens."""

    def piece(self, token_id: int, first: bool) -> Any:
        return None


class Source(TokenizerSource):
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __call__(self) -> Source:
        return self

    def open(self, folder: Path, options: dict[str, Any]) -> Tokenizer:
        return self.tokenizer


def together(ids: Sequence[int], cuts: random.Random) -> Script:
    """Return a script with deltas of one to four tokens."""

    def script(request: EngineRequest) -> Iterator[RequestDelta]:
        single = list(tokens(request, ids))
        while single:
            size = cuts.randint(1, 4)
            now, single = single[:size], single[size:]
            yield replace(
                now[-1],
                token_ids=tuple(token for one in now for token in one.token_ids),
                logprobs=tuple(entry for one in now for entry in one.logprobs),
                prompt_logprobs=now[0].prompt_logprobs,
            )

    return script


def check(choice: dict[str, Any], pieces: list[bytes]) -> None:
    """Check that offsets never fall, stay within the text, and are where the text has the tokens that are whole."""
    offsets, text = choice["logprobs"]["text_offset"], choice["text"]
    assert len(offsets) == len(pieces)
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)
    for offset, piece in zip(offsets, pieces, strict=True):
        try:
            whole = piece.decode()
        except UnicodeDecodeError:
            continue
        assert text[offset : offset + len(whole)] == whole, (offset, whole, text)


async def both(site: Site, **body: Any) -> dict[str, Any]:
    """Return the whole choice, which a stream adds up to."""
    whole = (await site.complete(**body, return_token_ids=True)).json()["choices"][0]
    parts = [part["choices"][0] for part in chunks(await site.complete(**body, return_token_ids=True, stream=True))]
    assert "".join(part["text"] for part in parts) == whole["text"]
    told = [part["logprobs"] for part in parts if part["logprobs"]]
    assert [offset for one in told for offset in one["text_offset"]] == whole["logprobs"]["text_offset"]
    return dict(whole)


def _bytes(random: random.Random, broken: bool) -> bytes:
    data = "".join(random.choices(ALPHABET, k=random.randint(1, 12))).encode()
    if broken:
        for _ in range(3):
            place = random.randrange(len(data) + 1)
            data = data[:place] + random.choice((b"\xe4", b"\xf0\x9f", b"\xff", b"\x80")) + data[place:]
    return data


@pytest.mark.parametrize("kind", [Cuts, InWindows])
@pytest.mark.parametrize("broken", [False, True], ids=["valid", "invalid"])
@pytest.mark.parametrize("echo", [False, True], ids=["answer", "echo"])
async def test_every_cut(kind: type[Cuts], broken: bool, echo: bool, tmp_path: Path) -> None:
    """Begin a token within a character where the character begins."""
    tokenizer, draw, engine = kind(), random.Random(5), FakeEngine()
    plugins = FakePlugins(tokenizer={"auto": Source(tokenizer)})
    async with serving(model_folder(tmp_path), engine, plugins) as service:
        site = Site()
        site.service = service  # type: ignore[assignment]
        for _ in range(25):
            del tokenizer.pieces[4:]
            asked, said = _bytes(draw, broken), _bytes(draw, broken)
            prompt, answer = tokenizer.cut(asked), tokenizer.cut(said, draw.choice((1, 2, 6)))
            engine.script = together(answer, draw)
            choice = await both(site, prompt=prompt, echo=echo, logprobs=1, max_tokens=len(answer), model="m")
            ids = [*prompt, *answer] if echo else answer
            check(choice, [tokenizer.pieces[token] for token in ids])
            texts = [part.decode("utf-8", "replace") for part in ((asked, said) if echo else (said,))]
            if kind is Cuts or not broken:  # a window decodes the end of the prompt with the answer
                assert choice["text"] == "".join(texts)
            if not broken and (kind is Cuts or LOST not in "".join(texts)):  # windows cannot tell it from a part
                data = (asked if echo else b"") + said
                starts = accumulate((len(tokenizer.pieces[token]) for token in ids), initial=0)
                wanted = [len(data[:start].decode("utf-8", "ignore")) for start in starts]
                assert choice["logprobs"]["text_offset"] == wanted[:-1]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("keep", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("kind", [Cuts, InWindows])
async def test_an_echo_is_what_truncation_left(kind: type[Cuts], side: str, keep: int, tmp_path: Path) -> None:
    """Echo the rest of a text, without the token that the tokenizer puts in front of it."""
    tokenizer, engine = kind(), FakeEngine()
    text = "<s>Grüße 你好 🙂 <s>!" if keep in (3, 40) else "Grüße 你好 🙂!"  # spelled out, or not
    ids = tokenizer.encode(text)
    tokenizer.encode = lambda text, *, add_special_tokens=True: list(ids)  # type: ignore[method-assign]
    answer = tokenizer.cut(b"yes")
    engine.script = lambda request: tokens(request, answer)
    plugins = FakePlugins(tokenizer={"auto": Source(tokenizer)})
    async with serving(model_folder(tmp_path), engine, plugins) as service:
        site = Site()
        site.service = service  # type: ignore[assignment]
        asked = {"truncate_prompt_tokens": keep, "truncation_side": side, "return_prompt_text": True, "max_tokens": 1}
        choice = await both(site, prompt=text, echo=True, logprobs=0, model="m", **asked)
    left = ids[-keep:] if side == "left" else ids[:keep]
    assert choice["prompt_token_ids"] == left
    added = side == "right" or keep == 40
    pieces = [tokenizer.pieces[token] for token in left[added:]]
    assert choice["prompt_text"] == b"".join(pieces).decode("utf-8", "replace")
    assert choice["text"].startswith(choice["prompt_text"])
    if added:
        assert choice["logprobs"]["text_offset"].pop(0) == 0
    check(choice, [*pieces, tokenizer.pieces[choice["token_ids"][0]]])


async def test_a_token_that_ends_the_answer_stands_at_its_end(tmp_path: Path) -> None:
    """Place it after the replacement of a character that was not completed."""
    engine = FakeEngine()
    engine.script = lambda request: tokens(request, [*b"a\xe4", 257])
    async with serving(model_folder(tmp_path), engine) as service:
        site = Site()
        site.service = service  # type: ignore[assignment]
        choice = await both(site, prompt="x", logprobs=0, max_tokens=9, stop_token_ids=[257], model="m")
    assert choice["text"] == "a\ufffd"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]

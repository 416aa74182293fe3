"""The kit of tokenizers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ferrule.errors import CheckpointError
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule_testkit.kits.base import Kit, promise, shown

TEXTS = (
    "",
    "Hello.",
    "The fox's café 你好 🙂‍↕️\n\n  two spaces,\ttabs\r\n and an end ",
    "def f(x):\n    return x ** 2  # comment\n" * 20,
    "\u0301\u200b\ufeff\ufffd\U0010ffff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "\x00\x01\x7f",
)


def _byte_level(folder: Path) -> None:
    from ferrule_testkit.tokenizers import byte_level, write_tokenizer

    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    write_tokenizer(folder, byte_level(), **settings)


class TokenizerKit(Kit):
    """A tokenizer gives back the text that it was given, keeps its ids in range, and may be used by many threads.

    Settings: `write`, which puts the tokenizer's files into a folder (by default a ``tokenizer.json``); `texts`, which
    come back unchanged; `options` for `open`.
    """

    kind = "tokenizer"
    write: Sequence[Callable[[Path], None]] = (_byte_level,)
    texts: Sequence[str] = TEXTS
    options: Mapping[str, Any] = {}

    def open(self) -> Tokenizer:
        folder = self.folder()
        self.write[0](folder)
        tokenizer: Tokenizer = self.new().open(folder, dict(self.options))
        return tokenizer

    # ------------------------------------------------------------------------------------ promises

    def test_texts_come_back(self) -> None:
        """Decode the ids of a text to the text, to the last white space."""
        tokenizer = self.open()
        for text in self.texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            got = tokenizer.decode(ids, skip_special_tokens=False)
            promise(got == text, f"{shown(text)} comes back as {shown(got)}")

    def test_ids_are_in_range(self) -> None:
        """Encode to whole numbers of [0, vocab_size), each with an entry of the vocabulary."""
        tokenizer = self.open()
        for text in self.texts:
            for special in (True, False):
                for token in tokenizer.encode(text, add_special_tokens=special):
                    known = type(token) is int and 0 <= token < tokenizer.vocab_size
                    promise(known, f"{shown(text)} has the id {token!r}, vocab_size is {tokenizer.vocab_size}")
                    promise(isinstance(tokenizer.token(token), str), f"id {token} has no entry")

    def test_ids_out_of_range_are_ignored(self) -> None:
        """Leave out ids that do not exist in `decode`, and return None for them from `token`."""
        tokenizer = self.open()
        ids = tokenizer.encode("Hello.", add_special_tokens=False)
        for stray in (-1, tokenizer.vocab_size, 2**31, 2**63):
            promise(tokenizer.token(stray) is None, f"token({stray}) is {shown(tokenizer.token(stray))}")
            got = tokenizer.decode([stray, *ids, stray])
            promise(got == tokenizer.decode(ids), f"with the id {stray} the text is {shown(got)}")

    def test_special_tokens(self) -> None:
        """Keep special ids in range, recognise them where they are written, and show them only on demand."""
        tokenizer = self.open()
        roles = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
        for role, token_id in roles.items():
            promise(token_id is None or 0 <= token_id < tokenizer.vocab_size, f"{role} has the id {token_id}")
            name = tokenizer.special_tokens.get(role)
            promise(token_id is None or tokenizer.token(token_id) == name, f"{role} is {name!r}, id {token_id}")
        for token_id in sorted(tokenizer.all_special_ids):
            promise(0 <= token_id < tokenizer.vocab_size, f"the special id {token_id} is out of range")
            name = tokenizer.token(token_id) or ""
            ids = tokenizer.encode(f"a{name}b", add_special_tokens=False)
            promise(token_id in ids, f"{name!r} written in a text is not recognised")
            promise(name in tokenizer.decode(ids, skip_special_tokens=False), f"{name!r} is not shown on demand")
            promise(name not in tokenizer.decode(ids), f"{name!r} is shown though special tokens are to be skipped")

    def test_pieces_make_the_text(self) -> None:
        """Join the bytes of tokens, where tokens have bytes, to the text that `decode` gives; all tokens have them, or
        none.
        """
        tokenizer = self.open()
        every = range(tokenizer.vocab_size)
        kinds = {tokenizer.piece(token, first) is None for token in every for first in (False, True)}
        promise(len(kinds) == 1, "some tokens have pieces, and some have none")
        if kinds == {True}:
            return
        for text in self.texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            pieces = [tokenizer.piece(token, place == 0) or b"" for place, token in enumerate(ids)]
            got = b"".join(pieces).decode("utf-8", "replace")
            wanted = tokenizer.decode(ids, skip_special_tokens=False)
            promise(got == wanted, f"the pieces of {shown(text)} join to {shown(got)}")
        promise(
            tokenizer.piece(-1, False) == tokenizer.piece(tokenizer.vocab_size, True) == b"", "stray ids have bytes"
        )

    def test_any_ids_can_be_decoded(self) -> None:
        """Decode any sequence of ids: bytes that are not UTF-8 become U+FFFD, and nothing raises."""
        tokenizer = self.open()
        step = max(1, tokenizer.vocab_size // 500)
        ids = list(range(0, tokenizer.vocab_size, step))
        for part in (ids, ids[::-1], [], [ids[-1]] * 50, *([token] for token in ids)):
            promise(isinstance(tokenizer.decode(part), str), f"decode({shown(part)}) is not a string")

    def test_threads_do_not_disturb_each_other(self) -> None:
        """Return the same to many threads as to one."""
        tokenizer = self.open()

        def work() -> list[Any]:
            ids = [tokenizer.encode(text) for text in self.texts]
            return [ids, [tokenizer.decode(part) for part in ids]]

        wanted, found = work(), []
        threads = [threading.Thread(target=lambda: found.append([work() for _ in range(8)])) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        promise(len(found) == 6, "a thread ended by an exception")
        promise(all(got == wanted for each in found for got in each), "threads get different ids or texts")

    def test_tokenizers_share_nothing(self) -> None:
        """Keep two tokenizers that are open at once, from two folders, independent and equal."""
        first, second = self.open(), self.open()
        for text in self.texts:
            promise(first.encode(text) == second.encode(text), f"two tokenizers of one model differ on {shown(text)}")

    def test_what_is_not_there_is_named(self) -> None:
        """Raise CheckpointError that names the place of a missing folder, or of one with damaged files."""
        folder = self.folder()
        self.write[0](folder)
        for file in folder.iterdir():
            if file.stat().st_size:
                file.write_bytes(b"\xff{")
        for wrong in (self.folder(), self.folder() / "none", folder):
            try:
                self.new().open(wrong, dict(self.options))
            except CheckpointError as error:
                promise(str(wrong) in str(error), f"the refusal does not name {wrong}: {shown(str(error))}")
            else:
                promise(False, "a tokenizer is opened from a folder that holds none")

"""The selection of an output's tokens that belong to the answer, where the client wants no thoughts."""

from __future__ import annotations

from msgspec import Struct

from ferrule.types import TokenLogprobs


class Token(Struct, frozen=True, gc=False):
    """One token of an output, and the start and end of its text in the whole output, in characters."""

    id: int
    logprob: TokenLogprobs | None
    start: int
    end: int


class AnswerTokens:
    """A filter that leaves out the tokens of thoughts and of the markup around them, and is given tokens one by one.

    A token waits until the reasoning parser has read its text. At the start of an answer, the tokens of its first text
    belong to it; tokens before those, such as a closing tag and line breaks, do not.
    """

    def __init__(self) -> None:
        self._waiting: list[Token] = []
        self._answering = False

    def take(self, tokens: list[Token], read: int, thoughts: int, content: int) -> list[Token]:
        """Return the tokens of the answer that are known now.

        `tokens` are new. The parser has read `read` characters of the text, and returned `thoughts` characters of
        thoughts and `content` characters of the answer for the last ones.
        """
        self._waiting += tokens
        if not thoughts and not content:
            return []
        due = [token for token in self._waiting if token.end <= read]
        del self._waiting[: len(due)]
        first = 0 if self._answering and not thoughts else _first(due, read - content) if content else len(due)
        self._answering = content > 0
        return due[first:]

    def finish(self) -> list[Token]:
        """Return the tokens of the answer among those without text, such as the one that ends it."""
        left, self._waiting = self._waiting, []
        return left if self._answering else []


def _first(tokens: list[Token], start: int) -> int:
    """Return the index of the first token with text behind `start`, or of the tokens without text directly in front of
    it.
    """
    place = len(tokens)
    while place and (tokens[place - 1].end > start or (place < len(tokens) and _silent(tokens[place - 1]))):
        place -= 1
    return place


def _silent(token: Token) -> bool:
    """Return whether a token has no text, as a part of a character."""
    return token.start == token.end

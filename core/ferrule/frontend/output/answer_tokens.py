"""Which tokens of an output are the answer's, where the client wants no thoughts."""

from __future__ import annotations

from msgspec import Struct

from ferrule.types import TokenLogprobs


class Token(Struct, frozen=True, gc=False):
    """One token of an output, and where its text stands in the whole: characters."""

    id: int
    logprob: TokenLogprobs | None
    start: int
    end: int


class AnswerTokens:
    """Leaves out the tokens of thoughts and of the markup around them. Feed it token by token.

    Tokens wait until the reasoning parser says what came of them. Where an answer begins, the tokens that its first
    text is made of belong to it; what stands before them, such as a closing tag and line breaks, does not.
    """

    def __init__(self) -> None:
        self._waiting: list[Token] = []
        self._answering = False

    def take(self, tokens: list[Token], read: int, thoughts: int, content: int) -> list[Token]:
        """The tokens of the answer that are known now.

        `tokens` are new. Of the text the parser has read `read` characters, and gave so many of `thoughts` and
        `content` for the last ones.
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
        """The tokens of the answer among those that nothing came of, such as the one that ends it."""
        left, self._waiting = self._waiting, []
        return left if self._answering else []


def _first(tokens: list[Token], start: int) -> int:
    """The place of the first token with text behind `start`, or of those without text directly in front of it."""
    place = len(tokens)
    while place and (tokens[place - 1].end > start or (place < len(tokens) and _silent(tokens[place - 1]))):
        place -= 1
    return place


def _silent(token: Token) -> bool:
    """A part of a character."""
    return token.start == token.end

"""OpenAI's Harmony format: an output is a row of messages, each on a channel and perhaps to a recipient.

https://cookbook.openai.com/articles/openai-harmony

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{…}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Callable

from msgspec import Struct

from ferrule.forms import Fixed, Form, Series, Triggered
from ferrule_parsing.reader import Reader, Tags

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
FUNCTION_CALL = "to=functions."  # in the header of a message that calls a function, in front of its name
SPECIAL_TOKENS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_LONGEST_HEADER = 256  # characters; what is longer is not one
_BEGINNING = "to="  # of an output whose prompt ends with the role
_HEADER = re.compile(r"(?:<\|start\|>)?[\w.:=@\-\s]*(?:(?:<\|channel\|>|<\|constrain\|>)[\w.:=@\-\s]*)*(?:<[|\w]*)?")
_CHANNEL = re.compile(r"(?:<\|channel\|>|^(?:assistant)?)\s*(\w+)")
_WORDS = ("to=", "analysis", "commentary", "final", "assistant")  # with which a header begins that lacks its tag
_TAGLESS = re.compile(r"\s*(?:assistant)?\s*(?:(?:analysis|commentary|final)\b)?[\w.=\- ]{0,64}")
_NO_TEXT = re.compile("|".join(re.escape(tag) for tag in SPECIAL_TOKENS))
_RECIPIENT = re.compile(r"(?:^|\s|\|>)to=(\S+?)(?=\s|<\||$)")
_ALL = Tags(*SPECIAL_TOKENS)
_IN_HEADER = Tags(MESSAGE, START, END, CALL, RETURN)
_CLOSING = Tags(END, CALL, RETURN, START, CHANNEL)


def starts_message(form: Form) -> bool:
    """Return whether a form is that of messages, and not of a message's text."""
    while isinstance(form, Series) and form.parts:
        form = form.parts[0]
    if isinstance(form, Triggered):
        return form.triggers == (FUNCTION_CALL,)
    return isinstance(form, Fixed) and form.text.startswith(CHANNEL)


class Head(Struct, frozen=True):
    """The beginning of a message. `raw`: its header as it was written. Without a channel it is text outside of
    messages.
    """

    raw: str = ""
    channel: str | None = None
    recipient: str | None = None


class Body(Struct, frozen=True):
    """Text of the message that began last."""

    text: str


class Tail(Struct, frozen=True):
    """The end of a message, with this tag; "" where there was none."""

    raw: str


Part = Head | Body | Tail


class HarmonyReader:
    """A splitter of text that arrives in parts into messages. Text outside of messages becomes a message without a
    channel, free of the format's tags.
    """

    def __init__(self) -> None:
        self._reader = Reader()
        self._state: Callable[[], bool] = self._at_start
        self._header: list[str] = []
        self._size = 0  # of the header
        self._open = False  # a message, or text outside of one, began
        self._parts: list[Part] = []

    def feed(self, text: str) -> list[Part]:
        """Return the parts of messages that new text completes."""
        self._reader.push(text)
        while self._state():
            pass
        return self._take()

    def finish(self) -> list[Part]:
        """Return what was held back, at the end of the output. The beginning of a header is markup, unless it names a
        recipient.
        """
        rest = self._reader.rest()
        if self._state == self._in_header:
            raw = "".join((*self._header, rest))
            rest = "" if _BEGINNING not in raw and _HEADER.fullmatch(raw) else _NO_TEXT.sub("", raw)
            self._header = []
        self._say(rest)
        self._close("")
        return self._take()

    # ---- states: each reads what it can, and returns whether the next state has text to read

    def _at_start(self) -> bool:
        """Read the start of the output, where the first tag may be missing, and the role and a recipient behind it may
        be in the prompt.
        """
        rest = self._reader.text[self._reader.at : self._reader.at + _LONGEST_HEADER]
        words = rest.lstrip()
        if any(word.startswith(words) for word in _WORDS) and len(rest) < _LONGEST_HEADER:
            return False
        found = _TAGLESS.match(rest)
        end = found.end() if found and words.startswith(_WORDS) else 0
        tag = _ALL.here(rest, end) if end else ""
        if tag is None and len(rest) < _LONGEST_HEADER:
            return False
        tagless = tag in (MESSAGE, CHANNEL, CONSTRAIN)
        self._state = self._in_header if tagless or words.startswith(_BEGINNING) else self._outside
        return True

    def _outside(self) -> bool:
        text, tag = self._reader.until(_ALL)
        self._say(text)
        if tag in (START, CHANNEL):
            self._close("")
            self._begin_header(tag)
        return bool(tag)

    def _in_header(self) -> bool:
        text, tag = self._reader.until(_IN_HEADER)
        self._header.append(text)
        self._size += len(text)
        if tag == MESSAGE and self._size <= _LONGEST_HEADER:
            self._begin_message()
            return True
        if not tag and self._size <= _LONGEST_HEADER:
            return False
        self._reader.at -= len(tag)
        raw = "".join(self._header)  # it is not one
        markup = tag and _BEGINNING not in raw and _HEADER.fullmatch(raw)
        self._say("" if markup else _NO_TEXT.sub("", raw))
        self._header = []
        self._state = self._outside
        return True

    def _in_message(self) -> bool:
        text, tag = self._reader.until(_CLOSING)
        if text:
            self._parts.append(Body(text))
        if tag:
            begins = tag in (START, CHANNEL)
            self._close("" if begins else tag)
            self._state = self._outside
            if begins:
                self._begin_header(tag)
        return bool(tag)

    # ---- helpers

    def _begin_header(self, tag: str) -> None:
        self._header, self._size = [tag], 0
        self._state = self._in_header

    def _begin_message(self) -> None:
        raw = "".join(self._header)
        channel, recipient = _CHANNEL.search(raw), _RECIPIENT.search(raw)
        self._close("")
        self._parts.append(Head(raw + MESSAGE, channel[1] if channel else "", recipient[1] if recipient else None))
        self._open, self._header = True, []
        self._state = self._in_message

    def _say(self, text: str) -> None:
        """Add text that is outside of messages."""
        if text:
            if not self._open:
                self._parts.append(Head())
                self._open = True
            self._parts.append(Body(text))

    def _close(self, tag: str) -> None:
        if self._open:
            self._open = False
            self._parts.append(Tail(tag))

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

"""The name of a call, and the markup around it."""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ferrule.forms import Fixed, Form, Regex
from ferrule_parsing.calls import CallWriter
from ferrule_parsing.formats import CallReader, CallSyntax
from ferrule_parsing.reader import Reader

_NAME = re.compile(r"""[^\s<>{}()\[\]"'`,;=|｜]+""")
_LONGEST = 256  # characters of a name


@dataclass(frozen=True)
class CallHead:
    """The head of a call: ``before`` name ``behind``, with white space where the two have some, and around the name.

    `behind`: the spellings of the text that ends the head; the first one is generated, and "" is the end of the name
    alone. `prefix`: in front of the name, and not a part of it. `numbered`: the name is followed by ``:0``, and prefix,
    name and number together are the id of the call. `id_mark`: stands between the name and an id that the model gave
    the call, in front of `behind`; it is not generated.
    """

    before: str = ""
    behind: tuple[str, ...] = ("",)
    prefix: str = ""
    numbered: bool = False
    id_mark: str = ""

    @cached_property
    def start(self) -> str:
        """The first word of the head."""
        return next(iter(words_of(self.before)), "")

    def begins(self, text: str, at: int) -> bool | None:
        if self.start:
            found = text[at : at + len(self.start)]
            return found == self.start or (None if self.start.startswith(found) else False)
        return _NAME.match(text, at) is not None

    def form(self, name: str) -> tuple[Form, ...] | None:
        """Return the forms of the head of a function's call. None for a name that would be read as another."""
        if _NAME.fullmatch(name) is None or len(name) > _LONGEST or (self.numbered and ":" in name):
            return None
        if not self.numbered:
            return (Fixed(f"{self.before}{self.prefix}{name}{self.behind[0]}"),)
        return Fixed(f"{self.before}{self.prefix}{name}:"), Regex("[0-9]{1,3}"), Fixed(self.behind[0])

    def split(self, written: str) -> tuple[str, str | None]:
        """Return (name, id) from the text in the place of the name."""
        name = written.removeprefix(self.prefix)
        if not self.numbered:
            return name, None
        return name.rpartition(":")[0] or name, written


class Spellings:
    """A reader of one of several texts: the longest that stands here, with any white space where the texts have
    some.
    """

    def __init__(self, *texts: str) -> None:
        self.failed = False
        self._left = [(text, words_of(text)) for text in texts]
        self._count = 0  # words that were read

    def read(self, reader: Reader) -> str | None:
        """Return the text that was read. None: more must come, or `failed`."""
        count = self._count
        while any(len(words) > count for _, words in self._left):
            reader.space()
            word = self._word(reader)
            if word is None:
                return None
            if not word:
                break
            if len(self._left) > 1:
                self._left = [one for one in self._left if one[1][count : count + 1] == (word,)]
            self._count = count = count + 1
        whole = [text for text, words in self._left if len(words) == count]
        self.failed = not whole
        return whole[0] if whole else None

    def _word(self, reader: Reader) -> str | None:
        """Return the next word of one of the texts; "" when none of them stands here. None: more must come."""
        next_ones = [words[self._count] for _, words in self._left if len(words) > self._count]
        for word in sorted(next_ones, key=len, reverse=True) if len(next_ones) > 1 else next_ones:
            found = reader.take(word)
            if found is not False:
                return word if found else None
        return ""


@lru_cache(maxsize=256)
def words_of(text: str) -> tuple[str, ...]:
    """Return a text's words, which white space separates."""
    return tuple(text.split())


class HeadReader:
    """A reader of one head. `known`: the only names that are accepted, None: all. `follow`: what must follow a head
    that does not end with the first spelling of `behind`.
    """

    def __init__(self, head: CallHead, known: frozenset[str] | None, follow: str = "") -> None:
        self.failed = False
        self._head = head
        self._known = known
        self._follow = follow
        self._before = Spellings(head.before) if head.before else None
        self._name: list[str] = []
        self._id: list[str] | None = None  # behind the mark of an id
        self._behind: Spellings | None = None  # the name was read

    def read(self, reader: Reader) -> tuple[str, str | None] | None:
        """Return (name, id) when the head was read. None: more must come, or `failed`."""
        if self._before is not None:
            if self._before.read(reader) is None:
                self.failed = self._before.failed
                return None
            self._before = None
        behind = self._behind or self._read_name(reader)
        if behind is None:
            return None
        ended = behind.read(reader)
        if ended is None:
            self.failed = behind.failed
            return None
        if self._follow and ended != self._head.behind[0]:
            if not reader.past_space():
                return None
            self.failed = not reader.text.startswith(self._follow, reader.at)
            if self.failed:
                return None
        name, id = self._head.split("".join(self._name))
        id = "".join(self._id) if self._id is not None else id
        self.failed = not name or (self._known is not None and name not in self._known)
        return None if self.failed else (name, id)

    def _read_name(self, reader: Reader) -> Spellings | None:
        """Read the name and the id; return a reader of the text that ends the head once both were read."""
        word = self._name if self._id is None else self._id
        if not word:
            reader.space()
        if reader.empty:
            return None
        word.append(reader.match(_NAME))
        length = sum(map(len, word))
        if length > _LONGEST or not length:
            self.failed = True
        elif not reader.empty:
            marked = self._take_id_mark(reader)
            if marked:
                self._id = []
                return self._read_name(reader)
            if marked is False:
                self._behind = Spellings(*self._head.behind)
        return self._behind

    def _take_id_mark(self, reader: Reader) -> bool | None:
        """Return whether the mark of an id was read. None: more text is needed to decide."""
        if not self._head.id_mark or self._id is not None:
            return False
        return reader.take(self._head.id_mark)


@dataclass(frozen=True)
class HeadedCall(CallSyntax):
    """A way to write a call that begins with its `head`."""

    head: CallHead

    @property
    def start(self) -> str:  # type: ignore[override]
        return self.head.start

    def begins(self, text: str, at: int) -> bool | None:
        return self.head.begins(text, at)


class HeadedReader(CallReader):
    """A reader of a call's head, which starts the call; `read_arguments` of the subclass reads the rest.

    `known` and `follow`: as `HeadReader` has them.
    """

    def __init__(self, head: CallHead, known: frozenset[str] | None, follow: str = "") -> None:
        self._head = HeadReader(head, known, follow)

    def read(self, reader: Reader, out: CallWriter) -> None:
        if not self.named:
            found, self.failed = self._head.read(reader), self._head.failed
            if found is None:
                return
            self.start(*found, out)
        self.read_arguments(reader, out)

    def start(self, name: str, id: str | None, out: CallWriter) -> None:
        """Start the call, whose head was read."""
        self.named = True
        self.started(name)
        out.start(name, id)

    def started(self, name: str) -> None:
        """Prepare for the arguments of the function `name`; called once, when the name was read."""

    @abstractmethod
    def read_arguments(self, reader: Reader, out: CallWriter) -> None:
        """Read as much of the arguments as has come."""

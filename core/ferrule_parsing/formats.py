"""`ToolFormat`: how a model writes its calls, described once. The parser and the constraint are made of it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from os.path import commonprefix
from typing import Any

from ferrule.forms import Anything, Fixed, Form, GrammarSpec, OneOf, Regex, Repeated, Series, Tag, Triggered
from ferrule.interfaces.parsers import DroppedTags
from ferrule.structured_outputs.calls import EnforcedFunction
from ferrule_parsing.calls import CallWriter
from ferrule_parsing.reader import Reader, Tags

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments of the offered functions, by name


class CallReader(ABC):
    """A reader of one call. `named`: the call was started. `done`: it was read. `failed`: the text here is not a call,
    or is a call that breaks off.
    """

    named = False
    done = False
    failed = False

    @abstractmethod
    def read(self, reader: Reader, out: CallWriter) -> None:
        """Read as much of the call as has come."""

    unread = ""  # that was read of a call which failed behind its name, and belongs to nothing

    def in_block(self, open: tuple[str, ...], close: tuple[str, ...]) -> None:
        """Note the tags that surround the call's block; called once, before anything is read."""

    def resume(self, reader: Reader, out: CallWriter) -> bool:
        """Return whether a part of the call ended earlier, when the output ends within the call after its name; if so,
        the text that follows that part is unread again.
        """
        return False

    def finish(self, out: CallWriter) -> None:
        """Write what was held back, when the output ends within the call after its name."""


class CallSyntax(ABC):
    """A way to write one call."""

    marks: tuple[str, ...] = ()  # that may stand behind the call and mean nothing
    start: str = ""  # what a call begins with, if that is always the same

    @abstractmethod
    def begins(self, text: str, at: int) -> bool | None:
        """Return whether a call begins at `at`, where there is no white space. None: more text is needed to decide."""

    @abstractmethod
    def reader(self, schemas: Schemas, exact: frozenset[str], *, unmarked: bool) -> CallReader:
        """Make a reader for one call. `exact`: functions whose arguments are sure to fit their schema, because they are
        constrained. `unmarked`: no tag marks this as a call, only its own look, so the reader checks more.
        """

    @abstractmethod
    def form(self, function: EnforcedFunction) -> Form | None:
        """Return the form of calls of one function with arguments that fit. None: this cannot be expressed for the
        schema.
        """


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """Blocks of calls in a text. White space between the parts of a block means nothing.

    `open` and `close`: the spellings of what begins and ends a block; the first ones are generated. A closing tag may
    be missing. "" among the opening ones: an output may begin with the calls themselves.
    `calls`: the ways in which a call may be written; the first one is generated.
    `brackets`: the calls of a block stand between them; an opening tag that ends with the first one brings it.
    `separator`: between the calls of a block; None: each call has
    a block of its own. `padding`: what is generated behind the opening tag, and before the closing one.
    `between`: what is generated between blocks. `dropped`: further markup that means nothing to clients; of a pair, all
    from the first text to the second. The opening and closing tags are such markup where the parser has special tokens.
    `echoed`: the brackets and calls may stand behind the closing tag once more, which means nothing.
    """

    calls: tuple[CallSyntax, ...]
    open: tuple[str, ...] = ("",)
    close: tuple[str, ...] = ()
    brackets: tuple[str, str] | None = None
    separator: str | None = None
    padding: tuple[str, str] = ("", "")
    between: str = "\n"
    dropped: DroppedTags = ()
    echoed: bool = False

    @cached_property
    def text_tags(self) -> Tags | None:
        """The tags to search a text for."""
        return _tags(*self.open)

    @cached_property
    def late_tags(self) -> Tags | None:
        """The tags to search a text for behind an opening tag that no list of calls followed."""
        return _tags(*self.open, self.edges[0])

    @cached_property
    def unclosed_tags(self) -> Tags | None:
        """The tags to search a text for behind a block whose closing tag has not come."""
        return _tags(*self.open, *self.close)

    @cached_property
    def call_tags(self) -> tuple[str, ...]:
        """The opening tags, but for those that a text may hold as well."""
        return tuple(filter(_is_tag, self.open))

    def markup(self, special_tokens: tuple[str, ...]) -> DroppedTags:
        """Return the tags that never become content where the format is written with these special tokens."""
        tags = (*special_tokens, *self.open, *self.close) if special_tokens else ()
        return (*filter(_is_tag, tags), *self.dropped)

    @cached_property
    def close_tags(self) -> Tags | None:
        return _tags(*self.close)

    @cached_property
    def separators(self) -> frozenset[str]:
        """The separators between the calls of a block."""
        return frozenset((self.separator or "").split())

    @cached_property
    def ends(self) -> frozenset[str]:
        """The marks that may stand behind a call and mean nothing."""
        return frozenset(mark for syntax in self.calls for mark in syntax.marks)

    @cached_property
    def edges(self) -> tuple[str, str, str]:
        """The brackets that come next, by how many came."""
        before, behind = self.brackets or ("", "")
        return before.strip(), behind.strip(), ""

    @cached_property
    def marks(self) -> Mapping[tuple[int, bool], Tags | None]:
        """The tags that may stand between the parts of a block, by the number of brackets that came (0 to 2), and by
        whether a call came.
        """
        before, behind, _ = self.edges
        return {
            (0, False): _tags(before),
            (0, True): _tags(*self.ends, *self.separators),
            (1, False): _tags(behind),
            (1, True): _tags(behind, *self.ends, *self.separators),
            (2, False): None,
            (2, True): None,
        }

    def constraint(
        self, functions: tuple[EnforcedFunction, ...], *, most: int | None, required: bool
    ) -> GrammarSpec | None:
        """Return the form of up to `most` calls of these functions, at least one if `required`, and text around them if
        not.

        None when the schema of one of them cannot be written in this format.
        """
        forms = [self.calls[0].form(function) for function in functions]
        calls = tuple(form for form in forms if form is not None)
        if not calls or len(calls) < len(forms):
            return None
        inside: Form = OneOf(calls)
        blocks = most
        if self.separator is not None:
            inside, blocks = Repeated(inside, self.separator, 1, most), 1
        end = self.close[0] if self.close and self.open[0] else ""
        if required:
            block = _series(Fixed(self.open[0]), self._content(self.open[0], inside), Fixed(end))
            return GrammarSpec(form=Repeated(block, self.between, 1, blocks))
        form = self._chosen(inside, end, blocks)
        return None if form is None else GrammarSpec(form=form)

    def brings_bracket(self, tag: str) -> bool:
        """Return whether the first bracket is the end of this opening tag."""
        return bool(self.edges[0]) and tag.endswith(self.edges[0])

    def _content(self, tag: str, calls: Form) -> Form:
        """Return the form of the text between an opening tag and the closing one."""
        before, behind = self.brackets or ("", "")
        opening = self.padding[0] + ("" if self.brings_bracket(tag) else before)
        return _series(Fixed(opening), calls, Fixed(behind + self.padding[1]))

    def _chosen(self, calls: Form, end: str, blocks: int | None) -> Form | None:
        """Return the form of text with blocks in it, where the model chooses. Without an opening tag, the output begins
        with the block.

        None where an opening tag is a plain word, which a text may contain.
        """
        triggers = spelled = tuple(filter(None, self.open))
        tags = tuple(Tag(tag, self._content(tag, calls), end if tag == self.open[0] else "") for tag in spelled)
        common = commonprefix(spelled)
        if any(map(str.isalpha, common)):  # one trigger, behind which the other spellings cannot be written
            triggers, tags = (common,), tags[:1]
        if any(map(str.isalnum, triggers)):
            return None
        text: Form = Triggered(triggers, tags, blocks) if triggers else Anything()
        if "" not in self.open:
            return text
        bare = self.brackets[0][0] if self.brackets else "{"
        behind = tuple(_series(Fixed(tag.begin), tag.content, Fixed(tag.end)) for tag in tags)
        return OneOf((self._content("", calls), *behind, Series((Regex(_beginning(bare, triggers)), text))))


def _is_tag(text: str) -> bool:
    return text.startswith(("<", "[", "]<")) and len(text) > 1


def _beginning(bare: str, triggers: tuple[str, ...]) -> str:
    """Return a pattern for the first characters of a text that begins neither with white space, nor with `bare`, nor
    with a trigger.

    In the pattern, what might be the beginning of a trigger is followed by a character that does not continue one.
    """
    firsts = {trigger[0] for trigger in triggers}
    prefixes = {trigger[:length] for trigger in triggers for length in range(1, len(trigger))}
    ways = [rf"[^\s{_class({bare} | firsts)}]"]
    for prefix in sorted(prefixes):
        following = {trigger[len(prefix)] for trigger in triggers if trigger.startswith(prefix)}
        ways += [re.escape(prefix) + f"[^{_class(following | firsts)}]"] if prefix != bare else []
    return "|".join(ways)


def _class(characters: set[str]) -> str:
    """Write characters as they stand inside the brackets of a pattern."""
    return "".join(f"\\{one}" if one in r"\]^-[" else one for one in sorted(characters))


@lru_cache(maxsize=256)
def _tags(*texts: str) -> Tags | None:
    some = tuple(filter(None, texts))
    return Tags(*some) if some else None


def _series(*parts: Form) -> Series:
    return Series(tuple(part for part in parts if part != Fixed("")))

"""`ToolFormat`: how a model writes its calls, described once. The parser and the constraint are made of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from ferrule.structured_outputs.calls import EnforcedFunction
from ferrule.types import Anything, Fixed, Form, GrammarSpec, OneOf, Regex, Repeated, Series, Tag, Triggered
from ferrule_parsing.calls import CallWriter
from ferrule_parsing.reader import Reader

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments of the offered functions, by name


class CallReader(ABC):
    """Reads one call. `named`: the call was started. `done`: it was read. `failed`: what stands here is not a call, or
    one that breaks off."""

    named = False
    done = False
    failed = False

    @abstractmethod
    def read(self, reader: Reader, out: CallWriter) -> None:
        """Read as much of the call as has come."""

    def finish(self, out: CallWriter) -> None:
        """The output ends within the call, which has its name: write what was held back."""


class CallSyntax(ABC):
    """How one call is written."""

    marks: tuple[str, ...] = ()  # that may stand behind the call and mean nothing
    start: str = ""  # what a call begins with, if that is always the same

    @abstractmethod
    def begins(self, text: str, at: int) -> bool | None:
        """Whether a call begins at a place that is not white space. None: more text is needed to say so."""

    @abstractmethod
    def reader(self, schemas: Schemas, exact: frozenset[str], *, unmarked: bool) -> CallReader:
        """For one call. `exact`: functions whose arguments are sure to fit their schema, because they are constrained.
        `unmarked`: nothing but its own look says that this is a call, so look twice."""

    @abstractmethod
    def form(self, function: EnforcedFunction) -> Form | None:
        """Calls of one function with arguments that fit. None: this cannot be said for the schema."""


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """Blocks of calls in a text. White space between the parts of a block means nothing.

    `open` and `close`: the spellings of what begins and ends a block; the first ones are generated. A closing tag may
    be missing. "" among the opening ones: an output may begin with the calls themselves.
    `calls`: the ways in which a call may be written; the first one is generated.
    `brackets`: the calls of a block stand between them. `separator`: between the calls of a block; None: each call has
    a block of its own. `padding`: what is generated behind the opening tag, and before the closing one.
    `between`: what is generated between blocks. `dropped`: markup in the text that means nothing to clients.
    """

    calls: tuple[CallSyntax, ...]
    open: tuple[str, ...] = ("",)
    close: tuple[str, ...] = ()
    brackets: tuple[str, str] | None = None
    separator: str | None = None
    padding: tuple[str, str] = ("", "")
    between: str = "\n"
    dropped: tuple[str, ...] = ()

    def constraint(
        self, functions: tuple[EnforcedFunction, ...], *, most: int | None, required: bool
    ) -> GrammarSpec | None:
        """Up to `most` calls of these functions, at least one if `required`, and text around them if not.

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
        before, behind = self.brackets or ("", "")
        content = _series(Fixed(self.padding[0] + before), inside, Fixed(behind + self.padding[1]))
        end = self.close[0] if self.close and self.open[0] else ""
        if required:
            block = _series(Fixed(self.open[0]), content, Fixed(end))
            return GrammarSpec(form=Repeated(block, self.between, 1, blocks))
        if not self.open[0]:
            return self._begun(_series(content, Fixed(end)))
        trigger = commonprefix(self.open)
        if not any(map(str.isalpha, trigger)):
            return None  # the other opening tags cannot be kept out without forbidding common text
        return GrammarSpec(form=Triggered(trigger, (Tag(self.open[0], content, end),), blocks))

    def _begun(self, calls: Form) -> GrammarSpec | None:
        """Calls, or a text that cannot be taken for them: without a tag, only its first character tells."""
        if self.open != ("",):
            return None
        first = self.brackets[0][0] if self.brackets else "{"
        return GrammarSpec(form=OneOf((calls, Series((Regex(rf"[^\s\{first}]"), Anything())))))


def _series(*parts: Form) -> Series:
    return Series(tuple(part for part in parts if part != Fixed("")))

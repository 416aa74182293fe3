"""`tool_parser` and `reasoning_parser`: from deltas of text to events.

One parser object serves one choice of one request. Whatever the cut of the text into deltas, the events fold to the
same answer; nothing is lost, and no text raises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from msgspec import Struct

from ferrule.forms import Form, GrammarSpec
from ferrule.interfaces.tokenizer import Tokenizer

DroppedTags = tuple[str | tuple[str, str], ...]  # tags; a pair: everything from the first to the second


class ChoiceContext(Struct, frozen=True, kw_only=True):
    """The facts about a choice that are known before its first delta."""

    prompt: str = ""  # its text up to where the answer begins; of a prompt of ids, at least the end
    prompt_ids: tuple[int, ...] = ()
    continued: str = ""  # what the message says already that the answer goes on with (continue_final_message)
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str | dict[str, Any] | None = None
    template_kwargs: dict[str, Any] = {}
    parallel_tool_calls: bool = True  # False: one call at most
    templated: bool = True  # False: the client wrote the whole prompt, so no chat template opened thoughts
    streamed: bool = True  # False: nobody reads the events before the last one is there
    tokenizer: Tokenizer | None = None
    new_tool_parser: Callable[[], ToolParser] | None = None  # for the reasoning parser: makes what reads the calls
    dropped_tags: DroppedTags = ()  # for the tool parser: those of the reasoning parser
    closing_tags: tuple[str, ...] = ()  # for the tool parser: that end thoughts, so they are markup behind a call


class TextDelta(Struct, frozen=True, gc=False):
    """New text of one choice, and the ids that it came from (for parsers that look at special tokens)."""

    text: str
    token_ids: tuple[int, ...] = ()


class Content(Struct, frozen=True, gc=False):
    text: str


class Reasoning(Struct, frozen=True, gc=False):
    text: str


class CallStart(Struct, frozen=True, gc=False):
    index: int
    id: str
    name: str


class CallArguments(Struct, frozen=True, gc=False):
    """A fragment of the call's arguments; the fragments of one call join to a JSON text."""

    index: int
    fragment: str


class CallEnd(Struct, frozen=True, gc=False):
    index: int


Event = Content | Reasoning | CallStart | CallArguments | CallEnd


def join(events: Iterable[Event]) -> Iterator[Event]:
    """Yield events that say the same in as few: texts of one kind that follow each other become one."""
    for (kind, _), group in groupby(events, lambda event: (type(event), getattr(event, "index", None))):
        same: list[Any] = list(group)
        if kind is CallArguments:
            yield CallArguments(same[0].index, "".join(event.fragment for event in same))
        elif kind is Content or kind is Reasoning:
            yield kind("".join(event.text for event in same))
        else:
            yield from same


class ThoughtTags(Struct, frozen=True, kw_only=True):
    """The texts with which the thoughts of an output begin and end, for a limit on their length."""

    inside: bool  # the output begins with thoughts
    opens: tuple[str, ...]  # texts behind which they begin; none: thoughts that are over do not begin again
    closes: tuple[str, ...]  # texts that end them
    end: str  # what is written to end them early; the answer follows it
    again: bool = False  # thoughts that ended may begin again


class ReasoningParser(ABC):
    """A reader of the thoughts in an output, constructed without arguments for one choice."""

    wants_special_tokens: bool = False  # True, at the latest after `begin`: special tokens stay in the text
    special_tokens: tuple[str, ...] = ()  # that the format is written with: these stay in the text, others do not
    dropped_tags: DroppedTags = ()  # that never become content

    def begin(self, context: ChoiceContext) -> None:
        """Learn of the choice, once, before its first delta. A prompt may end inside or behind a block of thinking."""

    def constrain(self, form: Form) -> Form:
        """Return the form of the whole output when the text after the thoughts is to have `form`. Called after `begin`.

        The default is for parsers whose output has no thoughts when it is constrained.
        """
        return form

    def thoughts(self) -> ThoughtTags | None:
        """Return where thoughts begin and end, after `begin`. None, the default: their length cannot be limited."""
        return None

    @abstractmethod
    def feed(self, delta: TextDelta) -> Sequence[Reasoning | Content]:
        """Take the next delta; what cannot be decided yet is held back."""

    @abstractmethod
    def finish(self) -> Sequence[Reasoning | Content]:
        """Release what was held back."""


class ToolParser(ABC):
    """A reader of the calls in an output, constructed with the request's tools (the OpenAI objects) for one choice."""

    wants_special_tokens: bool = False  # True, at the latest after `begin`: special tokens stay in the text
    special_tokens: tuple[str, ...] = ()  # that the format is written with: these stay in the text, others do not

    call_tags: tuple[str, ...] = ()  # with which calls begin, and which end open thoughts; set before `begin`

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        self.tools = tools

    def begin(self, context: ChoiceContext) -> None:
        """Learn of the choice, once, before its first delta."""

    @abstractmethod
    def constraint(self, choice: str | dict[str, Any]) -> GrammarSpec | None:
        """Return the constraint that makes the model call as `tool_choice` demands, in this parser's format.

        "required": one or more calls of any tool; an object that names a function: one call of that; "auto": text and
        calls, of which those of tools with `strict: true` fit their schema. Arguments of an enforced call fit the
        tool's schema. None: the format cannot be enforced, or for "auto" and "none", need not be. Called after `begin`.
        """

    @abstractmethod
    def feed(self, delta: TextDelta) -> Sequence[Event]:
        """Take the next delta; what cannot be decided yet is held back."""

    @abstractmethod
    def finish(self) -> Sequence[Event]:
        """Release what was held back; close an open call."""

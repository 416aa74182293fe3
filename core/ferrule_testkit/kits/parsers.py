"""What the kits of both parsers share: outputs of real models, and joining events to one result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ferrule.interfaces.parsers import CallArguments, CallEnd, CallStart, Content, Event, Reasoning, TextDelta
from ferrule_testkit.kits.base import promise, shown
from ferrule_testkit.kits.count import work

Feed = Callable[[TextDelta], Sequence[Event]]

# What a model says when it calls nothing.
PLAIN = (
    "",
    "Hello.",
    "Is 3 < 4? Yes: 4 > 3, and a[0] is {0}.\n\nTwo  spaces, a\ttab and an end \n",
    "Use <b>bold</b>, <toolbox>, {'a': [1, 2]} and x </ y. 100 % of $5 \\ `code` | bar",
    "Grüße, 你好, 🙂‍↕️ e\u0301 \u200b\ufffd end",
)

# Calls and thoughts in the words of many models, whole and broken: no parser may fall over any of them.
FOREIGN = (
    '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>"}}\n</tool_call>',
    '<tool_call>{"name": "f", "arguments"</tool_call> x <tool_call>',
    '<tool_call>{"arguments": {}}</tool_call><tool_call>[]</tool_call><tool_call></tool_call></tool_call>',
    "<tool_call><function=f>\n<parameter=a>\n1\n</parameter>\n</function></tool_call>",
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
    '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}',
    '{"name": "f", "parameters": {"a": "\\u00e9\\"}"}} {"name": 1}',
    "[f(a=1, b='x'), g()] [f(",
    '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g"}',
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "<think>a</think>b<think>c</think></think>",
    "a</think>b",
    "<think>never closed, <tool_call>{",
    "<seed:think>x</seed:think><|channel|>analysis<|message|>x<|end|>",
    '<function_call> {"name": "f", "arguments": "{\\"a\\": 1}"} [[[[ ]] <<<<',
)


def squeezed(text: str) -> str:
    """Return a text without its white space, since the protocol decides how much of that belongs to the markup."""
    return "".join(text.split())


@dataclass
class FoldedCall:
    name: str
    arguments: str = ""
    ended: bool = False


@dataclass
class Fold:
    """The sum of a choice's events."""

    content: str = ""
    reasoning: str = ""
    calls: list[FoldedCall] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.reasoning + self.content

    def answer(self) -> tuple[Any, ...]:
        return self.content, self.reasoning, [(call.name, call.arguments) for call in self.calls]

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStart(index, id, name):
                    promise(index == len(self.calls), f"call {index} starts after {len(self.calls)} calls")
                    promise(isinstance(id, str) and bool(id), f"call {index} has the id {id!r}")
                    promise(isinstance(name, str) and bool(name), f"call {index} has the name {name!r}")
                    self.calls.append(FoldedCall(name))
                    self.ids.append(id)
                case CallArguments(index, fragment):
                    self._open(index, "arguments").arguments += fragment
                case CallEnd(index):
                    self._open(index, "an end").ended = True
                case _:
                    promise(False, f"{shown(event)} is not an event")

    def _open(self, index: int, what: str) -> FoldedCall:
        promise(0 <= index < len(self.calls), f"{what} of call {index}, which has not started")
        promise(not self.calls[index].ended, f"{what} of call {index}, which has ended")
        return self.calls[index]


def fold(parser: Any, pieces: Iterable[str], *, finish: bool = True) -> Fold:
    """Feed the pieces, and finish. Every call must be over then."""
    folded = Fold()
    for piece in pieces:
        folded.add(parser.feed(TextDelta(piece, _ids(piece))))
    if finish:
        folded.add(parser.finish())
        promise(all(call.ended for call in folded.calls), "a call is still open after finish")
        promise(len(set(folded.ids)) == len(folded.ids), f"two calls have one id: {folded.ids}")
    return folded


def _ids(text: str) -> tuple[int, ...]:
    """Return the ids that a `ByteTokenizer` gives a text."""
    return tuple(text.encode("utf-8", "surrogatepass"))


def same(wanted: Fold, got: Fold, text: str, pieces: Sequence[str]) -> None:
    promise(
        wanted.answer() == got.answer(),
        f"{shown(text)} gives {shown(wanted.answer())}, but {shown(got.answer())} when cut as {shown(list(pieces))}",
    )


def linear(make: Callable[[], Any], text: str, sizes: tuple[int, int] = (200, 1600)) -> None:
    """Check that eight times the text costs no more than about eight times the work."""

    def cost(size: int) -> int:
        pieces = (text * (size // len(text) + 1))[:size]
        parser = make()

        def run() -> None:
            for char in pieces:
                parser.feed(TextDelta(char))
            parser.finish()

        return work(run)

    small, large = (cost(size) for size in sizes)
    factor = sizes[1] / sizes[0]
    promise(
        large <= 2 * factor * small,
        f"{sizes[1]} characters of {shown(text)} cost {large / small:.0f} times the work of {sizes[0]}; "
        f"linear would be {factor:.0f}",
    )

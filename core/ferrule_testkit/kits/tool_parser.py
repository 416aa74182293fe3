"""The kit of tool parsers."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ferrule.forms import GrammarSpec
from ferrule.interfaces.parsers import ChoiceContext, TextDelta, ToolParser
from ferrule_testkit.kits.base import Kit, does_not_apply, promise, shown
from ferrule_testkit.kits.cuts import cuts
from ferrule_testkit.kits.parsers import FOREIGN, PLAIN, Fold, fold, linear, same, squeezed
from ferrule_testkit.kits.payloads import (
    HOSTILE_ARGUMENTS,
    HOSTILE_NAME,
    HOSTILE_NAME_WRITTEN,
    NOT_NUMBERS,
    escaped,
    exchanged,
    strict_json,
)
from ferrule_testkit.tokenizers import ByteTokenizer

_HELD_BACK = 256  # characters of plain text that may wait for a decision


@dataclass(frozen=True)
class CallText:
    """A call as the model writes it, markup included, and what it means."""

    text: str
    name: str
    arguments: Mapping[str, Any]


Sample = Sequence["str | CallText"]  # an answer of the model: text and calls in order


def _function(name: str, **properties: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": f"{name}.", "parameters": schema}}


class ToolParserKit(Kit):
    """A tool parser gives the same calls however the text is cut, loses nothing, and never raises.

    Give `samples`: answers in the parser's own protocol, each a sequence of text and `CallText`. Without them only the
    promises that hold for any text are proved. `json_names` and `json_arguments` False: what looks like a JSON string
    for a name, or a JSON object of arguments, means something else. `new_ids` False: the model writes the ids of calls.
    """

    kind = "tool_parser"
    samples: Sequence[Sample] = ()
    tools: Sequence[dict[str, Any]] = (
        _function("get_weather", city="string", unit="string"),
        _function("add", a="number", b="number"),
        _function("f", a="string"),
        _function("now"),
    )
    plain: Sequence[str] = PLAIN
    json_names: bool = True
    json_arguments: bool = True
    new_ids: bool = True

    def make(self, tools: Sequence[dict[str, Any]] | None = None) -> ToolParser:
        """Make a parser at the beginning of a choice, with a tokenizer of bytes."""
        given = json.loads(json.dumps(list(self.tools))) if tools is None else tools  # deepcopy is ten times slower
        parser: ToolParser = self.new(given)
        parser.begin(ChoiceContext(tools=tuple(given), tool_choice="auto", tokenizer=ByteTokenizer()))
        return parser

    def texts(self) -> Iterator[str]:
        yield from (_text(sample) for sample in self.samples)
        yield from self.plain
        yield from FOREIGN

    # ------------------------------------------------------------------------------------ promises

    def test_calls_are_found(self) -> None:
        """Find each sample's calls, in order, with their arguments as a JSON text."""
        for sample in self._samples():
            folded = fold(self.make(), [_text(sample)])
            wanted = [(part.name, dict(part.arguments)) for part in sample if isinstance(part, CallText)]
            got = [(call.name, _json(call.arguments, sample)) for call in folded.calls]
            promise(got == wanted, f"{shown(_text(sample))} gives {shown(got)}, not {shown(wanted)}")

    def test_escapes_in_names(self) -> None:
        """Unescape a name that is a JSON string, with escapes, quotes and backslashes."""
        if not self.json_names:
            does_not_apply("names are not JSON strings in this format")
        alone = [(_text(sample), part.name) for sample in self._samples() for part in _only_call(sample)]
        for whole, called in alone:
            for written, name in ((escaped(called), called), (HOSTILE_NAME_WRITTEN, HOSTILE_NAME)):
                text = exchanged(whole, json.dumps(called), written)
                if text is None:
                    continue
                for pieces in ([text], list(text)):
                    names = [call.name for call in fold(self.make([*self.tools, _function(name)]), pieces).calls]
                    promise(names == [name], f"{shown(text)} calls {shown(names)}, not {shown([name])}")

    def test_hostile_arguments(self) -> None:
        """Return arguments with escapes, quotes, lone surrogates and huge numbers as JSON of the same value."""
        for part, arguments in self._verbatim():
            for hostile in HOSTILE_ARGUMENTS:
                text = part.text.replace(arguments, hostile)
                wanted = strict_json(hostile, "the kit")
                for pieces in ([text], list(text)):
                    calls = fold(self.make(), pieces).calls
                    got = [strict_json(call.arguments, shown(text)) for call in calls]
                    promise(got == [wanted], f"{shown(text)} gives the arguments {shown(got)}, not {shown([wanted])}")

    def test_numbers_that_json_does_not_have(self) -> None:
        """Raise nothing and lose nothing for NaN and Infinity in arguments: emit the call, or its text as content."""
        for part, arguments in self._verbatim():
            text = part.text.replace(arguments, NOT_NUMBERS)
            for pieces in ([text], list(text)):
                folded = fold(self.make(), pieces)
                names = [call.name for call in folded.calls]
                kept = names == [part.name] if names else squeezed(NOT_NUMBERS) in squeezed(folded.content)
                promise(kept, f"{shown(text)} gives the calls {names} and the content {shown(folded.content)}")

    def test_text_around_calls_survives(self) -> None:
        """Return text before, between and after calls as content, but for special tokens; never the calls' own text."""
        for sample in self._samples():
            wanted = "".join(part for part in sample if isinstance(part, str))
            got = fold(self.make(), [_text(sample)]).content
            place = f"content of {shown(_text(sample))}"
            promise(self._bare(got) == self._bare(wanted), f"{place} is {shown(got)}, not {shown(wanted)}")

    def test_plain_text_passes_unchanged(self) -> None:
        """Return an answer without a call as content, to the last white space."""
        for text in self.plain:
            for pieces in ([text], list(text)):
                folded = fold(self.make(), pieces)
                promise(folded.answer() == (text, "", []), f"{shown(text)} becomes {shown(folded.answer())}")

    def test_any_cut_gives_the_same(self) -> None:
        """Return events that sum to the same answer, however a text is cut into deltas."""
        for text in self.texts():
            whole = fold(self.make(), [text])
            for pieces in cuts(text):
                same(whole, fold(self.make(), pieces), text, pieces)

    def test_short_texts_in_every_cut(self) -> None:
        """Return the same for short texts, and for the beginnings and ends of the samples, in each of their cuts."""
        long = [_text(sample) for sample in self.samples] + list(FOREIGN[:4])
        for text in dict.fromkeys(part for each in long for part in (each[:9], each[-9:])):
            whole = fold(self.make(), [text])
            for pieces in cuts(text):
                same(whole, fold(self.make(), pieces), text, pieces)

    def test_truncation_never_raises_and_closes_every_call(self) -> None:
        """Raise nothing, wherever a text ends, and end every call that started."""
        for text in self.texts():
            for end in range(len(text)):
                fold(self.make(), [text[:end]])

    def test_truncation_loses_nothing(self) -> None:
        """Keep all that came before the end of a truncated text, as content or as part of a call: no character of a
        payload disappears.

        A tag that ends calls may also end a call where the tag stands in a value whose own end did not come.
        """
        for sample in self._samples():
            calls = fold(self.make(), [_text(sample)]).calls
            wanted = sum(isinstance(part, CallText) for part in sample)
            promise(len(calls) == wanted, f"{shown(_text(sample))} gives {len(calls)} calls, not {wanted}")
            for before, number, part, length in _truncations(sample):
                folded = fold(self.make(), [before + part.text[:length]])
                self._check_truncated(sample, folded, (number, part, length), calls[number].arguments)

    def test_plain_text_is_not_held_back(self) -> None:
        """Hand on plain text while it comes, not at the end."""
        text = "The quick brown fox jumps over the lazy dog. " * 40
        content = fold(self.make(), text, finish=False).content
        late = len(text) - len(content)
        promise(late <= _HELD_BACK, f"{late} of {len(text)} characters of plain text wait for the end")

    def test_requests_share_nothing(self) -> None:
        """Parse several texts at the same time, or after one that broke off, as each alone."""
        texts = [text for text in self.texts() if text]
        alone = [fold(self.make(), [text]).answer() for text in texts]
        parsers = [self.make() for _ in texts]
        folds = [Fold() for _ in texts]
        for at in range(max(map(len, texts))):
            for parser, folded, text in zip(parsers, folds, texts, strict=True):
                folded.add(parser.feed(TextDelta(text[at : at + 1])))
        for parser, folded, text, wanted in zip(parsers, folds, texts, alone, strict=True):
            folded.add(parser.finish())
            promise(folded.answer() == wanted, f"{shown(text)} beside others gives {shown(folded.answer())}")

    def test_ids_of_calls_are_never_used_twice(self) -> None:
        """Give the calls of the same text different ids in two requests."""
        if not self.new_ids:
            does_not_apply("the model writes the ids")
        for sample in self._samples():
            first, second = (fold(self.make(), [_text(sample)]).ids for _ in range(2))
            promise(not set(first) & set(second), f"two requests have a call {set(first) & set(second)}")

    def test_the_tools_are_left_alone(self) -> None:
        """Read the request's tools and do not change them."""
        tools = copy.deepcopy(list(self.tools))
        for text in self.texts():
            fold(self.make(tools), [text])
        promise(tools == list(self.tools), "the tools of the request were changed")

    def test_work_is_linear(self) -> None:
        """Work in proportion to the length of a text, one character at a time, also inside a call that does not end."""
        for text in ("word ", "<", "{", "[", "\n", *(_text(sample) for sample in self.samples)):
            linear(self.make, text)
        for sample in self.samples:
            for before, _, part, length in _truncations(sample):
                if length == len(part.text) // 2:
                    self._linear_inside(before + part.text[:length])

    def test_constraints(self) -> None:
        """Answer every tool_choice from `constraint` with a grammar or None; demand nothing for `none`."""
        name = self.tools[0]["function"]["name"]
        for choice in ("none", "auto", "required", {"type": "function", "function": {"name": name}}):
            found = self.make().constraint(choice)
            promise(found is None or isinstance(found, GrammarSpec), f"constraint({choice!r}) is {shown(found)}")
            promise(choice != "none" or found is None, "tool_choice none is given a grammar")

    # ------------------------------------------------------------------------------------ parts

    def _samples(self) -> Sequence[Sample]:
        if not self.samples:
            does_not_apply("no `samples` are given")
        return self.samples

    def _bare(self, text: str) -> str:
        """Return a text without white space, special tokens and tags that consist of them, which clients need not
        see.
        """
        parser = self.make()
        tags = (*parser.special_tokens, *(parser.call_tags if parser.special_tokens else ()))
        for tag in sorted(tags, key=len, reverse=True):
            text = text.replace(tag, "")
        return squeezed(text)

    def _calls(self) -> Iterator[CallText]:
        """Yield the calls of the samples."""
        for sample in self._samples():
            yield from (part for part in sample if isinstance(part, CallText))

    def _verbatim(self) -> Iterator[tuple[CallText, str]]:
        """Yield calls whose arguments stand in their text exactly once, as the parser returns them, and these
        arguments.
        """
        if not self.json_arguments:
            does_not_apply("arguments are not JSON in this format")
        for part in self._calls():
            found = fold(self.make(), [part.text]).calls
            if len(found) == 1 and exchanged(part.text, found[0].arguments, "") is not None:
                yield part, found[0].arguments

    def _linear_inside(self, beginning: str) -> None:
        def make() -> ToolParser:
            parser = self.make()
            parser.feed(TextDelta(beginning))
            return parser

        linear(make, "word ")

    def _check_truncated(self, sample: Sample, folded: Fold, at: tuple[int, CallText, int], arguments: str) -> None:
        number, part, length = at
        seen = self._bare(part.text[:length])
        plain = squeezed("".join(_before(sample, number)))
        place = f"{shown(_text(sample))} that ends after {shown(part.text[:length])}"
        content = self._bare(folded.content)
        promise(content.startswith(plain), f"{place}: content is {shown(folded.content)}, not {shown(plain)} and more")
        released = content[len(plain) :]
        start = part.text.find(part.name)
        if len(folded.calls) <= number:
            owed = self._bare(part.text[start:length]) if 0 <= start < length else ""
            kept = seen.endswith(released) and len(released) >= len(owed)
            expected = f"{shown(owed)} at its end, or a call of {part.name!r}"
            promise(kept, f"{place} loses the beginning of a call: content is {shown(folded.content)}, not {expected}")
            return
        call = folded.calls[number]
        promise(call.name == part.name, f"{place} calls {call.name!r}, not {part.name!r}")
        came = f"{place} gives the arguments {shown(call.arguments)}"
        fine = arguments.startswith(call.arguments) or _ended(part.text, length, call.arguments, arguments)
        promise(fine, f"{came}, not the beginning of {shown(arguments)}")
        start = part.text.find(arguments)
        if start >= 0 and self.json_arguments:
            owed = arguments[: max(0, length - start)]
            promise(len(call.arguments) >= len(owed), f"{came}, not {shown(owed)}")


def _ended(text: str, length: int, came: str, whole: str) -> bool:
    """Return whether `came`, parsed from the first `length` characters of a call, ends its last value at a tag that
    also ends the call. The model may have left out the end of the value, or may have written about the format's own
    tags.
    """
    try:
        given, wanted = list(json.loads(came).items()), list(json.loads(whole).items())
    except (ValueError, AttributeError):
        return False
    if not given or given[:-1] != wanted[: len(given) - 1]:
        return False
    (name, value), (other, all_of_it) = given[-1], wanted[len(given) - 1]
    if name != other or not isinstance(value, str) or not isinstance(all_of_it, str):
        return False
    return all_of_it.startswith(tuple(value + tag for tag in re.findall(r"</[^<>]+>", text[length:])))


def _text(sample: Sample) -> str:
    return "".join(part if isinstance(part, str) else part.text for part in sample)


def _only_call(sample: Sample) -> Sequence[CallText]:
    """Return the call of an answer with one call; nothing for an answer with another number of calls."""
    calls = [part for part in sample if isinstance(part, CallText)]
    return calls if len(calls) == 1 else ()


def _truncations(sample: Sample) -> Iterator[tuple[str, int, CallText, int]]:
    """Yield (text before the call, its number, the call, characters of it that came) of each end inside a call."""
    before, number = "", 0
    for part in sample:
        if isinstance(part, CallText):
            for length in range(len(part.text)):
                yield before, number, part, length
            number += 1
        before += part if isinstance(part, str) else part.text


def _before(sample: Sample, number: int) -> Iterator[str]:
    """Yield the plain text before the call with this number."""
    for part in sample:
        if isinstance(part, str):
            yield part
        elif number == 0:
            return
        else:
            number -= 1


def _json(arguments: str, sample: Sample) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        promise(False, f"arguments {shown(arguments)} of {shown(_text(sample))} are not JSON")

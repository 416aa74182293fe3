"""The kits of both parsers: a good parser keeps every promise, and each planted fault breaks one."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from ferrule.forms import GrammarSpec
from ferrule.interfaces.parsers import (
    CallArguments,
    CallEnd,
    CallStart,
    ChoiceContext,
    Content,
    Event,
    Reasoning,
    ReasoningParser,
    TextDelta,
    ToolParser,
)
from ferrule_plugins.tool_parser.hermes import Hermes
from ferrule_testkit.kits import CallText, ReasoningParserKit, Thought, ToolParserKit
from ferrule_testkit.kits.run import FAILED, OK, SKIPPED, run_kit

SAMPLES = (
    ["Let me see. ", CallText('«now»{"zone": "CET"}»', "now", {"zone": "CET"}), " That is it."],
    [
        CallText('«add»{"a": 1, "b": 2.5}»', "add", {"a": 1, "b": 2.5}),
        " and ",
        CallText('«f»{"a": "{\\"x\\""}»', "f", {"a": '{"x"'}),
    ],
    ["« is not a call, nor is «f» or «f»no JSON» one."],
)


class Arrows(ToolParser):
    """An invented protocol: «name»{JSON}». A call is handed out when it is complete."""

    conformance: ClassVar[dict[str, Any]] = {"samples": SAMPLES}

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        super().__init__(tools)
        self.held = ""
        self.count = 0
        self.looked = 0  # characters of `held` that are known to hold no end

    def constraint(self, choice: str | dict[str, Any]) -> GrammarSpec | None:
        return None

    def feed(self, delta: TextDelta) -> Sequence[Event]:
        self.held += delta.text
        events: list[Event] = []
        while event := self.next():
            events += event
        return events

    def next(self) -> list[Event]:
        """Return the events of the beginning of `held`; none while its meaning is open."""
        if not self.held.startswith("«"):
            text = self.held.partition("«")[0]
            return self.drop(len(text), [Content(text)]) if text else []
        if not self.looked:
            head = re.match("«[a-z]*(»|$)", self.held)
            if head is None:
                return self.drop(1, [Content("«")])
            self.looked = head.end() if head[1] else 0
        end = self.held.find("»", self.looked) if self.looked else -1
        if end < 0:
            self.looked = len(self.held) if self.looked else 0
            return []
        name, _, arguments = self.held[1:end].partition("»")
        try:
            json.loads(arguments)
        except ValueError:
            return self.drop(1, [Content("«")])
        return self.drop(end + 1, self.call(name, arguments))

    def call(self, name: str, arguments: str) -> list[Event]:
        number, id = self.count, f"call-{secrets.token_hex(8)}"
        self.count += 1
        return [CallStart(number, id, name), CallArguments(number, arguments), CallEnd(number)]

    def drop(self, length: int, events: list[Event]) -> list[Event]:
        self.held, self.looked = self.held[length:], 0
        return events

    def finish(self) -> Sequence[Event]:
        events: list[Event] = []
        while self.held:
            events += self.drop(1, [Content(self.held[:1])])
            while event := self.next():
                events += event
        return events


class TestArrows(ToolParserKit):
    plugin = Arrows


class EachDeltaAlone(Arrows):
    def feed(self, delta: TextDelta) -> Sequence[Event]:
        return [*super().feed(delta), *super().finish()]


class TextBetweenIsDropped(Arrows):
    def drop(self, length: int, events: list[Event]) -> list[Event]:
        return super().drop(length, [e for e in events if not self.count or not isinstance(e, Content)])


class EndIsDropped(Arrows):
    def finish(self) -> Sequence[Event]:
        return []


class WhiteSpaceIsStripped(Arrows):
    def drop(self, length: int, events: list[Event]) -> list[Event]:
        return super().drop(length, [Content(e.text.strip()) if isinstance(e, Content) else e for e in events])


class StateOfTheClass(Arrows):
    state: ClassVar[dict[str, str]] = {}

    @property
    def held(self) -> str:
        return self.state["held"]

    @held.setter
    def held(self, text: str) -> None:
        self.state["held"] = text


class LooksFromTheBeginning(Arrows):
    def next(self) -> list[Event]:
        if self.held.startswith("«") and "»" in self.held:
            self.held.find("»")
        return super().next()


class KeepsAllAndSearchesAll(Arrows):
    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        super().__init__(tools)
        self.everything = ""

    def feed(self, delta: TextDelta) -> Sequence[Event]:
        self.everything += delta.text
        re.findall("«[a-z]*»", self.everything)
        return super().feed(delta)


class RaisesOnWrongJSON(Arrows):
    def drop(self, length: int, events: list[Event]) -> list[Event]:
        if events == [Content("«")]:
            raise ValueError("no call")
        return super().drop(length, events)


class OneIdForAll(Arrows):
    def call(self, name: str, arguments: str) -> list[Event]:
        start, *rest = super().call(name, arguments)
        return [CallStart(start.index, f"call_{start.index}", name), *rest]


class NeverEnds(Arrows):
    def call(self, name: str, arguments: str) -> list[Event]:
        return super().call(name, arguments)[:2]


class WaitsForTheEnd(Arrows):
    def feed(self, delta: TextDelta) -> Sequence[Event]:
        self.held += delta.text
        return []


class WritesToTheTools(Arrows):
    def feed(self, delta: TextDelta) -> Sequence[Event]:
        for tool in self.tools:
            tool["seen"] = True
        return super().feed(delta)


class ArgumentsAreCut(Hermes):
    conformance: ClassVar[dict[str, Any]] = {
        "samples": [
            [CallText('<tool_call>{"name": "now", "arguments": {"zone": "CET"}}</tool_call>', "now", {"zone": "CET"})]
        ]
    }

    def feed(self, delta: TextDelta) -> Sequence[Event]:
        events = super().feed(delta)
        if not self._out.open:
            return events
        return [CallArguments(0, "{") if isinstance(event, CallArguments) else event for event in events]


class BreaksOnBackslashes(Arrows):
    def call(self, name: str, arguments: str) -> list[Event]:
        return super().call(name, arguments.replace("\\\\", "\\"))


class BreaksOnQuotes(Arrows):
    """A parser that also reads what Python prints."""

    def call(self, name: str, arguments: str) -> list[Event]:
        return super().call(name, arguments.replace("'", '"'))


class WritesInfinity(Arrows):
    def call(self, name: str, arguments: str) -> list[Event]:
        return super().call(name, json.dumps(json.loads(arguments)))


class WritesLoneSurrogates(Arrows):
    def call(self, name: str, arguments: str) -> list[Event]:
        return super().call(name, re.sub("\\\\u[dD][89a-fA-F]..", lambda found: json.loads(f'"{found[0]}"'), arguments))


class RaisesOnSurrogates(Arrows):
    def call(self, name: str, arguments: str) -> list[Event]:
        json.dumps(json.loads(arguments), ensure_ascii=False).encode()
        return super().call(name, arguments)


class RaisesOnNaN(Arrows):
    def call(self, name: str, arguments: str) -> list[Event]:
        return super().call(name, json.dumps(json.loads(arguments), allow_nan=False))


class DropsNaN(Arrows):
    def drop(self, length: int, events: list[Event]) -> list[Event]:
        return super().drop(length, [] if "NaN" in self.held[:length] else events)


class AsksForAVocabulary(Arrows):
    def begin(self, context: ChoiceContext) -> None:
        if context.tokenizer is not None:
            self.vocabulary = context.tokenizer.get_vocab()  # type: ignore[attr-defined]


class KnowsNamesAsWritten(Hermes):
    def feed(self, delta: TextDelta) -> Sequence[Event]:
        events = super().feed(delta)
        return [
            CallStart(event.index, event.id, json.dumps(event.name)[1:-1]) if isinstance(event, CallStart) else event
            for event in events
        ]


TOOL_FAULTS = {
    EachDeltaAlone: "test_any_cut_gives_the_same",
    TextBetweenIsDropped: "test_text_around_calls_survives",
    EndIsDropped: "test_truncation_loses_nothing",
    WhiteSpaceIsStripped: "test_plain_text_passes_unchanged",
    StateOfTheClass: "test_requests_share_nothing",
    LooksFromTheBeginning: "test_work_is_linear",
    KeepsAllAndSearchesAll: "test_work_is_linear",
    RaisesOnWrongJSON: "test_truncation_never_raises_and_closes_every_call",
    OneIdForAll: "test_ids_of_calls_are_never_used_twice",
    NeverEnds: "test_calls_are_found",
    WaitsForTheEnd: "test_plain_text_is_not_held_back",
    WritesToTheTools: "test_the_tools_are_left_alone",
    BreaksOnBackslashes: "test_hostile_arguments",
    BreaksOnQuotes: "test_hostile_arguments",
    WritesInfinity: "test_hostile_arguments",
    WritesLoneSurrogates: "test_hostile_arguments",
    RaisesOnSurrogates: "test_hostile_arguments",
    RaisesOnNaN: "test_numbers_that_json_does_not_have",
    DropsNaN: "test_numbers_that_json_does_not_have",
    AsksForAVocabulary: "test_calls_are_found",
    KnowsNamesAsWritten: "test_escapes_in_names",
}


# ----------------------------------------------------------------------------------------- reasoning


class Musing(ReasoningParser):
    """A parser of reasoning that comes first and ends with /end/; without that, all is reasoning."""

    conformance: ClassVar[dict[str, Any]] = {
        "samples": (
            Thought("I should say yes. /end/Yes, a/b.", "I should say yes. ", "Yes, a/b."),
            Thought("Not / the /en end", "Not / the /en end", ""),
            Thought("/end/No.", "", "No."),
        )
    }

    def __init__(self) -> None:
        self.held = ""
        self.over = False

    def feed(self, delta: TextDelta) -> Sequence[Reasoning | Content]:
        if self.over:
            return [Content(delta.text)]
        self.held += delta.text
        thought, end, answer = self.held.partition("/end/")
        if end:
            self.over, self.held = True, ""
            return [Reasoning(thought), Content(answer)]
        keep = next((n for n in range(4, 0, -1) if thought.endswith("/end/"[:n])), 0)
        self.held = thought[len(thought) - keep :]
        return [Reasoning(thought[: len(thought) - keep])]

    def finish(self) -> Sequence[Reasoning | Content]:
        return [Reasoning(self.held)]


class TestMusing(ReasoningParserKit):
    plugin = Musing


class ThoughtsAreTheAnswer(Musing):
    def feed(self, delta: TextDelta) -> Sequence[Reasoning | Content]:
        return [Content(event.text) for event in super().feed(delta)]


class HalfAMarkIsDropped(Musing):
    def finish(self) -> Sequence[Reasoning | Content]:
        return []


class OnlyWholeMarks(Musing):
    def feed(self, delta: TextDelta) -> Sequence[Reasoning | Content]:
        events = super().feed(delta)
        return events if self.over else [*events, *self.finish_early()]

    def finish_early(self) -> Sequence[Reasoning | Content]:
        held, self.held = self.held, ""
        return [Reasoning(held)]


class OverForEveryone(Musing):
    finished: ClassVar[set[bool]] = set()

    def feed(self, delta: TextDelta) -> Sequence[Reasoning | Content]:
        events = super().feed(delta)
        if self.over:
            self.finished.add(True)
        elif self.finished:
            return [Content(event.text) for event in events]
        return events


class RereadsTheThought(Musing):
    def __init__(self) -> None:
        super().__init__()
        self.whole = ""

    def feed(self, delta: TextDelta) -> Sequence[Reasoning | Content]:
        self.whole += delta.text
        self.whole.count("/end/")
        return super().feed(delta)


class FallsOverABracket(Musing):
    def feed(self, delta: TextDelta) -> Sequence[Reasoning | Content]:
        if "{" in delta.text:
            raise SystemExit("a bracket")
        return super().feed(delta)


class AsksForTheIdOfATag(Musing):
    def begin(self, context: ChoiceContext) -> None:
        if context.tokenizer is not None:
            (self.end,) = context.tokenizer.encode("/end/", add_special_tokens=False)


REASONING_FAULTS = {
    ThoughtsAreTheAnswer: "test_thoughts_and_answer_are_parted",
    HalfAMarkIsDropped: "test_truncation_loses_nothing",
    OnlyWholeMarks: "test_any_cut_gives_the_same",
    OverForEveryone: "test_requests_share_nothing",
    RereadsTheThought: "test_work_is_linear",
    FallsOverABracket: "test_truncation_never_raises",
    AsksForTheIdOfATag: "test_thoughts_and_answer_are_parted",
}


@pytest.mark.parametrize(
    ("kit", "fault", "broken"),
    [(ToolParserKit, *row) for row in TOOL_FAULTS.items()]
    + [(ReasoningParserKit, *row) for row in REASONING_FAULTS.items()],
)
def test_a_planted_fault_is_caught(kit: type, fault: type, broken: str) -> None:
    (outcome,) = run_kit(kit, fault, only=broken)
    assert outcome.result == FAILED
    assert outcome.reason


@pytest.mark.parametrize(
    ("kit", "fault", "promise", "said"),
    [
        (
            ToolParserKit,
            EndIsDropped,
            "test_truncation_loses_nothing",
            "content is 'Let me see. ', not 'n' at its end, or a call of 'now'",
        ),
        (ToolParserKit, ArgumentsAreCut, "test_truncation_loses_nothing", """arguments '{', not '{"'"""),
        (
            ToolParserKit,
            TextBetweenIsDropped,
            "test_text_around_calls_survives",
            "is 'Let me see. ', not 'Let me see. ",
        ),
        (ReasoningParserKit, HalfAMarkIsDropped, "test_truncation_loses_nothing", "gives '"),
    ],
)
def test_a_failure_says_what_was_expected_and_what_came(kit: type, fault: type, promise: str, said: str) -> None:
    (outcome,) = run_kit(kit, fault, only=promise)
    assert said in outcome.reason
    assert ", not '" in outcome.reason


def test_without_samples_what_holds_for_any_text_is_still_proved() -> None:
    class Bare(Arrows):
        conformance: ClassVar[dict[str, Any]] = {}

    results = {outcome.name: outcome.result for outcome in run_kit(ToolParserKit, Bare)}
    assert results["test_calls_are_found"] == SKIPPED
    assert set(results.values()) == {OK, SKIPPED}


def test_a_setting_that_a_kit_does_not_have_is_named() -> None:
    class Misspelt(Arrows):
        conformance: ClassVar[dict[str, Any]] = {"sampels": SAMPLES}

    assert {outcome.reason for outcome in run_kit(ToolParserKit, Misspelt)} == {
        f"conformance of {Misspelt.__qualname__} has no setting 'sampels'"
    }


def test_a_subclass_has_the_last_word_on_a_setting() -> None:
    class Kit(ToolParserKit):
        plugin = Arrows
        samples = SAMPLES[:1]

    kit = Kit()
    kit.setup_method()
    assert kit.samples == SAMPLES[:1]

"""Thoughts, a format or calls, streamed or whole: every combination, for every family of reasoning parsers.

The table of docs/reasoning.md says what comes of each. What a model writes is given here token by token: the constraint
must allow it, and the parsers must read what was meant.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import pytest

from ferrule.assembly.vocabulary import read_vocabulary, special_ids
from ferrule.errors import RequestError
from ferrule.forms import GrammarSpec, Json
from ferrule.frontend.output.parse import ParseChain, Parsers
from ferrule.frontend.output.reading import OutputReader
from ferrule.frontend.text.detokenize import decode
from ferrule.interfaces.guided_decoding import Grammar
from ferrule.interfaces.parsers import CallArguments, CallStart, ChoiceContext, Content, Event, Reasoning
from ferrule.interfaces.service import ChatPrompt, Generate
from ferrule.runner.thoughts import ThoughtCounter
from ferrule.sampling_params import Beam, SamplingParams
from ferrule.types import ThoughtLimit
from ferrule_plugins.guided_decoding.guidance import Guidance
from ferrule_plugins.tool_parser.hermes import Hermes
from ferrule_plugins.tool_parser.openai import OpenAIToolParser
from ferrule_testkit.tokenizers import ByteTokenizer

SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
FUNCTION: dict[str, Any] = {"name": "weather", "parameters": SCHEMA, "strict": True}
TOOLS: tuple[dict[str, Any], ...] = ({"type": "function", "function": FUNCTION},)
NAMED = {"type": "function", "function": {"name": "weather"}}
CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")
ASKED = ("nothing", "schema", "auto", "required", "named")
THOUGHT = "Is {it} 1?"
PARSERS = {entry.name: entry for entry in entry_points(group="ferrule.v1.reasoning_parser")}


@dataclass(frozen=True)
class Family:
    """A model's way of writing: `think` around its reasoning, `say` around its answer, `call` for a call of weather."""

    parser: str
    think: str = "<think>\n{}\n</think>\n\n"
    say: str = "{}"
    call: str = '<tool_call>\n{{"name": "weather", "arguments": {}}}\n</tool_call>'
    special: tuple[str, ...] = ()
    on: dict[str, Any] = field(default_factory=dict)  # how the prompt of a request that thinks ends
    off: dict[str, Any] | None = field(default_factory=dict)  # None: the model always thinks
    tools: Any = Hermes
    kept: str | None = None  # thoughts stay in the content, behind this


OPENED, CLOSED = {"prompt": "<assistant><think>\n"}, {"prompt": "<assistant><think>\n\n</think>\n\n"}
INSIDE = "{}\n</think>\n\n"
FAMILIES = (
    Family("qwen3", off=CLOSED),
    Family("glm45", off={"prompt": "<|assistant|>\n<think></think>\n"}),
    Family("kimi_k2", special=("<|tool_calls_section_begin|>",)),
    Family("deepseek_r1", INSIDE, on=OPENED, off=None),
    Family("deepseek_v3", INSIDE, on={**OPENED, "template_kwargs": {"thinking": True}}),
    Family("minimax_m2", INSIDE, on=OPENED, off=None),
    Family("minimax_m2_append_think", INSIDE, on=OPENED, off=None, kept="<think>\n"),
    Family("olmo3", INSIDE, on=OPENED, off=None),
    Family("step3", INSIDE, on=OPENED, off=None),
    Family("granite", "Here is my thought process:\n{}\n\nHere is my response:\n"),
    Family("granite", "Here's my thought process:\n{}\n\nHere's my response:\n"),
    Family("mistral", "[THINK]{}[/THINK]", special=("[THINK]", "[/THINK]")),
    Family("hunyuan_a13b", "<think>\n{}\n</think>\n", say="<answer>\n{}\n</answer>", off=CLOSED),
    Family("hunyuan_a13b", "<think>\n{}\n</think>\n", off={"prompt": "<think>\n\n</think>\n<answer>\n"}),
    Family("ernie45", INSIDE, say="<response>\n{}\n</response>\n", on=OPENED, off=None),
    Family("ernie45", INSIDE, on=OPENED, off=CLOSED),
    Family("seed_oss", "<seed:think>{}</seed:think>", special=("<seed:think>", "</seed:think>")),
    Family("gemma4", "<|channel>thought\n{}\n<channel|>", special=("<|channel>", "<channel|>")),
    Family(
        "openai_gptoss",
        "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        say="<|channel|>final<|message|>{}",
        call="<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{}",
        special=CHANNELS,
        tools=OpenAIToolParser,
    ),
    Family("none"),
)
THINKING = tuple(family for family in FAMILIES if family.parser != "none")
CASES = [(family, True) for family in THINKING] + [(family, False) for family in FAMILIES if family.off is not None]
IDS = [f"{number}-{family.parser}-{'thoughts' if on else 'none'}" for number, (family, on) in enumerate(CASES)]


class Case:
    """One family with thoughts or without, and what is asked of it."""

    def __init__(self, family: Family, thinks: bool, asked: str = "nothing", budget: int | None = None) -> None:
        self.family, self.thinks, self.asked = family, thinks, asked
        self.tokenizer, self.backend = tools_of(family.special)
        choice = {"required": "required", "named": NAMED, "auto": "auto"}.get(asked)
        self.tools = TOOLS if choice else ()
        ends = (family.on if thinks else family.off) or {}
        self.context = ChoiceContext(tools=self.tools, tool_choice=choice, tokenizer=self.tokenizer, **ends)
        self.parsers = Parsers(PARSERS[family.parser].load(), family.tools)
        self.reader = OutputReader(self.parsers, self.tokenizer)
        self.request = Generate(
            prompts=(ChatPrompt(messages=()),),
            params=SamplingParams(thinking_token_budget=budget),
            grammar=GrammarSpec(form=Json(SCHEMA)) if asked == "schema" else None,
            tools=self.tools or None,
            tool_choice=choice,
        )

    @property
    def chain(self) -> ParseChain:
        return ParseChain(self.parsers, self.tools or None, self.context)

    def grammar(self) -> Grammar | None:
        spec, _ = self.reader.constraint(self.request, self.chain, self.context)
        return None if spec is None else self.backend.load(self.backend.compile(spec))

    def limit(self) -> ThoughtLimit | None:
        return self.reader.thought_limit(self.request, self.chain)

    def answer(self, value: str = '{"a": 1}') -> str:
        """Return the model's text after its reasoning, with `value` as JSON or as arguments."""
        family = self.family
        called = family.call.format(value)
        if family.tools is Hermes and not (family.off or {}).get("prompt", "").endswith("<answer>\n"):
            called = family.say.format(called)
        return called if self.tools else family.say.format(value)

    def text(self, value: str = '{"a": 1}') -> str:
        return (self.family.think.format(THOUGHT) if self.thinks else "") + self.answer(value)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def read(self, ids: Sequence[int], size: int) -> tuple[str, str, list[tuple[str, Any]]]:
        """Return reasoning, content and calls of an output that comes in deltas of `size` tokens."""
        chain = self.chain
        events: list[Event] = []
        for at in range(0, len(ids), size):
            part = ids[at : at + size]
            shown = decode(self.tokenizer, part, kept=special_ids(self.tokenizer, chain.special_tokens))
            events += chain.feed(shown, tuple(part))
        events += chain.finish()
        calls: list[list[str]] = []
        for event in events:
            if isinstance(event, CallStart):
                calls.append([event.name, ""])
            elif isinstance(event, CallArguments):
                calls[-1][1] += event.fragment
        texts = ["".join(event.text for event in events if isinstance(event, kind)) for kind in (Reasoning, Content)]
        return texts[0], texts[1], [(name, json.loads(arguments)) for name, arguments in calls]

    def meant(self, thought: str = THOUGHT) -> tuple[str, str, list[tuple[str, Any]]]:
        """Return the reasoning, content and calls that `read` should find."""
        content = "" if self.tools else '{"a": 1}'
        calls = [("weather", {"a": 1})] if self.tools else []
        if self.family.kept is not None:
            return "", (self.family.kept + self.family.think.format(thought) + content).rstrip(), calls
        return thought if self.thinks else "", content, calls


@cache
def tools_of(special: tuple[str, ...]) -> tuple[ByteTokenizer, Guidance]:
    kind = type("Special", (ByteTokenizer,), {"names": ("<s>", "</s>", *special)})
    tokenizer = kind()
    written = special_ids(tokenizer, special)
    return tokenizer, Guidance(read_vocabulary(tokenizer, tokenizer.vocab_size, (257,), written))


def follows(grammar: Grammar | None, ids: Sequence[int]) -> bool:
    """Return whether a whole output has the form; True without a grammar."""
    if grammar is None:
        return True
    mask = np.zeros(-(-512 // 32), np.int32)
    if not grammar.accept(ids):
        return False
    grammar.fill(mask[:9])
    return bool(mask[257 // 32] >> 257 % 32 & 1)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(("family", "thinks"), CASES, ids=IDS)
def test_what_is_allowed_is_read_as_it_was_meant(family: Family, thinks: bool, asked: str) -> None:
    """Read outputs whole, and in streams."""
    case = Case(family, thinks, asked)
    ids = case.ids(case.text())
    assert follows(case.grammar(), ids)
    for size in (1, 5, 10_000):
        assert case.read(ids, size) == case.meant(), size


@pytest.mark.parametrize("asked", ["schema", "required", "named"])
@pytest.mark.parametrize(("family", "thinks"), CASES, ids=IDS)
def test_a_constraint_holds_behind_the_thoughts_and_only_there(family: Family, thinks: bool, asked: str) -> None:
    case = Case(family, thinks, asked)
    cut = case.text()[:-2] if asked == "schema" else case.text() + "x"
    for wrong in (case.text('{"a": 2}'), case.text("Hello."), cut):
        assert not follows(case.grammar(), case.ids(wrong))
    if not thinks and family.off and family.parser != "none":  # thoughts are over and do not begin again
        ids = case.ids(family.think.format(THOUGHT) + case.answer())
        assert not follows(case.grammar(), ids)


# ------------------------------------------------------------------------------------------- budgets


def limited(case: Case, limit: ThoughtLimit, thought: str) -> list[int]:
    """Return the output of a model that would think `thought` and then answer."""
    before, behind = case.family.think.format("\0").split("\0")
    counter = ThoughtCounter(limit, lambda id: case.tokenizer.piece(id, False) or b"")
    written: list[int] = []
    for token in case.ids(before + thought):
        if counter.forced is not None:
            break
        counter.accept([token])
        written.append(token)
    while (forced := counter.forced) is not None:
        counter.accept([forced])
        written.append(forced)
    ended = case.tokenizer.decode(written, skip_special_tokens=False)
    answer = case.answer()
    if ended.endswith("<|channel|>final<|message|>"):
        answer = answer.removeprefix("<|channel|>final<|message|>")
    return written + case.ids(answer if counter._over or limit.again else behind + answer)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("family", THINKING, ids=lambda family: family.parser)
def test_a_budget_ends_the_thoughts_and_the_answer_follows(family: Family, asked: str) -> None:
    case = Case(family, True, asked, budget=9)
    limit = case.limit()
    assert limit is not None
    ids = limited(case, limit, "x" * 50)
    assert follows(case.grammar(), ids)
    thought, content, calls = case.read(ids, 1)
    breaks = family.think.split("{}")[0].count("\n")  # a line break behind the tag is a token of the thoughts
    if family.kept is None:
        assert thought == "x" * (9 - breaks)
        assert (content, calls) == case.meant()[1:]
    else:
        assert content.startswith("<think>\nxxxxxxxxx</think>")
        assert calls == case.meant()[2]


@pytest.mark.parametrize("family", [family for family in THINKING if family.off], ids=lambda family: family.parser)
def test_where_thoughts_are_off_there_is_nothing_to_limit(family: Family) -> None:
    assert Case(family, False, budget=9).limit() is None


@pytest.mark.parametrize("budget", [None, -1])
def test_no_budget_is_no_limit(budget: int | None) -> None:
    assert Case(FAMILIES[0], True, budget=budget).limit() is None


def test_a_budget_that_cannot_be_kept_is_refused() -> None:
    case = Case(FAMILIES[0], True, budget=9)
    with pytest.raises(RequestError, match="--reasoning-parser"):
        case.reader.thought_limit(case.request, ParseChain(Parsers()))
    with pytest.raises(RequestError, match="does not support"):
        Case(FAMILIES[-1], False, budget=9).limit()
    searched = Generate(prompts=case.request.prompts, params=case.request.params, beam=Beam(width=2))
    with pytest.raises(RequestError, match="beam search"):
        case.reader.thought_limit(searched, case.chain)

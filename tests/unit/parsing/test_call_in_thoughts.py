"""A call inside thoughts that were not closed ends them, for every pair of parsers, and so does its constraint."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from msgspec.structs import replace

from ferrule.frontend.output.parse import ParseChain, Parsers
from ferrule.interfaces.guided_decoding import GrammarBackend, Vocabulary
from ferrule.interfaces.parsers import CallStart, ChoiceContext, Content, Reasoning
from ferrule.plugin import discover
from ferrule_parsing import FormatParser, ThinkingParser
from ferrule_plugins.guided_decoding.guidance import Guidance
from ferrule_plugins.guided_decoding.xgrammar import XGrammar
from ferrule_testkit.kits.cuts import cuts
from ferrule_testkit.kits.guided_texts import allowed
from ferrule_testkit.kits.parsers import Fold, fold
from ferrule_testkit.kits.tool_parser import CallText, ToolParserKit

PLUGINS = discover()
REASONING = {
    name: PLUGINS.load("reasoning_parser", name)
    for name in PLUGINS.names("reasoning_parser")
    if issubclass(PLUGINS.load("reasoning_parser", name), ThinkingParser) and name != "minimax_m2_append_think"
}
TOOLS = tuple(ToolParserKit.tools)
CALLERS = {
    name: PLUGINS.load("tool_parser", name)
    for name in PLUGINS.names("tool_parser")
    if issubclass(PLUGINS.load("tool_parser", name), FormatParser) and PLUGINS.load("tool_parser", name)([]).call_tags
}


class Chain:
    """A `ParseChain` that is fed as a parser is."""

    def __init__(self, reasoning: str, tools: str, **context: Any) -> None:
        parsers = Parsers(REASONING[reasoning], CALLERS[tools])
        self._chain = ParseChain(parsers, TOOLS, ChoiceContext(tools=TOOLS, **context))
        self.finish = self._chain.finish

    def feed(self, delta: Any) -> Any:
        return self._chain.feed(delta.text, delta.token_ids)


def opened(reasoning: str) -> tuple[str, str]:
    kind = REASONING[reasoning]
    tags = [tag if isinstance(tag, str) else tag[0] for tag in (kind.open_tag, kind.close_tag)]
    return tags[0], tags[1]


def context(reasoning: str) -> dict[str, Any]:
    """Return the context of a choice that thinks."""
    return {"prompt": opened(reasoning)[0]}


def read(reasoning: str, tools: str, text: str) -> Fold:
    """Parse a text in every cut, with the same result."""
    whole = fold(Chain(reasoning, tools, **context(reasoning)), [text])
    for pieces in cuts(text):
        assert fold(Chain(reasoning, tools, **context(reasoning)), pieces).answer() == whole.answer(), pieces
    return whole


def sample(tools: str) -> CallText:
    """Return a call as the model writes it, with its opening tag."""
    module, _, constant = CALLERS[tools].conformance.partition(":")
    samples = getattr(import_module(module), constant)["samples"]
    tags = CALLERS[tools]([]).call_tags
    alone = [part for one in samples if len(one) == 1 for part in one if isinstance(part, CallText)]
    found = next((part for part in alone if part.text.startswith(tags)), None)
    return found or CallText(tags[0] + alone[0].text, alone[0].name, alone[0].arguments)


PAIRS = [
    *(("qwen3", name) for name in CALLERS),
    *((name, "hermes") for name in REASONING),
    *((name, name) for name in REASONING if name in CALLERS),
    ("gemma4", "gemma4"),
    ("minimax_m2", "minimax_m2"),
    ("kimi_k2", "kimi_k2"),
]


@pytest.mark.parametrize(("reasoning", "tools"), sorted(set(PAIRS)))
def test_a_call_ends_thoughts_that_were_not_closed(reasoning: str, tools: str) -> None:
    call = sample(tools)
    close = opened(reasoning)[1]
    for behind, content in (("", ""), ("\nDone.", "Done."), (f"\n{close}\n\nDone.", "Done.")):
        found = fold(Chain(reasoning, tools, **context(reasoning)), list(f"I look.\n\n{call.text}{behind}"))
        assert (found.reasoning, found.content.strip()) == ("I look.", content)
        assert [one.name for one in found.calls] == [call.name]


@pytest.mark.parametrize(
    ("text", "thoughts", "content", "calls"),
    [
        (
            '<think>I look.\n\n<tool_call>{"name":"get_weather","arguments":{"city":"R"}}</tool_call>',
            "I look.",
            "",
            ["get_weather"],
        ),
        # a word about the tag is none
        ("<think>\nI use <tool_call> now.\n</think>\n\nYes.", "I use <tool_call> now.", "Yes.", []),
        ("<think>A <tool_call>\n\n<tool_call>[]</think>b", "A <tool_call>\n\n<tool_call>[]", "b", []),
        ('<think>A <tool_call> or\n<tool_call>{"name": "now"}', "A <tool_call> or", "", ["now"]),
        ("<think>A <tool_call", "A <tool_call", "", []),
        # what closes the thoughts may come behind the call, and is not in its arguments
        ('<think>A<tool_call>{"name": "now"}</tool_call></think>b', "A", "b", ["now"]),
        ('<think>A</think><tool_call>{"name": "now"}</tool_call></think>b', "A", "b", ["now"]),
        ("<think>A</think>b</think>", "A", "b</think>", []),
    ],
)
def test_what_ends_thoughts(text: str, thoughts: str, content: str, calls: list[str]) -> None:
    found = read("qwen3", "hermes", text)
    assert (found.reasoning, found.content, [one.name for one in found.calls]) == (thoughts, content, calls)


def test_arguments_may_hold_what_closes_thoughts() -> None:
    found = read("minimax_m2", "minimax_m2", _INVOKE.format("a</think>b") + "</think>c</think>")
    assert (found.content, found.calls[0].arguments) == ("c", '{"a": "a</think>b"}')


_INVOKE = '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">{}</parameter>\n</invoke>\n</minimax:tool_call>'


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_words_about_calls_take_linear_time(step: int) -> None:
    text = '<tool_call>{"x": [' * 2000
    found = fold(Chain("qwen3", "hermes", prompt="<think>"), [text[at : at + step] for at in range(0, len(text), step)])
    assert len(found.text) == len(text)


# ------------------------------------------------------------------------------------------- constraints

BYTES = Vocabulary((*(bytes([byte]) for byte in range(256)), b""), 257, (256,))
STOP = 256


@pytest.fixture(scope="module", params=[Guidance, XGrammar])
def backend(request: pytest.FixtureRequest) -> GrammarBackend:
    made: GrammarBackend = request.param(BYTES)
    return made


def goes(backend: GrammarBackend, reasoning: str, tools: str, text: str, choice: str = "required") -> bool:
    """Return whether the whole text is allowed where calls are enforced after unclosed reasoning."""
    told = ChoiceContext(tools=TOOLS, tool_choice=choice, **context(reasoning))
    chain = ParseChain(Parsers(REASONING[reasoning], CALLERS[tools]), TOOLS, told)
    assert chain.constraint is not None
    assert chain.reasoning is not None
    form = chain.reasoning.constrain(chain.constraint.form)
    grammar = backend.load(backend.compile(replace(chain.constraint, form=form)))
    return all(grammar.accept([byte]) for byte in text.encode()) and bool(allowed(grammar, BYTES)[STOP])


@pytest.mark.parametrize(
    ("reasoning", "tools", "call", "junk"),
    [
        (
            "kimi_k2",
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
            '{"a": "x"}<|tool_call_end|><|tool_calls_section_end|>',
            "<|tool_call_begin|>",
        ),
        ("qwen3", "hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>', "<tool_call> x"),
        (
            "glm45",
            "glm45",
            "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
            "<tool_call>g",
        ),
        ("gemma4", "gemma4", '<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>', "<|tool_call>x"),
    ],
)
def test_the_grammar_ends_thoughts_where_the_parser_does(
    backend: GrammarBackend, reasoning: str, tools: str, call: str, junk: str
) -> None:
    close = opened(reasoning)[1]
    assert goes(backend, reasoning, tools, f"Hm.\n{call}")
    assert goes(backend, reasoning, tools, f"Hm.{close}\n{call}")
    assert not goes(backend, reasoning, tools, f"Hm.{junk}{close}\n{call}")
    assert not goes(backend, reasoning, tools, f"Hm.{call}{close}")
    found = read(reasoning, tools, f"Hm.\n{call}")
    assert (found.reasoning, found.content, [(one.name, one.arguments) for one in found.calls]) == (
        "Hm.",
        "",
        [("f", '{"a": "x"}')],
    )


def test_a_limit_of_thoughts_knows_the_tags_of_calls() -> None:
    told = ChoiceContext(tools=TOOLS, prompt="<think>")
    chain = ParseChain(Parsers(REASONING["qwen3"], CALLERS["hermes"]), TOOLS, told)
    assert chain.reasoning is not None
    tags = chain.reasoning.thoughts()
    assert tags is not None
    assert tags.closes == ("</think>", "<tool_call>")


def test_without_tools_a_tag_is_a_part_of_the_thoughts() -> None:
    chain = ParseChain(Parsers(REASONING["qwen3"], CALLERS["hermes"]), None, ChoiceContext(prompt="<think>"))
    events = [*chain.feed('a<tool_call>{"name": "f"}</think>b'), *chain.finish()]
    assert events == [Reasoning('a<tool_call>{"name": "f"}'), Content("b")]
    assert not any(isinstance(event, CallStart) for event in events)

"""What a request's format, tools and thoughts make of the output: the constraint, and the parser that reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ferrule.errors import RequestError
from ferrule.forms import GrammarSpec, Json, OneOf, Regex
from ferrule.frontend.guided.calls import CallList
from ferrule.frontend.output.parse import ParseChain, Parsers
from ferrule.frontend.output.reading import OutputReader
from ferrule.interfaces.guided_decoding import GrammarBackend, Vocabulary
from ferrule.interfaces.parsers import CallArguments, CallStart, ChoiceContext, Content, Event, Reasoning, TextDelta
from ferrule.interfaces.service import ChatPrompt, Generate, Prompt
from ferrule.plugin import discover
from ferrule.sampling_params import SamplingParams
from ferrule.structured_outputs import GuidedDecodingParams
from ferrule.structured_outputs.calls import enforced
from ferrule_plugins.guided_decoding.guidance import Guidance
from ferrule_plugins.reasoning_parser.openai_gptoss import OpenAIGptOss
from ferrule_plugins.reasoning_parser.tagged import DeepSeekR1, Qwen3
from ferrule_plugins.tool_parser.hermes import Hermes
from ferrule_plugins.tool_parser.json_objects import Llama3Json
from ferrule_plugins.tool_parser.parameters import Qwen3Coder
from ferrule_testkit.kits.count import work

WORDS = Vocabulary((*(bytes([byte]) for byte in range(256)), b""), 257, (256,))
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = (
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": 'say "hi"', "parameters": {}}},
)
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def backend() -> Guidance:
    return Guidance(WORDS)


def fits(backend: GrammarBackend, spec: GrammarSpec | None, text: str) -> bool:
    """Return whether a whole text has the form."""
    assert spec is not None
    grammar = backend.load(backend.compile(spec))
    if not grammar.accept(list(text.encode())):
        return False
    mask = np.zeros(WORDS.words, np.int32)
    grammar.fill(mask)
    return bool(mask[256 // 32] & 1)


def demanded(parsers: Parsers, request: Generate, context: ChoiceContext) -> GrammarSpec | None:
    chain = ParseChain(parsers, None if request.raw else request.tools, context)
    return OutputReader(parsers, context.tokenizer).constraint(request, chain, context)[0]


def context(choice: str | dict[str, Any], **more: Any) -> ChoiceContext:
    return ChoiceContext(tools=TOOLS, tool_choice=choice, **more)


def read(chain: ParseChain, text: str, size: int) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return reasoning, content and calls of a text that comes in cuts of `size`."""
    events: list[Event] = []
    for at in range(0, len(text), size):
        events += chain.feed(text[at : at + size])
    events += chain.finish()
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, CallStart):
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[-1][1] += event.fragment
    thoughts = "".join(event.text for event in events if isinstance(event, Reasoning))
    content = "".join(event.text for event in events if isinstance(event, Content))
    return thoughts, content, [(name, json.loads(arguments)) for name, arguments in calls]


HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "a}\\"]"}}\n</tool_call>'
HERMES_HI = '<tool_call>\n{"name": "say \\"hi\\"", "arguments": {}}\n</tool_call>'
LISTED = '{"name": "weather", "parameters": {"city": "a}\\"]"}}'
LISTED_HI = '{"name": "say \\"hi\\"", "parameters": {}}'
ONE = [("weather", {"city": 'a}"]'})]
BOTH = [*ONE, ('say "hi"', {})]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("parser", "choice", "text", "calls"),
    [
        (Hermes, "required", HERMES_CALL, ONE),
        (Hermes, "required", f"{HERMES_CALL}\n{HERMES_HI}", BOTH),
        (Hermes, NAMED, HERMES_CALL, ONE),
        (None, "required", f"[{LISTED}]", ONE),
        (None, "required", f"[{LISTED}, {LISTED_HI}]", BOTH),
        (None, NAMED, '{"city": "a}\\"]"}', ONE),
    ],
)
def test_what_is_enforced_is_what_the_parser_reads(
    backend: Guidance, parser: Any, choice: Any, text: str, calls: Sequence[Any], size: int
) -> None:
    chain = ParseChain(Parsers(tools=parser), TOOLS, context(choice))
    assert fits(backend, chain.constraint, text)
    assert read(chain, text, size) == ("", "", calls)


def listed_work(size: int) -> int:
    """Return the work of reading calls of functions with a long name, one character at a time."""
    text = "[" + ", ".join([f'{{"name": "{"n{" * size}", "parameters": {{"a": []}}}}'] * 2) + "]"
    parser = CallList(TOOLS)
    parser.begin(context("required"))
    events: list[Event] = []

    def read_all() -> None:
        for letter in text:
            events.extend(parser.feed(TextDelta(letter)))

    done = work(read_all)
    assert [event.name for event in events if isinstance(event, CallStart)] == ["n{" * size] * 2
    return done


def test_the_work_for_a_long_name_is_linear() -> None:
    assert listed_work(4_000) < 3 * listed_work(2_000)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "text", ["[[[1]]]", '[{"name": "\\x", "parameters": {}}]', "[{{}}]", '[{"name": [{}]}]', "}}]{"]
)
def test_text_that_is_no_list_of_calls_has_none(text: str, size: int) -> None:
    chain = ParseChain(Parsers(), TOOLS, context("required"))
    assert read(chain, text, size) == ("", "", [])


ARRAY = {"type": "array", "items": {"$ref": "#/$defs/item"}, "$defs": {"item": {"type": "integer"}}}
EITHER = {
    "type": ["array", "object"],
    "properties": {"a": {"$ref": "#/$defs/item"}, "b": {"$ref": "#/properties/a"}},
    "required": ["a"],
    "$defs": {"item": {"type": "integer"}},
}


@pytest.mark.parametrize("parser", [Hermes, None])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_arguments_are_objects_whatever_types_a_schema_has(backend: Guidance, parser: Any, choice: Any) -> None:
    tools = ({"type": "function", "function": {"name": "weather", "parameters": EITHER}},)
    spec = ParseChain(Parsers(tools=parser), tools, ChoiceContext(tools=tools, tool_choice=choice)).constraint

    def call(arguments: str) -> str:
        if parser is not None:
            return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
        return arguments if choice == NAMED else f'[{{"name": "weather", "parameters": {arguments}}}]'

    assert fits(backend, spec, call('{"a": 1, "b": 2}'))
    assert [text for text in ("[1]", "[]", "{}", '{"a": 1, "b": "x"}') if fits(backend, spec, call(text))] == []


def test_a_schema_without_objects_fits_nothing(backend: Guidance) -> None:
    tools = ({"type": "function", "function": {"name": "weather", "parameters": ARRAY}},)
    (function,) = enforced(tools, "required")
    schema = {"type": "object", "allOf": [{"type": "array", "items": ARRAY["items"]}], "$defs": ARRAY["$defs"]}
    assert function.schema == schema
    with pytest.raises(ValueError, match="Unsatisfiable"):
        backend.compile(GrammarSpec(form=Json(function.schema)))


@pytest.mark.parametrize("parser", [Hermes, None])
def test_nothing_else_fits_an_enforced_call(backend: Guidance, parser: Any) -> None:
    spec = ParseChain(Parsers(tools=parser), TOOLS, context("required")).constraint
    single = ParseChain(Parsers(tools=parser), TOOLS, context("required", parallel_tool_calls=False)).constraint
    both = f"[{LISTED}, {LISTED_HI}]" if parser is None else f"{HERMES_CALL}\n{HERMES_HI}"
    assert fits(backend, spec, both)
    assert not fits(backend, single, both)
    for text in ("Hello", "", "[]", HERMES_CALL.replace("weather", "wether"), LISTED.replace("city", "town")):
        assert not fits(backend, spec, text)


def test_strict_functions_fit_their_schema_also_when_the_model_chooses(backend: Guidance) -> None:
    assert (Hermes(TOOLS).constraint("auto"), Hermes(TOOLS).constraint("none")) == (None, None)
    strict = ({"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1])
    spec = Hermes(strict).constraint("auto")
    assert fits(backend, spec, "Just text.")
    assert fits(backend, spec, f"Let me see. {HERMES_CALL} and {HERMES_HI}")
    assert not fits(backend, spec, f"Let me see. {HERMES_CALL.replace('city', 'town')}")
    assert fits(backend, spec, HERMES_HI.replace("{}", '{"any": 1}'))


@pytest.mark.parametrize(
    ("parser", "prompt", "fitting", "failing"),
    [
        (DeepSeekR1, "", 'Well {"a": 2}\n</think>\n\n{"a": 1}', '{"a": 1}'),
        (Qwen3, "", '<think>\nHm {</think>\n\n{"a": 1}', '<think>{"a": 1}'),
        (Qwen3, "", '{"a": 1}', 'Hm </think>{"a": 1}'),
        (Qwen3, "<think>\n\n</think>\n\n", '{"a": 1}', '<think></think>{"a": 1}'),
        (Qwen3, "<think>\n", 'Hm\n</think>\n\n{"a": 1}', '{"a": 1}'),
    ],
)
def test_a_format_begins_where_the_thoughts_end(
    backend: Guidance, parser: Any, prompt: str, fitting: str, failing: str
) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    reasoning = parser()
    reasoning.begin(ChoiceContext(prompt=prompt))
    spec = GrammarSpec(form=reasoning.constrain(Json(schema)))
    assert fits(backend, spec, fitting)
    assert not fits(backend, spec, failing)
    chain = ParseChain(Parsers(parser), None, ChoiceContext(prompt=prompt))
    assert read(chain, fitting, 2)[1] == '{"a": 1}'


@pytest.mark.parametrize("raw", [False, True])
def test_a_constraint_of_the_sampling_parameters_is_the_request_s(raw: bool) -> None:
    """Use the constraint that offline callers state there; a request's own, which routes state, comes first."""
    params = SamplingParams(guided_decoding=GuidedDecodingParams(regex="a"))
    for grammar, form in ((None, Regex("a")), (GrammarSpec(form=Regex("b")), Regex("b"))):
        request = Generate(prompts=(Prompt(text="x"),), params=params, grammar=grammar, raw=raw)
        spec = demanded(Parsers(), request, ChoiceContext())
        assert spec is not None
        assert spec.form == form


@pytest.mark.parametrize(
    ("parser", "prompt", "fitting", "failing"),
    [
        (Qwen3, "Answer:", "yes", "<think>no</think>yes"),
        (DeepSeekR1, "Answer:", "yes", "no</think>yes"),
        (Qwen3, "<think>\n", "no</think>yes", "yes"),
        (Qwen3, "<think>\n\n</think>\n\n", "yes", "<think>no</think>yes"),
        (OpenAIGptOss, "Answer:", "yes", "<|channel|>final<|message|>yes"),
    ],
)
def test_without_a_template_the_constraint_holds_from_the_first_token(
    backend: Guidance, parser: Any, prompt: str, fitting: str, failing: str
) -> None:
    request = Generate(
        prompts=(Prompt(text=prompt),), params=SamplingParams(), grammar=GrammarSpec(form=Regex("yes")), raw=True
    )
    told = ChoiceContext(prompt=prompt, templated=False)
    spec = demanded(Parsers(parser), request, told)
    assert fits(backend, spec, fitting)
    assert not fits(backend, spec, failing)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("parser", "refused"), [(Qwen3Coder, True), (Hermes, False)])
def test_a_strict_function_that_cannot_be_enforced_is_named(parser: Any, strict: bool, refused: bool) -> None:
    mixed = {"type": "object", "properties": {"a": {"type": ["string", "object"]}}}
    tools = (
        {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}},
        {"type": "function", "function": {"name": "mixed", "parameters": mixed, "strict": strict}},
    )
    request = Generate(prompts=(ChatPrompt(messages=()),), params=SamplingParams(), tools=tools, tool_choice="auto")
    told = ChoiceContext(tools=tools, tool_choice="auto")
    if refused and strict:
        with pytest.raises(RequestError, match="function 'mixed' cannot be enforced") as caught:
            demanded(Parsers(tools=parser), request, told)
        assert caught.value.param == "tools[1].function"
    else:
        assert demanded(Parsers(tools=parser), request, told) is not None


OPEN = {"type": "object"}
NAME = {**OPEN, "properties": {"name": {"type": "string"}, "x": {"type": "integer"}}, "additionalProperties": False}
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Rome"}}'


@pytest.mark.parametrize("name", ["guidance", "xgrammar", "outlines"])
@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        (CITY, ('{"city": "Rome"}', '{"city":"Rome"}')),
        ({**CITY, "additionalProperties": False}, ('{"city": "Rome"}', '{"city":"Rome"}')),
        (NAME, ('{"name": "Rome"}', '{"name": "weather", "x": 1}', '{"name":"weather"}', '{"x": 1}', "{}")),
        (OPEN, ('{"a": 1}', '{"name": "weather", "parameters": 1}', '{"name":"weather"}', "{}")),
    ],
)
def test_a_format_and_calls_that_begin_alike_are_both_in_reach(
    name: str, schema: dict[str, Any], texts: Sequence[str]
) -> None:
    backend = discover().make("guided_decoding", name, WORDS)
    calls = Llama3Json(TOOLS[:1]).constraint("required")
    assert calls is not None
    spec = GrammarSpec(form=OneOf((Json(schema), calls.form)))
    if backend.refuses(spec) is None:
        for text in (*texts, LLAMA_CALL, f"{LLAMA_CALL}; {LLAMA_CALL}"):
            assert fits(backend, spec, text), text
        assert not fits(backend, spec, f"{LLAMA_CALL}; {texts[0]}")

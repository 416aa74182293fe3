"""What the service and the chat route do with tools and parsers, without a model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from ferrule.api.app import build_app
from ferrule.api.lifecycle import Lifecycle
from ferrule.config import Config, FrontendConfig, ModelConfig
from ferrule.config.resolve import resolve
from ferrule.errors import ConfigError
from ferrule.forms import GrammarSpec
from ferrule.frontend.output.parse import join_events
from ferrule.frontend.service import FrontendService, build_service
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
from ferrule.interfaces.service import ChatPrompt, Generate, Output, Prompt, Service
from ferrule.plugin import Plugins, discover
from ferrule.sampling_params import SamplingParams
from ferrule.types import EngineRequest, FinishReason, RequestDelta, TokenLogprobs
from ferrule_plugins.reasoning_parser.tagged import DeepSeekR1, Qwen3
from ferrule_plugins.tool_parser.hermes import Hermes
from ferrule_testkit.service import ScriptedService
from ferrule_testkit.tokenizers import ByteTokenizers
from tests.fakes.engine import FakeEngine, Script, says, tokens
from tests.fakes.frontend import fold

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SAYS = 'Hm.</think>\n\nSo: <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "({{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if closed %}<think></think>{% endif %}{% endif %}"
)


class Seeing(ReasoningParser):
    """A parser that keeps the context of its beginning."""

    wants_special_tokens = True
    told: list[ChoiceContext]

    def begin(self, context: ChoiceContext) -> None:
        self.told.append(context)

    def feed(self, delta: TextDelta) -> Sequence[Reasoning | Content]:
        return [Content(delta.text)]

    def finish(self) -> Sequence[Reasoning | Content]:
        return []


class Dumping(ToolParser):
    """The whole text is a call, whose arguments are written anew, as Python writes them."""

    def constraint(self, choice: str | dict[str, Any]) -> GrammarSpec | None:
        return None

    def feed(self, delta: TextDelta) -> Sequence[Event]:
        self.text = getattr(self, "text", "") + delta.text
        return []

    def finish(self) -> Sequence[Event]:
        call = json.loads(self.text)
        return [CallStart(0, "id", call["name"]), CallArguments(0, json.dumps(call["arguments"])), CallEnd(0)]


class ParserPlugins(Plugins):
    def __init__(self, seeing: type[Seeing]) -> None:
        super().__init__()
        self._kinds: dict[str, dict[str, Any]] = {
            "tokenizer": {"auto": ByteTokenizers},
            "tool_parser": {"hermes": Hermes, "dumping": Dumping},
            "reasoning_parser": {"deepseek_r1": DeepSeekR1, "qwen3": Qwen3, "seeing": seeing},
        }

    def names(self, kind: str) -> tuple[str, ...]:
        return tuple(self._kinds.get(kind, ()))

    def load(self, kind: str, name: str) -> Any:
        return self._kinds[kind][name]

    def origin(self, kind: str, name: str) -> str:
        return "test"


class ServiceHarness:
    def __init__(self, service: FrontendService, engine: FakeEngine, told: list[ChoiceContext]) -> None:
        self.service, self.engine, self.told = service, engine, told

    async def answer(self, prompt: ChatPrompt | Prompt, **fields: Any) -> Output:
        params = SamplingParams(max_tokens=100)
        request = Generate(**{"prompts": (prompt,), "params": params, "tools": (TOOL,), **fields})
        return fold([output async for output in (await self.service.admit(request)).outputs()])[0]

    @property
    def prompt(self) -> str:
        return bytes(self.engine.requests[-1].prompt_ids).decode()


@asynccontextmanager
async def serving(folder: Path, says_text: str = SAYS, **frontend: Any) -> AsyncIterator[ServiceHarness]:
    (folder / "config.json").write_text(json.dumps({"architectures": ["FakeForCausalLM"], "eos_token_id": 1}))
    seeing = type("SeeingHere", (Seeing,), {"told": []})
    parsers = {"chat_template": TEMPLATE, "tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"}
    config = resolve(Config(model=ModelConfig(model=str(folder)), frontend=FrontendConfig(**{**parsers, **frontend})))
    engine = FakeEngine(says(list(says_text.encode())))
    service = build_service(config, ParserPlugins(seeing), engine)
    try:
        yield ServiceHarness(service, engine, seeing.told)
    finally:
        await service.close()


def chat(content: str = "x", **fields: Any) -> ChatPrompt:
    return ChatPrompt(messages=({"role": "user", "content": content},), tools=(TOOL,), **fields)


# ------------------------------------------------------------------------------------------- service


async def test_thoughts_text_and_calls_are_parted(tmp_path: Path) -> None:
    async with serving(tmp_path) as harness:
        answer = await harness.answer(chat())
        assert (answer.reasoning, answer.text) == ("Hm.", "So:")
        assert [(call.name, call.arguments) for call in answer.calls] == [("f", '{"a": 1}')]
        assert harness.prompt == "[f]<user>x<assistant>"


def test_what_no_answer_can_hold_is_replaced() -> None:
    """Replace lone surrogates, which a parser may make of a model's JSON escapes; a pair in two halves is one
    character.
    """
    events = [Content("a\ud83d"), Content("\ude00b"), CallStart(0, "i\udc00", "n\ud800"), CallArguments(0, '"\udfff"')]
    assert join_events([*events, Reasoning("\ud800")]) == (
        Content("a\U0001f600b"),
        CallStart(0, "i\ufffd", "n\ufffd"),
        CallArguments(0, '"\ufffd"'),
        Reasoning("\ufffd"),
    )


async def test_tool_choice_none_reads_no_calls(tmp_path: Path) -> None:
    async with serving(tmp_path) as harness:
        answer = await harness.answer(chat(), tool_choice="none")
        assert (answer.reasoning, answer.text) == ("Hm.", SAYS.partition("\n\n")[2])
        assert harness.prompt.startswith("[f]")
        assert (await harness.answer(chat(), tools=None)).text == answer.text


async def test_raw_text_is_as_the_model_wrote_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as harness:
        answer = await harness.answer(Prompt(text="x"), raw=True)
        assert (answer.text, answer.reasoning, answer.calls) == (SAYS, "", ())


async def test_the_prompt_says_that_thinking_is_over(tmp_path: Path) -> None:
    async with serving(tmp_path, "a</think>") as harness:
        answer = await harness.answer(chat(chat_template_kwargs={"closed": True}))
        assert (answer.text, answer.reasoning) == ("a</think>", "")
        ids = tuple(b"<assistant><think></think>")
        answer = await harness.answer(Prompt(ids=(120,) * 40 + ids))
        assert (answer.text, answer.reasoning) == ("a</think>", "")


async def test_a_continued_thought_goes_on(tmp_path: Path) -> None:
    async with serving(tmp_path, "b</think>c", reasoning_parser="qwen3") as harness:
        messages = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>a"})
        go_on = ChatPrompt(messages=messages, continue_final_message=True, add_generation_prompt=False)
        answer = await harness.answer(go_on)
        assert (answer.reasoning, answer.text) == ("b", "c")


async def test_what_a_parser_is_told(tmp_path: Path) -> None:
    async with serving(tmp_path, reasoning_parser="seeing") as harness:
        await harness.answer(chat(chat_template_kwargs={"closed": True}), tool_choice="auto", streamed=False)
        (context,) = harness.told
        assert (context.prompt, bytes(context.prompt_ids).decode()) == (harness.prompt, harness.prompt)
        assert (context.tools, context.tool_choice, context.continued) == ((TOOL,), "auto", "")
        assert (context.template_kwargs, context.streamed) == ({"closed": True}, False)
        assert context.tokenizer is harness.service.tokenizer
        await harness.answer(Prompt(text="x"), raw=True)
        assert len(harness.told) == 1


@pytest.mark.parametrize(("parser", "text"), [("seeing", "a<bos>b"), ("qwen3", "ab")])
async def test_special_tokens_stay_for_a_parser_that_wants_them(tmp_path: Path, parser: str, text: str) -> None:
    async with serving(tmp_path, reasoning_parser=parser) as harness:
        special = next(iter(sorted(harness.service.tokenizer.all_special_ids)))  # type: ignore[union-attr]
        harness.engine.script = says([97, special, 98])
        shown = text.replace("<bos>", harness.service.token_text(special))
        assert (await harness.answer(chat())).text == shown


async def test_calls_and_results_of_the_history_reach_the_template(tmp_path: Path) -> None:
    async with serving(tmp_path) as harness:
        call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
        messages: tuple[dict[str, Any], ...] = (
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "r"},
        )
        await harness.answer(ChatPrompt(messages=messages))
        assert harness.prompt == '<user>q<assistant>(call_1 f {"a": [1]})<tool>r<assistant>'


def in_deltas(ids: Sequence[int], size: int) -> Script:
    """Return a script whose deltas have so many tokens."""

    def script(request: EngineRequest) -> Iterator[RequestDelta]:
        ones = list(tokens(request, ids, FinishReason.STOP))
        for at in range(0, len(ones), size):
            some = ones[at : at + size]
            logprobs = tuple(entry for one in some for entry in one.logprobs)
            yield replace(some[-1], token_ids=tuple(one.token_ids[0] for one in some), logprobs=logprobs)

    return script


WHOLE = "<think>Hm. é</think>\n\né<b>: <tool_call>{}</tool_call>"


@pytest.mark.parametrize("size", [1, 7, 100])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (WHOLE, WHOLE.partition("\n\n")[2]),
        ("<b>Yes", "<b>Yes"),
        ("<think>Hm.", ""),
        ("<think>Hm.</think>", ""),
    ],
)
@pytest.mark.parametrize("held", [(), ("No, never",)])
async def test_tokens_of_thoughts_that_are_left_out(
    tmp_path: Path, size: int, text: str, shown: str, held: tuple[str, ...]
) -> None:
    """Return ids and logprobs of the answer alone, whatever the deltas, and also where text waits for a stop string."""
    async with serving(tmp_path, reasoning_parser="qwen3", enable_auto_tool_choice=True) as harness:
        ids = list(text.encode())
        harness.engine.script = in_deltas(ids, size)
        params = SamplingParams(max_tokens=100, logprobs=1, stop=list(held))
        for wanted, kept in ((True, text), (False, shown)):
            request = Generate(prompts=(chat(),), params=params, thought_tokens=wanted)
            (answer,) = (await (await harness.service.admit(request)).answer()).choices
            assert bytes(answer.token_ids).decode() == kept
            assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)
            assert list(answer.token_offsets) == sorted(answer.token_offsets)
            assert answer.usage.completion_tokens == len(ids)
            assert answer.usage.reasoning_tokens == len(ids) - len(shown.encode())


async def test_the_best_answers_are_the_same_where_thoughts_are_left_out(tmp_path: Path) -> None:
    """Rank answers by all of their tokens: the second one has the better logprobs, in its reasoning."""
    async with serving(tmp_path, reasoning_parser="qwen3") as harness:

        def script(request: EngineRequest) -> Iterator[RequestDelta]:
            best = request.work.seed % 2 == 1
            for delta in tokens(request, b"<think>a</think>" + (b"x" if best else b"y"), FinishReason.STOP):
                logprobs = tuple(TokenLogprobs(one.token_id, -0.1 if best else -0.5, 1) for one in delta.logprobs)
                yield replace(delta, logprobs=logprobs)

        harness.engine.script = script
        params = SamplingParams(max_tokens=100, n=1, best_of=2, seed=0)
        request = Generate(prompts=(chat(),), params=params, thought_tokens=False)
        (answer,) = (await (await harness.service.admit(request)).answer()).choices
        assert (answer.text, bytes(answer.token_ids)) == ("x", b"x")


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_without_reasoning_are_those_of_the_answer(tmp_path: Path, stream: bool) -> None:
    flags = {"reasoning_parser": "qwen3"}
    async with serving(tmp_path, "<think>Hm.</think>\n\nYes.", **flags) as harness:
        asked = {"messages": CHAT["messages"], "logprobs": True, "return_token_ids": True, "stream": stream}
        for reasoning, shown in ((True, "<think>Hm.</think>\n\nYes."), (False, "Yes.")):
            body = {**asked, "include_reasoning": reasoning, "max_tokens": 100}
            response = await posted(harness.service, body, "chat/completions", **flags)
            lines = response.text.splitlines() if stream else [response.text]
            found = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
            choices = [one for answer in found for one in answer["choices"]]
            entries = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())]
            assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == shown
            assert [id for choice in choices for id in choice.get("token_ids", ())] == list(shown.encode())
            told = [choice.get("delta") or choice.get("message") or {} for choice in choices]
            assert "".join(one.get("content") or "" for one in told) == "Yes."


# ------------------------------------------------------------------------------------------- route


async def post(body: dict[str, Any], route: str = "chat/completions", **frontend: Any) -> tuple[httpx.Response, Any]:
    service = ScriptedService()
    response = await posted(service, body, route, **frontend)
    return response, service.requests[-1] if service.requests else None


async def posted(service: Service, body: dict[str, Any], route: str, **frontend: Any) -> httpx.Response:
    lifecycle = Lifecycle()
    config = resolve(Config(frontend=FrontendConfig(**{"routers": ("openai",)} | frontend)))
    app = build_app(config, discover(), lifecycle)
    lifecycle.ready(service)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
        return await http.post(f"/v1/{route}", json=body)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_parser_writes_never_breaks_the_response(tmp_path: Path, stream: bool) -> None:
    """Send strict JSON: numbers that JSON does not have are in the text of the arguments only."""
    says_text = r'{"name": "f\ud800", "arguments": {"a": 1e999, "b": NaN, "c": "\udc00\"\\"}}'
    flags = {"enable_auto_tool_choice": True, "tool_call_parser": "dumping"}
    async with serving(tmp_path, says_text, reasoning_parser="", **flags) as harness:
        response = await posted(
            harness.service, {**CHAT, "stream": stream, "max_tokens": 100}, "chat/completions", **flags
        )
    assert response.status_code == 200
    if stream:
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        deltas = [msgspec.json.decode(event)["choices"][0]["delta"] for event in events]
        found = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
        arguments = "".join(function.get("arguments") or "" for function in found)
    else:
        (call,) = msgspec.json.decode(response.content)["choices"][0]["message"]["tool_calls"]
        found, arguments = [call["function"]], call["function"]["arguments"]
    assert found[0]["name"] == "f\ufffd"
    assert arguments == r'{"a": Infinity, "b": NaN, "c": "\udc00\"\\"}'


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}, {"tool_choice": None}])
async def test_auto_needs_its_flag(choice: dict[str, Any]) -> None:
    response, seen = await post(CHAT | choice)
    assert (response.status_code, response.json()["error"]["param"], seen) == (400, "tool_choice", None)
    assert "--enable-auto-tool-choice" in response.json()["error"]["message"]
    response, seen = await post(CHAT | choice, enable_auto_tool_choice=True, tool_call_parser="hermes")
    assert response.status_code == 200
    assert (seen.tools, seen.prompts[0].tools, seen.raw, seen.streamed) == ((TOOL,), (TOOL,), False, False)


@pytest.mark.parametrize("exclude", [True, False])
async def test_none_shows_the_tools_unless_told_otherwise(exclude: bool) -> None:
    body = CHAT | {"tool_choice": "none", "stream": True}
    _, seen = await post(body, exclude_tools_when_tool_choice_none=exclude)
    assert seen.prompts[0].tools == (None if exclude else (TOOL,))
    assert (seen.tool_choice, seen.streamed) == ("none", True)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize("options", [{}, {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}])
async def test_enforcing_needs_no_options(choice: Any, options: dict[str, Any]) -> None:
    _, seen = await post(CHAT | {"tool_choice": choice, "parallel_tool_calls": False}, **options)
    assert (seen.tool_choice, seen.parallel_tool_calls) == (choice, False)


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "function", "function": {"name": "g"}}, "tool_choice"),
        ("always", "tool_choice"),
        ({}, "tool_choice.type"),
    ],
)
async def test_a_choice_that_is_not_there_is_refused(choice: Any, param: str) -> None:
    response, _ = await post(CHAT | {"tool_choice": choice}, enable_auto_tool_choice=True, tool_call_parser="hermes")
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_completions_are_raw() -> None:
    _, seen = await post({"prompt": "x"}, "completions")
    assert seen.raw


def test_auto_tool_choice_needs_a_parser() -> None:
    with pytest.raises(ConfigError, match="--enable-auto-tool-choice needs --tool-call-parser"):
        resolve(Config(frontend=FrontendConfig(enable_auto_tool_choice=True)))
    both = FrontendConfig(enable_auto_tool_choice=True, tool_call_parser="hermes")
    assert resolve(Config(frontend=both)).frontend == both

"""Stop strings end the answer, and thoughts only where the request says so: in every cut, with calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ferrule.errors import RequestError
from ferrule.frontend.service import FrontendService
from ferrule.interfaces.service import ChatPrompt, Generate, Output, Prompt
from ferrule.sampling_params import Beam, SamplingParams
from ferrule.types import EngineRequest, FinishReason, RequestDelta
from ferrule_plugins.reasoning_parser.openai_gptoss import OpenAIGptOss
from ferrule_plugins.reasoning_parser.tagged import DeepSeekR1, Qwen3
from ferrule_plugins.tool_parser.hermes import Hermes
from tests.fakes.engine import FakeEngine, Script, tokens
from tests.fakes.frontend import FakePlugins, fold, model_folder, serving

CHAT = ChatPrompt(messages=({"role": "user", "content": "Hi"},))
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
THOUGHTS = "<think>Well, END. Or EN</think>\n\nD it is"
HARMONY = (
    "<|channel|>analysis<|message|>END<|end|><|start|>assistant<|channel|>commentary<|message|>First. <|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>END<|end|>"
    "<|start|>assistant<|channel|>final<|message|>The END. "
)


def in_deltas(text: str, size: int) -> Script:
    """Return a script in which a byte is a token, and `size` tokens come together."""

    def script(request: EngineRequest) -> Iterator[RequestDelta]:
        single = list(tokens(request, text.encode(), FinishReason.LENGTH))
        for first in range(0, len(single), size):
            some = single[first : first + size]
            yield replace(
                some[-1],
                token_ids=tuple(one.token_ids[0] for one in some),
                logprobs=tuple(entry for one in some for entry in one.logprobs),
            )

    return script


@asynccontextmanager
async def thinking(
    folder: Path, engine: FakeEngine, parser: type = Qwen3, tool_parser: bool = False
) -> AsyncIterator[FrontendService]:
    plugins = FakePlugins(
        tokenizer=FakePlugins().kinds["tokenizer"], reasoning_parser={"r": parser}, tool_parser={"h": Hermes}
    )
    flags = {"enable_auto_tool_choice": True, "tool_call_parser": "h"} if tool_parser else {}
    async with serving(model_folder(folder), engine, plugins, frontend={"reasoning_parser": "r", **flags}) as service:
        yield service


async def ask(service: FrontendService, stop: str | list[str], prompt: Any = CHAT, **asked: Any) -> list[Output]:
    params = SamplingParams(
        stop=stop, max_tokens=230, n=asked.pop("n", 1), **asked.pop("params", {}), skip_special_tokens=False
    )
    found: list[Output] = [
        output async for output in (await service.admit(Generate(prompts=(prompt,), params=params, **asked))).outputs()
    ]
    return fold(found)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("include", [False, True])
async def test_they_apply_to_the_answer(tmp_path: Path, size: int, streamed: bool, include: bool) -> None:
    """Ignore a match that begins in the reasoning and ends after it. Tokens are counted up to the match."""
    engine = FakeEngine(in_deltas(f"{THOUGHTS}. END of it.", size))
    params = {"include_stop_str_in_output": include, "logprobs": 0}
    async with thinking(tmp_path, engine) as service:
        for answer in await ask(service, ["END", "zzz"], n=2, streamed=streamed, params=params):
            assert answer.reasoning == "Well, END. Or EN"
            assert answer.text == "D it is. END" if include else "D it is. "
            assert (answer.finish, answer.stop_reason) == (FinishReason.STOP, "END")
            count = len(f"{THOUGHTS}. END")
            assert answer.usage.completion_tokens == len(answer.token_ids) == len(answer.logprobs) == count
            assert answer.usage.reasoning_tokens == len("<think>Well, END. Or EN</think>\n\n")


@pytest.mark.parametrize("size", [1, 4, 1000])
async def test_a_request_may_have_them_in_thoughts(tmp_path: Path, size: int) -> None:
    async with thinking(tmp_path, FakeEngine(in_deltas(THOUGHTS, size))) as service:
        (answer,) = await ask(service, "END", stop_in_reasoning=True)
    assert (answer.reasoning, answer.text, answer.stop_reason) == ("Well, ", "", "END")
    assert answer.usage.completion_tokens == len("<think>Well, END")


@pytest.mark.parametrize("size", [1, 5, 1000])
async def test_without_a_match_nothing_is_lost(tmp_path: Path, size: int) -> None:
    """Send at the end what might have become a stop string."""
    async with thinking(tmp_path, FakeEngine(in_deltas(f"{THOUGHTS} EN", size))) as service:
        (answer,) = await ask(service, "END")
    assert (answer.text, answer.finish, answer.stop_reason) == ("D it is EN", FinishReason.LENGTH, None)


@pytest.mark.parametrize("size", [1, 6, 1000])
async def test_thoughts_that_begin_again(tmp_path: Path, size: int) -> None:
    async with thinking(tmp_path, FakeEngine(in_deltas(HARMONY, size)), OpenAIGptOss) as service:
        (answer,) = await ask(service, "END")
    assert (answer.reasoning, answer.text, answer.stop_reason) == ("ENDEND", "First. The ", "END")


@pytest.mark.parametrize("size", [1, 6, 1000])
async def test_calls_are_part_of_the_answer(tmp_path: Path, size: int) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "xENDy"}}\n</tool_call>'
    engine = FakeEngine(in_deltas(f"<think>END</think>\n\n{call}", size))
    async with thinking(tmp_path, engine, tool_parser=True) as service:
        (cut,) = await ask(service, "END", tools=(TOOL,))
        (whole,) = await ask(service, "</tool_call>", tools=(TOOL,))
    assert (cut.stop_reason, cut.reasoning, len(cut.calls)) == ("END", "END", 1)
    assert cut.calls[0].arguments.startswith('{"a": "x')
    assert "END" not in cut.calls[0].arguments
    assert (whole.stop_reason, whole.calls[0].arguments) == ("</tool_call>", '{"a": "xENDy"}')


async def test_no_end_before_min_tokens(tmp_path: Path) -> None:
    text = "Hm.</think>END, the END."
    async with thinking(tmp_path, FakeEngine(in_deltas(text, 3)), DeepSeekR1) as service:
        (answer,) = await ask(service, "END", params={"min_tokens": len("Hm.</think>END")})
    assert (answer.reasoning, answer.text, answer.stop_reason) == ("Hm.", "END, the ", "END")


async def test_stop_tokens_end_thoughts(tmp_path: Path) -> None:
    engine = FakeEngine(lambda request: tokens(request, b"<think>ab!cd"))
    async with thinking(tmp_path, engine) as service:
        (answer,) = await ask(service, "END", params={"stop_token_ids": [ord("!")]})
    assert (answer.reasoning, answer.finish, answer.stop_reason) == ("ab", FinishReason.STOP, ord("!"))


async def test_what_is_raw_has_no_thoughts(tmp_path: Path) -> None:
    """Treat all that the model wrote as the answer, in completions."""
    async with thinking(tmp_path, FakeEngine(in_deltas(THOUGHTS, 2))) as service:
        (answer,) = await ask(service, "END", Prompt(text="Hi"), raw=True)
    assert (answer.text, answer.stop_reason) == ("<think>Well, ", "END")


async def test_a_beam_search_must_say_so(tmp_path: Path) -> None:
    async with thinking(tmp_path, FakeEngine()) as service:
        with pytest.raises(RequestError, match="stop_in_reasoning") as caught:
            await ask(service, "END", beam=Beam(width=2), params={"temperature": 0, "top_k": -1})
    assert caught.value.param == "stop"

"""Parser files as people write them for vLLM: deriving from a parser of its own, reading partial JSON, or Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from ferrule.errors import RequestFailed
from ferrule.frontend.output.parse import Parsers
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule_testkit.tokenizers import ByteTokenizer
from tests.unit.plugins.compat_vllm.reading import Characters, answer, calls, plugins_of

DERIVED_OLD = """
import regex as re

from vllm.entrypoints.openai.tool_parsers import ToolParserManager
from vllm.entrypoints.openai.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
from vllm.transformers_utils.tokenizer import AnyTokenizer, MistralTokenizer


@ToolParserManager.register_module("shouting")
class Shouting(Hermes2ProToolParser):
    def __init__(self, tokenizer: AnyTokenizer):
        super().__init__(tokenizer)
        assert not isinstance(tokenizer, MistralTokenizer)
        self.tool_call_start_token = "<CALL>"
        self.tool_call_end_token = "</CALL>"
        self.tool_call_regex = re.compile("<CALL>(.*?)</CALL>")
"""

DERIVED_NEW = """
import vllm.envs as envs
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.tokenizers import TokenizerLike
from vllm.tool_parsers.abstract_tool_parser import Tool, ToolParserManager
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser


class Quiet(Hermes2ProToolParser):
    def __init__(self, tokenizer: TokenizerLike, tools: list[Tool] | None = None):
        super().__init__(tokenizer, tools)
        self.timeout = envs.VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS
        self.known = {tool.function.name for tool in self.tools}

    def extract_tool_calls_streaming(self, previous_text, current_text, delta_text, *rest) -> DeltaMessage | None:
        message = super().extract_tool_calls_streaming(previous_text, current_text, delta_text, *rest)
        for call in message.tool_calls if message is not None else ():
            assert call.function.name is None or call.function.name in self.known
        assert [call["arguments"] for call in self.prev_tool_call_arr] == self.streamed_args_for_tool
        return message


ToolParserManager.register_module(name="quiet", module=Quiet)
"""

# One object after a mark; what has come of it is completed and compared with what came before.
PARTIAL = """
import json
from typing import Sequence, Union

import partial_json_parser
from partial_json_parser.core.options import Allow
from vllm.entrypoints.chat_utils import random_tool_call_id
from vllm.entrypoints.openai.protocol import (ChatCompletionRequest, DeltaFunctionCall, DeltaMessage, DeltaToolCall,
                                              ExtractedToolCallInformation, FunctionCall, ToolCall)
from vllm.entrypoints.openai.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager
from vllm.entrypoints.openai.tool_parsers.utils import (consume_space, find_common_prefix, is_complete_json,
                                                        partial_json_loads)
from vllm.logger import init_logger
from vllm.utils import is_list_of

logger = init_logger(__name__)


@ToolParserManager.register_module("bang")
class Bang(ToolParser):
    def extract_tool_calls(self, model_output: str, request: ChatCompletionRequest) -> ExtractedToolCallInformation:
        text, _, rest = model_output.partition("!")
        if not rest:
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        call, _ = partial_json_loads(rest[consume_space(0, rest):], Allow.ALL)
        function = FunctionCall(name=call["name"], arguments=json.dumps(call["arguments"], ensure_ascii=False))
        calls = [ToolCall(type="function", function=function)]
        assert is_list_of(calls, ToolCall)
        return ExtractedToolCallInformation(tools_called=True, tool_calls=calls, content=text or None)

    def extract_tool_calls_streaming(self, previous_text: str, current_text: str, delta_text: str,
                                     previous_token_ids: Sequence[int], current_token_ids: Sequence[int],
                                     delta_token_ids: Sequence[int],
                                     request: ChatCompletionRequest) -> Union[DeltaMessage, None]:
        text, mark, rest = current_text.partition("!")
        if not mark:
            return DeltaMessage(content=delta_text)
        raw = rest[consume_space(0, rest):]
        try:
            call = partial_json_parser.loads(raw, Allow.ALL if "arguments" in raw else Allow.ALL & ~Allow.STR)
        except partial_json_parser.core.exceptions.MalformedJSON:
            logger.debug("not enough text")
            return None
        if "name" not in call:
            return None
        if not self.current_tool_name_sent:
            self.current_tool_name_sent = True
            self.streamed_args_for_tool.append("")
            self.prev_tool_call_arr.append(call)
            return DeltaMessage(tool_calls=[DeltaToolCall(index=0, type="function", id=random_tool_call_id(),
                                function=DeltaFunctionCall(name=call["name"]).model_dump(exclude_none=True))])
        self.prev_tool_call_arr[0] = call
        now = json.dumps(call.get("arguments"), ensure_ascii=False) if call.get("arguments") else ""
        if not is_complete_json(raw):
            now = find_common_prefix(now, now.rstrip('"}]'))
        new = now[len(self.streamed_args_for_tool[0]):]
        self.streamed_args_for_tool[0] += new
        call = DeltaToolCall(index=0, function=DeltaFunctionCall(arguments=new))
        return DeltaMessage(tool_calls=[call]) if new else None
"""

# Calls as a Python list.
PYTHONIC = """
import ast

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.engine.protocol import DeltaMessage, ExtractedToolCallInformation
from vllm.tool_parsers.abstract_tool_parser import Tool, ToolParser, ToolParserManager
from vllm.tool_parsers.utils import UnexpectedAstError, compute_tool_delta, handle_single_tool, make_valid_python


@ToolParserManager.register_module("listed")
class Listed(ToolParser):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        assert [tool.function.name for tool in self.tools] == ["add"]

    def extract_tool_calls(self, model_output, request):
        body = ast.parse(model_output, mode="eval").body
        return ExtractedToolCallInformation(tools_called=True, tool_calls=[handle_single_tool(e) for e in body.elts])

    def extract_tool_calls_streaming(self, previous_text, current_text, delta_text, previous_token_ids,
                                     current_token_ids, delta_token_ids, request: ChatCompletionRequest):
        try:
            valid = make_valid_python(current_text)
        except UnexpectedAstError:
            return DeltaMessage(content=delta_text)
        if valid is None:
            return None
        calls = [handle_single_tool(e) for e in ast.parse(valid[0], mode="eval").body.elts if isinstance(e, ast.Call)]
        deltas = []
        for index, call in enumerate(calls):
            if index == len(self.streamed_args_for_tool):
                self.streamed_args_for_tool.append("")
            withheld = valid[1][:-2].replace("'", '"') + "}" if index == len(calls) - 1 and len(valid[1]) > 1 else ""
            delta = compute_tool_delta(self.streamed_args_for_tool[index], call, index, withheld)
            if delta is not None:
                self.streamed_args_for_tool[index] += delta.function.arguments
                deltas.append(delta)
        return DeltaMessage(tool_calls=deltas) if deltas else None
"""

# vLLM 0.6.0: no request is given, and the first delta of a call is a class of its own.
WITHOUT_REQUEST = """
from vllm.entrypoints.openai.protocol import (DeltaMessage, ExtractedToolCallInformation, FunctionCall,
                                              InitialDeltaToolCall, ToolCall)
from vllm.entrypoints.openai.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager


@ToolParserManager.register_module("first")
class First(ToolParser):
    def extract_tool_calls(self, model_output: str) -> ExtractedToolCallInformation:
        call = ToolCall(type="function", function=FunctionCall(name="add", arguments=model_output))
        return ExtractedToolCallInformation(tools_called=True, tool_calls=[call])

    def extract_tool_calls_streaming(self, previous_text, current_text, delta_text, previous_token_ids,
                                     current_token_ids, delta_token_ids):
        function = {"arguments": delta_text} if previous_text else {"name": "add", "arguments": delta_text}
        return DeltaMessage(tool_calls=[InitialDeltaToolCall(index=0, function=function)])
"""

THINKING = """
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.{name}_reasoning_parser import {base}


@ReasoningParserManager.register_module("mine")
class Mine({base}):
    def extract_reasoning(self, model_output, request):
        reasoning, content = super().extract_reasoning(model_output, request)
        return reasoning, content and content.lstrip()
"""


class Thinking(Characters):
    """A tokenizer in which `{` and `}` are the tokens of thinking."""

    def token(self, token_id: int) -> str | None:
        return {1: "<think>", 2: "</think>"}.get(token_id) or super().token(token_id)


@pytest.mark.parametrize(
    ("name", "text", "tag"), [("shouting", DERIVED_OLD, "CALL"), ("quiet", DERIVED_NEW, "tool_call")]
)
@pytest.mark.parametrize(("streamed", "size"), [(True, 1), (True, 7), (True, 1000), (False, 5)])
def test_deriving_from_hermes(tmp_path: Path, name: str, text: str, tag: str, streamed: bool, size: int) -> None:
    parser = plugins_of(tmp_path, "tool_parser", name, text).load("tool_parser", name)
    one = f'<{tag}>{{"name": "add", "arguments": {{"a": "</{tag}>"}}}}</{tag}>'
    found = answer(Parsers(tools=parser), f"Sums: {one}\n{one} and <", size, streamed=streamed)
    assert calls(found) == [("add", {"a": f"</{tag}>"})] * 2
    assert found.text == "Sums: and <"
    assert len({call.id for call in found.calls}) == 2
    broken = answer(Parsers(tools=parser), f'<{tag}>{{"name": "add", "arguments": {{"a": 1', size, streamed=streamed)
    assert [(call.name, call.arguments) for call in broken.calls] == [("add", '{"a": 1')]


@pytest.mark.parametrize(("streamed", "size"), [(True, 1), (True, 3), (False, 5)])
def test_partial_json(tmp_path: Path, streamed: bool, size: int) -> None:
    parser = plugins_of(tmp_path, "tool_parser", "bang", PARTIAL).load("tool_parser", "bang")
    text = 'Now! {"name": "add", "arguments": {"a": 12, "b": {"c": ["x", "y"]}}}'
    found = answer(Parsers(tools=parser), text, size, streamed=streamed)
    assert calls(found) == [("add", {"a": 12, "b": {"c": ["x", "y"]}})]
    assert found.text == "Now"


@pytest.mark.parametrize(("streamed", "size"), [(True, 1), (True, 3), (False, 5)])
def test_calls_written_as_python(tmp_path: Path, streamed: bool, size: int) -> None:
    parser = plugins_of(tmp_path, "tool_parser", "listed", PYTHONIC).load("tool_parser", "listed")
    found = answer(Parsers(tools=parser), "[add(a='x y', b=1), add(b=true)]", size, streamed=streamed)
    assert calls(found) == [("add", {"a": "x y", "b": 1}), ("add", {"b": True})]


@pytest.mark.parametrize("streamed", [True, False])
def test_methods_without_the_request(tmp_path: Path, streamed: bool) -> None:
    parser = plugins_of(tmp_path, "tool_parser", "first", WITHOUT_REQUEST).load("tool_parser", "first")
    found = answer(Parsers(tools=parser), '{"a": 1}', 2, streamed=streamed)
    assert calls(found) == [("add", {"a": 1})]


@pytest.mark.parametrize(
    ("base", "prompt", "text", "expected"),
    [
        ("DeepSeekR1", b"", "Hm</think>\n\nYes", ("Hm", "Yes")),
        ("DeepSeekR1", b"", "<think>Hm</think>Yes", ("Hm", "Yes")),
        ("Qwen3", b"", "<think>Hm</think>Yes", ("Hm", "Yes")),
        ("Qwen3", b"", "No </think> thoughts", (None, "No </think> thoughts")),
        ("Qwen3", b"x\1", "Hm</think>Yes", ("Hm", "Yes")),
        ("Qwen3", b"\1\2", "Yes", (None, "Yes")),
    ],
)
@pytest.mark.parametrize("streamed", [True, False])
def test_deriving_from_a_reasoning_parser(
    tmp_path: Path, base: str, prompt: bytes, text: str, expected: tuple[str | None, str], streamed: bool
) -> None:
    name = {"DeepSeekR1": "deepseek_r1", "Qwen3": "qwen3"}[base]
    written = THINKING.format(name=name, base=f"{base}ReasoningParser")
    parser = plugins_of(tmp_path, "reasoning_parser", "mine", written).load("reasoning_parser", "mine")
    tokenizer: Tokenizer = Thinking()
    found = answer(Parsers(parser), text, 1000, streamed=streamed, tokenizer=tokenizer, prompt_ids=tuple(prompt))
    assert (found.reasoning or None, found.text.lstrip()) == expected


def test_a_tokenizer_without_the_tokens_is_refused(tmp_path: Path) -> None:
    written = THINKING.format(name="qwen3", base="Qwen3ReasoningParser")
    parser = plugins_of(tmp_path, "reasoning_parser", "mine", written).load("reasoning_parser", "mine")
    with pytest.raises(RequestFailed) as caught:
        answer(Parsers(parser), "x", 1, tokenizer=ByteTokenizer())
    assert "no token <think>" in str(caught.value.__cause__)

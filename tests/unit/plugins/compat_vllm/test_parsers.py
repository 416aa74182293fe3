"""Parser files written for vLLM, through the adapter that reads them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ferrule.errors import PluginError
from ferrule.frontend.guided.calls import CallList
from ferrule.frontend.output.parse import ParseChain, Parsers
from ferrule.interfaces.parsers import ChoiceContext
from ferrule.interfaces.service import Output
from ferrule.plugin import Plugins
from ferrule_testkit.tokenizers import ByteTokenizer
from tests.fakes.frontend import fold
from tests.unit.plugins.compat_vllm import reading
from tests.unit.plugins.compat_vllm.reading import ADAPTER, TOOLS, answer, calls

# Calls as [[name {json}]], in the manner of files for vLLM 0.6 to 0.10.
OLD_TOOLS = """
import json
import re
from typing import Sequence, Union

from vllm.entrypoints.openai.protocol import (ChatCompletionRequest, DeltaFunctionCall, DeltaMessage, DeltaToolCall,
                                              ExtractedToolCallInformation, FunctionCall, ToolCall)
from vllm.entrypoints.openai.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager
from vllm.logger import init_logger
from vllm.transformers_utils.tokenizer import AnyTokenizer
from vllm.utils import random_uuid

logger = init_logger(__name__)


@ToolParserManager.register_module(["square", "square_too"])
class SquareToolParser(ToolParser):
    def __init__(self, tokenizer: AnyTokenizer):
        super().__init__(tokenizer)
        self.call = re.compile(r"\\[\\[(\\w+) (\\{[^\\]]*\\})\\]\\]")
        self.ids = self.vocab and self.model_tokenizer.encode("[[", add_special_tokens=False)

    def adjust_request(self, request: ChatCompletionRequest) -> ChatCompletionRequest:
        if request.tools and request.tool_choice != "none":
            request.skip_special_tokens = False
        return request

    def extract_tool_calls(self, model_output: str, request: ChatCompletionRequest) -> ExtractedToolCallInformation:
        found = self.call.findall(model_output)
        if "EXPLODE" in model_output:
            raise ValueError("whole")
        if not found:
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        calls = [ToolCall(type="function", function=FunctionCall(name=name, arguments=args)) for name, args in found]
        content = model_output[:model_output.index("[[")]
        return ExtractedToolCallInformation(tools_called=True, tool_calls=calls, content=content if content else None)

    def extract_tool_calls_streaming(self, previous_text: str, current_text: str, delta_text: str,
                                     previous_token_ids: Sequence[int], current_token_ids: Sequence[int],
                                     delta_token_ids: Sequence[int],
                                     request: ChatCompletionRequest) -> Union[DeltaMessage, None]:
        assert current_text == previous_text + delta_text
        assert list(current_token_ids) == [*previous_token_ids, *delta_token_ids]
        if "EXPLODE" in current_text:
            raise ValueError("stream")
        found = self.call.findall(current_text)
        if "[" not in current_text:
            return DeltaMessage(content=delta_text)
        if len(found) <= self.current_tool_id + 1:
            return None
        self.current_tool_id += 1
        name, args = found[-1]
        self.prev_tool_call_arr.append({"name": name, "arguments": json.loads(args)})
        self.streamed_args_for_tool.append("")
        return DeltaMessage(tool_calls=[
            DeltaToolCall(index=self.current_tool_id, type="function", id=f"chatcmpl-tool-{random_uuid()}",
                          function=DeltaFunctionCall(name=name).model_dump(exclude_none=True))
        ])
"""

# In the manner of newer files: split modules, tools in the constructor, arguments streamed, an import in a method.
NEW_TOOLS = '''
from __future__ import annotations

import vllm.tool_parsers.utils as utils
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.engine.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
from vllm.tokenizers import TokenizerLike
from vllm.tool_parsers import ToolParser, ToolParserManager


class Colons(ToolParser):
    """Streams only. After '@name ' everything is arguments."""

    def __init__(self, tokenizer: TokenizerLike, tools=None):
        super().__init__(tokenizer, tools)
        self.names = [tool.function.name for tool in tools or []]

    def extract_tool_calls_streaming(self, previous_text, current_text, delta_text, previous_token_ids,
                                     current_token_ids, delta_token_ids, request):
        from vllm.entrypoints.chat_utils import make_tool_call_id

        if "@" not in current_text:
            return DeltaMessage(content=delta_text)
        head, _, rest = current_text.partition("@")
        name, blank, arguments = rest.partition(" ")
        if not blank:
            return None
        before = previous_text.partition("@")[2].partition(" ")[2]
        fragment = arguments[len(utils.find_common_prefix(arguments, before)) :]
        call = DeltaFunctionCall(arguments=fragment)
        if self.current_tool_name_sent:
            return DeltaMessage(tool_calls=[DeltaToolCall(index=0, function=call)])
        self.current_tool_name_sent = True
        call.name = name if name in self.names else "unknown"
        return DeltaMessage(tool_calls=[DeltaToolCall(index=0, id=make_tool_call_id(), function=call)])


ToolParserManager.register_module(name="colons", module=Colons)
ToolParserManager.register_lazy_module(name="lazy", module_path="elsewhere.colons", class_name="Colons")
'''

OLD_REASONING = '''
from collections.abc import Sequence
from typing import Optional, Union

from vllm.entrypoints.openai.protocol import ChatCompletionRequest, DeltaMessage
from vllm.reasoning import ReasoningParser, ReasoningParserManager


@ReasoningParserManager.register_module("arrow")
class ArrowParser(ReasoningParser):
    """Thoughts up to '=>'."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.end = self.vocab[">"]

    def is_reasoning_end(self, input_ids: list[int]) -> bool:
        return self.end in input_ids

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        return input_ids

    def extract_reasoning_content(self, model_output: str, request: ChatCompletionRequest):
        thoughts, _, content = model_output.partition("=>")
        return thoughts, content or None

    def extract_reasoning_content_streaming(self, previous_text: str, current_text: str, delta_text: str,
                                            previous_token_ids: Sequence[int], current_token_ids: Sequence[int],
                                            delta_token_ids: Sequence[int]) -> Union[DeltaMessage, None]:
        if "=>" in previous_text:
            return DeltaMessage(content=delta_text)
        if "=>" in current_text:
            return DeltaMessage(content=current_text.partition("=>")[2])
        if current_text.endswith("="):
            return None
        return DeltaMessage(reasoning_content=delta_text)
'''

NEW_REASONING = """
from vllm.reasoning.abs_reasoning_parsers import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser


@ReasoningParserManager.register_module("braces")
class Braces(BaseThinkingReasoningParser):
    @property
    def start_token(self) -> str:
        return "{"

    @property
    def end_token(self) -> str:
        return "}"
"""

OWN = "from ferrule_plugins.tool_parser.hermes import Hermes\n\n\nclass Mine(Hermes):\n    open_tag = '<mine>'\n"
FILES = {"old_tools": OLD_TOOLS, "new_tools": NEW_TOOLS, "old_reasoning": OLD_REASONING, "new_reasoning": NEW_REASONING}


def plugins_of(folder: Path, kind: str, name: str, text: str = "", adapter: str = ADAPTER) -> Plugins:
    return reading.plugins_of(folder, kind, name, text or FILES[name], adapter)


@pytest.fixture(autouse=True)
def no_trace() -> Iterator[None]:
    """Check that no test leaves a stand-in for vLLM behind, or finds one."""
    before = list(sys.meta_path)
    yield
    assert [name for name in sys.modules if name.partition(".")[0] == "vllm"] == []
    assert sys.meta_path == before


# ------------------------------------------------------------------------------------------- tool parsers


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_an_old_tool_parser_streamed(tmp_path: Path, size: int) -> None:
    parser = plugins_of(tmp_path, "tool_parser", "old_tools").load("tool_parser", "square")
    text = 'Sums: [[add {"a": 1, "b": "ü"}]]'
    found = answer(Parsers(tools=parser), text, size)
    assert calls(found) == [("add", {"a": 1, "b": "ü"})]  # arguments that the parser left to the server
    assert found.calls[0].id.startswith("chatcmpl-tool-")
    assert found.text == ("" if size == 1000 else text[: 5 // size * size + (size == 1)])  # as this parser streams


def test_enforced_calls_are_json_of_the_tools(tmp_path: Path) -> None:
    """Constrain the output to JSON, because such a file does not say what its notation looks like."""
    parser = plugins_of(tmp_path, "tool_parser", "old_tools").load("tool_parser", "square")
    context = ChoiceContext(tools=tuple(TOOLS), tool_choice="required", tokenizer=ByteTokenizer())
    chain = ParseChain(Parsers(tools=parser), TOOLS, context)
    assert isinstance(chain.tools, CallList)
    assert chain.constraint is not None
    text = '[{"name": "add", "parameters": {"a": 1}}]'
    events = [event for character in text for event in chain.feed(character)] + [*chain.finish()]
    (folded,) = fold([Output(index=0, events=tuple(events))])
    assert (folded.text, calls(folded)) == ("", [("add", {"a": 1})])


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    parser = plugins_of(tmp_path, "tool_parser", "old_tools").load("tool_parser", "square")
    found = answer(Parsers(tools=parser), '[[add {"a": 1e999, "b": {"c": NaN, "ü": -Infinity}}]]', 1)
    assert [call.arguments for call in found.calls] == ['{"a": null, "b": {"c": null, "ü": null}}']


def test_an_old_tool_parser_not_streamed(tmp_path: Path) -> None:
    parser = plugins_of(tmp_path, "tool_parser", "old_tools").load("tool_parser", "square")
    text = 'Sums: [[add {"a": 1}]][[add {"a": 2}]]'
    found = answer(Parsers(tools=parser), text, 3, streamed=False)
    assert calls(found) == [("add", {"a": 1}), ("add", {"a": 2})]
    assert found.text == "Sums: "
    assert len({call.id for call in found.calls}) == 2
    assert answer(Parsers(tools=parser), "no call", 3, streamed=False).text == "no call"
    assert answer(Parsers(tools=parser), "", 3, streamed=False).text == ""


def test_every_registered_name_is_known_and_checked(tmp_path: Path) -> None:
    plugins = plugins_of(tmp_path, "tool_parser", "old_tools")
    assert {"square", "square_too", "hermes"} <= set(plugins.names("tool_parser"))
    assert plugins.load("tool_parser", "square_too").wrapped.__name__ == "SquareToolParser"
    with pytest.raises(PluginError, match=r"no tool_parser plugin 'squares'.*square"):
        plugins.load("tool_parser", "squares")


def test_adjust_request_keeps_special_tokens(tmp_path: Path) -> None:
    parser = plugins_of(tmp_path, "tool_parser", "old_tools").load("tool_parser", "square")
    context = ChoiceContext(tools=TOOLS, tokenizer=ByteTokenizer())
    assert ParseChain(Parsers(tools=parser), TOOLS, context).wants_special_tokens
    lazy = plugins_of(tmp_path, "tool_parser", "new_tools").load("tool_parser", "lazy")
    assert not ParseChain(Parsers(tools=lazy), TOOLS, context).wants_special_tokens


@pytest.mark.parametrize("name", ["colons", "lazy"])
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_new_tool_parser_that_only_streams(tmp_path: Path, name: str, streamed: bool, size: int) -> None:
    parser = plugins_of(tmp_path, "tool_parser", "new_tools").load("tool_parser", name)
    found = answer(Parsers(tools=parser), '@add {"a": [1, 1, 1]}', size, streamed=streamed)
    assert (calls(found), found.text) == ([("add", {"a": [1, 1, 1]})], "")


@pytest.mark.parametrize("streamed", [True, False])
def test_what_a_parser_raises_costs_no_text(tmp_path: Path, streamed: bool, caplog: Any) -> None:
    parser = plugins_of(tmp_path, "tool_parser", "old_tools").load("tool_parser", "square")
    found = answer(Parsers(tools=parser), "one EXPLODE two", 1, streamed=streamed)
    assert (found.text, found.calls) == ("one EXPLODE two", ())
    assert "plugin tool_parser:square of file " in caplog.text


def test_parsers_share_nothing(tmp_path: Path) -> None:
    parser = plugins_of(tmp_path, "tool_parser", "old_tools").load("tool_parser", "square")
    context = ChoiceContext(tools=TOOLS, tokenizer=ByteTokenizer())
    one, two = (ParseChain(Parsers(tools=parser), TOOLS, context) for _ in range(2))
    one.feed('[[add {"a": 1}')
    assert two.feed("x") + two.finish() == ParseChain(Parsers(), None).feed("x")
    assert calls(fold([Output(index=0, events=one.feed("]]") + one.finish())])[0]) == [("add", {"a": 1})]


# ------------------------------------------------------------------------------------------- reasoning parsers


@pytest.mark.parametrize(("streamed", "size"), [(True, 1), (True, 1000), (False, 1), (False, 7)])
def test_an_old_reasoning_parser(tmp_path: Path, streamed: bool, size: int) -> None:
    parser = plugins_of(tmp_path, "reasoning_parser", "old_reasoning").load("reasoning_parser", "arrow")
    found = answer(Parsers(parser), "so a = b =>yes", size, streamed=streamed)
    if size == 1000:  # what this parser's streaming makes of it
        assert found.text == "yes"
        return
    expected = "so a = b " if not streamed else "so a  b "
    assert (found.reasoning, found.text) == (expected, "yes")


def test_a_prompt_that_ends_the_reasoning(tmp_path: Path) -> None:
    parser = plugins_of(tmp_path, "reasoning_parser", "old_reasoning").load("reasoning_parser", "arrow")
    found = answer(Parsers(parser), "a =>b", 2, prompt_ids=tuple(b"x=>"))
    assert (found.reasoning, found.text) == ("", "a =>b")


@pytest.mark.parametrize(("streamed", "size"), [(True, 1), (True, 4), (False, 4)])
def test_a_new_reasoning_parser(tmp_path: Path, streamed: bool, size: int) -> None:
    parser = plugins_of(tmp_path, "reasoning_parser", "new_reasoning").load("reasoning_parser", "braces")
    found = answer(Parsers(parser), "{think}content", size, streamed=streamed)
    assert (found.reasoning, found.text) == ("think", "content")


# ------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("name", FILES)
def test_without_the_adapter_the_missing_option_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(PluginError, match=r"written for vllm\. It needs --plugin-adapter ferrule_plugins\.compat_vllm"):
        plugins_of(tmp_path, "tool_parser" if "tools" in name else "reasoning_parser", name, adapter="")


def test_a_file_of_our_own_that_uses_vllm_needs_no_adapter(tmp_path: Path) -> None:
    text = "import vllm\n" + OWN
    plugins = plugins_of(tmp_path, "tool_parser", "mine", text, adapter="")
    with pytest.raises(PluginError, match="No module named 'vllm'"):
        plugins.load("tool_parser", "mine")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import vllm.engine.core", "no stand-in for the module vllm.engine.core"),
        ("from vllm.tool_parsers import Other", "no stand-in for Other of vllm.tool_parsers"),
        ("raise SystemExit(3)", r"sys.exit\(3\)"),
    ],
)
def test_what_has_no_stand_in_is_named(tmp_path: Path, line: str, message: str) -> None:
    plugins = plugins_of(tmp_path, "tool_parser", "broken", f"{NEW_TOOLS}\n{line}\n")
    with pytest.raises(PluginError, match=message):
        plugins.load("tool_parser", "colons")


def test_a_name_that_was_not_registered_after_all(tmp_path: Path) -> None:
    text = NEW_TOOLS.replace("ToolParserManager.register_module", "0 and ToolParserManager.register_module")
    plugins = plugins_of(tmp_path, "tool_parser", "shy", text)
    with pytest.raises(PluginError, match="registers no 'colons'"):
        plugins.load("tool_parser", "colons")


def test_files_of_our_own_go_past_the_adapter(tmp_path: Path) -> None:
    plugins = plugins_of(tmp_path, "tool_parser", "mine", OWN)
    assert plugins.load("tool_parser", "mine").open_tag == "<mine>"


@pytest.mark.parametrize(("adapter", "message"), [("no_such.module", "cannot be imported"), ("json", "not an adapter")])
def test_an_adapter_that_is_none(tmp_path: Path, adapter: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        plugins_of(tmp_path, "tool_parser", "old_tools", adapter=adapter)


def test_the_real_vllm_is_used_when_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tmp_path / "site" / "vllm" / "tool_parsers"
    real.mkdir(parents=True)
    (real.parent / "__init__.py").touch()
    (real / "__init__.py").write_text(
        "class ToolParser:\n    prev_tool_call_arr = []\n    def __init__(self, tokenizer): pass\n"
        "    def adjust_request(self, request): return request\n"
        "class ToolParserManager:\n    found = {}\n    @classmethod\n    def register_module(cls, name):\n"
        "        return lambda parser: cls.found.setdefault(name, parser)\n    @classmethod\n"
        "    def get_tool_parser(cls, name): return cls.found[name]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    text = (
        "from vllm.tool_parsers import ToolParser, ToolParserManager\n\n\n@ToolParserManager.register_module('real')\n"
        "class Real(ToolParser):\n    def extract_tool_calls_streaming(self, *args): return None\n"
    )
    try:
        parser = plugins_of(tmp_path, "tool_parser", "real", text).load("tool_parser", "real")
        assert Path(sys.modules["vllm"].__file__ or "").parent == real.parent
        assert answer(Parsers(tools=parser), "nothing", 1).text == ""
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]


def test_helpers_do_what_their_names_say(tmp_path: Path) -> None:
    from ferrule_plugins.compat_vllm import helpers

    cases: Sequence[tuple[str, str, str]] = (
        ('{"fruit": "apple"}', '{"fruit": "ap"}', "ple"),
        ('{"a": 1}', "", '{"a": 1}'),
        ('{"a": [1, 1', '{"a": [1', ", 1"),
    )
    for current, old, middle in cases:
        assert helpers.extract_intermediate_diff(current, old) == middle
    assert helpers.find_common_suffix('{"fruit": "ap"}', '{"fruit": "apple"}') == '"}'
    assert helpers.find_all_indices("aXbXX", "X") == [1, 3, 4]
    assert helpers.is_complete_json("[1]")
    assert not helpers.is_complete_json("[1")

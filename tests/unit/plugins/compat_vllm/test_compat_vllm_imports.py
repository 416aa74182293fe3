"""What vLLM's parsers import has a stand-in, under old paths and new ones, or is refused by name."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.abc import SourceLoader
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ferrule_plugins import compat_vllm
from ferrule_plugins.compat_vllm import builtin, helpers, protocol, pythonic
from ferrule_plugins.compat_vllm.modules import Importer
from ferrule_plugins.compat_vllm.wrapped import VllmTokenizer
from ferrule_testkit.tokenizers import ByteTokenizer

TABLE = Path(__file__).with_name("data") / "imports.txt"

# On purpose without a stand-in: vLLM's newer parsing engine and the adapters of it, parsers that Ferrule does not have,
# guided decoding, and what runs other files.
REFUSED = (
    ("vllm.parser.engine.registered_adapters", "Qwen3ParserToolAdapter"),
    ("vllm.parser.qwen3", "qwen3_config"),
    ("vllm.entrypoints.harmony_utils", "parse_chat_output"),
    ("vllm.entrypoints.openai.parser.harmony_utils", "parse_chat_output"),
    ("vllm.entrypoints.cohere.cohere_chat_message", "Citation"),
    ("vllm.reasoning.deepseek_v3_reasoning_parser", "DeepSeekV3ReasoningParser"),
    ("vllm.tool_parsers.glm4_moe_tool_parser", "Glm4MoeModelToolParser"),
    ("vllm.tool_parsers.rust_tool_parser", "RustToolParser"),
    ("vllm.tool_parsers.structural_tag_registry", "get_model_structural_tag"),
    ("vllm.tool_parsers.utils", "get_json_schema_from_tools"),
    ("vllm.utils", "import_from_path"),
)


def imports() -> Iterator[tuple[str, list[str]]]:
    module, names = "", []
    for line in [*TABLE.read_text().splitlines(), "end"]:
        if line.startswith(" "):
            names += line.split()
        elif not line.startswith("#"):
            if module:
                yield module, names
            module, names = line, []


class Text(SourceLoader):
    """A loader that loads a text as if it were a file."""

    def __init__(self, text: str) -> None:
        self.text = text

    def get_data(self, path: str) -> bytes:
        return self.text.encode()

    def get_filename(self, fullname: str) -> str:
        return "file.py"


def run(text: str) -> ModuleType:
    """Make a file's module as the adapter does."""
    module = ModuleType("file")
    compat_vllm.prepare(module)
    loader = Text(text)
    module.__spec__ = spec_from_loader("file", loader)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("module", "names"), list(imports()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_name_can_be_imported(module: str, names: list[str]) -> None:
    parent, _, child = module.rpartition(".")
    lines = [f"from {module} import {', '.join(names)}", f"import {module}", f"import {module} as one"]
    found = run("\n".join([*lines, f"from {parent} import {child}"]))
    assert vars(found)["one"] is vars(found)[child]
    assert all(vars(found)[name] is getattr(vars(found)["one"], name) for name in names)


def test_the_table_is_read() -> None:
    table = dict(imports())
    assert len(table) > 35
    assert "random_tool_call_id" in table["vllm.entrypoints.chat_utils"]


@pytest.mark.parametrize(("module", "name"), REFUSED)
def test_what_has_no_stand_in_is_refused_by_name(module: str, name: str) -> None:
    with pytest.raises(ImportError, match=rf"compat_vllm has no stand-in for .*({name} of )?{module}"):
        run(f"from {module} import {name}")


def test_an_attribute_without_a_stand_in_is_named() -> None:
    with pytest.raises(AttributeError, match=r"no stand-in for VLLM_OTHER of vllm\.envs"):
        run("import vllm.envs as envs\nenvs.VLLM_OTHER")


def test_old_and_new_paths_give_the_same() -> None:
    load = Importer({})
    for old, new, name in (
        ("vllm.entrypoints.openai.protocol", "vllm.entrypoints.generate.base.protocol", "DeltaMessage"),
        ("vllm.entrypoints.openai.tool_parsers", "vllm.tool_parsers", "ToolParserManager"),
        ("vllm.entrypoints.openai.reasoning_parsers", "vllm.reasoning", "ReasoningParserManager"),
        ("vllm.transformers_utils.tokenizer", "vllm.tokenizers.mistral", "MistralTokenizer"),
        ("vllm.entrypoints.chat_utils", "vllm.renderers.chat_utils", "make_tool_call_id"),
    ):
        assert getattr(load(old, fromlist=(name,)), name) is getattr(load(new, fromlist=(name,)), name)


def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "partial_json_parser", None)
    with pytest.raises(ImportError, match=r"pip install 'ferrule\[compat-vllm\]'"):
        run("import partial_json_parser")
    with pytest.raises(ImportError, match=r"pip install 'ferrule\[compat-vllm\]'"):
        helpers.partial_json_loads("{", None)


# ------------------------------------------------------------------------------------------- helpers


def test_partial_json_is_read_as_far_as_it_goes() -> None:
    from partial_json_parser.core.options import Allow

    assert helpers.partial_json_loads('{"a": [1, "x', Allow.ALL) == ({"a": [1, "x"]}, 12)
    assert helpers.partial_json_loads('{"a": 1} and more', Allow.ALL) == ({"a": 1}, 8)
    with pytest.raises(ValueError, match=r".+"):
        helpers.partial_json_loads("nothing", Allow.ALL)


def test_helpers_of_texts() -> None:
    assert [helpers.consume_space(at, "a \n b") for at in (0, 1, 4, 9)] == [0, 4, 4, 9]
    assert [helpers.partial_tag_overlap(text, "<call>") for text in ("x", "x<", "x<cal", "x<call>", "<call")] == [
        0,
        1,
        4,
        0,
        5,
    ]
    assert helpers.make_tool_call_id() != helpers.random_tool_call_id()
    assert helpers.make_tool_call_id(id_type="kimi_k2", func_name="f", idx=2) == "functions.f:2"
    assert helpers.is_list_of([1, "x"], int)
    assert not helpers.is_list_of([1, "x"], int, check="all")
    assert not helpers.is_list_of((1,), int)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, ["integer"]),
        ({"type": ["number", "null"]}, ["number", "null"]),
        ({"anyOf": [{"type": "array"}, {"enum": [True, None]}]}, ["array", "boolean", "null"]),
        ({}, ["string"]),
        (True, ["string"]),
    ],
)
def test_types_of_a_schema(schema: Any, types: list[str]) -> None:
    assert helpers.extract_types_from_schema(schema) == types


@pytest.mark.parametrize(
    ("value", "types", "expected"),
    [
        ("7", "integer", 7),
        ("7.5", ["integer", "number"], 7.5),
        ("7.0", "number", 7),
        ("NaN", "number", "NaN"),
        ("1e999", "number", "1e999"),
        ("True", "boolean", True),
        ("null", ["string", "null"], None),
        ('{"a": 1}', "object", {"a": 1}),
        ("[1]", "object", "[1]"),
        ("7", "string", "7"),
    ],
)
def test_values_are_read_by_their_schema(value: str, types: Any, expected: Any) -> None:
    found = helpers.coerce_to_schema_type(value, types)
    assert (type(found), found) == (type(expected), expected)


def test_tools_are_found_by_name() -> None:
    function = protocol.FunctionDefinition(name="f", parameters={"properties": {"a": {"type": "integer"}}})
    tools = [protocol.ChatCompletionToolsParam(function=function)]
    assert helpers.find_tool_properties(tools, "f") == {"a": {"type": "integer"}}
    assert helpers.find_tool_properties(tools, "g") == helpers.find_tool_properties(None, "f") == {}
    assert helpers.find_tool_name(tools, "f")
    assert not helpers.find_tool_name(None, "f")


@pytest.mark.parametrize(
    ("text", "added"),
    [
        ("[f(a=1, b=[{'x': 'y", "'}])]"),
        ("[f(a='(", "')]"),
        ("[f(a=1,", ")]"),
        ("[f(a=1)", "]"),
        ("[f(a=", None),
        ("[f(a=tr", None),
        ("[f(a=true", ")]"),
        ("[f(a=1, b", None),
        ("[f(a={'x'", None),
        ("[f(a={'x':", None),
    ],
)
def test_the_beginning_of_a_python_expression(text: str, added: str | None) -> None:
    found = pythonic.make_valid_python(text)
    assert (found and found[1]) == added
    if found:
        ast.parse(found[0])


def test_calls_written_as_python() -> None:
    with pytest.raises(pythonic.UnexpectedAstError, match="closes nothing"):
        pythonic.make_valid_python("[f(]")
    parsed = ast.parse("a.f(x=1, y=[true, {'k': -2.5}], z=null)", mode="eval").body
    assert isinstance(parsed, ast.Call)
    call = pythonic.handle_single_tool(parsed)
    assert (call.function.name, call.function.arguments) == ("a.f", '{"x": 1, "y": [true, {"k": -2.5}], "z": null}')
    for wrong in ("f(x=g())", "f(x=1e999)", "f()(x=1)"):
        parsed = ast.parse(wrong, mode="eval").body
        assert isinstance(parsed, ast.Call)
        with pytest.raises(pythonic.UnexpectedAstError):
            pythonic.handle_single_tool(parsed)
    first = pythonic.compute_tool_delta("", call, 0, "}")
    assert first is not None
    assert first.function is not None
    assert (first.id, first.function.name) == (call.id, "a.f")
    rest = pythonic.compute_tool_delta(first.function.arguments or "", call, 0, "")
    assert rest is not None
    assert rest.function == protocol.DeltaFunctionCall(arguments="}")
    assert pythonic.compute_tool_delta(call.function.arguments, call, 0, "") is None


def test_messages_have_what_is_used_of_pydantic() -> None:
    delta = protocol.DeltaMessage.model_validate(
        {"content": "x", "tool_calls": [{"index": 0, "function": {"name": "f"}}]}
    )
    assert delta.tool_calls[0].function == protocol.DeltaFunctionCall(name="f")
    assert delta.model_copy(update={"content": "y"}).content == "y"
    assert protocol.DeltaMessage(content="x").model_dump_json(exclude_none=True) == '{"content":"x","tool_calls":[]}'
    assert protocol.InitialDeltaToolCall(index=0).type == "function"
    request = protocol.ChatCompletionRequest()
    request.anything = 1  # type: ignore[attr-defined]
    assert VllmTokenizer(ByteTokenizer()).encode("a") == ByteTokenizer().encode("a")


def test_thoughts_are_counted() -> None:
    class Tokens(ByteTokenizer):
        def token(self, token_id: int) -> str | None:
            return {1: "<think>", 2: "</think>"}.get(token_id, super().token(token_id))

    parser = builtin.DeepSeekR1ReasoningParser(VllmTokenizer(Tokens()))
    assert [parser.count_reasoning_tokens(ids) for ids in ([1, 9, 9, 2, 9], [9, 2, 9], [9, 9])] == [2, 1, 2]
    assert parser.is_reasoning_end([1, 9, 2])
    assert not parser.is_reasoning_end([2, 1])
    assert parser.is_reasoning_end_streaming([], (token for token in [9, 2]))
    assert parser.extract_content_ids([1, 2, 9]) == [9]

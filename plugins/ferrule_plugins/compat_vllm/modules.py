"""vLLM's modules, as far as parser files import them, for one file: old paths and new ones."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from ferrule.sampling_params import SamplingParams
from ferrule_plugins.compat_vllm import bases, builtin, helpers, protocol, pythonic
from ferrule_plugins.compat_vllm.wrapped import VllmTokenizer

Members = Mapping[str, Any]

_MESSAGES = (
    "ChatCompletionNamedFunction",
    "ChatCompletionNamedToolChoiceParam",
    "ChatCompletionRequest",
    "ChatCompletionToolsParam",
    "ChatMessage",
    "DeltaFunctionCall",
    "DeltaMessage",
    "DeltaToolCall",
    "ExtractedToolCallInformation",
    "FunctionCall",
    "FunctionDefinition",
    "InitialDeltaToolCall",
    "ResponsesRequest",
    "ToolCall",
)
_TOOL_HELPERS = (
    "coerce_to_schema_type",
    "consume_space",
    "extract_intermediate_diff",
    "extract_types_from_schema",
    "find_all_indices",
    "find_common_prefix",
    "find_common_suffix",
    "find_tool_name",
    "find_tool_properties",
    "is_complete_json",
    "partial_json_loads",
    "partial_tag_overlap",
    "safe_literal_eval",
)
_PYTHONIC_HELPERS = (
    "UnexpectedAstError",
    "compute_tool_delta",
    "get_parameter_value",
    "handle_single_tool",
    "make_valid_python",
)
_VARIABLES = {"VLLM_ENFORCE_STRICT_TOOL_CALLING": False, "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS": 1}
_OPENAI = "vllm.entrypoints.openai"


class StandIn(ModuleType):
    """A module of vLLM. The error for a name that it does not have is in terms of the adapter."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"compat_vllm has no stand-in for {name} of {self.__name__}")


class Importer:
    """A replacement of ``__import__`` in one module: `vllm` and the modules below it come from here, all others from
    where they were.
    """

    def __init__(self, namespace: Members) -> None:
        self._modules: dict[str, ModuleType] = {}
        for name, members in _modules(namespace):
            vars(self._module(name)).update(members)

    def __call__(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        if level or name.partition(".")[0] != "vllm":
            return _import(name, globals, locals, fromlist or (), level)
        found = self._modules.get(name)
        if found is None:
            raise ModuleNotFoundError(f"compat_vllm has no stand-in for the module {name}", name=name)
        missing = [wanted for wanted in fromlist or () if wanted != "*" and not hasattr(found, wanted)]
        if missing:
            raise ImportError(f"compat_vllm has no stand-in for {', '.join(missing)} of {name}", name=name)
        return found if fromlist else self._modules["vllm"]

    def _module(self, name: str) -> ModuleType:
        if name not in self._modules:
            self._modules[name] = StandIn(name)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(self._module(parent), child, self._modules[name])
        return self._modules[name]


def _import(name: str, *args: Any) -> ModuleType:
    try:
        return builtins.__import__(name, *args)
    except ModuleNotFoundError as error:
        if error.name != helpers.PARTIAL_JSON:
            raise
        raise ModuleNotFoundError(f"{error.msg}: {helpers.PARTIAL_JSON_HINT}", name=error.name) from error


def _modules(namespace: Members) -> Iterator[tuple[str, Members]]:
    """Yield (module, some of its names); a module may come twice. The registries are new ones."""
    yield from _tool_parsers(bases.Manager(namespace))
    yield from _reasoning_parsers(bases.Manager(namespace))
    yield from _entrypoints()
    yield from _tokenizers()
    yield "vllm.config", {"ModelConfig": protocol.ModelConfig}
    yield "vllm.envs", _VARIABLES
    yield "vllm.exceptions", {"VLLMValidationError": protocol.VLLMValidationError}
    yield "vllm.logger", {"init_logger": bases.init_logger}
    guided = dict.fromkeys(("GuidedDecodingParams", "StructuredOutputsParams"), protocol.StructuredOutputsParams)
    yield "vllm.sampling_params", {**guided, "SamplingParams": SamplingParams}
    yield "vllm.utils", {"is_list_of": helpers.is_list_of, "random_uuid": protocol.random_uuid}
    yield "vllm.utils.collection_utils", {"is_list_of": helpers.is_list_of}
    yield "vllm.utils.mistral", {"is_mistral_tokenizer": helpers.is_mistral_tokenizer}


def _tool_parsers(manager: bases.Manager) -> Iterator[tuple[str, Members]]:
    names = {"ToolParser": bases.ToolParser, "ToolParserManager": manager, "Tool": protocol.ChatCompletionToolsParam}
    utilities = {name: getattr(helpers, name) for name in _TOOL_HELPERS}
    utilities |= {name: getattr(pythonic, name) for name in _PYTHONIC_HELPERS}
    utilities["Tool"] = names["Tool"]
    for path in ("vllm.tool_parsers", f"{_OPENAI}.tool_parsers"):
        yield path, {**names, "Hermes2ProToolParser": builtin.Hermes2ProToolParser}
        yield f"{path}.abstract_tool_parser", names
        yield f"{path}.utils", utilities
        yield f"{path}.hermes_tool_parser", {"Hermes2ProToolParser": builtin.Hermes2ProToolParser}
    yield "vllm.tool_parsers.tool_strict_level", {"ToolStrictLevel": protocol.ToolStrictLevel}


def _reasoning_parsers(manager: bases.Manager) -> Iterator[tuple[str, Members]]:
    names = {"ReasoningParser": bases.ReasoningParser, "ReasoningParserManager": manager}
    base = {"BaseThinkingReasoningParser": builtin.BaseThinkingReasoningParser}
    parsers = {
        "deepseek_r1": builtin.DeepSeekR1ReasoningParser,
        "identity": builtin.IdentityReasoningParser,
        "qwen3": builtin.Qwen3ReasoningParser,
    }
    for path in ("vllm.reasoning", f"{_OPENAI}.reasoning_parsers"):
        yield path, {**names, **base, **{parser.__name__: parser for parser in parsers.values()}}
        yield f"{path}.abs_reasoning_parsers", names
        yield f"{path}.basic_parsers", base
        for name, parser in parsers.items():
            yield f"{path}.{name}_reasoning_parser", {parser.__name__: parser}


def _entrypoints() -> Iterator[tuple[str, Members]]:
    messages = {name: getattr(protocol, name) for name in _MESSAGES}
    for part in ("", ".chat_completion", ".engine", ".responses"):
        yield f"{_OPENAI}{part}.protocol", messages
    yield "vllm.entrypoints.generate.base.protocol", messages
    ids = {"make_tool_call_id": helpers.make_tool_call_id, "random_tool_call_id": helpers.random_tool_call_id}
    for path in ("vllm.entrypoints.chat_utils", "vllm.renderers.chat_utils"):
        yield path, ids
    for path in ("vllm.entrypoints.tool_server", "vllm.entrypoints.mcp.tool_server"):
        yield path, {"ToolServer": protocol.ToolServer}


def _tokenizers() -> Iterator[tuple[str, Members]]:
    names = {
        "AnyTokenizer": VllmTokenizer,
        "TokenizerLike": VllmTokenizer,
        "MistralTokenizer": protocol.MistralTokenizer,
    }
    for path in ("vllm.tokenizers", "vllm.transformers_utils.tokenizer", "vllm.transformers_utils.tokenizers"):
        yield path, names
    for path in ("vllm.tokenizers", "vllm.transformers_utils.tokenizers"):
        yield f"{path}.mistral", {"MistralTokenizer": protocol.MistralTokenizer}

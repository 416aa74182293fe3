"""vLLM's documented modules, as far as parser files import them, for one file."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from ferrule_plugins.compat_vllm import bases, protocol

_PROTOCOL = (
    "ChatCompletionNamedFunction",
    "ChatCompletionNamedToolChoiceParam",
    "ChatCompletionRequest",
    "ChatCompletionToolsParam",
    "DeltaFunctionCall",
    "DeltaMessage",
    "DeltaToolCall",
    "ExtractedToolCallInformation",
    "FunctionCall",
    "FunctionDefinition",
    "ResponsesRequest",
    "ToolCall",
)
_HELPERS = (
    "extract_intermediate_diff",
    "find_all_indices",
    "find_common_prefix",
    "find_common_suffix",
    "is_complete_json",
)
_OPENAI = "vllm.entrypoints.openai"


class Importer:
    """Takes the place of ``__import__`` in one module: `vllm` and what is below it is here, all else where it was."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._modules: dict[str, ModuleType] = {}
        for name, members in _members(namespace).items():
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
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        found = self._modules.get(name)
        if found is None:
            raise ModuleNotFoundError(f"compat_vllm has no stand-in for the module {name}", name=name)
        missing = [wanted for wanted in fromlist or () if wanted != "*" and not hasattr(found, wanted)]
        if missing:
            raise ImportError(f"compat_vllm has no stand-in for {', '.join(missing)} of {name}", name=name)
        return found if fromlist else self._modules["vllm"]

    def _module(self, name: str) -> ModuleType:
        if name not in self._modules:
            self._modules[name] = ModuleType(name)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(self._module(parent), child, self._modules[name])
        return self._modules[name]


def _members(namespace: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Module → its names. The registries are new ones."""
    tools, reasoning = bases.Manager(namespace), bases.Manager(namespace)
    tool_names = {"ToolParser": bases.ToolParser, "ToolParserManager": tools}
    reasoning_names = {"ReasoningParser": bases.ReasoningParser, "ReasoningParserManager": reasoning}
    thinking = {"BaseThinkingReasoningParser": bases.BaseThinkingReasoningParser}
    messages = {name: getattr(protocol, name) for name in _PROTOCOL}
    helpers = {name: getattr(bases, name) for name in _HELPERS}
    found: dict[str, dict[str, Any]] = {
        **{f"{_OPENAI}{part}.protocol": messages for part in ("", ".chat_completion", ".engine", ".responses")},
        "vllm.reasoning": {**reasoning_names, **thinking},
        "vllm.reasoning.basic_parsers": thinking,
        "vllm.logger": {"init_logger": bases.init_logger},
        "vllm.utils": {"random_uuid": protocol.random_uuid},
        "vllm.entrypoints.chat_utils": {"make_tool_call_id": protocol.make_tool_call_id},
        "vllm.transformers_utils.tokenizer": {"AnyTokenizer": Any},
        "vllm.tokenizers": {"TokenizerLike": Any},
    }
    for path in ("vllm.tool_parsers", f"{_OPENAI}.tool_parsers"):
        found |= {path: tool_names, f"{path}.abstract_tool_parser": tool_names, f"{path}.utils": helpers}
    for path in ("vllm.reasoning", f"{_OPENAI}.reasoning_parsers"):
        found |= {f"{path}.abs_reasoning_parsers": reasoning_names}
        found[path] = {**found.get(path, {}), **reasoning_names}
    return found

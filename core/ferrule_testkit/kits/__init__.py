"""Conformance kits: one class per kind of plugin. Each test method is one promise.

    from ferrule_testkit.kits import PolicyKit

    class TestMine(PolicyKit):
        plugin = Mine

`ferrule plugins check NAME` runs the same kit without a test file.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ferrule.plugin.kinds import KINDS, load_object
from ferrule_testkit.kits.base import Broken, Kit, promise

if TYPE_CHECKING:
    from ferrule_testkit.kits.adapter_bank import AdapterBankKit
    from ferrule_testkit.kits.attention import AttentionKit
    from ferrule_testkit.kits.command import CommandKit
    from ferrule_testkit.kits.executor import ExecutorKit
    from ferrule_testkit.kits.forms import FormTexts
    from ferrule_testkit.kits.guided_decoding import GuidedDecodingKit
    from ferrule_testkit.kits.hooks import HooksKit
    from ferrule_testkit.kits.hub import HubKit
    from ferrule_testkit.kits.kv_cache import KVCacheKit
    from ferrule_testkit.kits.load_format import LoadFormatKit
    from ferrule_testkit.kits.logits_processor import LogitsProcessorKit
    from ferrule_testkit.kits.lora_resolver import LoraResolverKit
    from ferrule_testkit.kits.model import ModelKit
    from ferrule_testkit.kits.platform import PlatformKit
    from ferrule_testkit.kits.quantization import QuantizationKit
    from ferrule_testkit.kits.reasoning_parser import ReasoningParserKit, Thought
    from ferrule_testkit.kits.response_store import ResponseStoreKit
    from ferrule_testkit.kits.router import RouterKit
    from ferrule_testkit.kits.sampler import SamplerKit
    from ferrule_testkit.kits.scheduling import PolicyKit, SchedulerKit
    from ferrule_testkit.kits.stat_logger import StatLoggerKit
    from ferrule_testkit.kits.tokenizer import TokenizerKit
    from ferrule_testkit.kits.tool_parser import CallText, ToolParserKit

# Loaded when they are asked for: a kit imports what its kind needs, and some kinds need torch.
_HOMES = MappingProxyType(
    {
        "AdapterBankKit": "adapter_bank",
        "AttentionKit": "attention",
        "CallText": "tool_parser",
        "CommandKit": "command",
        "ExecutorKit": "executor",
        "FormTexts": "forms",
        "GuidedDecodingKit": "guided_decoding",
        "HooksKit": "hooks",
        "HubKit": "hub",
        "KVCacheKit": "kv_cache",
        "LoadFormatKit": "load_format",
        "LogitsProcessorKit": "logits_processor",
        "LoraResolverKit": "lora_resolver",
        "ModelKit": "model",
        "PlatformKit": "platform",
        "PolicyKit": "scheduling",
        "QuantizationKit": "quantization",
        "ReasoningParserKit": "reasoning_parser",
        "ResponseStoreKit": "response_store",
        "RouterKit": "router",
        "SamplerKit": "sampler",
        "SchedulerKit": "scheduling",
        "StatLoggerKit": "stat_logger",
        "Thought": "reasoning_parser",
        "TokenizerKit": "tokenizer",
        "ToolParserKit": "tool_parser",
    }
)

__all__ = [
    "AdapterBankKit",
    "AttentionKit",
    "Broken",
    "CallText",
    "CommandKit",
    "ExecutorKit",
    "FormTexts",
    "GuidedDecodingKit",
    "HooksKit",
    "HubKit",
    "KVCacheKit",
    "Kit",
    "LoadFormatKit",
    "LogitsProcessorKit",
    "LoraResolverKit",
    "ModelKit",
    "PlatformKit",
    "PolicyKit",
    "QuantizationKit",
    "ReasoningParserKit",
    "ResponseStoreKit",
    "RouterKit",
    "SamplerKit",
    "SchedulerKit",
    "StatLoggerKit",
    "Thought",
    "TokenizerKit",
    "ToolParserKit",
    "kit_of",
    "promise",
]


def kit_of(kind: str) -> type[Kit]:
    """Return the kit of a kind of plugin. Raises LookupError for a kind without a kit."""
    if kind not in KINDS:
        raise LookupError(f"there is no kit for the kind {kind!r}")
    kit: type[Kit] = load_object(KINDS[kind].kit)
    return kit


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

"""Ferrule: an LLM inference server whose core is small and in which every piece that varies is a plugin."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ferrule.llm.arguments import AsyncEngineArgs, EngineArgs
    from ferrule.llm.async_llm import AsyncLLM, AsyncLLMEngine
    from ferrule.llm.engine import LLMEngine
    from ferrule.llm.lora import LoRARequest
    from ferrule.llm.offline import LLM
    from ferrule.llm.outputs import (
        BeamSearchParams,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingParams,
        RequestOutput,
    )
    from ferrule.sampling_params import RequestOutputKind, SamplingParams
    from ferrule.structured_outputs import GuidedDecodingParams, StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "GuidedDecodingParams",
    "LLMEngine",
    "LoRARequest",
    "PoolingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]
_HOMES = {
    "AsyncEngineArgs": "ferrule.llm.arguments",
    "AsyncLLM": "ferrule.llm.async_llm",
    "AsyncLLMEngine": "ferrule.llm.async_llm",
    "BeamSearchParams": "ferrule.llm.outputs",
    "CompletionOutput": "ferrule.llm.outputs",
    "EmbeddingOutput": "ferrule.llm.outputs",
    "EmbeddingRequestOutput": "ferrule.llm.outputs",
    "EngineArgs": "ferrule.llm.arguments",
    "GuidedDecodingParams": "ferrule.structured_outputs",
    "LLM": "ferrule.llm.offline",
    "LLMEngine": "ferrule.llm.engine",
    "LoRARequest": "ferrule.llm.lora",
    "PoolingParams": "ferrule.llm.outputs",
    "RequestOutput": "ferrule.llm.outputs",
    "RequestOutputKind": "ferrule.sampling_params",
    "SamplingParams": "ferrule.sampling_params",
    "StructuredOutputsParams": "ferrule.structured_outputs",
}


def __getattr__(name: str) -> Any:
    """Import the public classes when they are first used, so that `ferrule --help` stays quick."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ferrule' has no attribute {name!r}")

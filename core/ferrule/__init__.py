"""Ferrule: an LLM inference server whose core is small and in which every piece that varies is a plugin."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ferrule.llm.offline import LLM
    from ferrule.llm.outputs import BeamSearchParams
    from ferrule.sampling_params import SamplingParams
    from ferrule.structured_outputs import GuidedDecodingParams, StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchParams",
    "GuidedDecodingParams",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]
_HOMES = {
    "BeamSearchParams": "ferrule.llm.outputs",
    "GuidedDecodingParams": "ferrule.structured_outputs",
    "LLM": "ferrule.llm.offline",
    "SamplingParams": "ferrule.sampling_params",
    "StructuredOutputsParams": "ferrule.structured_outputs",
}


def __getattr__(name: str) -> Any:
    """Import the public classes when they are first used, so that `ferrule --help` stays quick."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ferrule' has no attribute {name!r}")

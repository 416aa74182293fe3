"""Ferrule: an LLM inference server whose core is small and in which every piece that varies is a plugin."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ferrule.launch.offline import LLM
    from ferrule.types import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the public classes when they are first used, so that `ferrule --help` stays quick."""
    if name == "LLM":
        from ferrule.launch.offline import LLM

        return LLM
    if name == "SamplingParams":
        from ferrule.types import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'ferrule' has no attribute {name!r}")

"""The embedded default model: a small trained chat model that every install carries.

`tools/tiny` of the repository makes and measures it.
"""

from pathlib import Path


def path() -> Path:
    """Return the folder of the checkpoint, in Hugging Face layout (``LlamaForCausalLM``)."""
    return Path(__file__).resolve().parent / "checkpoint"

"""The embedded default model: a small trained chat model that every install carries.

Only :func:`path` is needed to serve it; the sibling modules make and measure it
(``python -m ferrule_contrib.tiny.train`` and ``python -m ferrule_contrib.tiny.evaluate``).
"""

from pathlib import Path


def path() -> Path:
    """Return the folder of the checkpoint, in Hugging Face layout (``LlamaForCausalLM``)."""
    return Path(__file__).resolve().parent / "checkpoint"

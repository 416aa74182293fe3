"""`mistral`: the layout in which Mistral AI publishes weights, ``consolidated*.safetensors`` beside ``params.json``.

Tensors are given under the names that transformers has for them, and the rows of queries and keys in its order: in this
layout the two numbers that are rotated together are neighbours, in that of transformers they are half a head apart.
https://github.com/mistralai/mistral-inference/blob/main/src/mistral_inference/transformer.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrule import checkpoint
from ferrule.interfaces.model import Model
from ferrule_plugins.load_format import mistral_params
from ferrule_plugins.load_format.pt import PyTorchFiles
from ferrule_plugins.load_format.safetensors import Safetensors

if TYPE_CHECKING:
    import torch

_NAMES = (
    (r"^tok_embeddings\.", "model.embed_tokens."),
    (r"^norm\.", "model.norm."),
    (r"^output\.", "lm_head."),
    (r"^layers\.", "model.layers."),
    (r"\.attention\.w([qkvo])\.", r".self_attn.\1_proj."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.feed_forward\.(gate|experts)\.", r".block_sparse_moe.\1."),
    (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
    (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
    (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
    (r"\.qscale_weight$", ".weight_scale"),
    (r"\.qscale_act$", ".input_scale"),
)
_IMAGES = re.compile(r"^(vision_encoder|vision_language_adapter|patch_merger|pre_mm_projector_norm)\.")
_ROTATED = re.compile(r"\.attention\.w([qk])\.weight$")


class MistralFiles(Safetensors):
    """A reader of the text model's tensors in Mistral's layout; tensors of a part for images are left out."""

    conformance = "ferrule_testkit.samples.load_format:MISTRAL"
    forms = ("consolidated*.safetensors",)
    fetch_order = -1
    reserves = ("consolidated*",)
    single = "consolidated.safetensors"
    start = "consolidated"
    config_file = "params.json"
    config_names = mistral_params.NAMES

    @classmethod
    def configuration(cls, stated: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
        return mistral_params.translated(stated, file)

    @classmethod
    def refuses(cls, folder: Path | None) -> str | None:
        others = (layout for layout in (Safetensors, PyTorchFiles) if layout.refuses(folder) is None)
        return "the folder has weights in the layout of transformers" if any(others) else super().refuses(folder)

    def tensors(
        self, folder: Path | None, model: Model, options: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        heads: dict[str, int] = {}
        for name, tensor in super().tensors(folder, model, options):
            if _IMAGES.search(name):
                continue
            rotated = _ROTATED.search(name)
            if rotated and folder is not None:
                heads = heads or _heads(folder)
                tensor = _in_halves(tensor, heads[rotated[1]])
            yield renamed(name), tensor


def _heads(folder: Path) -> dict[str, int]:
    """Return how many heads queries and keys have, as the folder says. Raises CheckpointError."""
    file = folder / "params.json"
    stated = mistral_params.translated(checkpoint.read_json(file), file)
    return {"q": int(stated["num_attention_heads"]), "k": int(stated["num_key_value_heads"])}


def renamed(name: str) -> str:
    """Return transformers' name of a tensor."""
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _in_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return a weight [heads * dim, hidden] with the even rows of each head before its odd ones. A weight that does not
    divide stays: its shape is refused where the model has another.
    """
    rows = weight.shape[0]
    if weight.dim() != 2 or rows % (2 * heads):
        return weight
    return weight.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(rows, -1)

"""The files that a model folder would have beside its weights, made from what a GGUF file says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ferrule_files.gguf.architectures import find, is_quantized, read_config
from ferrule_files.gguf.names import Names, Target
from ferrule_files.gguf.reader import FLOATS, GgufModel, TensorInfo
from ferrule_files.gguf.tokens import Vocabulary, read_tokenizer

_SUPER = 256  # numbers of a block that has two levels of scales
_SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def describe(model: GgufModel) -> Mapping[str, bytes]:
    """Return the names and contents of the files that describe the model.

    Raises CheckpointError for what the GGUF file lacks or what is not known here.
    """
    config = read_config(model)
    if is_quantized(model):
        config["quantization_config"] = {"quant_method": "gguf", "types": _types(model, config)}
    found: dict[str, Any] = {"config.json": config}
    if model.get("tokenizer.ggml.model", str, "no_vocab") not in ("no_vocab", "none"):
        vocabulary = Vocabulary(model)
        found["tokenizer.json"], found["tokenizer_config.json"] = read_tokenizer(vocabulary)
        config["eos_token_id"], config["bos_token_id"] = vocabulary.ends(), vocabulary.role("bos")
    stated = {name: model.get(f"general.sampling.{key}", (int, float)) for name, key in _SAMPLING.items()}
    found["generation_config.json"] = {name: value for name, value in stated.items() if value is not None}
    return {name: msgspec.json.encode(content) for name, content in found.items()}


def _types(model: GgufModel, config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the layers of each quantized type; a tied head has the embedding's type."""
    names = Names(find(model), config)
    found: dict[str, list[str]] = {}
    for info in model.tensors.values():
        if info.type.name in FLOATS:
            continue
        for target in names.targets(info):
            layer, _, suffix = target.name.rpartition(".")
            if layer == "embed_tokens" and config["tie_word_embeddings"]:
                layer = "lm_head"
            if suffix == "weight" and not target.change:
                found.setdefault(_type(info, target), []).append(layer)
    return found


def _type(info: TensorInfo, target: Target) -> str:
    """Return the file's type, with the size of the blocks that are left of a k-quant's where columns are reordered."""
    size = info.type.size
    left = target.block(size) if size == _SUPER else size
    return info.type.name if left == size else f"{info.type.name}/{left}"

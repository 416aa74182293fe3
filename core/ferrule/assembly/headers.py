"""Sizes of a configuration against the shapes in the weights' headers, before anything is allocated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ferrule.assembly.choose import ModelChoice, PluginChooser
from ferrule.config import WorkerSettings
from ferrule.errors import CheckpointError, PluginError

_EXACT = ("hidden_size", "n_embd")
_WIDTHS = ("vocab_size", "intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size")
_HEADS = ("num_attention_heads", "n_head", "head_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_PASSES = 64  # through the same layers, which some classes of libraries count as layers


def check_headers(config: WorkerSettings, chooser: PluginChooser, choice: ModelChoice) -> None:
    """Check the sizes in ``config.json`` against the shapes of the weights, where there are weights.

    Raises CheckpointError, naming the key, for a size that is larger than every one that the weights have of its kind.
    This is an upper bound, because files may have quantized, merged or padded tensors; sizes that are too small, or do
    not fit in another way, are found when a tensor is loaded. The hidden size is the size of some tensor in every
    model.
    """
    context = choice.context
    try:
        source = chooser.weight_format(config)()
    except PluginError:
        return
    shapes = source.shapes(context.folder, choice.load_options)
    if not shapes:
        return
    stated = context.config
    file = getattr(stated, "file", Path("config.json"))
    names = getattr(stated, "names", {}) or choice.model_names
    own = {common: name for name, common in names.items() if stated.get(name) is not None}
    passes = _PASSES if choice.any_architecture else 1
    for key, what in _contradictions(stated, shapes, passes):
        raise CheckpointError(
            f"{file}: {own.get(key, key)!r} is {stated[key]}, but the weights in {context.folder} have {what}.",
            "The weights do not belong to this configuration.",
        )


def _contradictions(
    config: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]], passes: int
) -> Iterator[tuple[str, str]]:
    """Yield each key whose size is too large, and what the weights have instead. Layers are counted by the numbers in
    the names of tensors.
    """
    sizes = {size for shape in shapes.values() for size in shape}
    largest = max(sizes, default=0)
    counted = 1 + max((int(number) for name in shapes for number in re.findall(r"\d+", name)), default=-1)
    keys = (*_EXACT, *_WIDTHS, *_HEADS, *_LAYERS)
    stated = {key: value for key in keys if type(value := config.get(key)) is int}
    for key in (*_EXACT, *_WIDTHS, *_HEADS):
        if stated.get(key, 0) > largest:
            yield key, f"no tensor larger than {largest}"
    for key in _EXACT:
        if key in stated and stated[key] not in sizes:
            yield key, "no tensor of this size"
    for key in _LAYERS:
        if stated.get(key, 0) > passes * counted > 0:
            yield key, f"{counted} at most"

"""`mtp`: the layer that a checkpoint has beside the model's own, to predict the token after the next.

DeepSeek-V3 (https://arxiv.org/abs/2412.19437) and GLM-4.5 keep it as the layer behind the last, Qwen3-Next and 3.5 as
`mtp`. Norms of the next token's embedding and of the hidden state, side by side, are mapped to the input of a layer
like the model's, whose norm goes to the model's head. Files may hold copies of embedding and head: the model's are
used. Where there are several such layers, the first makes all guesses.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ferrule.checkpoint import changed
from ferrule.errors import CheckpointError, ConfigError
from ferrule.interfaces.model import BuildContext, ForwardContext
from ferrule.interfaces.quantization import Quantizable, QuantizationMethod
from ferrule.interfaces.speculator import SpeculatorContext
from ferrule_nn import Decoder, Linear, Naming, building
from ferrule_plugins.speculator.chain import ChainHead, ChainSpeculator
from ferrule_plugins.speculator.head_files import HeadFiles, TargetSizes, best

_PART = "further."  # how names of the layer's tensors begin, once they are renamed
_FLOATS = (".weight", "bias", ".gate_up_proj", ".down_proj")  # ends of names of tensors that are not quantized
_COPIES = ("further.block.embed_tokens.", "further.block.shared_head.head.")


def _naming(target: Decoder, layers: int) -> Naming:
    """Return the rules for a layer behind `layers` others, and for one under a name of its own."""
    behind = rf"^layers\.{layers}\."
    own = (
        (behind + r"shared_head\.norm\.", "further.norm."),
        (behind + r"(enorm|hnorm|eh_proj)\.", r"further.\1."),
        (behind, "further.block."),
        (r"^mtp\.fc\.", "further.eh_proj."),
        (r"^mtp\.pre_fc_norm_embedding\.", "further.enorm."),
        (r"^mtp\.pre_fc_norm_hidden\.", "further.hnorm."),
        (r"^mtp\.norm\.", "further.norm."),
        (r"^mtp\.layers\.0\.", "further.block."),
    )
    return replace(target.naming, renames=(*target.naming.renames, *own), ignored=())


def _is_further(name: str) -> bool:
    return name.startswith(_PART) and not name.startswith(_COPIES)


class FurtherLayer(nn.Module):
    """The layer, the norms and the projection in front of it, and the norm behind it."""

    def __init__(self, owner: Decoder, index: int) -> None:
        super().__init__()
        size = owner.spec.hidden_size
        self.enorm, self.hnorm, self.norm = owner.make_norm(), owner.make_norm(), owner.make_norm()
        self.eh_proj = Linear(2 * size, size)
        self.block = owner.make_layer(index)


class MtpHead(ChainHead):
    """A target's own head, with the target's embedding, head and rotation."""

    def __init__(self, build: BuildContext, target: Decoder, layers: int) -> None:
        super().__init__()
        self.naming = _naming(target, layers)
        self.hidden_size, self.block_name = target.spec.hidden_size, f"layers.{layers}"  # as methods know it
        more = changed(
            build.config, {"num_hidden_layers": layers + 1, "layer_types": ["full_attention"] * (layers + 1)}
        )
        if mlps := build.config.get("mlp_layer_types"):
            more["mlp_layer_types"] = [*mlps, "sparse"]
        owner = type(target)(replace(build, config=more, device=torch.device("meta")))  # describes one layer more
        owner.rope, owner.local_rope = target.rope, target.local_rope
        with building(build):
            self.further = FurtherLayer(owner, layers)
        self._target = (target,)  # in a tuple, so that torch does not register it as a submodule

    def quantize(self, method: QuantizationMethod) -> None:
        """Give the layer's matrices their schemes. The projection in front of it is of floats."""
        for name, part in list(self.further.block.named_modules(prefix=self.block_name)):
            if isinstance(part, Quantizable):
                part.quantize(name, method)

    def follow(self, ids: torch.Tensor, hidden: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        (target,), further = self._target, self.further
        embedded = target.embed_tokens(ids)
        x = further.eh_proj(torch.cat((further.enorm(embedded), further.hnorm(hidden)), dim=-1))
        rotation = None if target.rope is None else target.rope.at(ctx, x.dtype)
        y: torch.Tensor = further.norm(further.block(x, ctx, rotation))  # like the target's, which it stands for
        return y

    def guess(self, hidden: torch.Tensor) -> torch.Tensor:
        (target,) = self._target
        return best(target.logits(hidden))


class Mtp(ChainSpeculator):
    own_settings = ("model", "revision")
    usual_tokens = 1
    model_types = ("mtp", "*_mtp")

    def make_head(self, context: SpeculatorContext) -> ChainHead:
        target, layers = context.target, TargetSizes.of(context).layers
        folder = context.settings.get("model") or context.build.folder
        if not isinstance(target, Decoder) or folder is None:
            raise ConfigError(
                f"--speculative-config: {type(target).__name__} has no layer that predicts further tokens.",
                "Take another method.",
            )
        try:
            files = HeadFiles(Path(folder), _naming(target, layers), _is_further)
        except CheckpointError as error:
            raise CheckpointError(f"mtp: {error.message}", error.hint) from None
        method = _method(context, files)
        head = MtpHead(context.build, target, layers)
        if method is not None:
            head.quantize(method)
        files.fill(head, context.build, method)
        return head


def _method(context: SpeculatorContext, files: HeadFiles) -> QuantizationMethod | None:
    """Return the method that reads the layer's matrices; None where they are floats.

    Raises CheckpointError where they are quantized, and the target's are not.
    """
    quantized = [name for name in files.shapes if not name.endswith(_FLOATS)]
    if quantized and context.quantization is None:
        raise CheckpointError(
            f"The layer in {files.folder} that predicts further tokens is quantized, and config.json does not say how: "
            f"it has {quantized[0]}."
        )
    return context.quantization if quantized else None

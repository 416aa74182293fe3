"""`medusa`: heads that each guess one further token from the target's hidden state (Cai et al. 2024).

Head i is a few layers x + SiLU(W x), and a matrix to the vocabulary. Two layouts of the weights are read: the authors',
`i.j.linear.weight` and `i.N.weight`, and `blocks.i.layers.j.weight` and `lm_heads.i.weight`. The number of heads and
layers is that of the weights: published config.json files have others. There are no trees of guesses: each head gives
the token that it finds likeliest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from ferrule.errors import CheckpointError
from ferrule.interfaces.speculator import DraftSteps, KnownRows, Speculator, SpeculatorContext
from ferrule_nn import Head, Linear, Naming, building
from ferrule_plugins.speculator.head_files import HeadFiles, TargetSizes, best, check_count, folder_of
from ferrule_plugins.speculator.target import TargetParts

_NAMING = Naming(
    renames=(
        (r"^(model\.)?(medusa_heads?\.)?", ""),
        (r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2."),
        (r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight"),
    )
)
_PARTS = re.compile(r"(blocks|lm_heads)\.(\d+)\.")


class ResidualLayers(nn.Module):
    """Layers x + SiLU(W x + b)."""

    def __init__(self, hidden_size: int, count: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(hidden_size, hidden_size, bias) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(nn.Module):
    """The layers of each head, and the matrices to the vocabulary: one for each head, one for all, or none."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        layers = [name.split(".") for name in shapes if re.fullmatch(r"blocks\.\d+\.layers\.\d+\.weight", name)]
        numbers = sorted({int(parts[1]) for parts in layers})
        bias = any(name.startswith("blocks.") and name.endswith(".bias") for name in shapes)
        self.blocks = nn.ModuleList(
            ResidualLayers(hidden_size, sum(int(parts[1]) == number for parts in layers), bias) for number in numbers
        )
        count = sum(name.startswith("lm_heads.") for name in shapes)
        self.lm_heads = nn.ModuleList(Head(hidden_size, vocab_size) for _ in range(count))


class Medusa(Speculator):
    own_settings = ("model", "revision")
    usual_tokens = 3
    model_types = ("medusa", "MedusaModel")

    def __init__(self, context: SpeculatorContext) -> None:
        files, sizes = HeadFiles(folder_of(context, "medusa"), _NAMING), TargetSizes.of(context)
        numbers = {int(found[2]) for name in files.shapes if (found := _PARTS.match(name)) and found[1] == "blocks"}
        check_count(context, files.folder, len(numbers))
        hidden = files.need("blocks.0.layers.0.weight")[1]
        rows = next((shape[0] for name, shape in files.shapes.items() if name.startswith("lm_heads.")), sizes.vocab)
        ids = files.tensor("token_map")  # of the ids that heads know, where these are not all
        self._ids = None if ids is None or rows != len(ids) else ids.to(context.build.device).long()
        sizes.check(files.folder, hidden=hidden, vocab=rows if self._ids is None else sizes.vocab)

        def is_wanted(name: str) -> bool:
            found = _PARTS.match(name)
            return found is not None and int(found[2]) < context.num_tokens

        files = files.narrowed(is_wanted)
        with building(context.build):
            self._heads = MedusaHeads(files.shapes, hidden, rows)
        files.fill(self._heads, context.build)
        own: list[Callable[[torch.Tensor], torch.Tensor]] = [*self._heads.lm_heads] or [TargetParts(context).head]
        if len(own) not in (1, context.num_tokens):
            raise CheckpointError(f"The weights in {files.folder} have matrices to the vocabulary for some heads only.")
        self._lm_heads = own if len(own) > 1 else own * context.num_tokens

    def modules(self) -> Sequence[nn.Module]:
        return (self._heads,)

    def propose(self, rows: KnownRows, steps: DraftSteps) -> torch.Tensor:
        hidden, count = rows.hidden, max(rows.wanted)
        pairs = zip(self._heads.blocks[:count], self._lm_heads, strict=False)
        ids = torch.stack([best(lm_head(block(hidden))) for block, lm_head in pairs], dim=1)
        return ids if self._ids is None else self._ids[ids]

"""Which part of a parameter each rank of tensor parallelism has, and the whole parameter from these parts.

As in Megatron-LM (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053): projections into heads and into a
feed-forward block are divided by outputs, projections back by inputs, tables by rows. Key and value heads are repeated
where there are more ranks than heads; tables are filled up with zeros to a multiple of 64 rows.
https://docs.vllm.ai/en/stable/api/vllm/model_executor/layers/linear/
https://docs.vllm.ai/en/stable/api/vllm/model_executor/layers/vocab_parallel_embedding/
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ferrule.errors import CheckpointError, ConfigError
from ferrule_nn import MLP, Attention, Embedding, GatedMLP, Head, LayerNorm, Linear, RMSNorm, Router
from ferrule_nn.moe import SharedGate

PADDED_TO = 64  # rows of a table


@dataclass(frozen=True)
class Section:
    """`size` entries in `units` that are never cut: heads, or single rows. `repeated`: ranks may share a unit."""

    size: int
    units: int
    repeated: bool = False

    def share(self, ranks: int) -> int:
        """How many entries one of so many ranks has. Raises ConfigError where they cannot be divided."""
        if self.units % ranks == 0:
            return self.size // ranks
        if self.repeated and ranks % self.units == 0:
            return self.size // self.units
        raise ConfigError(f"{self.units} heads or rows cannot be divided among {ranks} ranks.")

    def copies(self, ranks: int) -> int:
        """How many ranks have the same entries."""
        return self.share(ranks) * ranks // self.size if self.size else 1


@dataclass(frozen=True)
class Division:
    """`axis` is divided, each of `sections` on its own; without sections every rank has the whole parameter.

    `rows`: of a table, before it is filled up; 0 for what is not a table.
    """

    axis: int = 0
    sections: tuple[Section, ...] = ()
    rows: int = 0

    def part(self, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """What one of `ranks` ranks has. Raises ConfigError where it cannot be divided."""
        if self.rows:
            filling = whole.new_zeros(-self.rows % PADDED_TO, *whole.shape[1:])
            whole = torch.cat([whole, filling]) if len(filling) else whole
        if not self.sections or ranks == 1:
            return whole
        parts, start = [], 0
        for section in self.sections:
            share = section.share(ranks)
            parts.append(whole.narrow(self.axis, start + rank // section.copies(ranks) * share, share))
            start += section.size
        return torch.cat(parts, dim=self.axis) if len(parts) > 1 else parts[0]

    def whole(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parameter that these parts of all ranks make. Raises CheckpointError, naming it, where they make none."""
        ranks, first = len(parts), parts[0]
        if any(part.shape != first.shape or part.dtype != first.dtype for part in parts):
            raise CheckpointError(f"Tensor {name!r} has another shape or type in some of the {ranks} ranks.")
        if ranks == 1:
            merged = first
        elif not self.sections:
            if not all(torch.equal(part, first) for part in parts):
                raise CheckpointError(f"Tensor {name!r} is not divided, and differs among the {ranks} ranks.")
            merged = first
        else:
            merged = self._joined(name, parts)
        filled_up = merged.dim() > 0 and len(merged) == -(-self.rows // PADDED_TO) * PADDED_TO
        return merged[: self.rows] if self.rows and filled_up else merged

    def _joined(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        ranks, shape = len(parts), tuple(parts[0].shape)
        try:
            shares = [section.share(ranks) for section in self.sections]
        except ConfigError as error:
            raise CheckpointError(f"Tensor {name!r}: {error.message}") from None
        if self.axis >= len(shape) or shape[self.axis] != sum(shares):
            raise CheckpointError(
                f"Tensor {name!r} has the shape {shape} in each of {ranks} ranks, and the model needs {sum(shares)} "
                f"in dimension {self.axis} there.",
                "The weights do not belong to this config.json.",
            )
        split = [part.split_with_sizes(shares, dim=self.axis) for part in parts]
        pieces = [
            split[rank][index]
            for index, section in enumerate(self.sections)
            for rank in range(0, ranks, section.copies(ranks))
        ]
        return torch.cat(pieces, dim=self.axis)


WHOLE = Division()


def division(modules: Mapping[str, nn.Module], name: str) -> Division | None:
    """How the parameter of that name is divided; None for one of a layer of which that is not known.

    `modules` are those of the model by their names.
    """
    path, _, own = name.rpartition(".")
    layer = modules.get(path)
    if type(layer) in (RMSNorm, LayerNorm, SharedGate) or isinstance(layer, Router):
        return WHOLE
    if isinstance(layer, Head) or isinstance(layer, Embedding) and path.endswith("embed_tokens"):
        rows = layer.out_features if isinstance(layer, Head) else layer.weight.shape[0]
        padded = -(-rows // PADDED_TO) * PADDED_TO
        return Division(0, (Section(padded, padded),), rows)
    if not isinstance(layer, Linear):
        return None
    above, _, last = path.rpartition(".")
    outputs, inputs = _sections(modules.get(above), last)
    if outputs:
        return Division(0, outputs)
    if inputs:
        return WHOLE if own == "bias" else Division(1, inputs)  # one rank adds the bias, and all have it
    return None


def _sections(block: nn.Module | None, layer: str) -> tuple[tuple[Section, ...], tuple[Section, ...]]:
    """Of the outputs, or of the inputs of a layer of this block. Both are empty where neither is known."""
    if isinstance(block, Attention):
        sizes, spec = block.qkv_proj.projections, block.spec
        if layer == "qkv_proj" and list(sizes) == ["q_proj", "k_proj", "v_proj"]:
            query = Section(sizes["q_proj"], spec.num_heads)
            return (query, *(Section(sizes[each], spec.num_kv_heads, True) for each in ("k_proj", "v_proj"))), ()
        if layer == "o_proj":
            return (), (Section(block.o_proj.in_features, spec.num_heads),)
    if isinstance(block, GatedMLP | MLP):
        inner = block.down_proj.in_features
        section = Section(inner, inner)
        if layer == "gate_up_proj":
            return (section, section), ()
        if layer == "up_proj":
            return (section,), ()
        if layer == "down_proj":
            return (), (section,)
    return (), ()

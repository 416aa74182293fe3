"""`mlp_speculator`: a chain of small networks over a state and the token before (Wertheimer et al. 2024).

Stage i maps the state s and the last token t to s' = GELU(norm(P s + c E(t))), and guesses the likeliest token of H s'.
The first state is the target's hidden state. https://arxiv.org/abs/2404.19124
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ferrule.interfaces.speculator import DraftSteps, KnownRows, Speculator, SpeculatorContext
from ferrule_nn import Embedding, Head, Linear, Naming, building, parameter
from ferrule_plugins.speculator.head_files import HeadFiles, TargetSizes, best, check_count, config_of, folder_of, size

_EPS = 1e-6
_NAMING = Naming(renames=((r"^speculator\.", ""),))
_STAGE = re.compile(r"(emb|proj|head|ln)\.(\d+)\.")


def _normed(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS)).to(x.dtype)


class ScaledNorm(nn.Module):
    """The norm x / rms(x) * w + b."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = parameter(size), parameter(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _normed(x) * self.weight + self.bias


class Stages(nn.Module):
    """The networks of all stages; where they are tied, those of the first, and the second's projection."""

    def __init__(self, config: Mapping[str, Any], count: int) -> None:
        super().__init__()
        hidden, vocab = size(config, "emb_dim"), size(config, "vocab_size")
        inner = int(config.get("inner_dim") or hidden)
        self.stages, tied = count, bool(config.get("tie_weights"))
        own, projections = 1 if tied else count, min(count, 2) if tied else count
        self.emb = nn.ModuleList(Embedding(vocab, inner) for _ in range(own))
        self.proj = nn.ModuleList(Linear(hidden if not i else inner, inner) for i in range(projections))
        self.ln = nn.ModuleList(ScaledNorm(inner) for _ in range(own))
        self.head = nn.ModuleList(Head(inner, vocab) for _ in range(own))
        self.scales_input = bool(config.get("scale_input"))
        state_weight = 0.5 ** (0.5 / size(config, "n_predict"))  # a state halves over all stages, in squares
        self.token_weight = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight

    def has(self, name: str) -> bool:
        """Return whether a tensor is of a stage that there is: tied stages may be in a file more than once."""
        found = _STAGE.match(name)
        return found is not None and int(found[2]) < len(self.get_submodule(found[1]))  # type: ignore[arg-type]

    def forward(self, ids: torch.Tensor, hidden: torch.Tensor, count: int) -> torch.Tensor:
        """Guess `count` tokens: ids [rows], hidden [rows, hidden] → [rows, count]."""
        state = _normed(hidden) / math.sqrt(2) if self.scales_input else hidden
        guesses = []
        for index in range(min(count, self.stages)):
            emb, proj, ln, head = (_stage(parts, index) for parts in (self.emb, self.proj, self.ln, self.head))
            state = F.gelu(ln(torch.add(proj(state), emb(ids), alpha=self.token_weight)))
            ids = best(head(state))
            guesses.append(ids)
        return torch.stack(guesses, dim=1)


def _stage(parts: nn.ModuleList, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a stage's own part, or the last that there is, which later stages share."""
    return parts[min(index, len(parts) - 1)]


class MLPSpeculator(Speculator):
    own_settings = ("model", "revision")
    usual_tokens = 3
    model_types = ("mlp_speculator", "MLPSpeculatorPreTrainedModel")

    def __init__(self, context: SpeculatorContext) -> None:
        folder = folder_of(context, "mlp_speculator")
        config = config_of(folder)
        check_count(context, folder, size(config, "n_predict"))
        TargetSizes.of(context).check(folder, hidden=size(config, "emb_dim"), vocab=size(config, "vocab_size"))
        with building(context.build):
            self._stages = Stages(config, context.num_tokens)
        HeadFiles(folder, _NAMING, self._stages.has).fill(self._stages, context.build)

    def modules(self) -> Sequence[nn.Module]:
        return (self._stages,)

    def propose(self, rows: KnownRows, steps: DraftSteps) -> torch.Tensor:
        slots = torch.tensor(rows.slots, device=rows.history.device)
        last = rows.history[slots, rows.lengths - 1].long()
        guesses: torch.Tensor = self._stages(last, rows.hidden, max(rows.wanted))
        return guesses

"""A speculator that finds the last token earlier in the text, and guesses that it goes on as it did there."""

from __future__ import annotations

import torch

from ferrule.errors import ConfigError
from ferrule.interfaces.speculator import DraftSteps, KnownRows, Speculator, SpeculatorContext


class ExampleSpeculator(Speculator):
    """A source of guesses that works on the device, where the texts are, and waits for nothing."""

    own_settings = ("furthest",)
    usual_tokens = 3

    def __init__(self, context: SpeculatorContext) -> None:
        furthest = context.settings.get("furthest", 1000)
        if type(furthest) is not int or furthest < 1:
            raise ConfigError(f"--speculative-config.furthest: {furthest!r:.80} is not a whole number from 1 on.")
        self._furthest = furthest

    def propose(self, rows: KnownRows, steps: DraftSteps) -> torch.Tensor:
        device = rows.history.device
        texts = rows.history[torch.tensor(rows.slots, device=device)].long()  # [rows, positions]
        end = rows.lengths.unsqueeze(1) - 1  # of the last token
        places = torch.arange(texts.shape[1], device=device)
        earlier = (places < end) & (places >= end - self._furthest) & (texts == texts.gather(1, end))
        found = torch.where(earlier, places, -1).max(dim=1, keepdim=True).values  # the newest
        wanted = found + 1 + torch.arange(max(rows.wanted), device=device)
        guesses = texts.gather(1, wanted.clamp(max=texts.shape[1] - 1))
        return torch.where((found >= 0) & (wanted <= end), guesses, -1)

"""Small heads that guess tokens: random checkpoints of them, and what transformers' layers say that they guess."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ferrule.interfaces.scheduler import GuessLimits
from ferrule.interfaces.speculator import DraftSteps, KnownRows, Speculator
from ferrule.plugin import discover
from ferrule_testkit.checkpoints import RECIPES, SIZES, randomise, write_tokenizer
from ferrule_testkit.harness import Engine, Harness

Tensors = dict[str, torch.Tensor]


def write_head(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], pickled: str = "") -> Path:
    """Write a head's folder: as safetensors, or in PyTorch's format to the file `pickled`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(dict(tensors), folder / pickled)
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def write_variant(folder: Path, recipe: str, seed: int = 5, **changes: Any) -> Any:
    """Write the checkpoint of a recipe with other values in its configuration, and return transformers' model."""
    changes = {**SIZES, **RECIPES[recipe].changes, **changes}
    config = AutoConfig.for_model(
        RECIPES[recipe].model_type, **{key: value for key, value in changes.items() if value is not ...}
    )
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(model, seed)
    model = model.to(torch.float32).eval().requires_grad_(False)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def random_tensors(seed: int, **shapes: Sequence[int]) -> Tensors:
    """Draw matrices, and vectors near one. Names have `__` for a dot."""
    draw = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(tuple(shape), generator=draw)
        made[name.replace("__", ".")] = 1 + 0.2 * noise if len(shape) == 1 else noise * (1.5 * shape[-1] ** -0.5)
    return made


class HeadHarness(Harness):
    """A model with a speculator. `proposed` has the known ids of each row that guesses were made for, and these."""

    def __init__(
        self, folder: Path, method: str, num_tokens: int, options: Mapping[str, Any] = {}, **settings: Any
    ) -> None:
        """Load both. `options` are those of `Harness`, `settings` the speculator's."""
        self.proposed: list[tuple[list[int], list[int]]] = []
        self.num_tokens = num_tokens
        kind: type[Speculator] = discover().load("speculator", method)
        propose = kind.propose

        def noted(speculator: Speculator, rows: KnownRows, steps: DraftSteps) -> torch.Tensor:
            guesses = propose(speculator, rows, steps)
            for slot, length, own in zip(rows.slots, rows.lengths.tolist(), guesses.tolist(), strict=True):
                self.proposed.append((rows.history[slot, :length].tolist(), own))
            return guesses

        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(kind, "propose", noted)
        given = {"method": method, "num_speculative_tokens": num_tokens, **settings}
        try:
            super().__init__(folder, **{"dtype": "float32", "speculative": given, **options})
        except BaseException:
            self._patch.undo()
            raise

    def close(self) -> None:
        self._patch.undo()
        super().close()

    def engine(self, **limits: Any) -> Engine:
        self.proposed.clear()
        return super().engine(**{"guesses": GuessLimits(most=self.num_tokens, adaptive=False), **limits})

    def share_right(self, texts: Sequence[Sequence[int]]) -> float:
        """Return the share of guesses that were right, among those of tokens that `texts`, whole, have."""
        right = total = 0
        for known, guesses in self.proposed:
            text = next(text for text in texts if list(text[: len(known)]) == known)
            pairs = list(zip(guesses, text[len(known) :], strict=False))
            right, total = right + sum(a == b for a, b in pairs), total + len(pairs)
        return right / total


class Reference:
    """A model of transformers: hidden states of a text, embeddings and logits."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.config = self.model.config

    @torch.no_grad()
    def hidden(self, ids: Sequence[int], inner: Sequence[int] = ()) -> torch.Tensor:
        """Return hidden states [tokens, hidden] after the final norm, or those that enter layers side by side."""
        states = self.model.model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0] for layer in inner], dim=-1) if inner else states[-1][0]

    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        found: torch.Tensor = self.model.model.embed_tokens(torch.tensor(list(ids)))
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model.lm_head(hidden)
        return found


@torch.no_grad()
def chain(
    hidden: torch.Tensor, ids: Sequence[int], count: int, follow: Callable[..., torch.Tensor], guess: Callable[..., int]
) -> list[int]:
    """Guess tokens one after the other by pairs of `ids`, those behind the first, and hidden states before them."""
    after, guesses = list(ids), []
    for _ in range(count):
        state = follow(after, hidden)[-1:]
        token = guess(state)
        guesses.append(token)
        after.append(token)
        hidden = torch.cat((hidden, state))
    return guesses


def run_layer(layer: nn.Module, x: torch.Tensor, config: Any, rotary: nn.Module) -> torch.Tensor:
    """Run a decoder layer of transformers causally over all positions from 0 on: x [tokens, hidden]."""
    positions = torch.arange(len(x))[None]
    mask = torch.full((len(x), len(x)), float("-inf")).triu(1)[None, None]
    out = layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=rotary(x[None], positions))
    found: torch.Tensor = (out[0] if isinstance(out, tuple) else out).reshape(len(x), -1)
    return found

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

from ferrule.interfaces.speculator import DraftSteps, KnownRows, Speculator
from ferrule.plugin import discover
from ferrule_testkit.checkpoints import RECIPES, SIZES, randomise, write_tokenizer
from ferrule_testkit.harness import Engine, Harness

Tensors = dict[str, torch.Tensor]
HIDDEN, VOCAB, INNER, KV = 64, 320, 96, 32  # of tiny models
INNER_IDS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}  # of a model with two layers


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
        given = {"method": method, "num_speculative_tokens": num_tokens, "adaptive": False, **settings}
        try:
            super().__init__(folder, **{"dtype": "float32", "speculative": given, **options})
        except BaseException:
            self._patch.undo()
            raise

    def close(self) -> None:
        self._patch.undo()
        super().close()

    def engine(self, **limits: Any) -> Engine:
        made = super().engine(**limits)
        self.proposed.clear()  # of its warm-up
        return made

    def share_right(self, texts: Sequence[Sequence[int]]) -> float:
        """Return the share of guesses that were right, among those of tokens that `texts`, whole, have."""
        right = total = 0
        for known, guesses in self.proposed:
            text = next(text for text in texts if list(text[: len(known)]) == known)
            pairs = [pair for pair in zip(guesses, text[len(known) :], strict=False) if pair[0] >= 0]
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


# ------------------------------------------------------------------------------------------------ tensors of heads


def medusa_tensors(heads: int, layers: int = 1) -> Tensors:
    shapes = {f"{i}__{j}__linear__weight": (HIDDEN, HIDDEN) for i in range(heads) for j in range(layers)}
    shapes |= {f"{i}__{j}__linear__bias": (HIDDEN,) for i in range(heads) for j in range(layers)}
    return random_tensors(3, **shapes, **{f"{i}__{layers}__weight": (VOCAB, HIDDEN) for i in range(heads)})


def mlp_tensors(stages: int, projections: int, inner: int) -> Tensors:
    shapes: dict[str, Sequence[int]] = {}
    for i in range(projections):
        shapes[f"speculator__proj__{i}__weight"] = (inner, HIDDEN if i == 0 else inner)
    for i in range(stages):
        shapes[f"speculator__emb__{i}__weight"] = shapes[f"speculator__head__{i}__weight"] = (VOCAB, inner)
        shapes[f"speculator__ln__{i}__weight"] = shapes[f"speculator__ln__{i}__bias"] = (inner,)
    return random_tensors(4, **shapes)


def layer_shapes(prefix: str, inputs: int = HIDDEN) -> dict[str, Sequence[int]]:
    """Return the shapes of a layer's tensors; names have `__` for a dot."""
    attention = {"q_proj": (HIDDEN, inputs), "k_proj": (KV, inputs), "v_proj": (KV, inputs), "o_proj": (HIDDEN, HIDDEN)}
    mlp = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    shapes: dict[str, Sequence[int]] = {f"{prefix}__self_attn__{n}__weight": shape for n, shape in attention.items()}
    shapes |= {f"{prefix}__mlp__{n}__weight": shape for n, shape in mlp.items()}
    return {**shapes, f"{prefix}__post_attention_layernorm__weight": (HIDDEN,)}


def head_config(**changes: object) -> dict[str, object]:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 4, "num_key_value_heads": 2}
    return {
        **sizes,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        **changes,
    }


def eagle_tensors() -> Tensors:
    return random_tensors(5, **layer_shapes("layers__0"), fc__weight=(HIDDEN, 2 * HIDDEN))


def eagle3_tensors(**more: Sequence[int]) -> Tensors:
    shapes = {**layer_shapes("midlayer", 2 * HIDDEN), "fc__weight": (HIDDEN, 3 * HIDDEN), "norm__weight": (HIDDEN,)}
    shapes |= {f"midlayer__{name}__weight": (HIDDEN,) for name in ("hidden_norm", "input_layernorm")}
    return random_tensors(6, **{**shapes, **more})

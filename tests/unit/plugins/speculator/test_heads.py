"""Heads on the target's hidden states: what they guess, compared with torch; and outputs, which they do not change."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from ferrule.interfaces.scheduler import GuessLimits
from ferrule_testkit.harness import Harness
from tests.fakes.heads import (
    HIDDEN,
    VOCAB,
    HeadHarness,
    Reference,
    Tensors,
    chain,
    head_config,
    layer_shapes,
    medusa_tensors,
    mlp_tensors,
    random_tensors,
    run_layer,
    write_head,
)

PROMPTS = [list(range(5, 30)), [21, 22, 23], [40], list(range(200, 211))]
Guess = Callable[[list[int], int], list[int]]  # what follows known ids


@pytest.fixture(scope="module")
def wanted(tiny_llama: Path) -> list[list[int]]:
    """Return what the model says without guesses."""
    with Harness(tiny_llama, dtype="float32") as harness:
        return [output.token_ids for output in harness.engine().run(PROMPTS, max_tokens=20)]


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Reference:
    return Reference(tiny_llama)


def compare(harness: HeadHarness, guess: Guess, wanted: list[list[int]]) -> None:
    """Compare all guesses with a reference's, with prompts in parts and several requests at a time; outputs too."""
    seldom = {"guesses": GuessLimits(most=harness.num_tokens, lookahead=harness.num_tokens)}  # as they succeed
    for limits in ({}, {"max_num_batched_tokens": 10}, seldom):
        engine = harness.engine(**limits)
        found = [output.token_ids for output in engine.run(PROMPTS, max_tokens=20)]
        assert found == wanted
        assert len(harness.proposed) > (0 if limits is seldom else 10)
        for known, own in harness.proposed:
            while own and own[-1] == -1:
                own.pop()
            assert own == guess(known, len(own)), known
        assert limits is seldom or max(len(own) for _, own in harness.proposed) == harness.num_tokens
    harness.executor.call("check", ())


# ------------------------------------------------------------------------------------------------ medusa


@pytest.mark.parametrize("layout", ["published", "converted", "truncated"])
def test_medusa(tmp_path: Path, tiny_llama: Path, reference: Reference, wanted: list[list[int]], layout: str) -> None:
    tensors, ids = medusa_tensors(4), torch.arange(VOCAB)
    written, pickled = tensors, "medusa_lm_head.pt"
    if layout != "published":
        pickled = ""
        written = {
            f"blocks.{i}.layers.0.{own}": tensors[f"{i}.0.linear.{own}"] for i in range(4) for own in ("weight", "bias")
        }
        ids = torch.arange(0, VOCAB, 3) if layout == "truncated" else ids
        written |= {f"lm_heads.{i}.weight": tensors[f"{i}.1.weight"][ids] for i in range(4)}
        written |= {"token_map": ids} if layout == "truncated" else {}
    folder = write_head(tmp_path / "head", {"medusa_num_heads": 2}, written, pickled)

    def guess(known: list[int], count: int) -> list[int]:
        last = reference.hidden(known[:-1])[-1]
        made = []
        for i in range(count):
            x = last + F.silu(tensors[f"{i}.0.linear.weight"] @ last + tensors[f"{i}.0.linear.bias"])
            made.append(int(ids[(tensors[f"{i}.1.weight"][ids] @ x).argmax()]))
        return made

    with HeadHarness(tiny_llama, "medusa", 3, model=str(folder)) as harness:  # one head less than there are
        compare(harness, guess, wanted)


def test_medusa_by_the_models_own_head(
    tmp_path: Path, tiny_llama: Path, reference: Reference, wanted: list[list[int]]
) -> None:
    tensors = {name: tensor for name, tensor in medusa_tensors(2, 2).items() if ".linear." in name}
    folder = write_head(tmp_path / "head", {}, tensors)

    def guess(known: list[int], count: int) -> list[int]:
        made = []
        for i in range(count):
            x = reference.hidden(known[:-1])[-1]
            for j in range(2):
                x = x + F.silu(tensors[f"{i}.{j}.linear.weight"] @ x + tensors[f"{i}.{j}.linear.bias"])
            made.append(int(reference.logits(x).argmax()))
        return made

    with HeadHarness(tiny_llama, "medusa", 2, model=str(folder)) as harness:
        compare(harness, guess, wanted)


# ------------------------------------------------------------------------------------------------ mlp_speculator


@pytest.mark.parametrize("tied", [False, True])
def test_mlp_speculator(
    tmp_path: Path, tiny_llama: Path, reference: Reference, wanted: list[list[int]], tied: bool
) -> None:
    tensors = mlp_tensors(1, 2, 48) if tied else mlp_tensors(3, 3, 48)
    config = {"emb_dim": HIDDEN, "inner_dim": 48, "n_predict": 3, "vocab_size": VOCAB}
    config |= {"tie_weights": tied, "scale_input": tied, "model_type": "mlp_speculator"}
    folder = write_head(tmp_path / "head", config, tensors)

    def part(name: str, stage: int) -> torch.Tensor:
        return tensors.get(
            f"speculator.{name.replace('#', str(stage))}", tensors[f"speculator.{name.replace('#', '0')}"]
        )

    def normed(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean() + 1e-6).sqrt()

    def guess(known: list[int], count: int) -> list[int]:
        state, made, last = reference.hidden(known[:-1])[-1], [], known[-1]
        state = normed(state) / math.sqrt(2) if tied else state
        keep = 0.5 ** (0.5 / 3)
        for i in range(count):
            projection = tensors[f"speculator.proj.{min(i, 1) if tied else i}.weight"]
            token = part("emb.#.weight", i)[last] * math.sqrt((1 - keep**2) * 48 / 2) / keep
            state = F.gelu(normed(projection @ state + token) * part("ln.#.weight", i) + part("ln.#.bias", i))
            last = int((part("head.#.weight", i) @ state).argmax())
            made.append(last)
        return made

    with HeadHarness(tiny_llama, "mlp_speculator", 3, model=str(folder)) as harness:
        compare(harness, guess, wanted)


# ------------------------------------------------------------------------------------------------ eagle


def a_layer(reference: Reference, tensors: Tensors, prefix: str, inputs: int = HIDDEN) -> nn.Module:
    """Return a decoder layer of transformers with these weights."""
    made = LlamaDecoderLayer(reference.config, 0)
    for name in ("q_proj", "k_proj", "v_proj"):
        old = getattr(made.self_attn, name)
        setattr(made.self_attn, name, nn.Linear(inputs, old.out_features, bias=False))
    own = {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}.")}
    made.input_layernorm = made.input_layernorm if "input_layernorm.weight" in own else nn.Identity()
    made.load_state_dict(own, strict=True)
    return made.eval()


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


@pytest.mark.parametrize("layout", ["published", "with its own"])
def test_eagle(tmp_path: Path, tiny_llama: Path, reference: Reference, wanted: list[list[int]], layout: str) -> None:
    own = layout == "with its own"
    shapes = {**layer_shapes("layers__0"), "fc__weight": (HIDDEN, 2 * HIDDEN)}
    more = {"embed_tokens__weight": (VOCAB, HIDDEN), "lm_head__weight": (VOCAB, HIDDEN), "norm__weight": (HIDDEN,)}
    more |= {"layers__0__input_layernorm__weight": (HIDDEN,), "enorm__weight": (HIDDEN,), "hnorm__weight": (HIDDEN,)}
    tensors = random_tensors(5, **shapes, **(more if own else {"fc__bias": (HIDDEN,)}))
    folder = write_head(tmp_path / "head", head_config(), tensors, "" if own else "pytorch_model.bin")
    layer, rotary = a_layer(reference, tensors, "layers.0"), LlamaRotaryEmbedding(reference.config)
    bias = tensors.get("fc.bias", torch.zeros(HIDDEN))

    def follow(ids: list[int], hidden: torch.Tensor) -> torch.Tensor:
        embedded = tensors["embed_tokens.weight"][ids] if own else reference.embed(ids)
        if own:
            embedded, hidden = norm(embedded, tensors["enorm.weight"]), norm(hidden, tensors["hnorm.weight"])
        x = torch.cat((embedded, hidden), dim=-1) @ tensors["fc.weight"].t() + bias
        return run_layer(layer, x, reference.config, rotary)

    def best(state: torch.Tensor) -> int:
        if own:
            return int((norm(state, tensors["norm.weight"]) @ tensors["lm_head.weight"].t()).argmax())
        return int(reference.logits(state).argmax())

    def guess(known: list[int], count: int) -> list[int]:
        return chain(reference.hidden(known[:-1]), known[1:], count, follow, best)

    with HeadHarness(tiny_llama, "eagle", 3, model=str(folder)) as harness:
        compare(harness, guess, wanted)


# ------------------------------------------------------------------------------------------------ eagle3


@pytest.mark.parametrize("layout", ["reduced vocabulary", "normed first"])
def test_eagle3(tmp_path: Path, tiny_llama: Path, reference: Reference, wanted: list[list[int]], layout: str) -> None:
    reduced, inner = layout == "reduced vocabulary", (1, 0, 1)
    ids = torch.arange(1, VOCAB, 4) if reduced else torch.arange(VOCAB)
    shapes = {**layer_shapes("midlayer", 2 * HIDDEN), "fc__weight": (HIDDEN, 3 * HIDDEN), "norm__weight": (HIDDEN,)}
    shapes |= {f"midlayer__{name}__weight": (HIDDEN,) for name in ("hidden_norm", "input_layernorm")}
    tensors = random_tensors(6, **shapes, lm_head__weight=(len(ids), HIDDEN))
    written = dict(tensors)
    if reduced:
        written |= {"d2t": ids - torch.arange(len(ids)), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
    config = head_config(draft_vocab_size=len(ids), norm_before_residual=not reduced)
    folder = write_head(tmp_path / "head", {**config, "eagle_aux_hidden_state_layer_ids": inner}, written)
    hidden_norm = tensors.pop("midlayer.hidden_norm.weight")
    layer, rotary = a_layer(reference, tensors, "midlayer", 2 * HIDDEN), LlamaRotaryEmbedding(reference.config)
    first_norm, layer.input_layernorm = layer.input_layernorm, nn.Identity()

    def follow(ids: list[int], hidden: torch.Tensor) -> torch.Tensor:
        normed = norm(hidden, hidden_norm)
        both = torch.cat((first_norm(reference.embed(ids)), normed), dim=-1)
        attended = run_layer(_Attention(layer.self_attn), both, reference.config, rotary)
        x = (hidden if reduced else normed) + attended
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def best(state: torch.Tensor) -> int:
        return int(ids[(norm(state, tensors["norm.weight"]) @ tensors["lm_head.weight"].t()).argmax()])

    def guess(known: list[int], count: int) -> list[int]:
        hidden = reference.hidden(known[:-1], inner) @ tensors["fc.weight"].t()
        return chain(hidden, known[1:], count, follow, best)

    with HeadHarness(tiny_llama, "eagle3", 3, model=str(folder)) as harness:
        compare(harness, guess, wanted)


class _Attention(nn.Module):
    """An attention that is called like a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, **given: object) -> torch.Tensor:
        found: torch.Tensor = self.inner(x, **given)[0]
        return found

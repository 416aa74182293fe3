"""Heads on the target's hidden states: what they guess, compared with torch; and outputs, which they do not change."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from ferrule.errors import StartupError
from ferrule_testkit.harness import Harness
from tests.fakes.heads import (
    HeadHarness,
    Reference,
    Tensors,
    chain,
    random_tensors,
    run_layer,
    write_head,
    write_variant,
)

HIDDEN, VOCAB, INNER, KV = 64, 320, 96, 32  # of the tiny model
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
    for limits in ({}, {"max_num_batched_tokens": 10}):
        engine = harness.engine(**limits)
        found = [output.token_ids for output in engine.run(PROMPTS, max_tokens=20)]
        assert found == wanted
        assert len(harness.proposed) > 10
        for known, own in harness.proposed:
            while own and own[-1] == -1:
                own.pop()
            assert own == guess(known, len(own)), known
    assert max(len(own) for _, own in harness.proposed) == harness.num_tokens
    harness.executor.call("check", ())


# ------------------------------------------------------------------------------------------------ medusa


def medusa_tensors(heads: int, layers: int = 1) -> Tensors:
    shapes = {f"{i}__{j}__linear__weight": (HIDDEN, HIDDEN) for i in range(heads) for j in range(layers)}
    shapes |= {f"{i}__{j}__linear__bias": (HIDDEN,) for i in range(heads) for j in range(layers)}
    return random_tensors(3, **shapes, **{f"{i}__{layers}__weight": (VOCAB, HIDDEN) for i in range(heads)})


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


def mlp_tensors(stages: int, projections: int, inner: int) -> Tensors:
    shapes: dict[str, Sequence[int]] = {}
    for i in range(projections):
        shapes[f"speculator__proj__{i}__weight"] = (inner, HIDDEN if i == 0 else inner)
    for i in range(stages):
        shapes[f"speculator__emb__{i}__weight"] = shapes[f"speculator__head__{i}__weight"] = (VOCAB, inner)
        shapes[f"speculator__ln__{i}__weight"] = shapes[f"speculator__ln__{i}__bias"] = (inner,)
    return random_tensors(4, **shapes)


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


# ------------------------------------------------------------------------------------------------ right guesses


def knowing_eagle(folder: Path, head: Path) -> Path:
    """Write a model with one layer, and a head that computes what the model does, but for the first token's part.

    Attention is made to matter little, because the head does not see that token.
    """
    model = write_variant(folder, "llama", num_hidden_layers=1)
    model.model.layers[0].self_attn.o_proj.weight.mul_(0.001)
    model.save_pretrained(folder)
    state = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    tensors = {name: tensor for name, tensor in state.items() if name.startswith(("layers.", "norm."))}
    tensors["fc.weight"] = torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), dim=1)  # the embedding alone
    return write_head(head, head_config(), tensors)


@pytest.mark.parametrize("limits", [{}, {"depth": 2}, {"num_blocks": 24, "max_num_batched_tokens": 12}], ids=str)
def test_a_head_that_knows_the_model_guesses_right(tmp_path: Path, limits: dict[str, int]) -> None:
    head, manner = (
        knowing_eagle(tmp_path / "model", tmp_path / "head"),
        {"max_tokens": 30, "temperature": 1.0, "seed": 3},
    )
    random = write_head(
        tmp_path / "random",
        head_config(),
        random_tensors(9, **layer_shapes("layers__0"), fc__weight=(HIDDEN, 2 * HIDDEN)),
    )
    with Harness(tmp_path / "model", dtype="float32") as harness:
        texts = [
            [*ids, *o.token_ids] for ids, o in zip(PROMPTS, harness.engine().run(PROMPTS, max_tokens=30), strict=True)
        ]
        sampled = [output.token_ids for output in harness.engine().run(PROMPTS, **manner)]
    shares = []
    for folder in (head, random):
        with HeadHarness(tmp_path / "model", "eagle", 4, model=str(folder)) as guessing:
            engine = guessing.engine(**limits)
            found = engine.run(PROMPTS, max_tokens=30)
            assert [[*ids, *o.token_ids] for ids, o in zip(PROMPTS, found, strict=True)] == texts
            shares.append(guessing.share_right(texts))
            again = engine.run([[*texts[0][:40], 7]], max_tokens=8)  # behind a prefix that was cached
            assert again[0].cached > 0 or "num_blocks" in limits
            assert [output.token_ids for output in guessing.engine(**limits).run(PROMPTS, **manner)] == sampled
    assert shares[0] > 0.8
    assert shares[1] < 0.3


# ------------------------------------------------------------------------------------------------ recorded passes


def test_recorded_passes_guess_the_same(tmp_path: Path) -> None:
    """Compare guesses of a head whose passes the device records with those of launched ones."""
    head = knowing_eagle(tmp_path / "model", tmp_path / "head")
    options = {"dtype": "bfloat16", "block_size": 16}
    with HeadHarness(tmp_path / "model", "eagle", 4, options, model=str(head)) as harness:
        texts = [
            [*ids, *o.token_ids] for ids, o in zip(PROMPTS, harness.engine().run(PROMPTS, max_tokens=30), strict=True)
        ]
        assert harness.share_right(texts) > 0.8


# ------------------------------------------------------------------------------------------------ files that do not fit


def eagle_tensors() -> Tensors:
    return random_tensors(5, **layer_shapes("layers__0"), fc__weight=(HIDDEN, 2 * HIDDEN))


def eagle3_tensors(**more: Sequence[int]) -> Tensors:
    shapes = {**layer_shapes("midlayer", 2 * HIDDEN), "fc__weight": (HIDDEN, 3 * HIDDEN), "norm__weight": (HIDDEN,)}
    shapes |= {f"midlayer__{name}__weight": (HIDDEN,) for name in ("hidden_norm", "input_layernorm")}
    return random_tensors(6, **{**shapes, **more})


INNER_IDS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
MLP = {"emb_dim": HIDDEN, "inner_dim": 48, "n_predict": 3, "vocab_size": VOCAB}
BAD: list[tuple[str, str, dict[str, object], Tensors, str]] = [
    ("no weights", "medusa", {}, {"other": torch.zeros(1)}, "asked|guesses one token|no matrix"),
    ("fewer heads", "medusa", {}, medusa_tensors(2), "num_speculative_tokens 3: .* has 2 heads"),
    ("vocabulary", "medusa", {}, {**medusa_tensors(3), "0.1.weight": torch.zeros(VOCAB, 65)}, "0.1.weight"),
    ("hidden size", "medusa", {}, random_tensors(1, **{f"{i}__0__linear__weight": (32, 32) for i in range(3)}), "hidden size of 32, and the model has 64"),
    ("some matrices", "medusa", {}, {k: t for k, t in medusa_tensors(3).items() if k != "2.1.weight"}, "for some heads only"),
    ("fewer stages", "mlp_speculator", {**MLP, "n_predict": 2}, mlp_tensors(2, 2, 48), "num_speculative_tokens 3: .* has 2 heads"),
    ("vocabulary", "mlp_speculator", {**MLP, "vocab_size": 99}, mlp_tensors(3, 3, 48), "vocabulary of 99, and the model has 320"),
    ("no n_predict", "mlp_speculator", {"emb_dim": HIDDEN}, mlp_tensors(3, 3, 48), "config.json has no 'n_predict'"),
    ("sizes", "mlp_speculator", MLP, mlp_tensors(3, 3, 40), "has the shape"),
    ("a missing stage", "mlp_speculator", MLP, mlp_tensors(2, 3, 48), "lack (emb|head|ln).2."),
    ("no fc", "eagle", head_config(), {k: t for k, t in eagle_tensors().items() if k != "fc.weight"}, "lack fc.weight"),
    ("vocabulary", "eagle", head_config(vocab_size=99), eagle_tensors(), "vocabulary of 99, and the model has 320"),
    ("hidden size", "eagle", head_config(hidden_size=32), eagle_tensors(), "hidden size of 32, and the model has 64"),
    ("sizes", "eagle", head_config(intermediate_size=32), eagle_tensors(), "has the shape"),
    ("another tensor", "eagle", head_config(), {**eagle_tensors(), "x.weight": torch.zeros(1)}, "does not have: 'x.weight'"),
    ("layers", "eagle3", head_config(), eagle3_tensors(), "before the layers 2, 1, -1, and the model has the layers 0 to 1"),
    ("no fc", "eagle3", head_config(**INNER_IDS), {k: t for k, t in eagle3_tensors().items() if k != "fc.weight"}, "no matrix fc.weight"),
    ("states", "eagle3", head_config(**INNER_IDS), eagle3_tensors(fc__weight=(HIDDEN, 96)), "hidden size of 32, and the model has 64"),
    ("no d2t", "eagle3", head_config(**INNER_IDS), eagle3_tensors(lm_head__weight=(80, HIDDEN)), "80 rows for 320 ids, and there is no d2t"),
    ("d2t", "eagle3", head_config(**INNER_IDS), {**eagle3_tensors(lm_head__weight=(80, HIDDEN)), "d2t": torch.full((80,), 300)}, "outside the vocabulary"),
    ("d2t's length", "eagle3", head_config(**INNER_IDS), {**eagle3_tensors(lm_head__weight=(80, HIDDEN)), "d2t": torch.zeros(9)}, "d2t is for 9 ids"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "config", "tensors", "message"), [case[1:] for case in BAD], ids=[f"{c[1]}: {c[0]}" for c in BAD]
)
def test_files_that_do_not_fit(
    tmp_path: Path,
    tiny_llama: Path,
    kind: str,
    config: dict[str, object],
    tensors: Tensors,
    message: str,
) -> None:
    folder = write_head(tmp_path / "head", config, tensors)
    with pytest.raises(StartupError, match=message) as raised:
        HeadHarness(tiny_llama, kind, 3, model=str(folder))
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize("kind", ["medusa", "mlp_speculator", "eagle", "eagle3"])
def test_a_head_without_a_folder(tiny_llama: Path, kind: str) -> None:
    with pytest.raises(StartupError, match="needs the key 'model'"):
        HeadHarness(tiny_llama, kind, 3)

"""A model of a stranger that neither Ferrule nor transformers knows, with states of its own.

The reference computes the same numbers one token after the other, from the weights alone.
"""

from __future__ import annotations

import json
import math
import random
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from ferrule.config import Config, ModelConfig, SchedulerConfig
from ferrule.config.resolve import resolve
from ferrule.env import Environment
from ferrule.errors import CheckpointError, ConfigError
from ferrule.plugin import discover
from ferrule_testkit import server as servers
from ferrule_testkit.checkpoints import write_tokenizer
from ferrule_testkit.harness import Harness

HIDDEN, HEADS, INNER, VOCAB, LAYERS = 32, 2, 48, 320, 3
DIM = HIDDEN // HEADS
KINDS = {"pure": ["memory"] * LAYERS, "hybrid": ["memory", "attention", "memory"]}
CONFIG: dict[str, Any] = {
    "architectures": ["AcmeMemoryForCausalLM"],
    "model_type": "acme_memory",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "eos_token_id": VOCAB - 1,
}
Weights = dict[str, torch.Tensor]


def draw_weights(kinds: Sequence[str]) -> Weights:
    draw = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw) * 1.5 / math.sqrt(columns)

    def vector(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": matrix(VOCAB, HIDDEN)}
    weights["model.norm.weight"] = 1 + 0.2 * vector(HIDDEN)
    for index, kind in enumerate(kinds):
        at = f"model.layers.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}.{norm}.weight"] = 1 + 0.2 * vector(HIDDEN)
        for name, rows, columns in (("gate", INNER, HIDDEN), ("up", INNER, HIDDEN), ("down", HIDDEN, INNER)):
            weights[f"{at}.mlp.{name}_proj.weight"] = matrix(rows, columns)
        weights[f"{at}.self_attn.o_proj.weight"] = matrix(HIDDEN, HIDDEN)
        if kind == "attention":
            for name in "qkv":
                weights[f"{at}.self_attn.{name}_proj.weight"] = matrix(HIDDEN, HIDDEN)
        else:
            weights[f"{at}.self_attn.qkv_proj.weight"] = matrix(3 * HIDDEN, HIDDEN)
            weights[f"{at}.self_attn.mix"] = vector(HIDDEN)
            weights[f"{at}.self_attn.decay"] = vector(HEADS, DIM)
            weights[f"{at}.self_attn.bonus"] = vector(HEADS)
    return weights


class Reference:
    """One request, one token at a time."""

    def __init__(self, weights: Weights, kinds: Sequence[str]) -> None:
        self.weights, self.kinds = weights, kinds
        self.before = [torch.zeros(HIDDEN)] * LAYERS
        self.matrices = [torch.zeros(HEADS, DIM, DIM)] * LAYERS
        self.past: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(LAYERS)]
        self.position = 0

    def step(self, token: int) -> torch.Tensor:
        """Return the logits [vocab] after `token`."""
        w = self.weights
        x = w["model.embed_tokens.weight"][token]
        for index, kind in enumerate(self.kinds):
            at = f"model.layers.{index}"
            y = self._norm(x, f"{at}.input_layernorm")
            y = self._attend(y, index) if kind == "attention" else self._remember(y, index)
            x = x + w[f"{at}.self_attn.o_proj.weight"] @ y
            y = self._norm(x, f"{at}.post_attention_layernorm")
            gate = F.silu(w[f"{at}.mlp.gate_proj.weight"] @ y)
            x = x + w[f"{at}.mlp.down_proj.weight"] @ (gate * (w[f"{at}.mlp.up_proj.weight"] @ y))
        self.position += 1
        return w["lm_head.weight"] @ self._norm(x, "model.norm")

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean() + 1e-6) * self.weights[f"{name}.weight"]

    def _remember(self, x: torch.Tensor, index: int) -> torch.Tensor:
        mix, decay, bonus, qkv = (
            self.weights[f"model.layers.{index}.self_attn.{name}"]
            for name in ("mix", "decay", "bonus", "qkv_proj.weight")
        )
        mixed = x + mix.sigmoid() * (self.before[index] - x)
        self.before[index] = x
        out = []
        matrices = []
        for head, (q, k, v) in enumerate((qkv @ mixed).view(3, HEADS, DIM).transpose(0, 1)):
            matrix = torch.diag(decay[head].sigmoid()) @ self.matrices[index][head] + torch.outer(k, v)
            matrices.append(matrix)
            out.append(q @ matrix + bonus[head] * (q @ k) * v)
        self.matrices[index] = torch.stack(matrices)
        return torch.cat(out)

    def _attend(self, x: torch.Tensor, index: int) -> torch.Tensor:
        q, k, v = (
            (self.weights[f"model.layers.{index}.self_attn.{name}_proj.weight"] @ x).view(HEADS, DIM) for name in "qkv"
        )
        self.past[index].append((self._rotate(k), v))
        keys, values = (torch.stack(each, 1) for each in zip(*self.past[index], strict=True))  # [heads, tokens, dim]
        scores = torch.einsum("hd,htd->ht", self._rotate(q), keys) / math.sqrt(DIM)
        return torch.einsum("ht,htd->hd", scores.softmax(-1), values).flatten()

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        angles = self.position / 10000.0 ** (torch.arange(0, DIM, 2) / DIM)
        left, right = x.chunk(2, -1)
        return torch.cat((left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()), -1)


class Case:
    """A checkpoint on disk and what it must say."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kinds = folder, KINDS[kind]
        self.weights = draw_weights(self.kinds)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**CONFIG, "layer_types": self.kinds}))
        save_file(self.weights, folder / "model.safetensors")
        write_tokenizer(folder)

    def expected(self, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], list[float], list[float]]:
        """Return tokens, their log-probabilities, and those of the prompt's."""
        reference = Reference(self.weights, self.kinds)
        tokens, said, prompted = list(prompt), [], []
        for position in range(len(prompt) + max_tokens - 1):
            logprobs = reference.step(tokens[position]).log_softmax(-1)
            if position < len(prompt) - 1:
                prompted.append(float(logprobs[tokens[position + 1]]))
            else:
                tokens.append(int(logprobs.argmax()))
                said.append(float(logprobs.max()))
        return tokens[len(prompt) :], said, prompted


PROMPTS = [[random.Random(length).randrange(VOCAB) for _ in range(length)] for length in (1, 2, 7, 16, 23, 40)]
TOKENS = 12


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("memory")
    return {kind: Case(folder / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def wanted(cases: dict[str, Case]) -> dict[str, list[Any]]:
    return {kind: [case.expected(prompt, TOKENS) for prompt in PROMPTS] for kind, case in cases.items()}


@pytest.fixture
def harness(request: pytest.FixtureRequest, cases: dict[str, Case], on_path: Any) -> Iterator[Harness]:
    on_path("acme_memory")
    with Harness(cases[request.param].folder, dtype="float32") as made:
        yield made


def check(outputs: Sequence[Any], wanted: Sequence[Any]) -> None:
    for output, (tokens, said, prompted) in zip(outputs, wanted, strict=True):
        assert output.error is None
        assert output.token_ids == tokens
        assert [entry.logprob for entry in output.logprobs] == pytest.approx(said, abs=1e-3)
        if output.prompt_logprobs:
            assert [entry.logprob for entry in output.prompt_logprobs] == pytest.approx(prompted, abs=1e-3)


@pytest.mark.parametrize("harness", KINDS, indirect=True)
def test_it_says_what_the_reference_says(harness: Harness, wanted: dict[str, Any]) -> None:
    kinds = [group.kind for group in harness.info.groups]
    expected = wanted["hybrid" if "full" in kinds else "pure"]
    assert kinds[-1] == "recurrent"
    assert harness.info.architecture == "AcmeMemoryForCausalLM"
    assert "acme-memory 0.3.0" in harness.info.implementation

    alone = harness.engine()
    for prompt, one in zip(PROMPTS, expected, strict=True):
        check(alone.run([prompt], max_tokens=TOKENS, prompt_logprobs=0), [one])
    check(harness.engine().run(PROMPTS, max_tokens=TOKENS), expected)
    # Prompts in pieces, slots that change hands, and two steps in flight.
    for depth in (1, 2):
        cut = harness.engine(max_num_batched_tokens=5, max_num_seqs=3, depth=depth)
        check(cut.run(PROMPTS, max_tokens=TOKENS, prompt_logprobs=0), expected)
    check(harness.engine(policy="chaos", max_num_batched_tokens=9, depth=2).run(PROMPTS, max_tokens=TOKENS), expected)


@pytest.mark.parametrize("harness", ["hybrid"], indirect=True)
def test_who_is_preempted_begins_again(harness: Harness, wanted: dict[str, Any]) -> None:
    crowded = harness.engine(num_blocks=1 + 15, max_num_batched_tokens=16, depth=2)
    outputs = crowded.run(PROMPTS, max_tokens=TOKENS)
    check(outputs, wanted["hybrid"])
    assert sum(output.num_preemptions for output in outputs) > 0


@pytest.mark.parametrize("harness", KINDS, indirect=True)
def test_prefixes_are_reused_where_states_were_saved(harness: Harness, wanted: dict[str, Any]) -> None:
    engine = harness.engine()
    expected = wanted["hybrid" if len(harness.info.groups) > 1 else "pure"]
    cached = []
    for _ in range(2):
        outputs = engine.run(PROMPTS, max_tokens=TOKENS)
        check(outputs, expected)
        cached.append([output.cached for output in outputs])
    assert cached == [[0] * 6, [0, 0, 0, 0, 20, 36]]


def test_states_that_do_not_fit_are_refused(cases: dict[str, Case], on_path: Any) -> None:
    on_path("acme_memory")
    config = resolve(
        Config(
            model=ModelConfig(model=str(cases["pure"].folder)),
            scheduler=SchedulerConfig(max_num_seqs=256),
            env=Environment(cpu_kvcache_space=0.001),
        )
    )
    plugins = discover()
    executor = plugins.load("executor", "uni")()
    with pytest.raises(ConfigError, match="--max-num-seqs"):
        executor.start(config, plugins)


def test_the_model_refuses_a_checkpoint_that_it_cannot_run(
    cases: dict[str, Case], on_path: Any, tmp_path: Path
) -> None:
    on_path("acme_memory")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "layer_types": ["memory", "guess", "memory"]}))
    with pytest.raises(CheckpointError, match="layer_types"):
        Harness(tmp_path)


def test_without_the_package_the_architecture_is_unknown(cases: dict[str, Case]) -> None:
    with pytest.raises(CheckpointError, match="acme_memory"):
        Harness(cases["pure"].folder)


@pytest.mark.slow  # e2e/plugins/test_templates.py serves a model of a package
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_served(
    kind: str, cases: dict[str, Case], wanted: dict[str, Any], installed: Any, tmp_path: Path
) -> None:
    args = [str(cases[kind].folder), "--dtype", "float32", "--max-num-seqs", "4", "--served-model-name", "memory"]
    with servers.running(args, tmp_path / "log", installed.environment("acme_memory")) as server:
        for prompt, (tokens, _, _) in zip(PROMPTS, wanted[kind], strict=True):
            body = {
                "model": "memory",
                "prompt": prompt,
                "temperature": 0,
                "max_tokens": TOKENS,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            asked = urllib.request.Request(
                f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=240) as response:
                (choice,) = json.load(response)["choices"]
            assert choice["token_ids"] == tokens
        assert server.says("acme-memory 0.3.0")
        assert server.says("ready at")
        assert ("no KV cache: the model keeps a state" in server.text()) == (kind == "pure")

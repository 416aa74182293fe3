"""A small model guesses for a large one: outputs stay, and how many guesses are right says that its entries are."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from ferrule.assembly.memory import device_tensors
from ferrule.config import WorkerSettings
from ferrule.errors import CheckpointError, ConfigError
from ferrule.execution import worker as worker_module
from ferrule.execution.worker import Worker
from ferrule.interfaces.scheduler import GuessLimits
from ferrule_plugins.speculator.draft_model import surest as by_torch
from ferrule_plugins.speculator.vocabularies import share_tokens
from ferrule_testkit.checkpoints import tiny_checkpoint
from ferrule_testkit.harness import Engine, Harness

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [21, 22, 23], [31, 32, 33, 34, 35], [41, 42], list(range(51, 90))]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7}
MOST = 4
CPU = torch.device("cpu")


class Pair(Harness):
    """A target and a draft model, which makes guesses at each step unless `engine` is told otherwise."""

    def __init__(self, target: Path, draft: Path, **settings: Any) -> None:
        named = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": MOST, "least_certainty": 0}
        super().__init__(target, dtype="float32", speculative=named | settings)

    def engine(self, **limits: Any) -> Engine:
        guesses = {"most": MOST, "adaptive": False, "lookahead": self.info.lookahead} | limits.pop("guesses", {})
        return super().engine(guesses=GuessLimits(**guesses), **limits)


def accepted(engine: Engine) -> float:
    return engine.stats.accepted_tokens / engine.stats.draft_tokens


@pytest.fixture(scope="module")
def wanted(tiny_llama: Path) -> dict[str, list[list[int]]]:
    """Return what the target says without guesses, greedy and sampled."""
    with Harness(tiny_llama, dtype="float32") as harness:
        manners: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": SAMPLED}
        return {
            name: [output.token_ids for output in harness.engine().run(PROMPTS, max_tokens=30, **manner)]
            for name, manner in manners.items()
        }


@pytest.fixture(scope="module")
def itself(tiny_llama: Path) -> Iterator[Pair]:
    with Pair(tiny_llama, tiny_llama) as made:
        yield made


@pytest.fixture(scope="module")
def stranger(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    draft = tiny_checkpoint("qwen3", tmp_path_factory.mktemp("draft"), seed=9)
    with Pair(tiny_llama, draft) as made:
        yield made


LIMITS: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "batched": {},
    "chunks": {"max_num_batched_tokens": 10},
    "preempted": {"num_blocks": 24, "max_num_batched_tokens": 16},
    "two in flight": {"depth": 2},
    "two in flight, preempted": {"depth": 2, "num_blocks": 24},
}


def cases() -> Iterator[Any]:
    """Yield pairs of limits and manner: each of the limits with one manner, in `make test-slow` with both."""
    for number, limits in enumerate(LIMITS):
        for manner in ("greedy", "sampled"):
            marks = [pytest.mark.slow] if (manner == "greedy") == bool(number % 2) else []
            yield pytest.param(limits, manner, id=f"{limits}-{manner}", marks=marks)


@pytest.mark.parametrize(("limits", "manner"), list(cases()))
def test_outputs_stay(
    itself: Pair, stranger: Pair, wanted: dict[str, list[list[int]]], limits: str, manner: str
) -> None:
    """Guess right, and wrong; the blocks of both are free at the end, which `run` checks."""
    for pair in (itself, stranger):
        engine = pair.engine(**LIMITS[limits])
        found = engine.run(PROMPTS, max_tokens=30, **(SAMPLED if manner == "sampled" else {}))
        assert [output.token_ids for output in found] == wanted[manner]
        assert ("preempted" in limits) == (sum(output.num_preemptions for output in found) > 0)
        pair.executor.call("check")
        if manner == "greedy":
            share = accepted(engine)
            assert share > 0.97 if pair is itself else share < 0.1


def test_a_cached_prefix_brings_the_entries_too(itself: Pair, wanted: dict[str, list[list[int]]]) -> None:
    engine = itself.engine()
    engine.run(PROMPTS[-1:], max_tokens=8)
    before = engine.stats
    (again,) = engine.run(PROMPTS[-1:], max_tokens=30)
    assert again.cached == len(PROMPTS[-1]) // 4 * 4 - 4 * (len(PROMPTS[-1]) % 4 == 0)
    assert again.token_ids == wanted["greedy"][-1]
    assert engine.stats.accepted_tokens - before.accepted_tokens == engine.stats.draft_tokens - before.draft_tokens


def test_what_was_missed_is_made_up_for(itself: Pair, wanted: dict[str, list[list[int]]]) -> None:
    """Guess only once a request runs alone: for the others, some tokens end their texts after ten or more."""
    longest = wanted["greedy"][-1]
    ends = [next(id for id in text[10:] if id not in longest) for text in wanted["greedy"][:-1]]
    engine = itself.engine(guesses={"max_requests": 1})
    (*_, found) = engine.run(PROMPTS, max_tokens=30, stop_token_ids=tuple(ends))
    assert found.token_ids == longest
    assert engine.stats.draft_tokens == engine.stats.accepted_tokens > 5


def test_without_a_block_for_them_fewer_are_guessed(itself: Pair) -> None:
    """Two requests of three blocks each fill the pool: guesses reach the ends of blocks and no further."""
    engine = itself.engine(num_blocks=7, guesses={"lookahead": 0})
    found = engine.run([[5, 6, 7], [8, 9, 10]], max_tokens=10)
    assert [len(output.token_ids) for output in found] == [10, 10]
    assert engine.stats.draft_tokens == engine.stats.accepted_tokens > 0


def edited(source: Path, folder: Path, **values: Any) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return folder


def test_nothing_is_guessed_beyond_the_draft_models_own_length(
    tmp_path: Path, tiny_llama: Path, wanted: dict[str, list[list[int]]]
) -> None:
    with Pair(tiny_llama, edited(tiny_llama, tmp_path / "short", max_position_embeddings=20)) as pair:
        engine = pair.engine()
        found = engine.run(PROMPTS[:1], max_tokens=30)
        assert found[0].token_ids == wanted["greedy"][0]
        assert engine.stats.draft_tokens == engine.stats.accepted_tokens == 11  # up to position 20
        (long,) = engine.run(PROMPTS[-1:], max_tokens=30)
        assert long.token_ids == wanted["greedy"][-1]
        assert engine.stats.draft_tokens == 11


def test_quantized_draft(tiny_llama: Path, wanted: dict[str, list[list[int]]]) -> None:
    with Pair(tiny_llama, tiny_llama, quantization="int8") as pair:
        engine = pair.engine()
        assert [output.token_ids for output in engine.run(PROMPTS, max_tokens=30)] == wanted["greedy"]
        assert 0.5 < accepted(engine) < 1.01


@pytest.mark.parametrize("recipes", [("llama", "gemma3_text"), ("gemma3_text", "llama"), ("lfm2", "llama")])
def test_groups_of_both_models(tmp_path: Path, recipes: tuple[str, str]) -> None:
    """Guess with a window for a target without, the other way round, and for a target with states."""
    target, draft = (tiny_checkpoint(name, tmp_path / name) for name in recipes)
    prompts = [list(range(5, 45)), [7, 8, 9]]
    with Harness(target, dtype="float32") as alone:
        wanted = [output.token_ids for output in alone.engine().run(prompts, max_tokens=30)]
        size = alone.info.page_bytes
    with Pair(target, draft) as pair:
        limited: dict[str, Any] = {"max_num_batched_tokens": 16, "num_blocks": 60}
        for limits in ({}, limited):
            engine = pair.engine(**limits)
            for _ in range(2):  # the second time with cached prefixes
                assert [output.token_ids for output in engine.run(prompts, max_tokens=30)] == wanted
            assert engine.stats.drafts > 0
        assert pair.info.page_bytes >= size
        pair.executor.call("check")


def test_windows_of_both(tmp_path: Path) -> None:
    """Be right with windows too, where blocks are given away meanwhile; and have outputs as they are when guesses were
    not wanted for longer than a window.
    """
    target, prompts = tiny_checkpoint("gemma3_text", tmp_path / "model"), [list(range(5, 45)), [3, 4]]
    with Pair(target, target) as pair:
        engine = pair.engine()
        long, short = (output.token_ids for output in engine.run(prompts, max_tokens=60))
        assert accepted(engine) > 0.97
        end = next(id for id in short[30:] if id not in long)
        engine = pair.engine(guesses={"max_requests": 1}, prefix_caching=False)
        found = engine.run(prompts, max_tokens=60, stop_token_ids=(end,))
        assert found[0].token_ids == long
        assert len(found[1].token_ids) > 30
        assert engine.stats.drafts > 0


def test_sleeping_and_waking(tiny_llama: Path, wanted: dict[str, list[list[int]]]) -> None:
    with Pair(tiny_llama, tiny_llama) as pair:
        assert pair.engine().run(PROMPTS, max_tokens=30)[0].token_ids == wanted["greedy"][0]
        pair.executor.call("release", (("weights", "kv_cache"), 1))
        for part in ("weights", "kv_cache"):
            pair.executor.call("restore", (part,))
        engine = pair.engine()
        assert [output.token_ids for output in engine.run(PROMPTS, max_tokens=30)] == wanted["greedy"]
        assert accepted(engine) > 0.97


@pytest.fixture
def worker(tiny_llama: Path, itself: Pair, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """Make a worker whose device is said to have memory of its own. It computes nothing: a CPU's kernels keep
    addresses.
    """
    monkeypatch.setattr(worker_module, "device_tensors", lambda model, device: device_tensors(model, CPU))
    made = Worker(WorkerSettings.of(itself.config), itself.plugins)
    made.start()
    made._own_memory = True
    monkeypatch.setattr(made, "_warm_up", lambda runner: None)
    made.init_cache(8)
    return made


@pytest.mark.parametrize("level", [1, 2])
def test_weights_of_both_sleep(level: int, worker: Worker) -> None:
    """Wake the same speculator at level 1, and make it again at level 2."""
    before = worker.model_runner.speculator
    assert before is not None
    (draft,) = before.modules()
    numbers = [parameter.clone() for parameter in draft.parameters()]
    worker.release(("weights", "kv_cache"), level)
    assert worker.model_runner.speculator is None
    left = sum(tensor.untyped_storage().nbytes() for tensor in device_tensors(draft, CPU))
    assert (left == 0) == (level == 1)
    worker.restore("weights")
    worker.restore("kv_cache")
    after = worker.model_runner.speculator
    assert after is not None
    assert (after is before) == (level == 1)
    assert all(map(torch.equal, after.modules()[0].parameters(), numbers))


def test_a_start_is_checked_without_weights(tmp_path: Path, tiny_llama: Path, itself: Pair) -> None:
    Worker(WorkerSettings.of(itself.config), itself.plugins).check_start()
    with Harness(tiny_llama, dtype="float32") as alone:
        assert itself.info.page_bytes == 2 * alone.info.page_bytes
        assert itself.info.weight_bytes == 2 * alone.info.weight_bytes
        assert (alone.info.lookahead, itself.info.lookahead) == (0, MOST)
    stateful = tiny_checkpoint("lfm2", tmp_path / "stateful")
    section = replace(itself.config.speculative, settings={"model": str(stateful)})
    with pytest.raises(ConfigError, match="recurrent"):
        Worker(WorkerSettings.of(replace(itself.config, speculative=section)), itself.plugins).check_start()


def test_the_servers_attention_must_serve_the_draft_model(tmp_path: Path, tiny_llama: Path) -> None:
    """Refuse a head size that the backend of the target's layers does not know."""
    narrow = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=8
    )
    folder = tmp_path / "narrow"
    LlamaForCausalLM(narrow).save_pretrained(folder)
    with pytest.raises(ConfigError, match="attention cpu_native, which serves the model, does not serve"):
        Harness(tiny_llama, dtype="float32", block_size=16, speculative={"method": "draft_model", "model": str(folder)})


# -------------------------------------------------------------------------------------------- vocabularies


def resized(source: Path, folder: Path, size: int) -> Path:
    """Copy a model, with another number of rows for ids that no token has."""
    edited(source, folder, vocab_size=size)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        more = torch.zeros(max(0, size - len(tensors[name])), tensors[name].shape[1])
        tensors[name] = torch.cat([tensors[name], more])[:size].contiguous()
    save_file(tensors, file, {"format": "pt"})
    return folder


def silent(source: Path, folder: Path) -> Path:
    """Copy a model that never says an id which no token has."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][300:] = 0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def permuted(source: Path, folder: Path) -> Path:
    """Copy a model whose plain tokens have other ids, in the reverse order."""
    shutil.copytree(source, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    plain = {token: id for token, id in tokenizer["model"]["vocab"].items() if id >= 5}
    last = max(plain.values())
    tokenizer["model"]["vocab"] |= {token: last + 5 - id for token, id in plain.items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    file, order = folder / "model.safetensors", torch.arange(320)
    order[5 : last + 1] = order[5 : last + 1].flip(0)
    tensors = load_file(file)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][order].contiguous()
    save_file(tensors, file, {"format": "pt"})
    return folder


def test_the_same_tokens_under_other_ids_or_among_others(tmp_path: Path, tiny_llama: Path) -> None:
    """Guess as well as the target itself, with a copy of it that has more rows, fewer, or all ids in another order."""
    target = silent(tiny_llama, tmp_path / "target")
    with Harness(target, dtype="float32") as alone:
        wanted = [output.token_ids for output in alone.engine().run(PROMPTS, max_tokens=30)]
    copies = (resized(target, tmp_path / str(size), size) for size in (352, 304))
    for draft in (*copies, permuted(target, tmp_path / "permuted")):
        with Pair(target, draft) as pair:
            engine = pair.engine()
            assert [output.token_ids for output in engine.run(PROMPTS, max_tokens=30)] == wanted
            assert accepted(engine) > 0.97


class Words:
    """A tokenizer of words."""

    bos_token_id = eos_token_id = None
    all_special_ids: frozenset[int] = frozenset()

    def __init__(self, *words: str) -> None:
        self._words, self.vocab_size = words, len(words)

    def token(self, id: int) -> str | None:
        return self._words[id] if id < len(self._words) else None

    def piece(self, id: int, first: bool) -> bytes | None:
        return None


def test_tokens_without_partners() -> None:
    target, draft = Words("a", "b", "c", "d"), Words("d", "x", "a", "b")
    shared = share_tokens(target, draft, (5, 4), torch.device("cpu"))  # type: ignore[arg-type]
    assert shared.drafted(torch.arange(5)).tolist() == [2, 3, 0, 0, 0]
    assert [shared.told(id) for id in range(4)] == [3, -1, 0, 1]
    with pytest.raises(ConfigError, match="shares 1 tokens"):
        share_tokens(target, Words("d", "x", "y", "z"), (4, 4), torch.device("cpu"))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ bad input


def test_draft_models_that_cannot_be_used(tmp_path: Path, tiny_llama: Path) -> None:
    other = resized(tiny_llama, tmp_path / "other", 400)
    for file in other.glob("tokenizer*"):
        file.unlink()
    stateful = tiny_checkpoint("lfm2", tmp_path / "stateful")
    partial = resized(tiny_llama, tmp_path / "partial", 320)
    tensors = load_file(partial / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, partial / "model.safetensors", {"format": "pt"})
    for folder, settings, problem in (
        (other, {}, "its vocabulary has 400 tokens, the target's 320"),
        (stateful, {}, "has recurrent states"),
        (tiny_llama, {"least_certainty": 2}, "least_certainty: 2 is not"),
        (tiny_llama, {"least_certainy": 0.1}, "least_certainy"),
    ):
        with pytest.raises(ConfigError, match=problem), Pair(tiny_llama, folder, **settings):
            pass
    with pytest.raises(CheckpointError, match=r"partial lack norm\.weight"), Pair(tiny_llama, partial):
        pass


def test_the_compiled_kernel_finds_the_likeliest_token_as_torch_does() -> None:
    kernel = pytest.importorskip("ferrule_kernels.cpu.sampling").Sampling()
    for vocab in (1, 7, 8, 100, 2048):
        logits = 4 * torch.randn(5, vocab)
        assert torch.allclose(kernel.surest(logits), by_torch(logits), atol=1e-5)
    ids, chances = kernel.surest(torch.tensor([[1.0, -torch.inf, 1.0], [1.0, torch.nan, 2.0]])).T.tolist()
    assert ids[0] == 0
    assert chances[0] == pytest.approx(-0.6931, abs=1e-4)
    assert math.isnan(chances[1])

"""Every architecture against transformers: the best token each time, the same log-probabilities.

A tiny random checkpoint, float32, greedy, through the whole engine, in each way in which a request can meet it. To add
an architecture, add its line to `ferrule_testkit.checkpoints`; to `unpublished` one that transformers does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule_testkit.checkpoints import NATIVE, RECIPES, TRANSFORMERS, tiny_checkpoint
from ferrule_testkit.harness import Engine, Harness, Output
from tests.conformance import unpublished
from tests.conformance.test_models_library import OTHER_INPUT, REFUSED

NEW_TOKENS = 14
TOLERANCE = 1e-4
CLEAR = 3e-4  # least distance between the two best logits: below, rounding could decide
BOTH = ("llama", "mistral", "gpt2", "gemma2")  # native ones that are run through transformers too
# One of each kind of cache: of every token, of a window, both, of two sizes of heads, latent, with sinks, in chunks, of
# states, of both. They run in every way. The other architectures differ from these in how a token is computed, not in
# what a step is: in `make test` they run in the last way, which mixes the others at random.
KINDS = (
    *("llama", "mistral", "gemma4_text", "phi3-longrope-beyond", "deepseek_v3", "gpt_oss", "llama4"),
    *("mamba2", "qwen3_next"),
)
# Through transformers, one of each kind of cache whose requests run one after another: ALiBi in the class, a state,
# both, chunks, no cache.
IN_TURN = ("bloom", "mamba", "granitemoehybrid", "llama4", "openai-gpt", "roberta")
CASES = [
    *((name, "auto", True) for name in KINDS),
    *((name, "auto", False) for name in (*NATIVE, *unpublished.MODELS) if name not in KINDS),
    *((name, "transformers", False) for name in (*BOTH, *IN_TURN)),
    *(
        pytest.param(name, "auto", True, marks=pytest.mark.slow)
        for name in (*NATIVE, *unpublished.MODELS)
        if name not in KINDS
    ),
    *(
        pytest.param(name, "transformers", True, marks=pytest.mark.slow)
        for name in (*NATIVE, *TRANSFORMERS)
        if (name not in KINDS or name in NATIVE) and name not in (*REFUSED, *OTHER_INPUT)
    ),
]


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(5, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


SHORT = [prompt(length, seed) for seed, length in enumerate((9, 10, 11, 9))]
LONG = [prompt(30, 10), prompt(47, 11)]  # longer than the windows, which are 12
BRANCH = LONG[1][:35] + prompt(4, 12)  # begins as the longest one does


class Reference:
    """Log-probabilities by the model that is right, which computes [tokens, vocab] logits for [tokens] ids at once."""

    def __init__(self, logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._logits = logits
        self._found: dict[tuple[int, ...], torch.Tensor] = {}

    def logprobs(self, ids: list[int], tokens: list[int]) -> torch.Tensor:
        """Return log-probabilities [tokens, vocab], each after the prompt `ids` and the tokens before."""
        whole = (*ids, *tokens[:-1])
        if whole not in self._found:
            with torch.inference_mode():
                logits = self._logits(torch.tensor(whole))[len(ids) - 1 :].float()
            self._found[whole] = logits.log_softmax(-1)
        return self._found[whole]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("checkpoints")

    def folder(name: str) -> Path:
        write = unpublished.write if name in unpublished.MODELS else tiny_checkpoint
        return write(name, root / name)

    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def reference(name: str, folder: Path) -> Reference:
    if name in unpublished.MODELS:
        return Reference(unpublished.logits_of(name, folder))
    from transformers import AutoModelForCausalLM

    attention = RECIPES[name].attention
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32).eval()
    return Reference(lambda ids: model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0])


def compare(way: str, prompts: Sequence[list[int]], outputs: Sequence[Output], reference: Reference) -> None:
    for ids, output in zip(prompts, outputs, strict=True):
        assert output.error is None, (way, output.error)
        assert len(output.logprobs) == NEW_TOKENS
        wanted = reference.logprobs(ids, output.token_ids)
        best = wanted.topk(2)
        assert output.token_ids == best.indices[:, 0].tolist(), (way, len(ids))
        assert (best.values[:, 0] - best.values[:, 1]).min() > CLEAR, "a near-tie: give the recipe another seed"
        chosen = torch.tensor([[given.logprob] for given in output.logprobs])
        named = torch.tensor([[given.token_id] for given in output.logprobs])
        top = torch.tensor([[value for _, value in given.top] for given in output.logprobs])
        for given, right in ((chosen, wanted.gather(1, named)), (top, wanted.topk(top.shape[1]).values)):
            errors = (given - right).abs().amax(1)
            assert errors.max() < TOLERANCE, (way, len(ids), int(errors.argmax()))


@pytest.mark.parametrize(("name", "implementation", "every_way"), CASES)
def test_tokens_and_logprobs_equal_those_of_the_reference(
    name: str, implementation: str, every_way: bool, folder_of: Any
) -> None:
    folder = folder_of(name)
    expected = reference(name, folder)
    everything = [*SHORT, *LONG] if every_way else [SHORT[0], *LONG]

    def run(engine: Engine, way: str, prompts: list[list[int]]) -> list[Output]:
        outputs = engine.run(prompts, max_tokens=NEW_TOKENS, logprobs=3)
        compare(way, prompts, outputs, expected)
        return outputs

    with Harness(folder, dtype="float32", model_impl=implementation) as harness:
        native = name not in TRANSFORMERS and implementation == "auto"
        assert harness.info.implementation.startswith("transformers ") != native
        if every_way:
            run_each_way(harness, run, everything)
        run(harness.engine(num_blocks=40, max_num_batched_tokens=24, policy="chaos", depth=2), "chaos", everything)


def run_each_way(harness: Harness, run: Callable[..., list[Output]], everything: list[list[int]]) -> None:
    run(harness.engine(depth=2), "batch", everything)

    chunked = harness.engine(max_num_batched_tokens=8)
    run(chunked, "chunked prefill", everything)
    assert chunked.stats.steps > sum(map(len, everything)) / 8

    cached = harness.engine()
    run(cached, "alone, filling the prefix cache", LONG[1:])
    states = sum(not group.paged for group in harness.info.groups)
    if states:  # a prefix can be begun behind only where the states were saved
        run_from_snapshots(cached, run)
    else:
        assert run(cached, "prefix cache, hit", [BRANCH])[0].cached >= 32

    paged = len(harness.info.groups) - states
    if paged:  # a model of states alone never waits for memory
        # room for the prompts, and for what only some of them write
        crowded = harness.engine(num_blocks=1 + 12 * paged, prefix_caching=False)
        run(crowded, "preemption", SHORT)
        assert crowded.stats.preemptions > 0


def run_from_snapshots(cached: Engine, run: Callable[..., list[Output]]) -> None:
    """Continue `LONG[1]`, whose states were saved at its last full block, and after every 16th token of the output."""
    (again,) = run(cached, "states, the same prompt", [LONG[1]])
    assert again.cached == 44
    (output,) = cached.run([LONG[1]], max_tokens=NEW_TOKENS)
    assert run(cached, "states, a prompt that goes on", [LONG[1] + output.token_ids + prompt(20, 14)])[0].cached >= 44
    run(cached, "states, another end", [BRANCH])
    run(cached, "states, four that begin alike", [BRANCH, LONG[1], BRANCH, LONG[1]])
    (whole,) = cached.run([LONG[1]], max_tokens=1, prompt_logprobs=0)
    assert (whole.cached, len(whole.prompt_logprobs)) == (0, len(LONG[1]) - 1)


@pytest.mark.parametrize("name", ["mamba", "lfm2"])  # of the other kinds of states, some are in `KINDS`
def test_a_prefix_of_states_is_reused(name: str, folder_of: Any) -> None:
    folder = folder_of(name)
    expected = reference(name, folder)

    def run(engine: Engine, way: str, prompts: list[list[int]]) -> list[Output]:
        outputs = engine.run(prompts, max_tokens=NEW_TOKENS, logprobs=3)
        compare(way, prompts, outputs, expected)
        return outputs

    with Harness(folder, dtype="float32") as harness:
        cached = harness.engine(max_num_batched_tokens=24, depth=2)
        run(cached, "states, filling", LONG[1:])
        run_from_snapshots(cached, run)


@pytest.mark.parametrize(
    ("name", "implementation"), [("mistral", "auto"), ("llama4", "auto"), ("llama4", "transformers")]
)
def test_layers_with_windows_and_chunks_free_their_blocks(name: str, implementation: str, folder_of: Any) -> None:
    """Run a long text in a cache that has room for what windows of 12 tokens keep, and not for all of it."""
    folder, text = folder_of(name), prompt(120, 15)
    with Harness(folder, dtype="float32", model_impl=implementation) as harness:
        windows = [group.window for group in harness.info.groups if group.paged]
        assert sorted(windows) == ([12] if name == "mistral" else [0, 12])
        blocks = 9 + (0 in windows) * 34  # a window, a step and a block at either end, and all tokens of a full group
        engine = harness.engine(num_blocks=1 + blocks, max_num_batched_tokens=16)
        outputs = engine.run([text], max_tokens=NEW_TOKENS, logprobs=3)
    compare("few blocks", [text], outputs, reference(name, folder))


def test_prefixes_are_not_shared_over_a_length_border(folder_of: Any) -> None:
    """Use other cache entries for long prompts: LongRoPE turns their tokens by other frequencies than a short
    prompt's.
    """
    short, long, longer = prompt(100, 20), prompt(100, 20) + prompt(40, 21), prompt(100, 20) + prompt(50, 22)
    with Harness(folder_of("phi3-longrope"), dtype="float32") as harness:
        alone = harness.engine().run([long])[0]
        engine = harness.engine()
        engine.run([short])
        assert engine.run([short])[0].cached > 90
        after_short = engine.run([long])[0]
        assert after_short.cached == 0
        assert after_short.token_ids == alone.token_ids
        assert engine.run([longer])[0].cached >= 96

"""The built-in sampler on the GPU's kernels: its kit, equal tokens as torch's version, and a step without a wait."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ferrule.interfaces.sampler import LogitsProcessor, LogprobsMode, SampleBatch, Sampled, SampleRow
from ferrule.types import TokenSampling
from ferrule_plugins.platform import cuda_stage
from ferrule_plugins.platform.cuda_stage import PinnedTransfers
from ferrule_plugins.sampler import chooser
from ferrule_plugins.sampler.default import DefaultSampler
from ferrule_plugins.sampler.triton import TritonChooser
from ferrule_testkit.kits import sampler as kit

VOCAB = 300
# The interpreter takes ten seconds for these; on a GPU all run.
ASIDE = (lambda test: test) if torch.cuda.is_available() else pytest.mark.slow
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "masked_select", "item")


class SeesOperations(TorchDispatchMode):
    """A mode that raises where the host reads a number of the device, or a shape depends on data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if any(name.startswith(waiting) for waiting in WAITS):
            raise RuntimeError(f"{name} waits for the device")
        if name.startswith("index") and any(_is_bool(each) for each in (args[1] if isinstance(args[1], list) else ())):
            raise RuntimeError("an index of bools waits for the device")
        return func(*args, **(kwargs or {}))


class SeesCalls(TorchFunctionMode):
    """A mode that raises where memory of the host is read without an operation that could be seen.

    Staged data is the host's beforehand. Where there is no device, its place cannot tell it apart.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        staged = sys._getframe(1).f_code.co_filename == cuda_stage.__file__
        if func in (torch.Tensor.tolist, torch.Tensor.numpy) and not staged:
            raise RuntimeError(f"{func.__name__} waits for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise where the host waits for the device; on a GPU the driver is asked too."""
    on_gpu = torch.cuda.is_available()
    before = torch.cuda.get_sync_debug_mode() if on_gpu else 0
    try:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("error")
        with SeesCalls(), SeesOperations():
            yield
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode(before)


def _is_bool(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


class Upward(LogitsProcessor):
    def __init__(self, **kwargs: Any) -> None:
        self.by = kwargs["by"]

    def apply(self, known_ids: Sequence[int], num_prompt: int, logits: torch.Tensor) -> torch.Tensor:
        logits[(known_ids[-1] + 1) % len(logits)] += self.by
        return logits


class Cold(TritonChooser):
    """A chooser that compiles kernels when they are needed: each test makes new samplers."""

    def warm(self, logits: torch.Tensor, history: torch.Tensor) -> None:
        """Do nothing yet."""


@pytest.fixture
def triton_chooser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "chooser", lambda device: Cold())


def _sampling(**changes: Any) -> TokenSampling:
    return TokenSampling(**{"seed": 0, "max_tokens": 100, **changes})


ROWS: list[tuple[dict[str, Any], bytes | None]] = [
    *((dict(given), None) for given in kit.MANNERS),
    ({"logprobs": 3, "temperature": 0.0}, None),
    ({"logprobs": 0, "top_p": 0.9}, None),
    ({"temperature": 0.0}, b"\x00\x12\x34\xff"),
    ({"allowed_token_ids": (1, 9, 17, 30), "logprobs": 5}, b"\x00\x12\x34\xff"),
    ({"bad_words": ((5,), (7, 8), (3, 3, 3, 3, 4)), "repetition_penalty": 1.2}, None),
    ({"min_tokens": 99, "stop_token_ids": (4, 5), "logit_bias": ((4, 30.0), (6, 2.0)), "logprobs": 1}, None),
]


def _batch(device: torch.device, rows: Sequence[tuple[dict[str, Any], bytes | None]] = ROWS) -> SampleBatch:
    draw = torch.Generator().manual_seed(3)
    history = torch.randint(0, 12, (len(rows), 40), generator=draw, dtype=torch.int32).to(device)
    given = [_sampling(seed=17 * n, **changes) for n, (changes, _) in enumerate(rows)]
    return SampleBatch([SampleRow(n, given[n], 5 + n % 4, 20 + n, mask) for n, (_, mask) in enumerate(rows)], history)


def _logits(device: torch.device, rows: int = len(ROWS)) -> torch.Tensor:
    return (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(5)) * 3).to(device)


class Found(kit.OnePlugin):
    def __init__(self) -> None:
        super().__init__(Upward)


def _sample(chosen: Any, monkeypatch: pytest.MonkeyPatch, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
    monkeypatch.setattr(chooser, "chooser", lambda device: chosen)
    return DefaultSampler(Found()).sample(logits, batch)


@pytest.mark.parametrize("mode", LogprobsMode)
def test_tokens_and_logprobs_are_those_of_torch(
    mode: LogprobsMode, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, logits = replace(_batch(device), logprobs_mode=mode), _logits(device)
    ours = _sample(Cold(), monkeypatch, logits.clone(), batch)
    wanted = _sample(chooser.TorchChooser(), monkeypatch, logits.clone(), batch)
    assert torch.equal(ours.tokens, wanted.tokens)
    assert torch.equal(ours.finite, wanted.finite)
    assert ours.finite.all()
    assert ours.ranked is not None
    assert wanted.ranked is not None
    for mine, theirs in zip(ours.ranked, wanted.ranked, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@ASIDE
def test_warming_leaves_logits_and_counts_as_they_are(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, logits = _batch(device), _logits(device)
    warm, before = TritonChooser(), logits.clone()
    warm.warm(logits, batch.history)
    assert torch.equal(logits, before)
    wanted = _sample(Cold(), monkeypatch, logits.clone(), batch)
    assert torch.equal(_sample(warm, monkeypatch, logits.clone(), batch).tokens, wanted.tokens)


def test_a_processor_beside_other_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [*ROWS[:3], ({"processors": (("it", {"by": 90.0}),), "temperature": 0.0}, None)]
    batch = _batch(device, rows)
    sampled = _sample(Cold(), monkeypatch, _logits(device, 4), batch)
    assert int(sampled.tokens[3]) == int(batch.history[3, batch.rows[3].position - 1]) + 1
    broken = _batch(device, [*rows[:3], ({"processors": (("it", {"wrong": 1}),)}, None)])
    failed = _sample(Cold(), monkeypatch, _logits(device, 4), broken)
    assert list(failed.errors) == [3]
    assert torch.equal(failed.tokens[:3], sampled.tokens[:3])


def test_rows_that_are_not_finite_leave_their_neighbours_alone(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, logits = _batch(device), _logits(device)
    wanted = _sample(Cold(), monkeypatch, logits.clone(), batch).tokens
    broken = [0, 1, 6, 9, 12, 13]
    logits[broken[0], 3], logits[broken[1]], logits[broken[2]] = float("nan"), float("inf"), float("-inf")
    logits[broken[3:], 7] = float("nan")
    sampled = _sample(Cold(), monkeypatch, logits, batch)
    assert [row for row, finite in enumerate(sampled.finite.tolist()) if not finite] == broken
    assert ((sampled.tokens >= 0) & (sampled.tokens < VOCAB)).all()
    others = [row for row in range(len(ROWS)) if row not in broken]
    assert torch.equal(sampled.tokens[others], wanted[others])


# ------------------------------------------------------------------------------------------ waits


@pytest.mark.parametrize("rows", [[({"temperature": 0.0}, None)] * 3, [({}, None)] * 3, *([row] for row in ROWS), ROWS])
def test_a_step_waits_for_nothing(
    rows: list[tuple[dict[str, Any], bytes | None]], device: torch.device, triton_chooser: None
) -> None:
    _check_waits(rows, device, LogprobsMode.RAW_LOGPROBS)


@ASIDE
@pytest.mark.parametrize("mode", [mode for mode in LogprobsMode if mode.processed or not mode.normalised])
def test_no_mode_of_logprobs_waits(mode: LogprobsMode, device: torch.device, triton_chooser: None) -> None:
    _check_waits(ROWS, device, mode)


def _check_waits(rows: list[tuple[dict[str, Any], bytes | None]], device: torch.device, mode: LogprobsMode) -> None:
    sampler, batch, logits = DefaultSampler(Found()), _batch(device, rows), _logits(device, len(rows))
    batch = replace(batch, logprobs_mode=mode)
    batch = replace(batch, transfers=PinnedTransfers(pinned=device.type == "cuda"))
    with no_waits():
        for _ in range(2):  # the second one finds what the first has made
            sampler.sample(logits.clone(), batch)


@pytest.mark.parametrize(
    "wait", [lambda x: x.max().item(), lambda x: x[x > 0], lambda x: x.tolist(), lambda x: bool(x.any())]
)
def test_a_wait_would_be_seen(wait: Any, device: torch.device) -> None:
    with no_waits(), pytest.raises(RuntimeError, match="waits for the device"):
        wait(torch.randn(5, device=device))


@ASIDE
def test_launches_do_not_grow_with_the_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use as many launches and as many tensors of the host for more rows of the same kind, whatever they ask for."""

    class Counting(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for times in (1, 3):
        sampler, batch = DefaultSampler(Found()), _batch(device, ROWS * times)
        monkeypatch.setattr(chooser, "chooser", lambda device: Cold())
        with Counting() as counting:
            sampler.sample(_logits(device, len(ROWS) * times), batch)
        counts.append(counting.calls)
    assert counts[0] == counts[1]


# ------------------------------------------------------------------------------------------ the kit


@pytest.mark.usefixtures("triton_chooser")
@pytest.mark.slow
class TestKit(kit.SamplerKit):
    """The sampler's kit with fewer draws and smaller vocabularies: the interpreter is slow."""

    plugin = DefaultSampler
    vocab_sizes = (100, 5003)

    @pytest.mark.slow
    def test_rows_do_not_depend_on_each_other(self) -> None:
        super().test_rows_do_not_depend_on_each_other()

    @pytest.mark.slow
    def test_top_k_top_p_and_min_p(self) -> None:
        super().test_top_k_top_p_and_min_p()

    @pytest.fixture(autouse=True)
    def _few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kit, "_DRAWS", 60)

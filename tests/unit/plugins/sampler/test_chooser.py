"""Compiled choice of tokens against torch's, and equal tokens alone and in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.sampler import Chooser, Draws, SampleRow
from ferrule.types import TokenSampling
from ferrule_kernels.cpu import library
from ferrule_plugins.platform.cpu_kernels import cpu_kernels
from ferrule_plugins.sampler import noise
from ferrule_plugins.sampler.chooser import CompiledChooser, TorchChooser, chooser
from ferrule_plugins.sampler.plan import Parcel, Plan

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def compiled() -> Chooser:
    made = chooser(cpu_kernels())
    assert isinstance(made, CompiledChooser)
    return made


def _drawn(
    chooser: Chooser, logits: torch.Tensor, rows: Sequence[int], samplings: Sequence[TokenSampling], noise: Any
) -> torch.Tensor:
    """Return the tokens [rows] that are drawn for some of the logits' rows."""
    numbers = zip(rows, samplings, np.asarray(noise).tolist(), strict=True)
    table = np.array([[row, s.top_k, u, s.top_p, s.temperature, s.min_p] for row, s, u in numbers])
    draws = Draws(table, True, lambda: torch.from_numpy(table))
    return chooser.draw(logits, chooser.best(logits), draws)[list(rows)]


def _sampling(**changes: Any) -> TokenSampling:
    return TokenSampling(seed=0, max_tokens=1, **changes)


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 1e-4},
    {"temperature": 100.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10**6},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"top_p": 1e-6},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8},
]


@pytest.mark.parametrize("vocab", [3, 16, 257, 5000])
@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0, 30.0])
def test_draws_are_those_of_torch(compiled: Chooser, vocab: int, spread: float) -> None:
    rng = np.random.default_rng(vocab)
    samplings = [_sampling(**changes) for changes in FILTERS for _ in range(12)]
    logits = torch.from_numpy(rng.normal(size=(len(samplings), vocab)).astype(np.float32)) * spread
    logits[:, 1] = -INF
    noise = rng.random(len(samplings))
    rows = list(range(len(samplings)))
    ours = _drawn(compiled, logits.clone(), rows, samplings, noise)
    assert torch.equal(ours, _drawn(TorchChooser(), logits.clone(), rows, samplings, noise))
    for row in rows[:: len(rows) // 9]:
        one = logits[row : row + 1].clone()
        assert _drawn(compiled, one, [0], [samplings[row]], noise[row : row + 1]).item() == ours[row]


def test_some_rows_of_a_batch(compiled: Chooser) -> None:
    logits, noise, samplings = torch.randn(6, 300), np.array([0.2, 0.9]), [_sampling(top_p=0.8), _sampling()]
    ours = _drawn(compiled, logits.clone(), [1, 4], samplings, noise)
    assert torch.equal(ours, _drawn(TorchChooser(), logits, [1, 4], samplings, noise))


def test_noise_at_its_ends(compiled: Chooser) -> None:
    logits = torch.zeros(2, 1000)
    logits[:, [0, 999]] = -INF
    assert _drawn(compiled, logits, [0, 1], [_sampling()] * 2, np.array([0.0, 1 - 2.0**-53])).tolist() == [1, 998]


def test_best(compiled: Chooser) -> None:
    rows = [[0.0, 3.0, 3.0, -1.0], [-INF, -INF, -5.0, -INF], [1.0, NAN, 2.0, 0.0], [-INF] * 4, [0.0, INF, 1.0, 2.0]]
    for width in (4, 16, 50):
        logits = torch.full((len(rows), width), -INF)
        logits[:, -4:] = torch.tensor(rows)
        tokens, most, finite = compiled.best(logits.clone())
        assert (tokens - (width - 4)).tolist()[:2] == [1, 2]
        assert finite.tolist() == [True, True, False, False, False]
        assert torch.equal(most.isfinite(), finite)
        assert torch.equal(TorchChooser().best(logits.clone()).finite, finite)
        assert ((tokens >= 0) & (tokens < width)).all()


@pytest.mark.parametrize("logits", [torch.randn(4, 50, dtype=torch.float64), torch.randn(50, 4).t()])
def test_other_logits_go_to_torch(compiled: Chooser, logits: torch.Tensor) -> None:
    assert torch.equal(compiled.best(logits).tokens, logits.argmax(-1))
    noise, samplings = np.full(4, 0.5), [_sampling()] * 4
    ours = _drawn(compiled, logits, [0, 1, 2, 3], samplings, noise)
    assert torch.equal(ours, _drawn(TorchChooser(), logits, [0, 1, 2, 3], samplings, noise))


@pytest.mark.parametrize("density", [0.0, 0.001, 0.02, 0.5, 1.0])
@pytest.mark.parametrize(("vocab", "width"), [(16, 1), (5000, 157), (5000, 60), (5001, 157)])
def test_masks_ban_what_they_do_not_name(compiled: Chooser, density: float, vocab: int, width: int) -> None:
    """Ban ids that the words do not reach, which may end before the vocabulary."""
    bits = np.random.default_rng(vocab).random((2, 32 * width)) < density
    words = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    logits = torch.randn(3, vocab)
    allowed = torch.zeros(2, max(vocab, 32 * width), dtype=torch.bool)
    allowed[:, : 32 * width] = torch.from_numpy(bits)
    expected = logits.clone()
    expected[[2, 0]] = logits[[2, 0]].where(allowed[:, :vocab], -INF)
    for each in (TorchChooser(), compiled):
        found = logits.clone()
        each.mask(found, torch.tensor([2, 0]), words)
        assert torch.equal(found, expected)


def test_without_kernels_torch_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise library.KernelsUnavailableError("no compiler")

    monkeypatch.setattr(library, "load", missing)
    assert type(chooser(cpu_kernels())) is TorchChooser
    assert type(chooser(Kernels())) is TorchChooser


@pytest.mark.parametrize("rows", [1, 5])
def test_rows_that_are_not_finite_become_zeros(compiled: Chooser, rows: int) -> None:
    bad = torch.tensor([[1.0, NAN, 2.0], [INF, 0.0, 1.0], [-INF, -INF, -INF], [NAN, INF, -INF], [3.0, 1.0, -INF]])
    for first in range(len(bad) - rows + 1):
        mine, theirs = bad[first : first + rows].clone(), bad[first : first + rows].clone()
        found, expected = compiled.best(mine), TorchChooser().best(theirs)
        assert found.finite.tolist() == expected.finite.tolist() == [row == 4 for row in range(first, first + rows)]
        assert torch.equal(mine, theirs)
        assert mine[~found.finite].count_nonzero() == 0
        assert mine[found.finite].tolist() == bad[4:].tolist() * int(first + rows == 5)


def test_noise_is_that_of_seed_and_position_wherever_a_request_goes() -> None:
    """Make noise for some positions at once: steps forward, by more than one, and back, to where a request begins
    again.
    """
    seeds = [3, 2**70 + 1]
    plan = Plan([TokenSampling(seed=seed, max_tokens=1) for seed in seeds])
    for first, second in [(0, 7), (1, 8), (2, 9), (17, 24), (18, 90), (5, 91), (5, 91), (2**40, 0), (2**40 + 1, 1)]:
        rows = [SampleRow(slot, plan.samplings[slot], 0, place) for slot, place in enumerate((first, second))]
        draws = plan.draws(rows, Parcel())
        assert draws is not None
        assert draws.table[:, 2].tolist() == noise.uniform(seeds, [first, second]).tolist()

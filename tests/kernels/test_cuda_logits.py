"""Masks, penalties and log-probabilities in Triton against their definitions."""

from __future__ import annotations

import pytest
import torch

from ferrule_kernels.cuda import logits as kernels

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("vocab", "width"), [(16, 1), (100, 4), (5000, 157), (5000, 60)])
def test_masks_ban_what_they_do_not_name(vocab: int, width: int, device: torch.device) -> None:
    """Ban ids that the words do not reach, which may end before the vocabulary."""
    logits = torch.randn(4, vocab, device=device)
    words = torch.randint(-(2**31), 2**31, (2, width), dtype=torch.int32, device=device)
    rows = torch.tensor([3, 1], device=device)
    bits = ((words[:, :, None] >> torch.arange(32, device=device)) & 1).view(2, -1).bool()
    allowed = torch.zeros(2, vocab, dtype=torch.bool, device=device)
    reach = min(vocab, width * 32)
    allowed[:, :reach] = bits[:, :reach]
    expected = logits.clone()
    expected[rows] = logits[rows].where(allowed, -INF)
    kernels.mask(logits, rows, words)
    assert torch.equal(logits, expected)


def _penalised(
    logits: torch.Tensor, ids: list[int], prompt: int, repetition: float, frequency: float, presence: float
) -> torch.Tensor:
    out = logits.clone()
    for token in set(ids):
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token in set(ids[prompt:]):
        out[token] -= frequency * ids[prompt:].count(token) + presence
    return out


@pytest.mark.parametrize("length", [1, 40, 2500])
def test_penalties_equal_their_definition(length: int, device: torch.device) -> None:
    logits = torch.randn(5, 50, device=device) * 3
    logits[4, 7] = -INF
    history = torch.randint(0, 50, (6, 3000), dtype=torch.int32, device=device)
    rows = [
        [0, 2, 0, length // 2, length, 1.3, 0.25, 0.5],
        [3, 5, 0, length, length, 1.5, 1.0, 1.0],  # all of it is prompt
        [4, 0, length // 3, length // 2, length, 0.8, -0.5, 0.0],  # its first positions have no ids
        [1, 1, 0, 0, 0, 2.0, 1.0, 1.0],  # it has seen nothing
    ]
    table = torch.tensor(rows, dtype=torch.float64, device=device)
    counts = kernels.count_buffer(3, 50, device)
    expected = logits.clone()
    for row, slot, start, prompt, position, *factors in rows:
        seen = history[int(slot), int(start) : int(position)].tolist()
        expected[int(row)] = _penalised(logits[int(row)], seen, int(prompt) - int(start), *factors)
    for _ in range(2):  # the second time finds the counts at zero again; four rows in a buffer for three
        changed = logits.clone()
        kernels.penalise(changed, history, table, length, counts)
        torch.testing.assert_close(changed, expected)
        assert not counts.any()
    assert torch.equal(changed[2], logits[2])


def test_ids_outside_of_the_vocabulary_change_nothing(device: torch.device) -> None:
    logits = torch.randn(1, 20, device=device)
    history = torch.tensor([[-1, 20, 10**6, 3]], dtype=torch.int32, device=device)
    table = torch.tensor([[0, 0, 0, 0, 4, 2.0, 0.0, 0.0]], dtype=torch.float64, device=device)
    expected = _penalised(logits[0], [3], 0, 2.0, 0.0, 0.0)
    kernels.penalise(logits, history, table, 4, kernels.count_buffer(1, 20, device))
    torch.testing.assert_close(logits[0], expected)


def test_a_buffer_has_a_bound(device: torch.device) -> None:
    assert kernels.count_buffer(256, 152_064, torch.device("meta")).shape == (55, 152_064)
    assert kernels.count_buffer(2, 10**9, torch.device("meta")).shape[0] == 1
    assert kernels.count_buffer(3, 100, device).shape[0] == 3


@pytest.mark.parametrize("vocab", [1, 300, 9000])
@pytest.mark.parametrize("spread", [0.1, 5.0, 80.0])
def test_log_sums(vocab: int, spread: float, device: torch.device) -> None:
    logits = torch.randn(4, vocab, device=device) * spread
    logits[1, vocab // 2 + 1 :] = -INF
    torch.testing.assert_close(kernels.log_sum_exp(logits), logits.double().logsumexp(-1).float(), rtol=2e-6, atol=2e-6)


def test_log_sums_of_what_is_not_finite(device: torch.device) -> None:
    logits = torch.zeros(4, 5000, device=device)
    logits[0, 4999], logits[1], logits[2, 3] = NAN, -INF, INF
    assert kernels.log_sum_exp(logits).isfinite().tolist() == [False, False, False, True]


def test_ranks(device: torch.device) -> None:
    logits = torch.randint(0, 30, (6, 5000), device=device).float()
    tokens = torch.tensor([0, 4999, 17, 4096, 4095, 2], device=device)
    expected = (logits > logits.gather(1, tokens[:, None])).sum(-1) + 1
    assert torch.equal(kernels.rank(logits, tokens), expected)


def test_the_cases_run(device: torch.device) -> None:
    for case in kernels.cases(device):
        case.run()
        assert case.bytes > 0

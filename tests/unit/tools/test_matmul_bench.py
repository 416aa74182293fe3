"""The benchmark of products: who races, and what is said of it."""

from __future__ import annotations

import pytest
import torch

from ferrule_kernels.cpu import library
from ferrule_kernels.cpu.machine import Limits
from tools.benchmarks import matmul as bench

pytestmark = pytest.mark.skipif(not library.available(), reason="there are no compiled kernels here")


def test_all_forms_race_and_their_products_are_those_of_the_weights() -> None:
    torch.manual_seed(0)
    racers = bench.contenders([(64, 32), (32, 64)])
    names = [one.name for one in racers]
    assert set(names) == {bench.READ, "bfloat16", *bench.FORMS} | ({bench.BASE} & set(names))
    for rows in (1, 20):
        bench.race(racers, rows, 2, 2)
        said = list(bench.lines(racers, rows, Limits(1, 1e9, 1e9, 0.0)))
        assert len(said) == len(racers) - (rows > bench.FEW)
        assert all(0 < one.best < float("inf") for one in racers)
        assert ("GB/s" in said[0]) is (rows <= bench.FEW)
    x = torch.randn(3, 32).bfloat16()
    dense = next(one for one in racers if one.name == "bfloat16").products[0](x).float()
    for one in racers:
        if one.name != bench.READ:
            assert (one.products[0](x).float() - dense).abs().max() < 0.15 * dense.abs().max()


def test_shares_are_of_what_was_read_and_of_the_units_rate() -> None:
    racers = [
        bench.Contender(name, [lambda x: x] * 2, [4, 4], nbytes, 100, best)
        for name, nbytes, best in ((bench.READ, 4000, 1e-6), (bench.BASE, 2000, 1e-6), ("bfloat16", 2000, 5e-7))
    ]
    read, base, ours = bench.lines(racers, 1, Limits(2, 0.0, 8e9, 0.0))
    assert "100% of the limit" in read
    assert "50% of the limit" in base
    assert base.endswith("1.00 x")
    assert "100% of the limit" in ours
    assert ours.endswith("2.00 x")
    base, ours = bench.lines(racers, 32, Limits(2, 0.0, 12.8e9, 0.0))
    assert "3.2 GOP/s" in base
    assert "25% of the limit" in base
    assert "50% of the limit" in ours

"""Cache objects of transformers are taken apart into what blocks and slots keep, and put together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ferrule_plugins.model.transformers.caches import CacheForm, CannotKeepError, OwnState, attributes, name

LENGTHS = (3, 5, 8)


def keys(length: int) -> torch.Tensor:
    """Return keys [1, 2, length, 4]."""
    return torch.arange(length * 8, dtype=torch.float32).view(length, 2, 4).permute(1, 0, 2).unsqueeze(0)


class Layer:
    def __init__(self, length: int) -> None:
        self.keys = keys(length)
        self.state = {0: torch.full((2, 3), float(length))}
        self.seen = length
        self.ready = True


def test_what_depends_on_the_length_is_told_from_what_does_not() -> None:
    form = CacheForm.of({length: [Layer(length), (keys(length), None)] for length in LENGTHS})
    assert [(name(each.path), each.dim, each.size) for each in form.tokens] == [("0.keys", 2, 8), ("1.0", 2, 8)]
    assert [(name(each.path), each.shape) for each in form.states] == [("0.state.0", (2, 3))]
    assert [name(path) for path in form.lengths] == ["0.seen"]


def test_a_cache_comes_back_from_its_entries() -> None:
    form = CacheForm.of({length: [Layer(length)] for length in LENGTHS})
    before = [Layer(6)]
    found = form.find(before)
    (token,), (state,) = form.tokens, form.states
    entries = torch.cat((token.entries(found[token.path], 6)[:4], token.entries(found[token.path], 2)))
    after = form.build(6, {token.path: token.tensor(entries), state.path: found[state.path]})
    assert torch.equal(after[0].keys, before[0].keys)
    assert torch.equal(after[0].state[0], before[0].state[0])
    assert (after[0].seen, after[0].ready) == (6, True)
    assert after[0] is not before[0]


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        (lambda length: [torch.zeros(length // 4 + 1)], "changes"),
        (lambda length: [torch.zeros(length, length)], "changes"),
        (lambda length: [torch.zeros(length, dtype=torch.int64)], "not floats"),
        (lambda length: [length % 2], "depends on the text's length"),
        (lambda length: [torch.zeros(2)] * length, "other parts"),
    ],
)
def test_what_cannot_be_kept_is_named(cache: Any, said: str) -> None:
    with pytest.raises(CannotKeepError, match=said):
        CacheForm.of({length: cache(length) for length in LENGTHS})


class Keeps(nn.Module):
    """A module that keeps the sum of its inputs in an attribute, as some classes of the library do."""

    def __init__(self) -> None:
        super().__init__()
        self.total: torch.Tensor | None = None
        self.table = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total = x.sum(0) if self.total is None else self.total + x.sum(0)
        return self.total


def test_states_in_modules_become_a_part_of_the_cache() -> None:
    module = Keeps()
    fresh = attributes(module)
    own = OwnState.of(module, fresh, [lambda: module(torch.ones(2, 3)), lambda: module(torch.ones(1, 3))])
    assert [path for path, _, _ in own.places] == [".total"]
    own.restore(None)
    module(torch.full((1, 3), 5.0))
    one = own.save("a cache")
    own.restore(None)
    module(torch.full((1, 3), 7.0))
    assert own.restore(one) == "a cache"
    assert torch.equal(module(torch.ones(1, 3)), torch.full((3,), 6.0))

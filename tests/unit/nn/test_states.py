"""Layers with a state: the same results in one pass, in chunks, token by token, and beside other requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from ferrule.interfaces.model import StateRows
from ferrule_nn import (
    DeltaSpec,
    GatedDelta,
    GatedRMSNorm,
    Mamba2Mixer,
    Mamba2Spec,
    MambaMixer,
    MambaSpec,
    ShortConv,
    StateLayer,
)

HIDDEN, SLOTS, LENGTH = 24, 5, 150  # longer than two of the layers' own chunks


def _mamba() -> nn.Module:
    return MambaMixer("mixer", MambaSpec(hidden_size=HIDDEN, inner_size=40, state_size=6, rank=5))


def _mamba2() -> nn.Module:
    spec = Mamba2Spec(hidden_size=HIDDEN, num_heads=6, head_dim=8, state_size=10, groups=2)
    return Mamba2Mixer("mixer", spec)


def _delta() -> nn.Module:
    spec = DeltaSpec(hidden_size=HIDDEN, num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6)
    return GatedDelta("mixer", spec)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "short_conv": lambda: ShortConv("mixer", HIDDEN, 4),
    "mamba": _mamba,
    "mamba2": _mamba2,
    "delta": _delta,
}


def make(name: str, dtype: torch.dtype) -> Any:
    return fill(LAYERS[name], dtype)


def fill(build: Callable[[], nn.Module], dtype: torch.dtype) -> Any:
    """Return the layer with random weights, drawn in float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        layer = build()
    finally:
        torch.set_default_dtype(before)
    draw = torch.Generator().manual_seed(7)
    for parameter in layer.parameters():
        noise = torch.randn(parameter.shape, generator=draw)
        parameter.data.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5 * noise)
    return layer


@dataclass
class Context:
    """The states of a layer, and which rows are in the step: (slot, tokens)."""

    layer: nn.Module
    dtype: torch.dtype
    rows: Sequence[tuple[int, int]] = ()
    data: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for each in self.layer.modules():
            if isinstance(each, StateLayer):
                shape, dtype = each.state.shape, each.state.dtype or self.dtype
                self.data[each.name] = torch.zeros(SLOTS, *shape, dtype=dtype)

    def state(self, name: str) -> StateRows:
        slots, lengths = zip(*self.rows, strict=True)
        start = torch.tensor((0, *lengths)).cumsum(0)
        return StateRows(self.data[name], torch.tensor(slots), start, lengths)

    def run(self, *rows: tuple[int, torch.Tensor]) -> list[torch.Tensor]:
        """Compute tokens of some slots in one step."""
        self.rows = [(slot, len(x)) for slot, x in rows]
        y: torch.Tensor = self.layer(torch.cat([x for _, x in rows]), self)
        return list(y.split([len(x) for _, x in rows]))


def text(seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(LENGTH, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_chunks_and_single_tokens_give_what_one_pass_gives(name: str, dtype: torch.dtype) -> None:
    layer = make(name, dtype)
    limit = 1e-5 if dtype == torch.float32 else 0.05
    a, b = text(1, dtype), text(2, dtype)
    whole = Context(layer, dtype)
    (wanted_a,), (wanted_b,) = whole.run((3, a)), whole.run((1, b))

    single = Context(layer, dtype)
    one_by_one = torch.cat([torch.cat(single.run((0, token))) for token in a.split(1)])
    assert (one_by_one - wanted_a).abs().max() <= limit * wanted_a.abs().max()
    for state, data in single.data.items():
        torch.testing.assert_close(data[0], whole.data[state][3], rtol=limit, atol=limit)

    mixed = Context(layer, dtype)
    mixed.data = {state: data.fill_(9) for state, data in mixed.data.items()}
    for data in mixed.data.values():
        data[[2, 4]] = 0
    got_a, got_b, cuts = [], [], [(1, 70), (1, 1), (67, 1), (1, 65), (80, 13)]  # of a and b in each step
    at = [0, 0]
    for count_a, count_b in cuts:
        part = (2, a[at[0] : at[0] + count_a]), (4, b[at[1] : at[1] + count_b])
        y, z = mixed.run(*part)
        at = [at[0] + count_a, at[1] + count_b]
        got_a.append(y)
        got_b.append(z)
    assert at == [LENGTH, LENGTH]
    for got, wanted in ((got_a, wanted_a), (got_b, wanted_b)):
        assert (torch.cat(got) - wanted).abs().max() <= limit * wanted.abs().max()
    for data in mixed.data.values():
        assert (data[[0, 1, 3]] == 9).all()  # of requests that are not in the step


def test_bfloat16_is_close_to_float32() -> None:
    for name in LAYERS:
        wide, narrow = make(name, torch.float32), make(name, torch.bfloat16)
        x = text(1, torch.float32)
        (wanted,) = Context(wide, torch.float32).run((0, x))
        (got,) = Context(narrow, torch.bfloat16).run((0, x.bfloat16()))
        assert (got - wanted).abs().max() < 0.06 * wanted.abs().max(), name


def test_a_short_convolution_sees_its_last_inputs() -> None:
    conv = ShortConv("mixer", 1, 3, bias=False, act=None)
    conv.weight.data = torch.tensor([[[1.0, 10.0, 100.0]]])
    context = Context(conv, torch.float32)
    (y,) = context.run((0, torch.tensor([[1.0], [2.0], [3.0]])))
    assert y[:, 0].tolist() == [100, 210, 321]
    assert context.data["mixer"][0, :, 0].tolist() == [2, 3]
    (y,) = context.run((0, torch.tensor([[4.0]])))
    assert y[:, 0].tolist() == [432]


@pytest.mark.parametrize("gate_first", [True, False])
def test_gated_norms(gate_first: bool) -> None:
    norm = GatedRMSNorm(4, groups=2, eps=0.0, gate_first=gate_first)
    norm.weight.data = torch.tensor([1.0, 2.0, 3.0, 4.0])
    x, z = torch.tensor([[3.0, 4.0, 6.0, 8.0]]), torch.tensor([[0.5, -1.0, 2.0, 0.0]])
    gate = z * z.sigmoid()
    parts = (x * gate if gate_first else x).view(2, 2)
    wanted = (parts / parts.square().mean(-1, keepdim=True).sqrt()).view(1, 4) * norm.weight
    torch.testing.assert_close(norm(x, z), wanted if gate_first else wanted * gate)

"""Kernels of layers with a state against the layers' torch code; equal bits however tokens are cut into steps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ferrule.assembly.model import pack
from ferrule_kernels.cpu import library
from ferrule_nn import DeltaSpec, GatedDelta, GatedRMSNorm, Mamba2Mixer, Mamba2Spec, ShortConv
from tests import compiler
from tests.shared import grid
from tests.unit.nn.test_states import HIDDEN, LENGTH, Context, fill, text

CUTS = [(1, 16, 17, 116), (150,), (64, 1, 1, 1, 83)]
SOURCES = [Path(library.__file__).parent / name for name in ("short_conv.cpp", "selective.cpp", "delta.cpp")]


def _mamba2(groups: int, dim: int, states: int, **more: Any) -> nn.Module:
    spec = Mamba2Spec(hidden_size=HIDDEN, num_heads=4, head_dim=dim, state_size=states, groups=groups, **more)
    return Mamba2Mixer("mixer", spec)


def _delta(keys: int, values: int, key_heads: int = 2, **more: Any) -> nn.Module:
    spec = DeltaSpec(
        hidden_size=HIDDEN, num_key_heads=key_heads, num_value_heads=4, key_dim=keys, value_dim=values, **more
    )
    return GatedDelta("mixer", spec)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "a convolution": lambda: ShortConv("mixer", HIDDEN, 4),
    "a convolution that is not gated": lambda: ShortConv("mixer", HIDDEN, 3, bias=False, act=None),
    "a convolution with another activation": lambda: ShortConv("mixer", HIDDEN, 4, act="gelu"),
    "mamba2": lambda: _mamba2(2, 6, 16),
    "mamba2, large": lambda: _mamba2(1, 8, 208, width_limits=(0.01, 0.2)),
    "mamba2 without a gated norm": lambda: _mamba2(4, 2, 64, gated_norm=False, act="gelu"),
    "delta": lambda: _delta(16, 32),
    "delta, large": lambda: _delta(48, 112, key_heads=4, interleaved=True),
}


@pytest.fixture(scope="module", params=["installed", "x86-64-v3", "x86-64-v4"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Use the installed library, then the kernels for processors that this one can stand for."""
    if request.param == "installed":
        yield
        return
    needed = {"x86-64-v3": "avx2", "x86-64-v4": "avx512f"}[request.param]
    if needed not in library.features():
        pytest.skip(f"the processor has no {needed}")
    if Path(library.load()._name).stem.partition(".")[0] == request.param.replace("x86-64-", "_"):
        pytest.skip("these are the installed ones")
    sources = [*SOURCES, SOURCES[0].with_name("elementwise.cpp")]
    target = compiler.shared_library(*sources, flags=[f"-march={request.param}"])
    with pytest.MonkeyPatch.context() as patch:
        loaded = ctypes.CDLL(str(target))
        patch.setattr(library, "load", lambda: loaded)
        yield


def _pair(name: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Return the layer in torch and with kernels, both with the same weights; only parts with a state or norm are
    packed.
    """
    plain, fused = fill(LAYERS[name], dtype), fill(LAYERS[name], dtype)
    for part in fused.modules():
        if isinstance(part, ShortConv | GatedRMSNorm | Mamba2Mixer | GatedDelta):
            part.pack()
            assert part._fused is not None
    return plain, fused


@pytest.mark.usefixtures("kernels")
@grid({"name": tuple(LAYERS), "dtype": (torch.float32, torch.bfloat16)})
def test_kernels_compute_what_torch_does(name: str, dtype: torch.dtype) -> None:
    limit = 2e-5 if dtype == torch.float32 else 0.05
    plain, fused = _pair(name, dtype)
    a, b = text(1, dtype), text(2, dtype)[:40]
    ours, theirs = Context(fused, dtype), Context(plain, dtype)
    for at in (0, 1, 2):  # states are carried on
        step = (3, a[50 * at : 50 * (at + 1)]), (1, b[at : at + 1]), (4, b[10 * at + 3 : 10 * at + 13])
        for got, wanted in zip(ours.run(*step), theirs.run(*step), strict=True):
            assert got.dtype == wanted.dtype
            assert (got - wanted).abs().max() <= limit * wanted.abs().max()
    for state, data in ours.data.items():
        torch.testing.assert_close(data, theirs.data[state], rtol=limit, atol=limit * float(data.abs().max()))
        assert not data[[0, 2]].any()  # of requests that are not in the step


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_bits_do_not_depend_on_cuts_or_neighbours(name: str, dtype: torch.dtype) -> None:
    """Check the scan, the convolution and the norm: the projections around them are not packed here."""
    _, layer = _pair(name, dtype)
    for projection in ("in_proj", "out_proj", "in_proj_qkvz", "in_proj_ba"):
        if hasattr(layer, projection):
            getattr(layer, projection).forward = _ByRow(getattr(layer, projection))
    x, other = text(1, dtype), text(2, dtype)
    whole = Context(layer, dtype)
    (wanted,) = whole.run((3, x))
    for cuts in CUTS:
        context, at, got = Context(layer, dtype), 0, []
        for count in cuts:
            _, y = context.run((0, other[:2]), (4, x[at : at + count]))
            got.append(y)
            at += count
        assert at == LENGTH
        assert torch.equal(torch.cat(got), wanted)
        assert all(torch.equal(data[4], whole.data[state][3]) for state, data in context.data.items())


class _ByRow:
    """A product of each row alone."""

    def __init__(self, layer: nn.Module) -> None:
        self._weight = layer.weight.detach()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([row @ self._weight.t() for row in x.split(1)])


@pytest.mark.parametrize(("repeats", "groups"), [(0, 3), (3, 1)])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_norms(dtype: torch.dtype, gate_first: bool, repeats: int, groups: int) -> None:
    size = 20
    norm = GatedRMSNorm(size if repeats else 3 * size, groups, gate_first=gate_first, repeats=repeats)
    nn.init.normal_(norm.weight)
    x, z = torch.randn(7, 60), torch.randn(7, 100).to(dtype)[:, 20:80]
    wanted = norm(x, z)
    pack(norm)  # type: ignore[arg-type]
    got = norm(x, z)
    assert got.dtype == wanted.dtype == dtype
    torch.testing.assert_close(got, wanted, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)


@pytest.mark.parametrize("make", [lambda: _mamba2(1, 3, 16), lambda: _mamba2(1, 4, 10), lambda: _delta(8, 16)])
def test_shapes_without_a_kernel_are_computed_by_torch(make: Callable[[], nn.Module]) -> None:
    plain, packed = fill(make, torch.float32), fill(make, torch.float32)
    packed.pack()  # type: ignore[operator]
    x = text(1, torch.float32)
    assert torch.equal(*(Context(layer, torch.float32).run((0, x))[0] for layer in (plain, packed)))

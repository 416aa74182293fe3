"""How packed weights are laid out and stated: the order of their bytes, and configurations that are refused."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.platform import DeviceCaps
from ferrule.interfaces.quantization import LinearLayer
from ferrule_kernels.cpu import dense, library
from ferrule_kernels.cpu.dense import DenseMatrix
from ferrule_kernels.cpu.matmul import PackedMatrix, Workspace
from ferrule_kernels.cpu.packed import LAYOUT, room
from ferrule_kernels.matmul import Form
from ferrule_plugins.quantization.packed import FerrulePacked, Kept, read, stated

CPU = DeviceCaps("cpu", "a processor", 1 << 30)
pytestmark = pytest.mark.skipif(dense.unit() is None, reason="there are no kernels for bfloat16 weights here")

# ---------------------------------------------------------------------------------------- what is stated

KEPT = {"lm_head": Kept(None), "layers.0.mlp.up_proj": Kept(Form(4, 32), factors=False)}
CONFIG = stated(KEPT, torch.bfloat16, "int4")


def test_the_configuration_says_what_was_packed() -> None:
    assert read(json.loads(json.dumps(CONFIG))) == KEPT


@pytest.mark.parametrize(
    ("caps", "dtype", "config", "text"),
    [
        (DeviceCaps("cuda", "a GPU", 1 << 34), torch.bfloat16, CONFIG, "packed for CPUs"),
        (CPU, torch.float32, CONFIG, "--dtype bfloat16"),
        (CPU, torch.bfloat16, {}, "ferrule pack"),
    ],
)
def test_it_refuses(caps: DeviceCaps, dtype: torch.dtype, config: dict[str, Any], text: str) -> None:
    assert text in (FerrulePacked.refuses(config, caps, dtype) or "")
    assert FerrulePacked.refuses(CONFIG, CPU, torch.bfloat16) is None


def test_it_refuses_a_processor_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "unit", lambda: None)
    assert "none of AMX, AVX-512 and AVX2" in (FerrulePacked.refuses(CONFIG, CPU, torch.bfloat16) or "")
    integers = stated({"a": Kept(Form(8))}, torch.bfloat16, "int8")
    assert FerrulePacked.refuses(integers, CPU, torch.bfloat16) is None

    def none() -> None:
        raise library.KernelsUnavailableError("there is no C++ compiler")

    monkeypatch.setattr(library, "load", none)
    assert "no C++ compiler" in (FerrulePacked.refuses(integers, CPU, torch.bfloat16) or "")


@pytest.mark.parametrize(
    "change",
    [
        {"layout": LAYOUT + 1},
        {"layout": None},
        {"layout": True},
        {"dtype": "int8"},
        {"forms": []},
        {"forms": {}},
        {"forms": [7]},
        {"forms": [{"kind": "runes", "layers": ["lm_head"]}]},
        {"forms": [{"kind": "bfloat16", "table": 1, "layers": ["lm_head"]}]},
        {"forms": [{"kind": "bfloat16", "table": False, "layers": "lm_head"}]},
        {"forms": [{"kind": "integers", "bits": 4, "group": 3, "digits": 1, "factors": False, "layers": ["a"]}]},
        {"forms": [{"kind": "integers", "bits": 2, "group": 0, "digits": 1, "factors": False, "layers": ["a"]}]},
        {"forms": [{"kind": "integers", "bits": 8, "group": 0, "digits": 1, "layers": ["a"]}]},
        {"dtype": "float32", "forms": [{"kind": "bfloat16", "table": False, "layers": ["lm_head"]}]},
    ],
)
def test_a_configuration_that_is_none(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="ferrule pack"):
        FerrulePacked({**CONFIG, **change})


def test_layers_that_no_form_names_are_left() -> None:
    method = FerrulePacked(CONFIG)
    assert method.scheme(LinearLayer("layers.9.mlp.up_proj", 64, 64)) is None
    with pytest.raises(CheckpointError, match="is no head"):
        FerrulePacked(stated({"a": Kept(None, table=True)}, torch.bfloat16, None)).scheme(LinearLayer("a", 64, 64))


# ---------------------------------------------------------------------------------------- the bytes


def test_the_order_of_bytes_is_that_of_the_layout() -> None:
    """When this fails the order has changed: count `LAYOUT` up, and take the new sums."""
    weight = (torch.arange(83 * 70) * 37 % 241 - 120).view(83, 70)
    scales = (torch.arange(83 * 3) % 8 + 1).view(83, 3) / 64
    four = PackedMatrix((weight % 16 - 8).to(torch.int8), Form(4, 32), None, Workspace(), scales)
    eight = PackedMatrix(weight.to(torch.int8), Form(8), None, Workspace(), scales[:, :1] / 3)
    floats = DenseMatrix(weight.bfloat16())
    assert four.factors is None
    assert eight.factors is not None
    packed = [matrix.packed.view(torch.uint8).numpy().tobytes() for matrix in (four, eight, floats)]
    sums = [hashlib.sha256(text).hexdigest()[:16] for text in packed]
    assert (LAYOUT, sums) == (1, ["d310ac53839f19a6", "9ebe8d2f832b75bc", "79884c3b6eeb7dd5"])


@pytest.mark.parametrize("bias", [False, True])
def test_a_matrix_is_made_of_what_was_packed(bias: bool) -> None:
    torch.manual_seed(3)
    weight, x = torch.randn(100, 72).bfloat16(), torch.randn(5, 72).bfloat16()
    added = torch.randn(100) if bias else None
    floats = DenseMatrix(weight, added)
    again = DenseMatrix.of_packed(floats.packed, (100, 72), added)
    assert torch.equal(again.multiply(x, torch.float32), floats.multiply(x, torch.float32))
    assert torch.equal(again.rows(torch.arange(100)), weight)
    assert again.nbytes == floats.nbytes
    scales = torch.rand(100, 1) / 50
    eight = PackedMatrix(
        torch.randint(-127, 128, (100, 72)).to(torch.int8), Form(8, digits=2), added, Workspace(), scales
    )
    same = PackedMatrix.of_packed(eight.packed, eight.factors, (100, 72), eight.form, added, Workspace())
    assert torch.equal(same.multiply(x), eight.multiply(x))
    for wrong in (eight.packed[:-1], eight.packed.to(torch.int16)):
        with pytest.raises(ValueError, match="a packed weight"):
            PackedMatrix.of_packed(wrong, eight.factors, (100, 72), eight.form, added, Workspace())
    with pytest.raises(ValueError, match="a packed weight"):
        DenseMatrix.of_packed(floats.packed, (120, 72))


def test_large_memory_is_like_any() -> None:
    for shape in ((3, 5), (1 << 21,), (0,)):
        memory = room(shape, torch.bfloat16)
        assert (tuple(memory.shape), memory.dtype) == (shape, torch.bfloat16)
        memory.fill_(3)
        assert bool((memory == 3).all())

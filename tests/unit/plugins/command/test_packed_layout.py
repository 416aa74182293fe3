"""How packed weights are laid out and stated: the order of their bytes, and configurations that are refused."""

from __future__ import annotations

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
from ferrule_kernels.cpu.packed import LAYOUTS, layout
from ferrule_kernels.matmul import Form
from ferrule_nn import MergedLinear
from ferrule_plugins.quantization.packed import FerrulePacked, LayerForm, read, stated
from ferrule_testkit.caps import fake_caps

CPU = fake_caps()
pytestmark = pytest.mark.skipif(dense.unit() is None, reason="there are no kernels for bfloat16 weights here")

# ---------------------------------------------------------------------------------------- what is stated

FOUR = {"kind": "integers", "bits": 4, "group": 32, "digits": 1, "factors": False, "layers": ["a"]}
KEPT = {"lm_head": LayerForm(None), "layers.0.mlp.up_proj": LayerForm(Form(4, 32), factors=False)}
CONFIG = stated(KEPT, torch.bfloat16, "int4")


def test_the_configuration_says_what_was_packed() -> None:
    assert read(json.loads(json.dumps(CONFIG))) == KEPT


@pytest.mark.parametrize(
    ("caps", "dtype", "config", "text"),
    [
        (fake_caps("cuda"), torch.bfloat16, CONFIG, "packed for CPUs"),
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
    integers = stated({"a": LayerForm(Form(8))}, torch.bfloat16, "int8")
    assert FerrulePacked.refuses(integers, CPU, torch.bfloat16) is None

    def none() -> None:
        raise library.KernelsUnavailableError("there is no C++ compiler")

    monkeypatch.setattr(library, "load", none)
    assert "no C++ compiler" in (FerrulePacked.refuses(integers, CPU, torch.bfloat16) or "")


@pytest.mark.parametrize(
    "change",
    [
        {"layout": 3},
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
        {"forms": [{"kind": "integers", "bits": 7, "group": 0, "digits": 1, "factors": False, "layers": ["a"]}]},
        {"forms": [{"kind": "integers", "bits": 6, "group": 8, "digits": 1, "factors": False, "layers": ["a"]}]},
        {"forms": [FOUR | {"table": [1, 2]}]},
        {"forms": [FOUR | {"table": [*range(15), 1.5]}]},
        {"forms": [FOUR | {"table": 16}]},
        {"forms": [{"kind": "integers", "bits": 8, "group": 0, "digits": 1, "layers": ["a"]}]},
        {"dtype": "float32", "forms": [{"kind": "bfloat16", "table": False, "layers": ["lm_head"]}]},
    ],
)
def test_a_configuration_that_is_none(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="ferrule pack"):
        FerrulePacked({**CONFIG, **change})


@pytest.mark.parametrize("form", [Form(4, 32, 2, True, tuple(range(16))), Form(6, 16), Form(3), Form(2, 16)])
def test_every_form_is_stated_and_read(form: Form) -> None:
    kept = {"a": LayerForm(form, factors=True)}
    assert read(json.loads(json.dumps(stated(kept, torch.bfloat16, "gguf")))) == kept


def test_layers_that_no_form_names_are_left() -> None:
    method = FerrulePacked(CONFIG)
    assert method.scheme(LinearLayer("layers.9.mlp.up_proj", 64, 64)) is None
    with pytest.raises(CheckpointError, match="is not a head"):
        FerrulePacked(stated({"a": LayerForm(None, table=True)}, torch.bfloat16, None)).scheme(LinearLayer("a", 64, 64))


@pytest.mark.parametrize("form", [None, Form(8)])
def test_no_layer_but_a_tied_head_has_the_table(form: Form | None) -> None:
    """Refuse the table also for a projection within a layer, which nothing asks whether it is a head."""
    method = FerrulePacked(stated({"qkv_proj.q_proj": LayerForm(form, table=True)}, torch.bfloat16, None))
    layer = MergedLinear(64, {"q_proj": 64, "k_proj": 64, "v_proj": 64})
    with pytest.raises(CheckpointError, match="not tied"):
        layer.quantize("qkv_proj", method)
    tied = {"lm_head": LayerForm(form, factors=form is not None, table=True)}
    assert read(json.loads(json.dumps(stated(tied, torch.bfloat16, None)))) == tied


# ---------------------------------------------------------------------------------------- the bytes


WEIGHT = (torch.arange(83 * 128) * 37 % 241 - 120).view(83, 128)


def ordered(number: int, block: torch.Tensor, together: int) -> torch.Tensor:
    """Return a panel's weights [channels, inputs] in an order; `together` neighbouring inputs of a channel stay
    together.
    """
    if number == 1:
        return block.unflatten(1, (-1, together)).transpose(0, 1).flatten()
    return block.unflatten(1, (-1, 16, together)).unflatten(0, (-1, 16)).permute(2, 0, 3, 1, 4).flatten()


def panels(weight: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % 16)).split(64))


def dense_bytes(number: int) -> torch.Tensor:
    return torch.cat([ordered(number, panel, 2) for panel in panels(WEIGHT.bfloat16())])


def integer_bytes(number: int, scales: torch.Tensor) -> torch.Tensor:
    """Pack 8 bits in groups of 64; missing channels are zeros."""
    parts = []
    for panel, scale in zip(panels(WEIGHT + 128), panels(scales), strict=True):
        for group in range(2):
            parts.append(scale[:, group].bfloat16().contiguous().view(torch.uint8))
            parts.append(ordered(number, panel.to(torch.uint8)[:, group * 64 : group * 64 + 64].contiguous(), 4))
    return torch.cat(parts)


def nibbles(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Pack 4 bits in groups of 32: of eight inputs the first four are in the lower halves of four bytes."""
    parts = []
    for panel, scale in zip(panels(weight), panels(scales), strict=True):
        for group in range(4):
            low, high = panel[:, group * 32 : group * 32 + 32].unflatten(1, (4, 2, 4)).unbind(2)
            parts.append(scale[:, group].bfloat16().contiguous().view(torch.uint8))
            parts.append((low + high * 16).to(torch.uint8).transpose(0, 1).flatten())
    return torch.cat(parts)


def test_the_order_of_bytes_is_that_of_the_layout() -> None:
    """Notice an order that has changed, which then needs a new number."""
    scales = (torch.arange(83 * 4) % 8 + 1).view(83, 4) / 64
    four = PackedMatrix((WEIGHT % 16 - 8).to(torch.int8), Form(4, 32), None, Workspace(), scales)
    assert torch.equal(four.packed, nibbles(WEIGHT % 16, scales))
    squares = PackedMatrix(WEIGHT.to(torch.int8), Form(8, 64), None, Workspace(), scales[:, :2])
    assert torch.equal(squares.packed, integer_bytes(layout(), scales))
    assert torch.equal(DenseMatrix(WEIGHT.bfloat16()).packed, dense_bytes(layout()))
    rows = PackedMatrix(WEIGHT[:, :72].to(torch.int8), Form(8), None, Workspace(), scales[:, :1])
    blocks = [
        torch.cat([scale[:, 0].bfloat16().contiguous().view(torch.uint8), ordered(1, panel.to(torch.uint8), 4)])
        for panel, scale in zip(panels(WEIGHT[:, :72] + 128), panels(scales), strict=True)
    ]
    assert torch.equal(rows.packed, torch.cat(blocks))  # 72 inputs fill no registers: there is one order


def test_what_was_packed_on_the_other_kind_of_processor_is_turned() -> None:
    other = next(number for number in LAYOUTS if number != layout())
    scales = (torch.arange(83 * 2) % 8 + 1).view(83, 2) / 64
    squares = PackedMatrix(WEIGHT.to(torch.int8), Form(8, 64), None, Workspace(), scales)
    packed = integer_bytes(other, scales)
    assert not torch.equal(packed, squares.packed)
    turned = PackedMatrix.of_packed(packed, None, (83, 128), squares.form, None, Workspace(), turn=True)
    assert torch.equal(turned.packed, squares.packed)
    floats = DenseMatrix.of_packed(dense_bytes(other), (83, 128), turn=True)
    assert torch.equal(floats.packed, DenseMatrix(WEIGHT.bfloat16()).packed)


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

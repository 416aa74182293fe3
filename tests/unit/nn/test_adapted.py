"""Layers as a bank of adapters sees them: ranks' parts make the whole, and norms of rows are those of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ferrule.errors import AsleepError
from ferrule.interfaces.adapters import BankContext
from ferrule.interfaces.ranks import WHOLE, Shard
from ferrule.types import Adapter
from ferrule_nn import Head, Linear, MergedLinear, Shared, inputs, load_into, outputs
from ferrule_nn.adapted import adapted, row_norms
from ferrule_nn.division import sharded
from ferrule_nn.ops import using
from ferrule_plugins.adapter_bank.lora import LoraBank
from ferrule_testkit.adapters import write_adapter
from ferrule_testkit.ranks import Exchange
from ferrule_testkit.simulate import load

MODULES = [
    ("q_proj", 24, 32),
    ("k_proj", 24, 8),
    ("v_proj", 24, 8),
    ("o_proj", 32, 24),
    ("lm_head", 24, 70),
]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        split = outputs(4, Shared(2), Shared(2))
        self.qkv_proj = MergedLinear(24, {"q_proj": 32, "k_proj": 8, "v_proj": 8}, split=split)
        self.o_proj = Linear(32, 24, bias=True, split=inputs(4))
        self.lm_head = Head(24, 70)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, _, v = self.qkv_proj(x).split(list(self.qkv_proj.projections.values()), dim=1)
        queries, values = q.unflatten(1, (-1, 8)), v.unflatten(1, (-1, 4)).repeat(1, 1, 2)
        shared = values.repeat_interleave(queries.shape[1] // values.shape[1], dim=1)
        hidden = self.o_proj((queries * shared).flatten(1))
        return hidden, self.lm_head(hidden)


def run(shard: Shard, adapter: Adapter, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with sharded(shard):
        block = Block()
    context = BankContext(
        num_slots=2, max_rank=4, max_host=2, bias=True, dtype=torch.float32, device=torch.device("cpu")
    )
    bank = LoraBank(context)
    for name, part in block.named_modules():
        if isinstance(part, Linear):
            assert part.adapt(name, bank)
    draw = torch.Generator().manual_seed(0)
    weights = [(f"{name}.weight", torch.randn(out, size, generator=draw) * size**-0.5) for name, size, out in MODULES]
    load_into(block, [*weights, ("o_proj.bias", torch.randn(24, generator=draw))])
    bank.load(2, adapter)
    bank.token_slots = bank.row_slots = torch.tensor([2, 0, 2])
    found: tuple[torch.Tensor, torch.Tensor] = block(x)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@torch.inference_mode()
def test_parts_of_ranks_make_the_whole(tmp_path: Path, ranks: int) -> None:
    biases = {"o_proj.base_layer.bias": torch.randn(24), "q_proj.lora_B.bias": torch.randn(32)}
    biases = {f"base_model.model.{name}": bias for name, bias in biases.items()}
    adapter = Adapter(name="a", path=str(write_adapter(tmp_path / "a", MODULES, tensors=biases)))
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(1))
    wanted = run(WHOLE, adapter, x)
    exchange = Exchange(ranks)
    work = [lambda shard=shard: run(shard, adapter, x) for shard in exchange.shards]
    for found in exchange.run(work):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", [None, "int8_per_channel_weight_only"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_norms_are_those_of_the_weights_in_any_form(method: str | None, dtype: torch.dtype) -> None:
    kernels = load("platform", "cpu")().execution().kernels()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with using(kernels):
            layer = Linear(100, 48, bias=True)
    finally:
        torch.set_default_dtype(before)
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 100, generator=draw).to(dtype)
    if method is not None:
        assert layer.quantize("layer", load("quantization", method)({}))
    with torch.no_grad():
        layer.weight.copy_(weight)
        assert layer.bias is not None
        layer.bias.copy_(torch.randn(48, generator=draw))
    down, up = torch.randn(3, 100, generator=draw), torch.randn(48, 3, generator=draw)
    layer.pack()
    wanted = (weight.float() + up @ down).norm(dim=1)
    torch.testing.assert_close(row_norms(layer, down, up), wanted, rtol=1e-4 if method is None else 2e-2, atol=1e-3)


def test_weights_that_have_lost_their_memory_are_not_read() -> None:
    layer = Linear(8, 4)
    norms = adapted("layer", [layer], {"layer": (0, None)}).norms
    assert norms is not None
    assert norms(0, torch.zeros(1, 8), torch.zeros(4, 1)).shape == (4,)
    layer.weight.untyped_storage().resize_(0)  # as in sleep of level 1 on a device of its own
    with pytest.raises(AsleepError, match="the model sleeps"):
        norms(0, torch.zeros(1, 8), torch.zeros(4, 1))

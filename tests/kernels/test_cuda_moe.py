"""Routing, sorting and products of experts, beside the reference; and the reference beside transformers' routers."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")
from ferrule.interfaces.adapters import BankContext
from ferrule.interfaces.kernels import Kernels
from ferrule.types import Adapter
from ferrule_kernels import moe as reference
from ferrule_kernels.cuda import grouped, moe
from ferrule_kernels.moe import Routing
from ferrule_nn import MoE, MoESpec, ops
from ferrule_plugins.adapter_bank.lora import LoraBank
from ferrule_plugins.model.gpt_oss import ClampedMLP
from ferrule_plugins.platform.cuda_kernels import triton_layers
from ferrule_testkit.adapters import write_adapter
from tests.fakes.waiting import Waits
from tests.shared import allocated, grid

PRODUCT_DTYPES = [torch.float32, torch.float16]
if torch.cuda.is_available():  # bfloat16's products are wrong under the interpreter
    PRODUCT_DTYPES.append(torch.bfloat16)
ROUTINGS = {
    "mixtral": Routing(num_experts=8, top_k=2),
    "odd": Routing(num_experts=13, top_k=5, renormalise=False, scale=2.0),
    "one": Routing(num_experts=4, top_k=1, scores="sigmoid", renormalise=False),
    "all": Routing(num_experts=3, top_k=3),
    "deepseek-v2": Routing(num_experts=20, top_k=6, groups=4, kept_groups=2, renormalise=False, scale=16.0),
    "deepseek-v3": Routing(
        num_experts=32, top_k=4, scores="sigmoid", groups=8, kept_groups=3, group_depth=2, scale=2.5
    ),
    "groups that are not powers of two": Routing(num_experts=15, top_k=4, groups=3, kept_groups=2, group_depth=2),
}


@grid({"name": list(ROUTINGS), "biased": [False, True], "dtype": [torch.float32, torch.float16]})
def test_route(name: str, biased: bool, dtype: torch.dtype, device: torch.device) -> None:
    routing = ROUTINGS[name]
    logits = torch.randn(9, routing.num_experts, device=device).to(dtype)
    bias = torch.randn(routing.num_experts, device=device) if biased else None
    weights, ids = moe.route(logits, routing, bias)
    expected_weights, expected_ids = reference.route(logits, routing, bias)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", list(ROUTINGS))
def test_of_equal_scores_the_first_wins_and_what_is_no_number_is_chosen_last(name: str, device: torch.device) -> None:
    routing = ROUTINGS[name]
    logits = torch.zeros(4, routing.num_experts, device=device)
    logits[1, 1::2] = 1.0
    logits[2, 0] = float("nan")
    logits[3, 1:] = float("-inf")
    weights, ids = moe.route(logits, routing)
    expected_weights, expected_ids = reference.route(logits, routing)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, equal_nan=True, rtol=1e-5, atol=1e-6)
    assert all(len(set(row)) == routing.top_k for row in ids.tolist())
    assert ids.min() >= 0
    assert ids.max() < routing.num_experts


def test_rows_of_a_wider_matrix(device: torch.device) -> None:
    wide = torch.randn(5, 20, device=device)
    assert torch.equal(moe.route(wide[:, 3:11], ROUTINGS["mixtral"])[1], wide[:, 3:11].topk(2).indices.int())


def test_the_reference_routes_as_deepseek_v3_does() -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = DeepseekV3Config(
        hidden_size=16,
        n_routed_experts=32,
        num_experts_per_tok=4,
        n_group=8,
        topk_group=3,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    theirs = DeepseekV3TopkRouter(config)
    with torch.no_grad():
        theirs.weight.normal_()
        theirs.e_score_correction_bias.uniform_()
        logits, weights, ids = theirs(torch.randn(20, 16))
    our_weights, our_ids = reference.route(logits, ROUTINGS["deepseek-v3"], theirs.e_score_correction_bias)
    order, our_order = ids.argsort(1), our_ids.argsort(1)
    assert torch.equal(ids.gather(1, order).int(), our_ids.gather(1, our_order))
    torch.testing.assert_close(our_weights.gather(1, our_order), weights.gather(1, order))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scores": "tanh"}, "'tanh'"),
        ({"groups": 5}, "5 equal groups"),
        ({"groups": 4, "kept_groups": 5}, "5 cannot be kept"),
        ({"top_k": 9}, "9 cannot be chosen"),
        ({"groups": 4, "top_k": 3}, "Of 2 experts 3"),
        ({"groups": 8, "group_depth": 2, "top_k": 1}, "judged by 2"),
    ],
)
def test_routings_that_cannot_be(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(ROUTINGS["mixtral"], **change)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------- blocks


def _ids(kind: str, tokens: int, top_k: int, num_experts: int, device: torch.device) -> torch.Tensor:
    ids = torch.rand(tokens, num_experts).argsort(1)[:, :top_k]
    if kind == "one expert":
        ids[:] = num_experts - 1
    if kind == "elsewhere":
        ids[ids % 3 == 1] = -1
    if kind == "nowhere":
        ids[:] = -1
    return ids.int().to(device)


@grid(
    {
        "kind": ["spread", "one expert", "elsewhere", "nowhere"],
        "tokens,top_k,num_experts": [(1, 1, 1), (1, 2, 8), (7, 3, 5), (40, 4, 64), (0, 2, 4)],
        "size": [16, 64],
    }
)
def test_align(kind: str, tokens: int, top_k: int, num_experts: int, size: int, device: torch.device) -> None:
    ids = _ids(kind, tokens, top_k, num_experts, device)
    ours, theirs = moe.align(ids, num_experts, size), reference.align(ids, num_experts, size)
    assert torch.equal(ours.experts, theirs.experts)
    used = int((theirs.experts >= 0).sum()) * size
    assert torch.equal(ours.rows[:used], theirs.rows[:used])
    assert (ours.num_rows, ours.size, ours.rows.shape) == (ids.numel(), size, theirs.rows.shape)


def test_more_ids_than_a_program_looks_at_at_a_time(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "_CHUNK", 16)
    ids = _ids("spread", 40, 3, 4, device)
    ours, theirs = moe.align(ids, 4, 32), reference.align(ids, 4, 32)
    assert torch.equal(ours.experts, theirs.experts)
    used = int((theirs.experts >= 0).sum()) * 32
    assert torch.equal(ours.rows[:used], theirs.rows[:used])


@pytest.mark.parametrize(("rows", "experts", "size", "blocks"), [(1, 8, 16, 1), (16, 8, 16, 8), (100, 4, 16, 10)])
def test_blocks_are_enough(rows: int, experts: int, size: int, blocks: int) -> None:
    assert reference.max_blocks(rows, experts, size) == blocks


# ------------------------------------------------------------------------------------------------ products


def _experts(dtype: torch.dtype, device: torch.device, num_experts: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = torch.randn(num_experts, 2 * 24, 40, device=device) * 40**-0.5
    down = torch.randn(num_experts, 40, 24, device=device) * 24**-0.5
    return gate_up.to(dtype), down.to(dtype)


@grid(
    {
        "dtype": PRODUCT_DTYPES,
        "kind": ["spread", "one expert", "elsewhere", "nowhere"],
        "tokens": [40, 7, 1],
    }
)
def test_experts(kind: str, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up, down = _experts(dtype, device)
    x = torch.randn(tokens, 40, device=device).to(dtype)
    ids = _ids(kind, tokens, 2, 5, device)
    weights = torch.rand(tokens, 2, device=device)
    ours = grouped.experts(x, gate_up, down, weights, ids, "silu")
    theirs = reference.experts(x, gate_up, down, weights, ids, F.silu)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert torch.equal(ours, grouped.experts(x, gate_up, down, weights, ids, "silu"))


@grid({"rows_per_expert": [16, 32, 64, 65], "shared": [False, True]})
def test_products_with_a_bias(rows_per_expert: int, shared: bool, device: torch.device) -> None:
    shape = grouped.tile(rows_per_expert, torch.float32)
    gate_up, _ = _experts(torch.float32, device)
    bias = torch.randn(5, 48, device=device)
    ids = _ids("spread", 6, 3, 5, device)
    x = torch.randn(6 if shared else 18, 40, device=device)
    blocks = moe.align(ids, 5, shape.rows)
    owner, source = ids.flatten().long(), x.repeat_interleave(3, 0) if shared else x
    plain = torch.einsum("rk,rnk->rn", source, gate_up[owner]) + bias[owner]
    torch.testing.assert_close(grouped.multiply(x, gate_up, blocks, shape, bias=bias), plain, rtol=1e-5, atol=1e-5)
    factors = torch.rand(18, device=device)
    gated = grouped.multiply(x, gate_up, blocks, shape, bias=bias, act="gelu", factors=factors)
    expected = F.gelu(plain[:, :24]) * plain[:, 24:] * factors[:, None]
    torch.testing.assert_close(gated, expected, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    gate_up, _ = _experts(torch.float32, device)
    blocks = moe.align(_ids("spread", 6, 3, 5, device), 5, 16)
    for x, rows in ((torch.ones(5, 40), 16), (torch.ones(6, 24), 16), (torch.ones(6, 40), 32)):
        with pytest.raises(ValueError, match="do not fit"):
            grouped.multiply(x.to(device), gate_up, blocks, grouped.tile(rows, torch.float32))


def test_every_case_runs(device: torch.device) -> None:
    """Run what is measured on a GPU; under the interpreter, which takes a second for each, one case of each module."""
    for module in (moe, grouped):
        for case in list(module.cases(device))[: None if device.type == "cuda" else 1]:
            assert case.bytes > 0
            assert case.run() is not None


@pytest.mark.parametrize("name", ["gated", "own activation and biases", "weighted inputs"])
def test_a_block_of_experts(name: str, device: torch.device) -> None:
    """Compare `ferrule_nn.moe` with these kernels with itself without any."""
    routing = Routing(num_experts=4, top_k=1 if name == "weighted inputs" else 2)
    spec = MoESpec(hidden_size=24, inner_size=16, routing=routing, weigh_inputs=name == "weighted inputs")
    make = partial(ClampedMLP, 24, 16, 1.702, 0.5) if name == "own activation and biases" else None
    with device, ops.using(Kernels((triton_layers(),))):
        block = MoE(spec, make)
    for parameter in allocated(block).parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(5, 24, device=device)
    plain = block(x)
    block.gate.pack()
    block.experts.pack()
    assert block.experts.blocks[0].down_proj.weight.numel() == 0, "the weights are not stacked"
    torch.testing.assert_close(block(x), plain, rtol=1e-4, atol=1e-5)


def _adapted(kernels: Kernels, folders: dict[int, Path], device: torch.device, **spec: Any) -> tuple[MoE, LoraBank]:
    """Make a block, packed, whose experts have adapters in slots of a bank, but not its router."""
    numbers = MoESpec(hidden_size=24, inner_size=16, routing=Routing(num_experts=4, top_k=2), **spec)
    with device, ops.using(kernels):
        block = MoE(numbers)
    context = BankContext(
        num_slots=3, max_rank=20, max_host=3, bias=True, dtype=torch.float32, device=device, kernels=kernels
    )
    bank = LoraBank(context)
    assert block.experts.adapt("experts", bank)
    draw = torch.Generator().manual_seed(0)
    for parameter in allocated(block).parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
    block.gate.pack()
    block.experts.pack()
    for slot, folder in folders.items():
        bank.load(slot, Adapter(name=folder.name, path=str(folder)))
    return block, bank


def _expert_adapters(folder: Path) -> dict[int, Path]:
    """Write one adapter of ranks above a program's, one that changes magnitudes (DoRA), and one of a single expert."""
    shapes = {"gate_proj": (24, 16), "up_proj": (24, 16), "down_proj": (16, 24)}
    modules = [(f"experts.{n}.{own}", *sizes) for n in range(4) for own, sizes in shapes.items()]
    magnitudes = {f"base_model.model.{name}.lora_magnitude_vector": torch.rand(out) for name, _, out in modules}
    return {
        1: write_adapter(folder / "plain", modules, rank=20),
        2: write_adapter(folder / "dora", modules, seed=1, tensors=magnitudes, use_dora=True),
        3: write_adapter(folder / "one", modules[3:6], seed=2),
    }


@pytest.mark.parametrize(("tokens", "weigh_inputs"), [(1, False), (6, True), (6, False), (140, False)])
@torch.inference_mode()
def test_adapters_of_experts(tokens: int, weigh_inputs: bool, device: torch.device, tmp_path: Path) -> None:
    """Compare experts with adapters, in few rows and in many, with the same ones without kernels."""
    folders = _expert_adapters(tmp_path)
    mine, bank = _adapted(Kernels((triton_layers(),)), folders, device, weigh_inputs=weigh_inputs)
    theirs, other = _adapted(Kernels(), folders, torch.device("cpu"), weigh_inputs=weigh_inputs)
    assert mine.experts.blocks[0].down_proj.weight.numel() == 0, "the weights are not stacked"
    draw = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 24, generator=draw)
    slots = (torch.arange(tokens) * 4 // tokens + 1) % 4
    bank.token_slots, other.token_slots = slots.to(device), slots
    with Waits():
        found = mine(x.to(device)).cpu()
    wanted = theirs(x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    other.token_slots = torch.zeros_like(slots)
    changed = (theirs(x) - wanted).abs().amax(1) > 1e-2
    assert changed[slots % 3 != 0].all()
    assert not changed[slots == 0].any()

"""Routers, experts and their loading, beside transformers' routers and a plain sum over experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from ferrule.assembly.model import pack
from ferrule.errors import CheckpointError
from ferrule.interfaces.quantization import QuantizationMethod
from ferrule_kernels import matmul, moe
from ferrule_kernels.moe import Routing, route
from ferrule_nn import MoE, MoESpec, Naming, building, load_into
from ferrule_plugins.quantization.fp8 import Fp8Method
from ferrule_plugins.quantization.integers import Int4WeightOnly, Int8WeightOnly
from ferrule_testkit.checkpoints import tiny_checkpoint
from ferrule_testkit.harness import Harness
from tests.unit.nn.test_layers import _context

HIDDEN, INNER = 64, 32
SPEC = MoESpec(hidden_size=HIDDEN, inner_size=INNER, routing=Routing(num_experts=6, top_k=2))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _block(spec: MoESpec = SPEC, dtype: torch.dtype = torch.float32) -> MoE:
    """Return a block with weights, not packed."""
    with building(_context(dtype)):
        block = MoE(spec)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.15)
    return block


def _plain(block: MoE, x: torch.Tensor, choice: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
    """Compute one expert after the other, from the parameters as they were loaded, in float32."""
    weights, ids = block.gate(x) if choice is None else choice
    out = torch.zeros(x.shape, dtype=torch.float32)
    for token, (factors, chosen) in enumerate(zip(weights.tolist(), ids.tolist(), strict=True)):
        for factor, expert in zip(factors, chosen, strict=True):
            row, own = x[token].float(), block.experts[expert]
            row = row * factor if block.weigh_inputs else row
            gate, up = (own.gate_up_proj.weight.float() @ row).chunk(2)
            y = own.down_proj.weight.float() @ (F.silu(gate) * up)
            out[token] += y if block.weigh_inputs else factor * y
    return out


# ------------------------------------------------------------------------------------------------- routers


def test_a_softmax_over_the_chosen_is_one_over_all_that_is_renormalised() -> None:
    """Route as Granite and gpt-oss do, and as Mixtral."""
    logits = torch.randn(20, 8)
    weights, ids = route(logits, Routing(num_experts=8, top_k=3))
    best = logits.topk(3)
    assert torch.equal(ids.long(), best.indices)
    torch.testing.assert_close(weights, best.values.softmax(-1))


def test_sigmoids_of_the_best_logits() -> None:
    """Route as Llama 4 does."""
    logits = torch.randn(20, 8)
    weights, ids = route(logits, Routing(num_experts=8, top_k=2, scores="sigmoid", renormalise=False))
    best = logits.topk(2)
    assert torch.equal(ids.long(), best.indices)
    torch.testing.assert_close(weights, best.values.sigmoid())


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    """Route as ERNIE 4.5 and MiniMax M2 do."""
    logits, bias = torch.zeros(1, 4), torch.tensor([0.0, 0.3, -0.3, 0.2])
    weights, ids = route(logits, Routing(num_experts=4, top_k=2), bias)
    assert ids.tolist() == [[1, 3]]
    assert weights.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("tolerance", [0.01, 0.3])
def test_sparsemixer_equals_transformers(tolerance: float) -> None:
    logits = torch.randn(50, 8)
    expected, expected_ids = sparsemixer(logits, jitter_eps=tolerance, training=False)
    weights, ids = route(logits, Routing(num_experts=8, top_k=2, scores="sparsemixer", tolerance=tolerance))
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected)


# ------------------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"routing": Routing(num_experts=6, top_k=1, scores="sigmoid", renormalise=False), "weigh_inputs": True},
        {"routing": Routing(num_experts=5, top_k=5)},
        {"correction": True, "router_bias": True},
    ],
    ids=["mixtral", "llama4", "all", "biases"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_equal_a_plain_sum(changes: dict[str, Any], dtype: torch.dtype, tokens: int) -> None:
    block = _block(MoESpec(**{**vars(SPEC), **changes}), dtype)
    x = torch.randn(tokens, HIDDEN).to(dtype)
    expected = _plain(block, x)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(block(x).float(), expected, rtol=tolerance, atol=tolerance)
    pack(block)  # type: ignore[arg-type]
    torch.testing.assert_close(block(x).float(), expected, rtol=tolerance, atol=tolerance)


def test_a_shared_expert_and_its_gate() -> None:
    block = _block(MoESpec(**{**vars(SPEC), "shared_size": 48, "shared_gate": True}))
    x = torch.randn(4, HIDDEN)
    assert block.shared_expert is not None
    assert block.shared_expert_gate is not None
    gate = torch.sigmoid(x @ block.shared_expert_gate.weight.t())
    torch.testing.assert_close(block(x), _plain(block, x) + gate * block.shared_expert(x))


@pytest.mark.parametrize("method", [None, Int8WeightOnly])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_alone_and_in_a_batch(
    method: type[QuantizationMethod] | None, dtype: torch.dtype
) -> None:
    block = _block(dtype=dtype)
    if method is not None:
        _quantize(block, method({}))
    pack(block)  # type: ignore[arg-type]
    x = torch.randn(40, HIDDEN).to(dtype)
    together = block(x)
    for token in (0, 7, 39):
        assert torch.equal(block(x[token : token + 1])[0], together[token])


def _quantize(block: MoE, method: QuantizationMethod) -> None:
    for name, part in block.named_modules():
        if hasattr(part, "quantize"):
            part.quantize(f"layers.0.mlp.{name}", method)


@pytest.mark.parametrize(
    ("method", "form"), [(Int8WeightOnly, Int8WeightOnly.form), (Int4WeightOnly, Int4WeightOnly.form)]
)
@pytest.mark.parametrize("tokens", [1, 9])
def test_quantized_experts_equal_their_dequantized_weights(
    method: type[QuantizationMethod], form: matmul.Form, tokens: int
) -> None:
    block = _block()
    x = torch.randn(tokens, HIDDEN)
    choice = block.gate(x)
    kept = _block()
    kept.load_state_dict(block.state_dict())
    for name, weight in kept.experts.named_parameters():
        assert name.endswith("proj.weight")
        weight.data = matmul.quantize(weight.data, form).weights(weight.shape[1])
    expected = _plain(kept, x, choice)
    _quantize(block, method({}))
    pack(block)  # type: ignore[arg-type]
    assert torch.equal(block.gate(x)[1], choice[1]), "routers are not quantized"
    torch.testing.assert_close(block.experts(x, *choice, False), expected, rtol=1e-3, atol=1e-3)


def test_fp8_experts_of_a_checkpoint() -> None:
    """Load experts as DeepSeek-V3 publishes them, with a scale for each 128 x 128 numbers."""
    spec = MoESpec(hidden_size=HIDDEN, inner_size=128, routing=Routing(num_experts=2, top_k=1))
    plain = _block(spec)
    block = _block(spec)
    _quantize(block, Fp8Method({"quant_method": "fp8", "weight_block_size": [128, 128]}))
    tensors = {"gate.weight": plain.gate.weight.data}
    for expert in range(2):
        own = plain.experts[expert]
        for name, layer, rows in (
            ("gate_proj", own.gate_up_proj, slice(0, 128)),
            ("up_proj", own.gate_up_proj, slice(128, 256)),
            ("down_proj", own.down_proj, slice(0, HIDDEN)),
        ):
            numbers, scale = (layer.weight.data[rows] * 100).to(torch.float8_e4m3fn), torch.tensor([[0.01]])
            tensors[f"experts.{expert}.{name}.weight"] = numbers
            tensors[f"experts.{expert}.{name}.weight_scale_inv"] = scale
            layer.weight.data[rows] = numbers.float() * scale
    x = torch.randn(3, HIDDEN)
    expected = _plain(plain, x)
    load_into(block, tensors.items())
    pack(block)  # type: ignore[arg-type]
    assert (block(x) - expected).norm() < 0.02 * expected.norm()


# ------------------------------------------------------------------------------------------------- loading


def _tensors(block: MoE, stacked: bool) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors: one for each expert and projection, or all of one kind in one."""
    found = {"mlp.gate.weight": block.gate.weight.data}
    gate_up = torch.stack([own.gate_up_proj.weight.data for own in block.experts])
    down = torch.stack([own.down_proj.weight.data for own in block.experts])
    if stacked:
        return {**found, "mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": down}
    for expert in range(len(gate_up)):
        for name, tensor in zip(("gate_proj", "up_proj"), gate_up[expert].chunk(2), strict=True):
            found[f"mlp.experts.{expert}.{name}.weight"] = tensor
        found[f"mlp.experts.{expert}.down_proj.weight"] = down[expert]
    return found


class _Copies(TorchDispatchMode):
    """A mode that counts numbers that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default or func is torch.ops.aten.clone.default:
            self.numbers += out.numel()
        return out


@pytest.mark.parametrize("stacked", [False, True])
def test_each_expert_is_copied_once(stacked: bool) -> None:
    source, target = _block(), nn.Module()
    target.mlp = _block()
    with _Copies() as copies:
        filled = load_into(target, _tensors(source, stacked).items())
    assert filled == {name for name, _ in target.named_parameters()}
    assert copies.numbers == sum(parameter.numel() for parameter in source.parameters())
    for (_, wanted), (_, loaded) in zip(source.named_parameters(), target.named_parameters(), strict=True):
        assert torch.equal(wanted, loaded)


def test_stacked_experts_stored_transposed() -> None:
    source, target = _block(), nn.Module()
    target.mlp = _block()
    tensors = {name: t.mT.contiguous() if t.dim() == 3 else t for name, t in _tensors(source, True).items()}
    load_into(target, tensors.items(), Naming(transposed=(r"\.experts\.(gate_up|down)_proj$",)))
    x = torch.randn(2, HIDDEN)
    assert torch.equal(target.mlp(x), source(x))


@pytest.mark.parametrize(("experts", "fault"), [(7, "does not have: 'mlp.experts.down_proj'"), (6, None)])
def test_a_stack_of_too_many_experts(experts: int, fault: str | None) -> None:
    target = nn.Module()
    target.mlp = _block()
    tensors = [("mlp.experts.down_proj", torch.randn(experts, HIDDEN, INNER))]
    if fault is None:
        load_into(target, tensors)
        return
    with pytest.raises(CheckpointError, match=fault):
        load_into(target, tensors)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("mixtral", tmp_path_factory.mktemp("mixtral"), shard_bytes=100_000)


def test_a_truncated_shard_in_the_middle_is_named(mixtral: Path) -> None:
    shards = sorted(mixtral.glob("*.safetensors"))
    middle = next(shard for shard in shards[1:] if any(".experts.1." in name for name in load_file(shard)))
    whole = middle.read_bytes()
    middle.write_bytes(whole[: len(whole) // 2])
    try:
        with pytest.raises(CheckpointError, match=middle.name):
            Harness(mixtral, dtype="float32").__enter__()
    finally:
        middle.write_bytes(whole)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantized_model_runs(mixtral: Path, quantization: str) -> None:
    """Leave routers as they are, so that most tokens of a greedy text are those of the float model."""
    prompt = [5, 17, 200, 31, 99, 250, 8]
    with Harness(mixtral, dtype="bfloat16", quantization=quantization) as harness:
        output = harness.engine().run([prompt], max_tokens=4)[0]
    assert output.error is None
    assert len(output.token_ids) == 4


def test_an_expert_that_is_not_finite_is_named_before_it_is_quantized(mixtral: Path) -> None:
    shards = sorted(mixtral.glob("*.safetensors"))
    shard = next(file for file in shards if any(".experts.3." in name for name in load_file(file)))
    whole, tensors = shard.read_bytes(), load_file(shard)
    name = next(each for each in tensors if ".experts.3." in each)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, shard, {"format": "pt"})
    try:
        with pytest.raises(CheckpointError, match=r"experts\.3\.\w+_proj: .* not a finite number"):
            Harness(mixtral, dtype="float32", quantization="int8").__enter__()
    finally:
        shard.write_bytes(whole)


def test_the_reference_sums_as_the_block_does() -> None:
    """Compare `ferrule_kernels.moe.experts`, which the kernels for GPUs are held to."""
    block = _block()
    x = torch.randn(5, HIDDEN)
    weights, ids = block.gate(x)
    gate_up = torch.stack([own.gate_up_proj.weight.data for own in block.experts])
    down = torch.stack([own.down_proj.weight.data for own in block.experts])
    torch.testing.assert_close(moe.experts(x, gate_up, down, weights, ids, F.silu), block(x), rtol=1e-4, atol=1e-5)

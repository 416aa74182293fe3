"""Whole layers and models with the kernels for GPUs, beside the same layers without any."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
from ferrule.assembly.model import pack
from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.model import BuildContext
from ferrule_kernels import moe as reference
from ferrule_kernels.cuda import gates, grouped, moe, norms, rope
from ferrule_nn import LayerNorm, ops
from ferrule_plugins.model import gemma2, gpt2, llama, opt, qwen3
from ferrule_plugins.platform.cuda_kernels import triton_layers
from tests.fakes.waiting import Waits
from tests.shared import allocated

TOKENS = 5
CONFIG: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (llama.Llama, {}),
    "qwen3": (qwen3.Qwen3, {"partial_rotary_factor": 0.5}),
    "gemma2": (gemma2.Gemma2, {}),
    "gpt2": (gpt2.GPT2, {"n_positions": 64, "n_head": 4, "n_embd": 24}),
    "opt": (opt.OPT, {"ffn_dim": 40, "activation_function": "relu"}),
}


def _model(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    make, changes = MODELS[name]
    context = BuildContext(
        config={**CONFIG, **changes},
        dtype=dtype,
        device=device,
        block_size=4,
        max_model_len=64,
        kernels=Kernels((triton_layers(),)),
    )
    model = make(context)
    for parameter in allocated(model).parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def _hidden(model: Any, device: torch.device) -> torch.Tensor:
    """Compute a model with an average over the groups' values as attention: what matters is its input."""

    def attend(layer: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Any) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        return q + (k + v).repeat_interleave(group, 1)

    positions = torch.arange(TOKENS, device=device)
    ctx: Any = SimpleNamespace(
        positions=positions, lengths=positions + 1, embeds=None, attend=attend, attend_heads=lambda *given: None
    )
    with torch.inference_mode():
        hidden: torch.Tensor = model(positions * 3, ctx)
    return hidden


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_models(name: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(name, dtype, device)
    plain = _hidden(model, device)
    launched: list[str] = []
    kernels = triton_layers()
    for kernel in (kernels.rms_norm, kernels.layer_norm, kernels.heads, kernels.gate, kernels.activation):
        _count(monkeypatch, kernel, launched)
    pack(model)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(_hidden(model, device), plain, rtol=tolerance, atol=tolerance)
    expected = {"LayerNorm", "Activation"} if name in ("gpt2", "opt") else {"RMSNorm", "CachedHeads", "Gate"}
    assert set(launched) == expected


def _count(monkeypatch: pytest.MonkeyPatch, kernel: Any, launched: list[str]) -> None:
    call = kernel.__call__

    def counted(self: Any, *given: Any) -> Any:
        launched.append(kernel.__name__)
        return call(self, *given)

    monkeypatch.setattr(kernel, "__call__", counted)


def test_a_layer_norm_with_a_kernel_of_its_own(device: torch.device) -> None:
    class Doubled(LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    with ops.using(Kernels((triton_layers(),))):
        layer = Doubled(16).to(device)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    layer.pack()
    assert layer.kernel is None


@pytest.mark.parametrize("module", [norms, gates, rope, moe, grouped])
def test_no_kernel_asks_the_device(module: Any, device: torch.device) -> None:
    cases = list(module.cases(device))
    with Waits():
        for case in cases[:4]:
            case.run()


def test_the_watch_sees_who_asks(device: torch.device) -> None:
    for ask in (torch.ones(2, device=device).nonzero, torch.ones(1, device=device).item):
        with pytest.raises(AssertionError, match="waits"), Waits():
            ask()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU records")
def test_experts_can_be_recorded(device: torch.device) -> None:
    """Use the same graph whatever the router says."""
    routing = reference.Routing(num_experts=8, top_k=2)
    gate_up = torch.randn(8, 64, 32, device=device) / 6
    down = torch.randn(8, 32, 32, device=device) / 6
    x, logits = torch.randn(12, 32, device=device), torch.randn(12, 8, device=device)

    def step() -> torch.Tensor:
        weights, ids = moe.route(logits, routing)
        return grouped.experts(x, gate_up, down, weights, ids, "silu")

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        logits.normal_()
        x.normal_()
        graph.replay()
        weights, ids = reference.route(logits, routing)
        expected = reference.experts(x, gate_up, down, weights, ids, torch.nn.functional.silu)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)

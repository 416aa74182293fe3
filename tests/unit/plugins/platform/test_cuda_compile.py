"""What `-O3` compiles, and that it computes the same; the compiler itself stands in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ferrule.config import Config, DeviceConfig, DeviceSettings
from ferrule.config.resolve import resolve
from ferrule.interfaces.model import BuildContext
from ferrule_plugins.model.llama import Llama
from ferrule_plugins.platform.cuda import CudaPlatform
from ferrule_plugins.platform.cuda_compile import compile_parts, parts_beside_attention
from ferrule_testkit.checkpoints import tiny_config, tiny_model


def settings(**sections: Any) -> DeviceSettings:
    """Return the settings that a plugin gets of a configuration with these sections."""
    return DeviceSettings.of(resolve(Config(**sections)))


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


def test_norms_and_blocks_beside_attention_are_compiled() -> None:
    model = tiny_model("llama")
    layers = len(model.model.layers)
    assert [type(part).__name__ for part in parts_beside_attention(model)] == layers * [
        "LlamaMLP",
        "LlamaRMSNorm",
        "LlamaRMSNorm",
    ]


def test_compiled_parts_are_shared_and_compute_the_same() -> None:
    """Compile all layers' parts, for several lengths, as few graphs."""
    model = tiny_model("llama")
    ids = [torch.arange(3, 3 + length).unsqueeze(0) for length in (5, 9, 12)]
    with torch.inference_mode():
        before = [model(each).logits for each in ids]
        graphs: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        assert compile_parts(model, backend=backend) == 3 * len(model.model.layers)
        after = [model(each).logits for each in ids]
    for mine, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert 2 <= len(graphs) <= 4  # a norm and a block, once more at most for another length


@pytest.mark.parametrize("level", [2, 3])
def test_parts_with_kernels_are_left_alone(level: int, caplog: pytest.LogCaptureFixture) -> None:
    config = {**tiny_config("llama").to_dict(), "num_hidden_layers": 1}
    context = BuildContext(
        config=config, dtype=torch.float32, device=torch.device("cpu"), block_size=16, max_model_len=64
    )
    model = Llama(context)
    CudaPlatform().execution().optimise(model, settings(device=DeviceConfig(compilation_config={"level": level})))
    assert all(part._compiled_call_impl is None for part in model.modules() if isinstance(part, nn.Module))
    assert len(caplog.records) <= (level == 3)

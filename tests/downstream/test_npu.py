"""A device and an attention backend of a stranger: same text as on the CPU, other cache."""

from __future__ import annotations

import json
import random
import shutil
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule.assembly.memory import device_tensors
from ferrule.config import Config, DeviceConfig, ModelConfig, PluginConfig
from ferrule.config.plugins import configured
from ferrule.config.resolve import resolve
from ferrule.env import Environment
from ferrule.errors import ConfigError, PluginError
from ferrule.interfaces.kernels import Kernels
from ferrule.plugin import discover
from ferrule_plugins.platform import cpu
from ferrule_testkit import server as servers
from ferrule_testkit.harness import Harness
from ferrule_testkit.quantized import FORMATS, quantized_checkpoint

PROMPTS = [[random.Random(length).randrange(3, 320) for _ in range(length)] for length in (1, 5, 16, 33)]
TOKENS = 12


def run(folder: Path, allowed: bool = False, **limits: Any) -> tuple[Harness, list[Any]]:
    """Run the prompts. `allowed`: --plugins-allow acme-npu, without which `auto` ignores a platform of another
    distribution.
    """
    plugins = configured(discover(), PluginConfig(plugins_allow=("acme-npu",) if allowed else ()), Environment())
    with Harness(folder, plugins=plugins, dtype="float32") as harness:
        outputs = harness.engine(**limits).run(PROMPTS, max_tokens=TOKENS)
    return harness, outputs


@pytest.fixture(scope="module")
def on_cpu(tiny_llama: Path) -> list[Any]:
    harness, outputs = run(tiny_llama)
    assert (harness.info.device, harness.info.attention, harness.info.depth) == ("cpu", "cpu", 1)
    return outputs


def same(outputs: list[Any], others: list[Any], within: float = 1e-4) -> None:
    for output, other in zip(outputs, others, strict=True):
        assert output.token_ids == other.token_ids
        assert [e.logprob for e in output.logprobs] == pytest.approx([e.logprob for e in other.logprobs], abs=within)


def test_auto_prefers_a_device_that_is_there_and_allowed(
    tiny_llama: Path, on_cpu: list[Any], on_path: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path("acme_npu")
    assert run(tiny_llama)[0].info.device == "cpu"  # what another distribution brings is opt-in
    harness, outputs = run(tiny_llama, allowed=True, num_blocks=30, max_num_batched_tokens=7, depth=2, policy="chaos")
    info = harness.info
    assert (info.device, info.attention, info.depth) == ("acme_npu", "acme_paged", 2)
    assert 0 < info.page_bytes * info.max_blocks <= 0.9 * (64 << 20)
    same(outputs, on_cpu)

    monkeypatch.setenv("ACME_NPU_COUNT", "0")
    harness, outputs = run(tiny_llama, allowed=True)
    assert harness.info.device == "cpu"
    assert "platform acme_npu refused: no NPU is plugged in" in harness.info.notes
    same(outputs, on_cpu)


def test_windows_slide_on_it_too(tiny_llama: Path, tmp_path: Path, on_path: Callable[[str], None]) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "mistral"))  # which has tensors of the same names
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 12}
    (folder / "config.json").write_text(json.dumps(config))
    _, wanted = run(folder)
    on_path("acme_npu")
    harness, outputs = run(folder, allowed=True, max_num_batched_tokens=10)
    assert (harness.info.attention, [group.window for group in harness.info.groups]) == ("acme_paged", [12])
    same(outputs, wanted)


ONLINE = ("int8", "int4", "fp8", "bitsandbytes", "mxfp4", "mxfp8", "fp8_per_block", "int4_weight_only")
SCHEMES = [*((name, "") for name in FORMATS), *(("", name) for name in ONLINE)]
QUICK = {"int8", "fp8-blocks", "gptq", "nf4"}  # of each way to multiply one; the rest run in `make test-slow`


@pytest.mark.parametrize(
    ("stored", "online"),
    [pytest.param(*scheme, marks=() if QUICK & set(scheme) else pytest.mark.slow) for scheme in SCHEMES],
)
def test_quantized_weights_need_no_kernels(
    stored: str,
    online: str,
    tiny_llama: Path,
    tmp_path: Path,
    on_path: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compute on the NPU what torch, the definition, computes on a CPU that is left without kernels."""
    folder, model = tiny_llama, {"quantization": online} if online else {}
    if stored:
        quantized_checkpoint(tiny_llama, tmp_path / "made", stored)
        folder = tmp_path / "made"
    monkeypatch.setattr(cpu, "cpu_kernels", Kernels)
    with Harness(folder, dtype="float32", **model) as harness:
        wanted = harness.engine().run(PROMPTS[:2], max_tokens=4)
    on_path("acme_npu")
    plugins = configured(discover(), PluginConfig(plugins_allow=("acme-npu",)), Environment())
    with Harness(folder, plugins=plugins, dtype="float32", **model) as harness:
        outputs = harness.engine().run(PROMPTS[:2], max_tokens=4)
        assert (harness.info.device, harness.info.attention) == ("acme_npu", "acme_paged")
    same(outputs, wanted, within=2e-3)  # other sums, and activations that are rounded the other way


def test_it_uses_the_kernels_that_it_has(tiny_llama: Path, on_cpu: list[Any], on_path: Callable[[str], None]) -> None:
    on_path("acme_npu")
    from acme_npu.platform import AcmeNorm, AcmeProducts

    before = AcmeNorm.calls, AcmeProducts.calls
    plugins = configured(discover(), PluginConfig(plugins_allow=("acme-npu",)), Environment())
    with Harness(tiny_llama, plugins=plugins, dtype="float32", quantization="int8") as harness:
        harness.engine().run(PROMPTS[:1], max_tokens=1)
        tensors = device_tensors(harness.executor._worker._worker.model_runner.model, torch.device("acme_npu"))  # type: ignore[attr-defined]
    assert tensors
    assert AcmeNorm.calls > before[0]
    assert AcmeProducts.calls > before[1]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"device": "acme_npu", "attention_backend": "cpu"}, "not on acme_npu"),
        ({"device": "cpu", "attention_backend": "acme_paged"}, "not on cpu"),
        ({"device": "acme_nqu"}, "acme_npu"),
    ],
)
def test_what_does_not_fit_is_refused(
    options: dict[str, str], problem: str, tiny_llama: Path, on_path: Callable[[str], None]
) -> None:
    on_path("acme_npu")
    with pytest.raises((ConfigError, PluginError)) as caught:
        start(resolve(Config(model=ModelConfig(model=str(tiny_llama)), device=DeviceConfig(**options))))
    assert problem in str(caught.value)


def test_a_device_that_was_named_and_is_not_there_is_an_error(
    tiny_llama: Path, on_path: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path("acme_npu")
    monkeypatch.setenv("ACME_NPU_COUNT", "0")
    with pytest.raises(ConfigError, match="--device acme_npu: no NPU is plugged in"):
        start(resolve(Config(model=ModelConfig(model=str(tiny_llama)), device=DeviceConfig(device="acme_npu"))))
    monkeypatch.delenv("ACME_NPU_COUNT")
    model = ModelConfig(model=str(tiny_llama), dtype="bfloat16")
    with pytest.raises(ConfigError, match="computes in float32"):
        start(resolve(Config(model=model, device=DeviceConfig(device="acme_npu"))))


def start(config: Config) -> None:
    plugins = configured(discover(), config.plugins, Environment())
    executor = plugins.load("executor", "uni")()
    try:
        executor.start(config, plugins)
    finally:
        executor.shutdown()


@pytest.mark.slow  # e2e/plugins/test_templates.py serves with a platform and attention of packages
def test_it_serves(tiny_llama: Path, on_cpu: list[Any], installed: Any, tmp_path: Path) -> None:
    args = [str(tiny_llama), "--device", "acme_npu", "--plugins-allow", "acme-npu", "--served-model-name", "tiny"]
    with servers.running(args, tmp_path / "log", installed.environment("acme_npu")) as server:
        for prompt, wanted in zip(PROMPTS[1:3], on_cpu[1:3], strict=True):
            body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
            asked = urllib.request.Request(
                f"{server.url}/v1/completions",
                json.dumps(body | {"return_token_ids": True}).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(asked, timeout=240) as response:
                (choice,) = json.load(response)["choices"]
            assert choice["token_ids"] == wanted.token_ids
        assert server.says("device acme_npu, attention acme_paged")

"""The memory of a GPU: shared out, given back asleep, and advice where it does not suffice."""

from __future__ import annotations

import gc
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ferrule import LLM, SamplingParams
from ferrule.config import Config, ModelConfig
from ferrule.config.resolve import resolve
from ferrule.errors import ConfigError
from ferrule_plugins.platform.cuda import CudaPlatform
from ferrule_plugins.platform.cuda_memory import TorchDevice
from tools.benchmarks.gpu_models import Shape

Open = Callable[..., LLM]
WEIGHTS = Shape(  # about 400 MiB in bfloat16
    "llama",
    {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
)
OPTIONS = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "enable_sleep_mode": True,
    "max_num_batched_tokens": 2048,
}
PROMPTS = [[5, 6, 7, 8], [9] * 40]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    WEIGHTS.write(folder)
    return folder


def _tokens(llm: LLM) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def _free() -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back(level: int, folder: Path, opened: Open) -> None:
    llm = opened(folder, device="cuda", num_gpu_blocks_override=4096, **OPTIONS)
    before, awake = _tokens(llm), _free()
    held = llm.model.weight_bytes + 4096 * llm.model.page_bytes
    llm.sleep(level=level)
    assert _free() - awake > 0.95 * held
    llm.wake_up()
    assert _tokens(llm) == before
    assert abs(_free() - awake) < 0.1 * held


@pytest.mark.parametrize("level", [1, 2])
def test_outputs_after_sleep_are_those_before(level: int, device: str, folder: Path, opened: Open) -> None:
    llm = opened(folder, device=device, num_gpu_blocks_override=64, **OPTIONS)
    before = _tokens(llm)
    llm.sleep(level=level)
    llm.wake_up(["weights"])
    llm.wake_up(["kv_cache"])
    assert _tokens(llm) == before


@pytest.mark.usefixtures("gpu")
def test_the_cache_stays_within_the_share(folder: Path, opened: Open) -> None:
    before, total = torch.cuda.mem_get_info()
    llm = opened(folder, device="cuda", num_gpu_blocks_override=None, gpu_memory_utilization=0.3, **OPTIONS)
    _tokens(llm)
    used = before - _free()
    assert llm.model.max_blocks * llm.model.page_bytes > 0.2 * total
    assert used < 0.32 * total


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_weights_with_the_host(quantization: str | None, folder: Path, opened: Open) -> None:
    """Get the same tokens, with graphs too, awake and after sleep, and free what the weights took of the device.

    The second model's threads and streams may have two more of cuBLAS's workspaces, of 32 MiB each.
    """
    held, tokens = [], []
    for size in (0.0, 0.1875):
        options = {**OPTIONS, "quantization": quantization, "cpu_offload_gb": size}
        llm = opened(folder, device="cuda", num_gpu_blocks_override=64, **options)
        tokens.append(_tokens(llm))
        held.append(torch.cuda.memory_allocated())
        llm.sleep(level=1)
        llm.wake_up()
        tokens.append(_tokens(llm))
        llm.close()
        gc.collect()
    assert tokens == [tokens[0]] * 4
    assert held[0] - held[1] > 0.1 * 2**30


@pytest.mark.usefixtures("gpu")
def test_what_the_host_keeps_takes_nothing_of_the_device() -> None:
    device = TorchDevice()
    free = _free()
    held = device.map_host(256 * 2**20)
    assert free - _free() < 32 * 2**20
    held.fill_(7)
    assert int(held[:: 2**20].sum()) == 7 * 256
    assert not held.untyped_storage().resizable()


@pytest.mark.usefixtures("gpu")
def test_too_small_a_share_is_told(folder: Path, opened: Open) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(folder, device="cuda", num_gpu_blocks_override=None, gpu_memory_utilization=0.001, **OPTIONS)
    assert "--gpu-memory-utilization 0." in caught.value.hint


@pytest.mark.usefixtures("gpu")
def test_too_many_blocks_are_told(folder: Path, opened: Open) -> None:
    with pytest.raises(ConfigError, match="KV cache does not fit") as caught:
        opened(folder, device="cuda", num_gpu_blocks_override=10**7, **OPTIONS)
    assert "--num-gpu-blocks-override" in caught.value.hint


@pytest.mark.usefixtures("gpu")
def test_a_profile_has_what_ran_on_the_device(tmp_path: Path) -> None:
    platform = CudaPlatform()
    platform.prepare(resolve(Config(model=ModelConfig(model="none"))))
    end = platform.execution().profile(tmp_path / "traces" / "trace.json.gz")
    torch.ones(1024, 1024, device="cuda").sum()
    end()
    with gzip.open(tmp_path / "traces" / "trace.json.gz") as stream:
        assert any(event.get("cat") == "kernel" for event in json.load(stream)["traceEvents"])


@pytest.mark.usefixtures("gpu")
def test_the_device_is_described() -> None:
    caps = CudaPlatform().prepare(resolve(Config(model=ModelConfig(model="none"))))
    major, minor = torch.cuda.get_device_capability()
    assert caps.features == {f"sm{major}{minor}"}
    assert caps.memory_bytes == torch.cuda.mem_get_info()[1]

"""`--kv-cache-dtype`: from the option to each attention's cache; twice the room; what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrule import LLM, SamplingParams
from ferrule.assembly.cache_scales import CacheScales
from ferrule.assembly.calibration import fixed_tokens
from ferrule.errors import CheckpointError, ConfigError
from ferrule_contrib.tiny import path
from ferrule_plugins.attention.cpu_native import CpuNativeAttention
from ferrule_plugins.attention.torch_sdpa import TorchSDPA

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["The capital of France is", "one two three four five six seven eight nine ten", "a"]


def serve(folder: Path | None = None, **options: Any) -> LLM:
    return LLM(str(folder or path()), dtype="float32", max_model_len=256, use_tqdm_on_load=False, **options)


def answers(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_every_attention_of_the_cpu_caches_the_same_eight_bits() -> None:
    """Get the same greedy tokens: in float32 results differ only in the order of sums; blocks take a quarter."""
    with serve() as whole:
        page = whole.model.page_bytes
    found = {}
    for name in ("cpu_native", "cpu", "torch_sdpa"):
        with serve(kv_cache_dtype="fp8", attention_backend=name) as llm:
            assert llm.model.page_bytes * 4 == page
            found[name] = answers(llm)
    assert found["cpu_native"] == found["cpu"] == found["torch_sdpa"]


def test_a_type_that_no_attention_caches_stops_the_start() -> None:
    with pytest.raises(ConfigError, match=r"no cache of bfloat16 for a model in float32 \(--kv-cache-dtype\)"):
        serve(kv_cache_dtype="bfloat16", attention_backend="cpu_native")


@pytest.mark.parametrize("attention", [CpuNativeAttention, TorchSDPA])
def test_names_of_types(attention: type[TorchSDPA]) -> None:
    named = {
        name: attention.cache_type(name, torch.bfloat16) for name in ("auto", "bfloat16", "fp8", "fp8_e5m2", "int8")
    }
    assert named == {
        "auto": torch.bfloat16,
        "bfloat16": torch.bfloat16,
        "fp8": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "int8": None,
    }


def scaled(folder: Path, scales: dict[str, torch.Tensor], heads: torch.Tensor | None = None) -> Path:
    """Write the same model with keys and values 4096 times as large, so that 8 bits do not hold them.

    With `heads` those of each key head are larger by a separate factor.
    """
    shutil.copytree(path(), folder)
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    heads = torch.full((config["num_key_value_heads"],), 4096.0) if heads is None else heads
    queries = heads.repeat_interleave(config["num_attention_heads"] // len(heads))
    for name, tensor in weights.items():
        weights[name] = tensor.float()
        if ".self_attn." in name:
            of, by_columns = queries if "q_proj" in name or "o_proj" in name else heads, "o_proj" in name
            factors = of.repeat_interleave(tensor.shape[by_columns] // len(of))
            factors = factors if "k_proj" in name or "v_proj" in name else 1 / factors
            weights[name] *= factors if by_columns else factors.unsqueeze(1)
    save_file({**weights, **scales}, folder / "model.safetensors", {"format": "pt"})
    return folder


_CONFIG = json.loads((path() / "config.json").read_text())
LAYERS, HEADS = _CONFIG["num_hidden_layers"], _CONFIG["num_key_value_heads"]
NAMES = {
    "of today": ("self_attn.k_scale", "self_attn.v_scale"),
    "of projections": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "of outputs": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    "both in one": ("self_attn.kv_scale",),
}


@pytest.fixture(scope="module")
def eight_bits() -> list[tuple[int, ...]]:
    """Return the answers of the model whose keys and values need no scales."""
    with serve(kv_cache_dtype="fp8") as llm:
        return answers(llm)


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_the_scales_of_a_checkpoint_are_used(
    names: tuple[str, ...], eight_bits: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """Use powers of two: what is cached has the bits of the model that needs no scales."""
    scales = {f"model.layers.{layer}.{name}": torch.tensor(4096.0) for layer in range(LAYERS) for name in names}
    folder = scaled(tmp_path / "model", {**scales, "model.layers.0.self_attn.q_scale": torch.tensor(3.0)})
    with serve(folder, kv_cache_dtype="fp8") as llm:
        assert answers(llm) == eight_bits


def test_a_cache_that_is_not_scaled_does_without_the_scales_of_a_checkpoint(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.{name}" for layer in range(LAYERS) for name in NAMES["of today"]]
    folder = scaled(tmp_path / "model", {name: torch.tensor(4096.0) for name in names})
    with serve() as plain, serve(folder) as llm:
        assert answers(llm) == answers(plain)
        assert any("--kv-cache-dtype fp8" in note for note in llm.model.notes)


def test_scales_of_single_heads_are_used(eight_bits: list[tuple[int, ...]], tmp_path: Path) -> None:
    """Use scales of compressed-tensors' `attn_head`: [heads, 1, 1]. Those of values and keys, or of keys beside one."""
    factors = torch.tensor([4096.0 / 2 ** (3 * head) for head in range(HEADS)])
    names = [f"model.layers.{layer}.self_attn.{part}_scale" for layer in range(LAYERS) for part in "kv"]
    folder = scaled(tmp_path / "model", {name: factors.view(-1, 1, 1).clone() for name in names}, factors)
    with serve(folder, kv_cache_dtype="fp8") as llm:
        assert answers(llm) == eight_bits
    rest = {name: factors.max().clone() for name in names if name.endswith("k_scale")}
    folder = scaled(tmp_path / "mixed", {name: torch.ones(HEADS) for name in names} | rest, torch.ones(HEADS))
    with serve(folder, kv_cache_dtype="fp8_e5m2") as llm:
        assert not any("not used" in note for note in llm.model.notes)


def test_another_number_of_heads_stops_the_start(tmp_path: Path) -> None:
    folder = scaled(tmp_path / "model", {"model.layers.1.self_attn.k_scale": torch.ones(HEADS + 1)})
    with pytest.raises(CheckpointError, match=rf"layers.1.* are {HEADS + 1} of keys and {HEADS + 1} of values"):
        serve(folder, kv_cache_dtype="fp8")


def test_packed_weights_have_the_scales(tmp_path: Path) -> None:
    names = (f"model.layers.{layer}.self_attn.kv_scale" for layer in range(LAYERS))
    folder = scaled(tmp_path / "model", {name: torch.tensor(4096.0) for name in names})
    found = []
    for method in ("int8", None):
        with serve(folder, kv_cache_dtype="fp8", quantization=method) as llm:
            found.append(answers(llm))
        if method:
            command = [sys.executable, "-m", "ferrule", "pack", str(folder), str(tmp_path / "packed")]
            subprocess.run([*command, "-q", method, "--dtype", "float32"], check=True, capture_output=True)
            folder = tmp_path / "packed"
    assert found[0] == found[1]


def test_scales_of_a_file_are_used(eight_bits: list[tuple[int, ...]], tmp_path: Path) -> None:
    folder, file = scaled(tmp_path / "model", {}), tmp_path / "scales.json"
    factors = {str(layer): 4096.0 for layer in range(LAYERS)}
    file.write_text(json.dumps({"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": factors}}}))
    with serve(folder, kv_cache_dtype="fp8") as without:
        assert answers(without) != eight_bits
    with serve(folder, kv_cache_dtype="fp8", quantization_param_path=str(file)) as llm:
        assert answers(llm) == eight_bits


def test_other_names_are_left_alone() -> None:
    names = ("layers.0.self_attn.q_scale_proj.weight", "layers.0.mlp.k_scale", f"layers.{'1' * 5000}.attn.k_scale")
    tensors = [(f"model.{name}", torch.ones(1)) for name in names]
    assert list(CacheScales(used=True).without(tensors)) == tensors


@pytest.mark.parametrize("scale", [0.0, float("nan"), [1.0, -1.0], [1.0] * 70000, [], 1j, 1e-30, 1e30])
def test_a_scale_that_is_not_a_positive_number_stops_the_start(scale: Any) -> None:
    tensors = [("model.layers.1.self_attn.k_scale", torch.tensor(scale))]
    with pytest.raises(CheckpointError, match=r"layers.1.self_attn.k_scale' must be (one|a) positive number"):
        list(CacheScales(used=True).without(tensors))


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"kv_cache": []},
        {"kv_cache": {"dtype": "int8", "scaling_factor": {"0": {}}}},
        {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {}, "1": {}}}},
        {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"a": 1.0}}}},
        {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 10**400}}}},
        {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": [1.0]}}},
    ],
)
def test_a_file_of_scales_that_is_not_read_stops_the_start(content: Any, tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="--quantization-param-path"):
        CacheScales.of(str(file), "fp8")
    with pytest.raises(ConfigError, match="the cache is of type auto"):
        CacheScales.of(str(file), "auto")
    with pytest.raises(ConfigError, match="/dev/zero is not a file"):
        CacheScales.of("/dev/zero", "fp8")


def test_calculated_scales_fit_large_keys_and_values(tmp_path: Path) -> None:
    """Use powers of two: what is cached has the bits of the model whose keys and values are smaller, also after
    sleep.
    """
    folder = scaled(tmp_path / "model", {f"model.layers.0.self_attn.{part}_scale": torch.tensor(3.0) for part in "kv"})
    with serve(kv_cache_dtype="fp8", calculate_kv_scales=True) as plain:
        wanted, said = answers(plain), plain.model.notes
        assert any(f"scales of {LAYERS} layers' caches calculated: keys " in note for note in said)
    with serve(folder, kv_cache_dtype="fp8", calculate_kv_scales=True, enable_sleep_mode=True) as llm:
        assert answers(llm) == wanted
        llm.sleep()
        llm.wake_up()
        assert answers(llm) == wanted


def test_calculated_scales_are_powers_of_two_within_bounds() -> None:
    scales = CacheScales(used=True, calculated=True)
    largest = {"layers.3.attn": (200.0, 100.1), "layers.4.attn": (0.0, 3e38), "layers.5.attn": (1e-38, 7.0)}
    said = scales.measure(largest)
    assert scales.measured == {"k": {3: 1.0, 4: 1.0, 5: 2.0**-63}, "v": {3: 2.0, 4: 2.0**63, 5: 0.125}}
    assert "scales of 3 layers' caches calculated" in said
    for broken in (float("nan"), float("inf")):
        with pytest.raises(CheckpointError, match=r"keys or values of layers\.1\.attn are not finite"):
            scales.measure({"layers.1.attn": (1.0, broken)})


def test_an_attention_without_scales_is_named() -> None:
    scales = CacheScales(used=True, calculated=True)
    assert "no attention takes scales" in scales.measure({})
    with pytest.raises(ConfigError, match="--calculate-kv-scales and --quantization-param-path"):
        CacheScales.of("scales.json", "fp8", calculated=True)


def test_tokens_of_the_calibration_are_the_same_at_each_start() -> None:
    first, again = (fixed_tokens(64, 300, {"bos_token_id": 7}) for _ in range(2))
    assert first == again
    assert first[0] == 7
    assert len(set(first)) > 32
    assert fixed_tokens(64, 300, {"bos_token_id": 300})[1:] == first[1:]

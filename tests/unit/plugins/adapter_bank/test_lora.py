"""The bank `lora`: tokens of rows with adapters are those of models that PEFT has merged the adapters into."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from ferrule.config import LoRAConfig
from ferrule.errors import AsleepError
from ferrule.types import Adapter, AdapterLoad
from ferrule_nn import Linear
from ferrule_testkit.checkpoints import NATIVE, tiny_checkpoint
from ferrule_testkit.harness import Harness, Output
from tests.fakes.peft_adapters import make_adapter
from tests.shared import grid

PROMPTS = [list(range(5, 5 + length)) for length in (3, 30, 17)]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def section(**changes: Any) -> LoRAConfig:
    return LoRAConfig(**{"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "enable_lora_bias": True} | changes)


def said(outputs: Sequence[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def check(found: Output, wanted: Output, tolerance: float = 1e-3) -> None:
    assert (found.error, found.token_ids) == (None, wanted.token_ids)
    assert [each.logprob for each in found.logprobs] == pytest.approx(
        [each.logprob for each in wanted.logprobs], abs=tolerance
    )


@cache
def unadapted(folder: Path) -> list[Output]:
    """Return what a model says without an adapter."""
    return alone(folder)


def alone(folder: Path, **kwargs: Any) -> list[Output]:
    with Harness(folder, dtype="float32", block_size=16) as opened:
        return opened.engine().run(PROMPTS, max_tokens=8, **kwargs)


BIASES: dict[str, dict[str, Any]] = {
    "lora_bias": {"target_modules": ["q_proj", "v_proj"], "lora_bias": True},
    "all": {"target_modules": ["q_proj", "v_proj"], "bias": "all"},
    "dora": {"target_modules": ["q_proj", "v_proj"], "bias": "all", "use_dora": True},
}
QUICK = ("gpt2", "gpt_neox", "phi3", "deepseek_v3", "qwen3_moe")  # transposed, fused in two ways, latent, experts
# PEFT does not adapt the first ones, and the last one's shared layers have other names in the model.
OTHERS = {"mamba", "falcon_mamba", "mamba2", "falcon_h1", "falcon_h1-norm", "nemotron_h", "zamba2"}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"target_modules": ["q_proj", "v_proj"]},
    "all": {"target_modules": "all-linear"},
    "rslora": {"target_modules": ALL, "use_rslora": True},
    "dora": {"target_modules": ALL, "use_dora": True},
    "ranks": {"target_modules": ALL, "rank_pattern": {"q_proj": 8, "up_proj": 2}, "alpha_pattern": {".*v_proj": 3}},
    "ends": {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
    "layers": {"target_modules": ALL, "layers_to_transform": [1]},
    "bin": {"target_modules": ALL, "safe": False},
}


def compare(folder: Path, adapter: Adapter, **changes: Any) -> None:
    """Run rows with an adapter and without, in one batch, chunked, and behind a cached prefix."""
    plain, wanted = unadapted(folder), alone(Path(adapter.path) / "merged")
    assert said(plain) != said(wanted)
    with Harness(folder, dtype="float32", block_size=16, sections={"lora": section(**changes)}) as opened:
        engine = opened.engine(max_num_batched_tokens=16)
        found = engine.run(PROMPTS, max_tokens=8, adapters=[adapter, None, adapter])
        for number, reference in enumerate((wanted, plain, wanted)):
            check(found[number], reference[number])
        (again,) = engine.run([PROMPTS[1]], max_tokens=8, adapters=[adapter])
        check(again, wanted[1])


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_the_merged_model(llama: Path, tmp_path: Path, name: str) -> None:
    compare(llama, make_adapter(llama, tmp_path / name, **SETTINGS[name]))


@pytest.mark.parametrize("name", BIASES)
def test_biases_are_those_of_the_merged_model(tmp_path: Path, name: str) -> None:
    folder = tiny_checkpoint("qwen2", tmp_path / "qwen2")
    compare(folder, make_adapter(folder, tmp_path / name, **BIASES[name]))


@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in NATIVE if name not in OTHERS],
)
def test_every_name_of_a_checkpoint_is_found(tmp_path: Path, model: str) -> None:
    folder = tiny_checkpoint(model, tmp_path / model)
    compare(folder, make_adapter(folder, tmp_path / "adapter", target_modules="all-linear"), max_lora_rank=16)


def test_recorded_steps_are_those_that_are_launched(llama: Path, tmp_path: Path) -> None:
    adapters = [make_adapter(llama, tmp_path / str(seed), seed=seed, target_modules=ALL) for seed in (1, 2, 3)]
    turns = [[adapters[0], None, adapters[1]], [adapters[2], adapters[1], None], [None, adapters[0], adapters[2]]]
    outputs = []
    for eager in (False, True):
        with Harness(
            llama, dtype="float32", block_size=16, enforce_eager=eager, sections={"lora": section()}
        ) as opened:
            engine = opened.engine(max_num_batched_tokens=64)
            outputs.append([engine.run(PROMPTS, max_tokens=12, adapters=turn) for turn in turns])
            recorder = opened.executor._worker._worker.model_runner._replays.recorder  # type: ignore[attr-defined]
            assert (recorder is None) == eager
            assert eager or recorder._recordings
    for recorded, launched in zip(*outputs, strict=True):
        for found, wanted in zip(recorded, launched, strict=True):
            assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs)


@pytest.mark.parametrize("name", ["default", "ranks", "dora", "ends"])
def test_adapters_in_8_bits_are_near_those_of_the_merged_model(llama: Path, tmp_path: Path, name: str) -> None:
    adapter = make_adapter(llama, tmp_path / name, **SETTINGS[name])
    wanted, plain = alone(Path(adapter.path) / "merged"), alone(llama)
    with Harness(llama, dtype="float32", block_size=16, sections={"lora": section(lora_dtype="int8")}) as opened:
        engine = opened.engine(max_num_batched_tokens=16)
        found = engine.run(PROMPTS, max_tokens=8, adapters=[adapter, None, adapter])
        bank = opened.executor._worker._worker.model_runner._adapters  # type: ignore[attr-defined]
        assert {each.down.dtype for each in bank._matrices.values()} == {torch.int8}
    check(found[1], plain[1])
    ours, theirs, without = ([each[row].logprobs[0].logprob for row in (0, 2)] for each in (found, wanted, plain))
    off, moved = (sum(abs(a - b) for a, b in zip(one, theirs, strict=True)) for one in (ours, without))
    assert 0 < off < 0.1 * moved


@grid({"quantization": [None, "int8", "int4"], "dtype": ["bfloat16", "float32"]})
def test_quantized_bases_get_the_adapters_part(
    llama: Path, tmp_path: Path, dtype: str, quantization: str | None
) -> None:
    adapter = make_adapter(llama, tmp_path / "adapter", target_modules=ALL)
    settings = {"dtype": dtype, "block_size": 16, "quantization": quantization, "enforce_eager": True}
    with Harness(llama, sections={"lora": section(lora_dtype="float32")}, **settings) as opened:
        found = opened.engine().run(PROMPTS, max_tokens=1, adapters=[adapter, None, adapter], logprobs=5)
    content = load_file(Path(adapter.path) / "adapter_model.safetensors")
    with Harness(llama, **settings) as opened:
        model = opened.executor._worker._worker.model_runner.model  # type: ignore[attr-defined]
        plain = opened.engine().run(PROMPTS, max_tokens=1, logprobs=5)
        for name, layer in model.named_modules():
            if isinstance(layer, Linear) and not layer.head:
                names = [f"{name.rpartition('.')[0]}.{own}" for own in layer.projections] or [name]
                keys = [f"base_model.model.model.{own}" for own in names]
                delta = torch.cat([content[f"{k}.lora_B.weight"] @ content[f"{k}.lora_A.weight"] * 2.0 for k in keys])
                layer.register_forward_hook(
                    lambda layer, x, y, delta=delta: (y.float() + x[0].float() @ delta.t()).to(y.dtype)
                )
        wanted = opened.engine().run(PROMPTS, max_tokens=1, logprobs=5)
    tolerance = 1e-3 if dtype == "float32" else 0.08
    for row, reference in enumerate((wanted, plain, wanted)):
        one, other = found[row].logprobs[0], reference[row].logprobs[0]
        assert one.logprob == pytest.approx(other.logprob, abs=tolerance)
        assert (one.token_id == other.token_id) or dtype == "bfloat16"
    assert wanted[0].logprobs != plain[0].logprobs


def test_adapters_stay_while_the_model_sleeps(llama: Path, tmp_path: Path) -> None:
    adapter = make_adapter(llama, tmp_path / "adapter", target_modules=ALL)
    with Harness(llama, dtype="float32", block_size=16, sections={"lora": section()}) as opened:
        first = opened.engine().run(PROMPTS, max_tokens=4, adapters=[adapter] * 3)
        worker = opened.executor._worker._worker  # type: ignore[attr-defined]
        layers = [weakref.ref(layer) for layer in worker.model_runner.model.modules() if isinstance(layer, Linear)]
        opened.executor.call("release", (("weights", "kv_cache"), 2))
        gc.collect()
        assert not any(ref() for ref in layers)  # the bank keeps no layer
        for part in ("weights", "kv_cache"):
            opened.executor.call("restore", (part,))
        again = opened.engine().run(PROMPTS, max_tokens=4, adapters=[adapter] * 3)
    assert said(again) == said(first)


def scales(harness: Harness) -> torch.Tensor:
    worker: Any = harness.executor._worker._worker  # type: ignore[attr-defined]
    found: torch.Tensor = worker._adapters._matrices["layers.0.self_attn.qkv_proj"].scales[1:].clone()
    assert not (found == 1).all()
    return found


def test_magnitudes_follow_the_weights_that_are_loaded_again(llama: Path, tmp_path: Path) -> None:
    base, other = tmp_path / "base", tiny_checkpoint("llama", tmp_path / "other", seed=7)
    shutil.copytree(llama, base)
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 16, "sections": {"lora": section()}}
    one, two = (make_adapter(base, tmp_path / str(n), seed=n, target_modules=ALL, use_dora=True) for n in (1, 2))
    with Harness(base, **settings) as opened:
        first = opened.engine().run(PROMPTS, max_tokens=8, adapters=[one, None, two])
        opened.executor.call("release", (("weights", "kv_cache"), 2))
        with pytest.raises(AsleepError):
            opened.executor.prepare(AdapterLoad(adapter=replace(one, name="new"), slot=0)).result()
        shutil.copy(other / "model.safetensors", base)
        for part in ("weights", "kv_cache"):
            opened.executor.call("restore", (part,))
        kept = scales(opened)
        found = opened.engine().run(PROMPTS, max_tokens=8, adapters=[one, None, two])  # loaded from the host's memory
    with Harness(base, **settings) as fresh:
        wanted = fresh.engine().run(PROMPTS, max_tokens=8, adapters=[one, None, two])
        torch.testing.assert_close(kept, scales(fresh))  # in the slots
    assert said(first) != said(wanted)
    for each, reference in zip(found, wanted, strict=True):
        check(each, reference)


def test_prompt_logprobs_are_the_adapters(llama: Path, tmp_path: Path) -> None:
    adapter = make_adapter(llama, tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    wanted = alone(tmp_path / "adapter" / "merged", prompt_logprobs=0)
    with Harness(llama, dtype="float32", block_size=16, sections={"lora": section()}) as opened:
        found = opened.engine(max_num_batched_tokens=16).run(
            PROMPTS, max_tokens=1, adapters=[adapter, None, adapter], prompt_logprobs=0
        )
    for row in (0, 2):
        assert [each.logprob for each in found[row].prompt_logprobs] == pytest.approx(
            [each.logprob for each in wanted[row].prompt_logprobs], abs=1e-3
        )


@pytest.mark.parametrize("model", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_experts_by_name_are_those_of_the_stack(tmp_path: Path, model: str) -> None:
    folder = tiny_checkpoint(model, tmp_path / model)
    targets = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    adapter = make_adapter(folder, tmp_path / "stacked", **targets)
    content = load_file(Path(adapter.path) / "adapter_model.safetensors")
    named: dict[str, torch.Tensor] = {}
    for name, tensor in content.items():
        before, experts, after = name.partition(".experts.")
        if not experts:
            named[name] = tensor
            continue
        down = content[name.replace("lora_B", "lora_A")]
        count = len(down) // 4
        for expert in range(count):
            own = "gate_up_proj" if "base_layer" in after else "down_proj"
            part = (
                tensor.view(count, 4, -1)[expert]
                if "lora_A" in after
                else tensor.view(len(tensor), 4, count)[..., expert]
            )
            named[f"{before}.experts.{expert}.{own}.{after.removeprefix('base_layer.')}"] = part.contiguous()
    shutil.copytree(adapter.path, tmp_path / "named", ignore=shutil.ignore_patterns("merged"))
    save_file(named, tmp_path / "named" / "adapter_model.safetensors")
    assert len(named) > len(content)
    with Harness(folder, dtype="float32", block_size=16, sections={"lora": section()}) as opened:
        by_name = Adapter(name="named", path=str(tmp_path / "named"))
        found = opened.engine().run(PROMPTS, max_tokens=8, adapters=[adapter, by_name, by_name])
    wanted = alone(tmp_path / "stacked" / "merged")
    for number in range(3):
        check(found[number], wanted[number])

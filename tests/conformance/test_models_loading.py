"""What reaches a model from its folder: every form of weights gives the same tokens, and every fault is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrule.config import LoadConfig
from ferrule.errors import CheckpointError, ConfigError, PluginError, StartupError
from ferrule_plugins.model.transformers import TransformersModel
from ferrule_plugins.model.transformers.flat import Flat
from ferrule_testkit.checkpoints import SIZES, randomise, tiny_checkpoint
from ferrule_testkit.harness import Harness
from tests.shared import grid

PROMPT = [5, 17, 200, 31, 99, 250, 8]
Weights = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tokens(folder: Path, **options: Any) -> list[int]:
    with Harness(folder, **{"dtype": "float32", **options}) as harness:
        return harness.engine().run([PROMPT])[0].token_ids


# ------------------------------------------------------------------------------------------------- forms


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_single_sharded_and_pickled_weights_give_the_same_tokens(tmp_path: Path, implementation: str) -> None:
    single = tiny_checkpoint("llama", tmp_path / "single")
    expected = tokens(single, model_impl=implementation)
    sharded = tiny_checkpoint("llama", tmp_path / "sharded", shard_bytes=100_000)
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert tokens(sharded, model_impl=implementation) == expected
    torch.save(load_file(single / "model.safetensors"), single / "pytorch_model.bin")
    (single / "model.safetensors").unlink()
    assert tokens(single, model_impl=implementation) == expected


@pytest.mark.parametrize(
    ("name", "implementation"), [("gpt2", "native"), ("opt", "native"), ("phi3", "native"), ("mixtral", "transformers")]
)
def test_dummy_weights_need_no_files_and_repeat(tmp_path: Path, name: str, implementation: str) -> None:
    folder = tiny_checkpoint(name, tmp_path / name)
    (folder / "model.safetensors").unlink()
    options = {
        "model_impl": implementation,
        "sections": {"load": LoadConfig(load_format="dummy", use_tqdm_on_load=False)},
    }
    first = tokens(folder, **options)
    assert len(first) == 12
    assert tokens(folder, **options) == first


@pytest.mark.parametrize(
    ("name", "architecture", "prefix"),
    [
        ("gemma3_text", "Gemma3ForConditionalGeneration", "language_model.model."),
        ("gemma4_text-plain", "Gemma4ForConditionalGeneration", "model.language_model."),
        ("ministral3", "Mistral3ForConditionalGeneration", "language_model.model."),
        ("llama4", "Llama4ForConditionalGeneration", "language_model.model."),
    ],
)
def test_the_text_part_of_a_composite_model_is_the_text_model(
    tmp_path: Path, name: str, architecture: str, prefix: str
) -> None:
    """Load weights with the names that files of composite models have, beside those of other parts."""
    folder = tiny_checkpoint(name, tmp_path / name)
    expected = tokens(folder)
    weights = {"vision_tower.patch.weight": torch.ones(2, 2), "model.multi_modal_projector.x": torch.ones(2)}
    for key, tensor in load_file(folder / "model.safetensors").items():
        inner = key.removeprefix("model.")
        weights[key if inner == key and prefix.startswith("model.") else f"language_model.{key}"] = tensor
        if inner != key:
            weights[prefix + inner] = weights.pop(f"language_model.{key}")
    save_file(weights, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    config = {"architectures": [architecture], "text_config": text, "vision_config": {"hidden_size": 8}}
    (folder / "config.json").write_text(json.dumps(config))
    assert tokens(folder) == expected


def test_windows_of_qwen_2_moe_without_layer_types_are_those_of_transformers(tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen2_moe", tmp_path / "moe")
    config = json.loads((folder / "config.json").read_text())
    del config["layer_types"]
    windows = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    (folder / "config.json").write_text(json.dumps({**config, **windows}))
    expected = tokens(folder, model_impl="transformers")
    assert tokens(folder, model_impl="native") == expected
    with Harness(folder, model_impl="native") as harness:
        assert sorted(group.window for group in harness.info.groups) == [0, 6]


def test_a_native_model_does_without_transformers(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "llama")
    script = (
        "import sys\nfrom ferrule_testkit.harness import Harness\n"
        "with Harness(sys.argv[1]) as harness: harness.engine().run([[5, 6]])\n"
        "print('transformers' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=240)
    assert done.stdout.split()[-1:] == ["False"], done.stderr


def test_overrides_reach_the_model(tmp_path: Path) -> None:
    folder = tiny_checkpoint("mistral", tmp_path / "mistral")
    with Harness(folder, hf_overrides={"sliding_window": None}) as harness:
        assert [group.kind for group in harness.info.groups] == ["full"]
    for implementation in ("native", "transformers"):
        with Harness(folder, model_impl=implementation) as harness:
            assert [(group.kind, group.window) for group in harness.info.groups] == [("sliding", 12)]
        with Harness(folder, model_impl=implementation, disable_sliding_window=True) as harness:
            assert [group.kind for group in harness.info.groups] == ["full"]
            assert harness.info.max_model_len == 12


# ------------------------------------------------------------------------------------------------- faults


def drop(weights: Weights, name: str) -> None:
    del weights[name]


def add(weights: Weights, name: str) -> None:
    weights[f"{name}_more"] = torch.ones(2)


def reshape(weights: Weights, name: str) -> None:
    weights[name] = weights[name][:-1].clone()


@grid(
    {
        "implementation": ["native", "transformers"],
        "change,named": [
            (drop, "layers.1.self_attn.k_proj"),
            (add, "k_proj.weight_more"),
            (reshape, "layers.1.self_attn.k_proj.weight"),
        ],
        "ending": [".safetensors", ".bin"],
    }
)
def test_a_tensor_that_does_not_fit_is_named_with_its_file(
    tmp_path: Path, implementation: str, change: Callable[[Weights, str], None], named: str, ending: str
) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "llama")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    change(weights, "model.layers.1.self_attn.k_proj.weight")
    if ending == ".bin":
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        Harness(folder, dtype="float32", model_impl=implementation)
    assert named in caught.value.message.replace("qkv_proj", "k_proj")
    assert str(folder) in caught.value.message


def test_a_folder_without_weights_says_what_each_format_missed(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(StartupError) as caught:
        Harness(folder)
    for reason in ("no .safetensors file", "no .bin or .pt file", "never chosen automatically"):
        assert reason in str(caught.value)


# ------------------------------------------------------------------------------------------------- refusals


def config_folder(tmp_path: Path, model_type: str, **changes: Any) -> Path:
    """Make a folder with a config.json and nothing else: a refusal comes before weights are read."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(tmp_path)
    return tmp_path


ABSURD = [
    {"hidden_size": 10**12},
    {"vocab_size": 10**15},
    {"vocab_size": -5},
    {"num_hidden_layers": 10**9},
    {"num_attention_heads": -4},
    {"intermediate_size": 1e30},
    {"head_dim": 10**9},
    {"num_attention_heads": 0},
    {"hidden_size": "wide"},
    {"num_attention_heads": 2.5},
    {"num_key_value_heads": 3},
    {"num_hidden_layers": -1},
    {"rms_norm_eps": float("inf")},
]


@grid({"implementation": ["native", "transformers"], "change": ABSURD})
def test_absurd_sizes_are_named(tmp_path: Path, implementation: str, change: dict[str, Any]) -> None:
    """Refuse absurd sizes before anything is allocated, and not in the words of an allocator."""
    folder = tiny_checkpoint("llama", tmp_path / "llama")
    with pytest.raises(CheckpointError, match=next(iter(change))) as caught:
        Harness(folder, model_impl=implementation, hf_overrides=change)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"hidden_size": 66, "head_dim": None}, "hidden_size"),  # with four heads
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": float("nan")}}, "factor"),
        ({"partial_rotary_factor": -0.5}, "partial_rotary_factor"),
        ({"hidden_size": 1 << 20, "vocab_size": 1 << 26, "num_hidden_layers": 4096}, "hidden_size"),  # 140 TB and more
    ],
)
def test_sizes_that_cannot_be_built_are_told_with_their_keys(tmp_path: Path, change: dict[str, Any], key: str) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "llama")
    with pytest.raises(CheckpointError) as caught:
        Harness(folder, model_impl="native", hf_overrides=change)
    assert "config.json" in str(caught.value)
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("t5", {}, "T5ForConditionalGeneration has an encoder and a decoder"),
        ("vit", {}, "ViTForImageClassification reads images only"),
        ("clip", {}, "does not generate text|images"),
        ("whisper", {}, "has an encoder and a decoder"),
        ("whisper", {"architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": False}, "an encoder"),
        ("qwen2_vl", {}, "reads images and text together"),
    ],
)
def test_what_does_not_continue_text_is_refused_with_what_it_is(
    tmp_path: Path, model_type: str, changes: dict[str, Any], said: str
) -> None:
    names = {"t5": "T5ForConditionalGeneration", "vit": "ViTForImageClassification", "clip": "CLIPModel"}
    config = {"model_type": model_type, "architectures": [names.get(model_type, model_type)]}
    config |= {"is_encoder_decoder": True} if model_type in ("t5", "whisper") else {}
    config |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=said) as caught:
        Harness(tmp_path)
    assert caught.value.hint


def test_a_diffusion_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "UNet2DConditionModel"}))
    with pytest.raises(CheckpointError, match="UNet2DConditionModel of diffusers"):
        Harness(tmp_path)


def test_an_encoder_is_refused_for_its_configuration(tmp_path: Path) -> None:
    """Run the same class with `is_decoder` as a decoder, and say so in the refusal of the encoder."""
    folder = tiny_checkpoint("bert", tmp_path / "bert")
    assert len(tokens(folder)) == 12
    with pytest.raises(CheckpointError, match="attends in both directions") as caught:
        Harness(folder, dtype="float32", hf_overrides={"is_decoder": False})
    assert '{"is_decoder": true}' in caught.value.hint


def test_a_cache_that_the_model_reads_itself_has_the_type_of_the_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8: the model implementation transformers"):
        Harness(tiny_checkpoint("openai-gpt", tmp_path), dtype="float32", kv_cache_dtype="fp8")


# ------------------------------------------------------------------------------------------------- rotation

ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.5 + 0.4 * i for i in range(8)],
    },
}


@grid({"kind": list(ROPES), "way": ["flat", "in turn"]})
def test_a_rotation_follows_the_length_of_its_own_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, way: str
) -> None:
    """Get the native implementation's tokens beside longer and shorter requests, and in chunks."""
    folder = tiny_checkpoint("llama", tmp_path / "llama")
    change = {"rope_parameters": ROPES[kind], "max_position_embeddings": 32 if kind == "dynamic" else 256}
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(5, 300, (length,), generator=draw).tolist() for length in (50, 9, 28, 70)]

    def run(implementation: str, **limits: Any) -> list[list[int]]:
        with Harness(folder, dtype="float32", model_impl=implementation, hf_overrides=change) as harness:
            return [output.token_ids for output in harness.engine(**limits).run(prompts)]

    expected = run("native")
    if way == "in turn":

        def refuse(self: Flat) -> None:
            raise CheckpointError("not flat")

        monkeypatch.setattr(Flat, "build", refuse)
    assert run("transformers") == expected
    assert run("transformers", max_num_batched_tokens=16) == expected


_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
_PER_TYPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}, "full_attention": _LINEAR}
_STATED: dict[str, tuple[str, dict[str, Any]]] = {  # the rotary settings of a file, in each form
    "new": ("llama", {"rope_parameters": _LINEAR}),
    "old": ("llama", {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "per type": ("gemma3_text", {"rope_parameters": _PER_TYPE}),
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_OVERRIDES: list[tuple[dict[str, Any], dict[str, Any]]] = [  # what is overridden, and what the file then means
    ({"rope_theta": 300.0}, {**_LINEAR, "rope_theta": 300.0}),
    ({"rope_scaling": _YARN}, {**_YARN, "rope_theta": 1e4}),
    ({"rope_scaling": {**_YARN, "rope_theta": 300.0}}, {**_YARN, "rope_theta": 300.0}),
    ({"rope_scaling": {"factor": 8.0}}, {**_LINEAR, "factor": 8.0}),
    ({"rope_scaling": None}, {"rope_type": "default", "rope_theta": 1e4}),
    ({"rope_theta": 300.0, "rope_scaling": _YARN}, {**_YARN, "rope_theta": 300.0}),
    ({"rope_parameters": _YARN}, {**_YARN, "rope_theta": 1e4}),
    ({"rope_parameters": {"rope_theta": 300.0}}, {**_LINEAR, "rope_theta": 300.0}),
]


def top_logprobs(folder: Path, implementation: str, overrides: dict[str, Any]) -> tuple[list[int], torch.Tensor]:
    """Return the token after a prompt of 40, three times, and the log-probabilities of the best three."""
    prompt = torch.randint(5, 300, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    with Harness(folder, dtype="float32", model_impl=implementation, hf_overrides=overrides) as harness:
        (output,) = harness.engine().run([prompt], max_tokens=3, logprobs=3)
    assert output.error is None
    return prompt + output.token_ids, torch.tensor([[value for _, value in each.top] for each in output.logprobs])


@grid({"form": list(_STATED), "implementation": ["native", "transformers"], "first": [0, 1]})
def test_an_override_of_rotary_settings_is_computed_in_each_form_of_the_file(
    tmp_path: Path, form: str, implementation: str, first: int
) -> None:
    """Compute every other override, from the `first` one on."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name, stated = _STATED[form]
    folder = tiny_checkpoint(name, tmp_path / name)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps({**config, **stated}))
    _, before = top_logprobs(folder, implementation, {})
    for overrides, meant in _OVERRIDES[first::2]:
        ids, got = top_logprobs(folder, implementation, overrides)
        theirs = AutoConfig.from_pretrained(folder)
        theirs.rope_parameters = {**_PER_TYPE, "full_attention": meant} if form == "per type" else meant
        model = AutoModelForCausalLM.from_pretrained(folder, config=theirs, dtype=torch.float32).eval()
        with torch.inference_mode():
            wanted = model(input_ids=torch.tensor([ids[:-1]])).logits[0, -3:].log_softmax(-1).topk(3).values
        assert (got - wanted).abs().max() < 1e-4, overrides
        assert (got - before).abs().max() > 1e-3, overrides


def test_an_unknown_architecture_and_a_quantized_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchForCausalLM"], "model_type": "no_such"}))
    with pytest.raises(CheckpointError, match="no model type 'no_such'"):
        Harness(tmp_path)
    folder = config_folder(tmp_path, "olmo", quantization_config={"quant_method": "awq"})
    with pytest.raises(PluginError, match="No quantization plugin"):
        Harness(folder)


def test_a_config_that_transformers_does_not_accept(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "jais2")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_bias": "four"}))
    with pytest.raises(CheckpointError, match="does not accept this config.json.*attention_bias"):
        Harness(folder)


@pytest.mark.advisory("CVE-2025-66448")
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_code_of_a_checkpoint_never_runs_unless_trusted(tmp_path: Path, known: bool, implementation: str) -> None:
    """Ignore the code of an architecture that is known, and refuse to start with another one."""
    folder, canary = tiny_checkpoint("llama", tmp_path / "llama"), tmp_path / "canary"
    code = f"open({str(canary)!r}, 'w').close()\n"
    code += "class C: pass\nclass M: pass\n"
    (folder / "evil.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    if not known:
        config |= {"model_type": "evil", "architectures": ["EvilForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    if known:
        assert len(tokens(folder, model_impl=implementation)) == 12
    else:
        with pytest.raises(CheckpointError, match=r"config\.json.*auto_map") as caught:
            Harness(folder, model_impl=implementation)
        assert "--trust-remote-code" in caught.value.hint
    assert not canary.exists()


def test_code_of_a_checkpoint_runs_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tiny_checkpoint("llama", tmp_path / "llama")
    expected = tokens(folder)
    shutil.copy(Path(__file__).parent / "data" / "own_llama.py", folder / "own_llama.py")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own_llama.OwnConfig", "AutoModelForCausalLM": "own_llama.OwnForCausalLM"}
    config |= {"model_type": "own_llama", "architectures": ["OwnForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert tokens(folder, trust_remote_code=True) == expected


def test_code_of_a_checkpoint_that_keeps_its_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run one class without a base model, with attention of its own, and keys and values in tuples."""
    import importlib.util

    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    file = Path(__file__).parent / "data" / "own_legacy.py"
    spec = importlib.util.spec_from_file_location("own_legacy", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.OwnForCausalLM(module.OwnConfig()).eval()
    randomise(model, 0)
    folder = tmp_path / "own"
    model.save_pretrained(folder)
    shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own_legacy.OwnConfig", "AutoModelForCausalLM": "own_legacy.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    expected = list(PROMPT)
    with torch.no_grad():
        while len(expected) < len(PROMPT) + 12:
            expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
    with Harness(folder, dtype="float32", trust_remote_code=True) as harness:
        assert [group.kind for group in harness.info.groups] == ["full"]
        for limits in ({}, {"max_num_batched_tokens": 3, "max_num_seqs": 2}):
            engine = harness.engine(**limits)
            outputs = engine.run([PROMPT, PROMPT[:4], PROMPT])
            assert outputs[0].token_ids == outputs[2].token_ids == expected[len(PROMPT) :]


@grid({"name": ["olmo", "bloom", "mamba"], "method": ["int8", "int4"]})
def test_linear_layers_are_quantized_in_both_ways(tmp_path: Path, name: str, method: str) -> None:
    """Keep the logits close to the float model's, and make each layer that can be quantized smaller."""
    folder = tiny_checkpoint(name, tmp_path / name)
    with Harness(folder, dtype="float32", model_impl="transformers") as harness:
        plain = harness.engine().run([PROMPT], max_tokens=1, logprobs=3)[0].logprobs[0]
        size = harness.info.weight_bytes
    with Harness(folder, dtype="float32", model_impl="transformers", quantization=method) as harness:
        assert harness.info.quantization == method
        assert harness.info.weight_bytes < 0.85 * size
        given = harness.engine().run([PROMPT], max_tokens=1, logprobs=3)[0].logprobs[0]
    if method == "int8":
        assert given.token_id == plain.token_id
        assert abs(given.logprob - plain.logprob) < 0.3


# ------------------------------------------------------------------------------------------------- self-check


def test_a_class_that_contradicts_itself_runs_in_turn(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Detect that PhiMoE of transformers builds a mask with a window of which it does not tell its attention function.

    Without the check a text longer than the window gets other tokens than the library's `generate` gives.
    """
    from transformers import AutoModelForCausalLM

    folder = tiny_checkpoint("phimoe", tmp_path / "phimoe")
    assert not why_in_turn(folder)  # without a window it does what it says
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": 8}))
    assert "PhimoeAttention computes other attention" in why_in_turn(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert tokens(folder, model_impl="transformers") == out[0, len(PROMPT) :].tolist()


def why_in_turn(folder: Path) -> str:
    """Return why requests run one after another; "" where they run together."""
    found: list[str] = []
    before = TransformersModel.load_weights

    def load(self: TransformersModel, weights: Any) -> set[str]:
        names = before(self, weights)
        found.append(self.reason)
        return names

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersModel, "load_weights", load)
        tokens(folder, model_impl="transformers")
    return found[0]


def test_a_window_that_is_never_reached_is_no_contradiction(tmp_path: Path) -> None:
    folder = tiny_checkpoint("phimoe", tmp_path / "phimoe")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": 32}))
    assert len(tokens(folder, model_impl="transformers", disable_sliding_window=True)) == 12


def test_caps_and_sinks_are_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notice an eager function that leaves out what the call asks for, which the library's forward pass would obey."""
    from transformers.models.gpt_oss import modeling_gpt_oss
    from transformers.models.llama.modeling_llama import eager_attention_forward

    folder = tiny_checkpoint("gpt_oss", tmp_path / "gpt_oss")
    assert len(tokens(folder, model_impl="transformers")) == 12
    monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", eager_attention_forward)  # without sinks
    assert "GptOssAttention computes other attention" in why_in_turn(folder)

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
from ferrule.errors import CheckpointError, PluginError, StartupError
from ferrule_testkit.checkpoints import SIZES, tiny_checkpoint
from ferrule_testkit.harness import Harness

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
    options = {"model_impl": implementation, "load": LoadConfig(load_format="dummy", use_tqdm_on_load=False)}
    first = tokens(folder, **options)
    assert len(first) == 12
    assert tokens(folder, **options) == first


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


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize(
    ("change", "named"),
    [(drop, "layers.1.self_attn.k_proj"), (add, "k_proj.weight_more"), (reshape, "layers.1.self_attn.k_proj.weight")],
)
@pytest.mark.parametrize("ending", [".safetensors", ".bin"])
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
    """A folder with a config.json and nothing else: what is refused is refused before weights are read."""
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
]


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize("change", ABSURD, ids=lambda change: "-".join(map(str, *change.items())))
def test_absurd_sizes_are_named(tmp_path: Path, implementation: str, change: dict[str, Any]) -> None:
    """Before anything is allocated, and not in the words of an allocator."""
    folder = tiny_checkpoint("llama", tmp_path / "llama")
    with pytest.raises(CheckpointError, match=next(iter(change))) as caught:
        Harness(folder, model_impl=implementation, hf_overrides=change)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("implementation", "change"),
    [
        ("native", {"num_attention_heads": 0}),
        ("transformers", {"num_attention_heads": 0}),
        ("native", {"hidden_size": "wide"}),
        ("transformers", {"hidden_size": "wide"}),
        ("native", {"hidden_size": 1 << 20, "vocab_size": 1 << 26, "num_hidden_layers": 4096}),  # 140 TB and more
    ],
)
def test_sizes_that_cannot_be_built_are_told_with_their_keys(
    tmp_path: Path, implementation: str, change: dict[str, Any]
) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "llama")
    with pytest.raises(CheckpointError) as caught:
        Harness(folder, model_impl=implementation, hf_overrides=change)
    assert "config.json" in str(caught.value)
    assert next(iter(change)) in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("mamba", {}, "attention interface|state"),
        ("bloom", {}, "attention interface"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "kind conv keep a state"),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}, "kind linear_attention keep a state"),
        ("llama4_text", {"layer_types": ["chunked_attention", "full_attention"]}, "kind chunked_attention"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "'dynamic'.*depends",
        ),
    ],
)
def test_what_transformers_cannot_run_on_the_paged_cache_is_refused_with_the_reason(
    tmp_path: Path, model_type: str, changes: dict[str, Any], said: str
) -> None:
    folder = config_folder(tmp_path, model_type, **changes)
    with pytest.raises(CheckpointError, match=said):
        Harness(folder, model_impl="transformers")


def test_rotation_that_depends_on_neighbours_is_refused_beyond_its_border(tmp_path: Path) -> None:
    folder = tiny_checkpoint("phi3-longrope", tmp_path / "phi3")
    with pytest.raises(CheckpointError, match="depends on the other requests") as caught:
        Harness(folder, model_impl="transformers")
    assert "--max-model-len 128" in caught.value.hint
    with Harness(folder, model_impl="transformers", max_model_len=128) as harness:
        assert harness.info.max_model_len == 128


def test_an_unknown_architecture_and_a_quantized_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchForCausalLM"], "model_type": "no_such"}))
    with pytest.raises(CheckpointError, match="no model type 'no_such'"):
        Harness(tmp_path)
    folder = config_folder(tmp_path, "olmo", quantization_config={"quant_method": "awq"})
    with pytest.raises(PluginError, match="No quantization plugin"):
        Harness(folder)


def test_a_config_that_transformers_does_not_accept(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "olmo")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": "four"}))
    with pytest.raises(CheckpointError, match="does not accept this config.json.*num_attention_heads"):
        Harness(folder)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_code_of_a_checkpoint_never_runs_unless_trusted(tmp_path: Path, known: bool, implementation: str) -> None:
    """With an architecture that is known the code is ignored; with another one, start-up is refused."""
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


# ------------------------------------------------------------------------------------------------- self-check


def test_a_class_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    """PhiMoE of transformers builds a mask with a window of which it does not tell its attention function.

    Without the check a text of more tokens than the window has gets other tokens than the library's `generate` gives.
    """
    folder = tiny_checkpoint("phimoe", tmp_path / "phimoe")
    assert len(tokens(folder)) == 12  # without a window it does what it says
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": 8}))
    with pytest.raises(CheckpointError, match=r"PhimoeAttention computes other attention .* no window, .* position 4"):
        Harness(folder, dtype="float32")


def test_a_window_that_is_never_reached_is_no_contradiction(tmp_path: Path) -> None:
    folder = tiny_checkpoint("phimoe", tmp_path / "phimoe")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": 32}))
    assert len(tokens(folder, disable_sliding_window=True)) == 12


def test_caps_and_sinks_are_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eager function that leaves out what the call asks for is what the library's forward pass would obey."""
    from transformers.models.gpt_oss import modeling_gpt_oss
    from transformers.models.llama.modeling_llama import eager_attention_forward

    folder = tiny_checkpoint("gpt_oss", tmp_path / "gpt_oss")
    assert len(tokens(folder)) == 12
    monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", eager_attention_forward)  # without sinks
    with pytest.raises(CheckpointError, match=r"GptOssAttention computes other attention .* sinks, position 0"):
        Harness(folder, dtype="float32")

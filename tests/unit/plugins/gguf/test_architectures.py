"""Each architecture: a tiny checkpoint of transformers as a GGUF file computes what the checkpoint itself does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule import checkpoint
from ferrule.config import Config, ModelConfig
from ferrule.config.resolve import resolve
from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext
from ferrule.plugin import discover
from ferrule_files.gguf.architectures import ARCHITECTURES
from ferrule_files.gguf.names import Names, ValueHeads
from ferrule_files.gguf.reader import read_model
from ferrule_files.offline import outline
from ferrule_plugins.gguf.describe import describe
from ferrule_plugins.gguf.tensors import ordered
from ferrule_plugins.load_format.gguf import Gguf
from ferrule_quantize.gguf.forms import FORMS
from ferrule_quantize.gguf_file import MIXES, write
from ferrule_testkit.checkpoints import RECIPES
from ferrule_testkit.kits.model_run import Runner
from ferrule_testkit.simulate import load
from tests.shared import some
from tests.unit.plugins.gguf import converted as c
from tests.unit.plugins.gguf.converted import Case

PROMPT = torch.randint(5, 300, (30,), generator=torch.Generator().manual_seed(3)).tolist()


def of(recipe: str, change: Any = None, keys: Mapping[str, Any] | None = None, **changes: Any) -> Case:
    """Return a recipe of the test kit, with changes to what its file can say."""
    own = RECIPES[recipe]
    return Case(own.model_type, {**own.changes, **changes}, change, keys or {}, own.seed, own.attention)


_GEMMA = {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_SCALES = {
    "embedding_scale": 4.0,
    "residual_scale": 0.6,
    "attention.scale": 0.3,
    "logit_scale": 0.5,
}
_LATENT = {
    "attention.kv_lora_rank": 32,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "attention.key_length_mla": 32,
    "attention.value_length_mla": 16,
    "rope.dimension_count": 16,
    "expert_shared_count": 1,
    "attention.head_count_kv": 1,
}
_SIGMOID = {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.5}
_NO_HEADS = {"attention.head_count": 0, "feed_forward_length": 0}  # as llama.cpp's converter writes
_DELTA = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 96,
    "full_attention_interval": 2,
    "rope.dimension_count": 8,
}
_MOE = {"n_group": 1, "topk_group": 1}
CASES: dict[str, Case] = {
    "arcee": of("arcee", c.llama),
    "bloom": of("bloom", c.by_heads, num_key_value_heads=...),
    "cohere2": of(
        "cohere2", None, {"logit_scale": 0.9}, num_hidden_layers=4, layer_types=None, tie_word_embeddings=True
    ),
    "command-r": of("cohere", None, {"logit_scale": 0.9}),
    "command-r heads": of("cohere-heads", None, {"logit_scale": 0.9}, tie_word_embeddings=True),
    "deepseek2": of(
        "deepseek_v3",
        c.deepseek,
        {**_LATENT, **_SIGMOID, "attention.q_lora_rank": 24, "expert_group_count": 4, "expert_group_used_count": 2},
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "deepseek2 v2": of("deepseek_v2", c.deepseek, {**_LATENT, "expert_weights_scale": 1.5}, topk_method="greedy"),
    "dots1": of("dots1", None, {**_SIGMOID, "expert_shared_count": 1, "expert_weights_scale": 1.0}),
    "ernie4_5": of("ernie4_5"),
    "ernie4_5-moe": of("ernie4_5_moe", None, {"expert_shared_count": 1, "interleave_moe_layer_step": 1}),
    "exaone4": of("exaone4", None, {"attention.sliding_window_pattern": [True, False, True]}),
    "exaone4 full": of("exaone4-full"),
    "falcon": of("falcon", c.falcon, {"attention.head_count_kv": 1}),
    "falcon 40b": of("falcon-new", c.falcon),
    "falcon 11b": of("falcon-11b", c.falcon),
    "gemma": of("gemma", c.one_more),
    "gemma2": of("gemma2", c.one_more, _CAPS, **_GEMMA, num_hidden_layers=2, layer_types=None),
    "gemma3": of(
        "gemma3_text",
        c.one_more,
        {},
        query_pre_attn_scalar=16,
        num_hidden_layers=6,
        layer_types=None,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    ),
    "gemma3 local": of(
        "gemma3_text",
        c.one_more,
        {"rope.freq_base_swa": 100.0},
        query_pre_attn_scalar=16,
        num_hidden_layers=6,
        layer_types=None,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "glm4": of("glm4"),
    "glm4moe": of(
        "glm4_moe", None, {**_SIGMOID, "expert_shared_count": 1, "expert_weights_scale": 1.0}, first_k_dense_replace=1
    ),
    "gpt-oss": of(
        "gpt_oss",
        c.gpt_oss,
        {},
        num_hidden_layers=2,
        layer_types=None,
        rope_parameters={**RECIPES["gpt_oss"].changes["rope_parameters"], "truncate": False},
    ),
    "gpt2": of("gpt2", c.gpt2, num_key_value_heads=...),
    "gpt2 width": of("gpt2", c.gpt2, num_key_value_heads=..., n_inner=80),
    "gptneox": of("gpt_neox", c.by_heads, {"use_parallel_residual": True}, num_key_value_heads=...),
    "gptneox serial": of("gpt_neox-serial", c.by_heads, {"use_parallel_residual": False}, num_key_value_heads=...),
    "granite": of("granite", c.llama, _SCALES),
    "granitemoe": of("granitemoe", c.granitemoe, _SCALES),
    "hunyuan-dense": of("hunyuan_v1_dense", None, {"rope.freq_base": 1e4 * 3.0 ** (16 / 14)}),
    "hunyuan-moe": of(
        "hunyuan_v1_moe",
        None,
        {"expert_shared_count": 1, "expert_shared_feed_forward_length": 96, "expert_feed_forward_length": 96},
    ),
    "internlm2": of("llama", c.llama),
    "llama": of("llama", c.llama),
    "llama tied": of("llama-tied", c.llama),
    "llama sparse": of("mixtral", c.sparse_llama),
    "llama 3": of("llama-llama3", c.llama),
    "mamba": of(
        "mamba",
        c.mamba,
        {**_NO_HEADS, "ssm.conv_kernel": 4, "ssm.inner_size": 96, "ssm.state_size": 16, "ssm.time_step_rank": 4},
    ),
    "mamba2": of(
        "mamba2",
        c.mamba2,
        {
            **_NO_HEADS,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 128,
            "ssm.state_size": 16,
            "ssm.time_step_rank": 8,
            "ssm.group_count": 2,
        },
    ),
    "minimax-m2": of("minimax_m2", None, {"expert_gating_func": 2}),
    "mistral3": of("ministral3", c.llama, {"attention.temperature_scale": 0.3}),
    "mpt": of("mpt", None, {"attention.clamp_kqv": 1.0, "attention.max_alibi_bias": 8.0}, num_key_value_heads=...),
    "nemotron": of("nemotron", c.one_more),
    "olmo": of("olmo", c.llama, {"attention.clamp_kqv": 1.0}),
    "olmo2": of("olmo2"),
    "olmoe": of("olmoe", norm_topk_prob=False),
    "phi2": of("phi"),
    "phi3": of("phi3"),
    "phi3 long": of("phi3-longrope-beyond"),
    "phimoe": of("phimoe"),
    "qwen2": of("qwen2"),
    "qwen2 yarn": of("qwen2-yarn"),
    "qwen2moe": of("qwen2_moe", None, {"expert_shared_feed_forward_length": 32}, norm_topk_prob=False),
    "qwen3": of("qwen3"),
    "qwen35": of("qwen3_5", c.delta, _DELTA),
    "qwen35 further": of("qwen3_5", c.delta, {**_DELTA, "block_count": 4, "nextn_predict_layers": 1}),
    "qwen35moe": of("qwen3_5_moe", c.delta, {**_DELTA, "expert_shared_feed_forward_length": 32}),
    "qwen3moe": of("qwen3_moe"),
    "qwen3next": of("qwen3_next", c.delta, {**_DELTA, "expert_shared_feed_forward_length": 32}),
    "seed_oss": of("seed_oss"),
    "smollm3": of("smollm3", c.llama, num_hidden_layers=4, no_rope_layer_interval=4),
    "stablelm": of("stablelm"),
    "stablelm heads": of("stablelm-heads", None, {"use_parallel_residual": True}),
    "starcoder": of("gpt_bigcode", None, {"attention.head_count_kv": 1}),
    "starcoder width": of("gpt_bigcode", None, {"attention.head_count_kv": 1}, n_inner=80),
    "starcoder2": of("starcoder2"),
    "starcoder2 full": of("starcoder2", sliding_window=None),
    "xverse": of("llama", c.llama),
}
NOT_WRITTEN = {
    "stablelm heads": "k_norm.norms.0.weight' has no name",
    "starcoder2": "cannot state which layers are of which kind",
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits(folder: Path, tensors: Any) -> torch.Tensor:
    """Return the logits after each of the prompt's last tokens, of the model in a folder with the weights that
    `tensors` reads for it.
    """
    config = checkpoint.read(folder)
    plugin = load("model", config["architectures"][0])
    config = checkpoint.completed(config, plugin.config_names, plugin.config_defaults)
    checkpoint.check_sizes(config, plugin.config_names)
    context = BuildContext(
        config=config, dtype=torch.float32, device=torch.device("cpu"), block_size=4, max_model_len=64, folder=folder
    )
    model = plugin(context)
    with torch.no_grad():
        filled = model.load_weights(tensors(model))
    assert filled == {name for name, _ in model.named_parameters()}
    runner = Runner(model, int(config["vocab_size"]))
    return torch.stack(runner.run([PROMPT], [[20, *[1] * 10]])[0])


def own(folder: Path) -> Any:
    source = load("load_format", "safetensors")()
    return lambda model: source.tensors(folder, model, {})


@pytest.mark.parametrize("name", some(CASES))
def test_a_file_computes_what_its_checkpoint_does(name: str, tmp_path: Path) -> None:
    case, architecture = CASES[name], name.partition(" ")[0]
    config, state = c.write_checkpoint(case, tmp_path / "checkpoint")
    folder, file = tmp_path / "described", tmp_path / "described" / "model.gguf"
    folder.mkdir()
    c.write_file(architecture, case, config, state, file)
    for text, content in describe(read_model([file])).items():
        (folder / text).write_bytes(content)
    wanted = logits(tmp_path / "checkpoint", own(tmp_path / "checkpoint"))
    got = logits(folder, lambda model: Gguf().tensors(folder, model, {}))
    assert (got - wanted).abs().max() < 2e-5 * wanted.abs().max()
    if architecture not in FORMS:
        return
    file = tmp_path / "written" / "model.gguf"
    file.parent.mkdir()
    if name in NOT_WRITTEN:
        with pytest.raises(CheckpointError, match=NOT_WRITTEN[name]):
            write_floats(tmp_path / "checkpoint", file)
        return
    write_floats(tmp_path / "checkpoint", file)
    for text, content in describe(read_model([file])).items():
        (file.parent / text).write_bytes(content)
    assert torch.equal(logits(file.parent, lambda model: Gguf().tensors(file.parent, model, {})), wanted)


def write_floats(source: Path, file: Path) -> None:
    """Write what `ferrule quantize --ignore .*` writes."""
    chosen = resolve(Config(model=ModelConfig(model=str(source), dtype="float32")))
    write(source, file, MIXES["q8_0"], outline(chosen, discover()), ignore=[".*"])


def test_every_architecture_has_a_case() -> None:
    assert {name.partition(" ")[0] for name in CASES} == set(ARCHITECTURES)


@pytest.mark.parametrize("key", ["embedding_length", "block_count", "attention.head_count"])
def test_a_file_without_a_number_that_all_need_is_one_error(key: str, tmp_path: Path) -> None:
    file, name = phi3_file(tmp_path), f"phi3.{key}"
    file.write_bytes(file.read_bytes().replace(name.encode(), f"{name[:-1]}~".encode()))
    with pytest.raises(CheckpointError, match=f"'{name}' must be a positive integer, not None"):
        describe(read_model([file]))


def test_as_many_keys_as_queries_need_not_be_said(tmp_path: Path) -> None:
    file = phi3_file(tmp_path, num_key_value_heads=4)
    said = json.loads(describe(read_model([file]))["config.json"])
    file.write_bytes(file.read_bytes().replace(b"phi3.attention.head_count_kv", b"phi3.attention.head_count_k~"))
    assert json.loads(describe(read_model([file]))["config.json"]) == said


def test_heads_that_are_not_those_of_the_weights_are_one_error(tmp_path: Path) -> None:
    file = phi3_file(tmp_path)
    file.write_bytes(file.read_bytes().replace(b"phi3.attention.head_count_kv", b"phi3.attention.head_count_k~"))
    with pytest.raises(CheckpointError, match="'blk.0.attn_qkv.weight' has 128 outputs, by the numbers of heads 192"):
        list(Gguf().tensors(tmp_path, torch.nn.Linear(1, 1), {}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm.group_count": 3}, "must be a multiple of 'qwen35.ssm.group_count'"),
        ({"ssm.group_count": 0}, "and both positive"),
        ({"ssm.time_step_rank": 1 << 20}, "must be a multiple of"),
        ({"ssm.inner_size": 3}, "must be positive"),
        ({"ssm.state_size": 0}, "must be positive"),
        ({"ssm.state_size": 1 << 30}, "by the numbers of heads"),
        ({"ssm.inner_size": 1 << 30}, "by the numbers of heads"),
        ({"nextn_predict_layers": 3}, "must be less than the number of blocks"),
    ],
)
def test_numbers_of_the_gated_delta_rule_that_do_not_fit_are_one_error(
    changes: dict[str, int], message: str, tmp_path: Path
) -> None:
    case = of("qwen3_5", c.delta, {**_DELTA, **changes})
    config, state = c.write_checkpoint(case, tmp_path / "checkpoint")
    file = tmp_path / "model.gguf"
    c.write_file("qwen35", case, config, state, file)
    with pytest.raises(CheckpointError, match=message):
        name_all(file)


def name_all(file: Path) -> None:
    model = read_model([file])
    names = Names(ARCHITECTURES[model.architecture], json.loads(describe(model)["config.json"]))
    for info in model.tensors.values():
        names.targets(info)


def test_outputs_of_the_gated_delta_rule_are_a_matrix(tmp_path: Path) -> None:
    heads = ValueHeads(groups=2, each=2, width=24, first=64, tiled=True)
    info = replace(next(iter(read_model([phi3_file(tmp_path)]).tensors.values())), shape=(96,))
    with pytest.raises(CheckpointError, match="has 0 rows or columns, by the numbers of heads 96"):
        heads.check(info, "ssm_out")


def test_quantized_columns_are_ordered_by_heads() -> None:
    """Order their scales too, one of which 32 columns have; refuse heads that split groups."""
    heads = ValueHeads(groups=2, each=3, width=64, first=0, tiled=True)
    wide = torch.randn(4, 6 * 64, generator=torch.Generator().manual_seed(1))
    scales = wide[:, ::32].contiguous()
    numbers = ordered(wide, heads.order())
    assert torch.equal(numbers.view(4, 2, 3, 64), wide.view(4, 3, 2, 64).transpose(1, 2))
    assert torch.equal(ordered(scales, heads.order(), 32), numbers[:, ::32])
    with pytest.raises(CheckpointError, match="not whole groups of 128"):
        ordered(wide[:, ::128], heads.order(), 128)


def phi3_file(folder: Path, **changes: Any) -> Path:
    """Write a file of a family that has queries, keys and values in one tensor."""
    case = of("phi3", **changes)
    config, state = c.write_checkpoint(case, folder / "checkpoint")
    c.write_file("phi3", case, config, state, folder / "model.gguf")
    return folder / "model.gguf"

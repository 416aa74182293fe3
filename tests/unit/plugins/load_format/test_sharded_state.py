"""The state of vLLM's workers: what `ferrule pack` writes is read back bit-equal, whatever the number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrule.config import LoadConfig
from ferrule.errors import CheckpointError, ConfigError, StartupError
from ferrule.plugin import Plugins, discover
from ferrule_files.workers import division
from ferrule_nn import ROWS, UNDIVIDED, AttentionSpec, Embedding, Linear
from ferrule_nn.attention import Attention
from ferrule_plugins.command.pack import PackCommand
from ferrule_plugins.command.pack.sharded import Item
from ferrule_plugins.load_format.runai_streamer_sharded import RunaiStreamerSharded
from ferrule_plugins.load_format.safetensors import Safetensors
from ferrule_plugins.load_format.sharded_state import ShardedState
from ferrule_testkit.checkpoints import tiny_checkpoint
from ferrule_testkit.harness import Harness

PROMPT = [5, 17, 200, 31, 99, 250, 8]
FIRST = "model-rank-0-part-0.safetensors"


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return discover()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tiny_checkpoint(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


def pack(plugins: Plugins, folder: Path, out: Path, ranks: int = 1, *more: str) -> Path:
    argv = [str(folder), str(out), "--format", "sharded_state", "-tp", str(ranks), "--no-use-tqdm-on-load", *more]
    assert PackCommand().run(argv, plugins) == 0
    return out


def served(
    folder: Path, load_format: str = "auto", model_loader_extra_config: dict[str, Any] | None = None, **model: Any
) -> list[Any]:
    """Return greedy tokens, and logprobs that show every bit of the logits."""
    load = LoadConfig(
        load_format=load_format,
        model_loader_extra_config=model_loader_extra_config or {},
        use_tqdm_on_load=False,
    )
    with Harness(folder, sections={"load": load}, **model) as harness:
        output = harness.engine().run([PROMPT], max_tokens=6, logprobs=2)[0]
    return [output.token_ids, output.logprobs]


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], file: str = FIRST) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, str(folder / file))


# ------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3_moe"])
def test_a_packed_state_serves_the_checkpoints_logits(
    tmp_path: Path, plugins: Plugins, source: Callable[[str], Path], name: str, ranks: int
) -> None:
    out = pack(plugins, source(name), tmp_path / "out", ranks)
    assert sorted(file.name for file in out.glob("*.safetensors")) == [
        f"model-rank-{rank}-part-0.safetensors" for rank in range(ranks)
    ]
    assert served(out) == served(source(name))  # chosen by itself


@pytest.mark.parametrize(
    ("name", "ranks", "format"),
    [
        ("llama", 4, "sharded_state"),  # two key heads, each in two ranks
        ("mixtral", 2, "runai_streamer_sharded"),
        ("gpt_neox", 2, "sharded_state"),  # a checkpoint has the rows of each head in turn
        ("gpt2", 1, "sharded_state"),  # a checkpoint has matrices the other way round
    ],
)
def test_other_layouts_come_back_too(
    tmp_path: Path, plugins: Plugins, source: Callable[[str], Path], name: str, ranks: int, format: str
) -> None:
    out = pack(plugins, source(name), tmp_path / "out", ranks)
    assert served(out, load_format=format) == served(source(name))


def test_float_weights_of_a_state_are_quantized_when_they_are_read(
    tmp_path: Path, plugins: Plugins, source: Callable[[str], Path]
) -> None:
    out = pack(plugins, source("llama"), tmp_path / "out", 2)
    assert served(out, quantization="int8") == served(source("llama"), quantization="int8")


def test_names_and_shapes_are_those_of_a_worker(
    tmp_path: Path, plugins: Plugins, source: Callable[[str], Path]
) -> None:
    out = pack(plugins, source("qwen3_moe"), tmp_path / "moe", 2)
    found = {name: tuple(tensor.shape) for name, tensor in load_file(out / FIRST).items() if ".1." not in name}
    layer = "model.layers.0."
    assert found == {
        "model.embed_tokens.weight": (160, 64),
        "lm_head.weight": (160, 64),
        "model.norm.weight": (64,),
        f"{layer}input_layernorm.weight": (64,),
        f"{layer}post_attention_layernorm.weight": (64,),
        f"{layer}self_attn.qkv_proj.weight": (64, 64),
        f"{layer}self_attn.o_proj.weight": (64, 32),
        f"{layer}self_attn.q_norm.weight": (16,),
        f"{layer}self_attn.k_norm.weight": (16,),
        **{f"{layer}self_attn.attn._{what}_scale": () for what in ("q", "k", "v", "prob")},
        f"{layer}mlp.gate.weight": (4, 64),
        f"{layer}mlp.experts.w13_weight": (4, 32, 64),
        f"{layer}mlp.experts.w2_weight": (4, 64, 16),
    }
    tied = load_file(pack(plugins, source("llama-tied"), tmp_path / "tied") / FIRST)
    assert "lm_head.weight" in tied  # the first of two names
    assert "model.embed_tokens.weight" not in tied


def test_ranks_have_the_rows_of_their_heads(tmp_path: Path, plugins: Plugins, source: Callable[[str], Path]) -> None:
    out = pack(plugins, source("llama"), tmp_path / "out", 4, "--dtype", "float32")
    whole = load_file(source("llama") / "model.safetensors")
    name = "model.layers.1.self_attn."
    q, k, v = (whole[f"{name}{each}_proj.weight"] for each in "qkv")
    for rank in range(4):
        found = load_file(out / f"model-rank-{rank}-part-0.safetensors")
        head, shared = slice(16 * rank, 16 * rank + 16), slice(rank // 2 * 16, rank // 2 * 16 + 16)
        assert torch.equal(found[f"{name}qkv_proj.weight"], torch.cat([q[head], k[shared], v[shared]]))
        assert torch.equal(found[f"{name}o_proj.weight"], whole[f"{name}o_proj.weight"][:, head])


def test_a_table_is_filled_up_to_64_rows_and_cut_again() -> None:
    modules = {"embed_tokens": Embedding(70, 4, split=ROWS)}
    torch.nn.init.normal_(modules["embed_tokens"].weight)
    table, found = modules["embed_tokens"].weight, division(modules, "embed_tokens.weight")
    assert found is not None
    parts = [Item("", [table], found).part(rank, 2) for rank in range(2)]
    assert [part.shape for part in parts] == [(64, 4), (64, 4)]
    assert not parts[1][6:].any()
    assert torch.equal(found.whole("", parts), table)
    assert torch.equal(found.whole("", [torch.cat(parts)]), table)


def test_scales_of_a_cache_come_back(tmp_path: Path, plugins: Plugins, source: Callable[[str], Path]) -> None:
    out = pack(plugins, source("llama"), tmp_path / "out")

    def double(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.attn._k_scale"] *= 2

    rewritten(out, double)
    from ferrule_plugins.model.llama import Llama

    model = torch.nn.Module()
    model.naming = Llama.naming
    names = dict(ShardedState().tensors(out, model, {}))
    assert float(names["model.layers.0.self_attn.attn.k_scale"]) == 2
    assert not any(name.endswith(("v_scale", "q_scale", "prob_scale")) for name in names)


# ------------------------------------------------------------------------------------------------- files


def test_other_names_and_parts(tmp_path: Path, plugins: Plugins, source: Callable[[str], Path]) -> None:
    out = pack(plugins, source("llama"), tmp_path / "out", 2)
    for rank in range(2):
        tensors = load_file(out / f"model-rank-{rank}-part-0.safetensors")
        (out / f"model-rank-{rank}-part-0.safetensors").unlink()
        names = sorted(tensors)
        for part in range(2):
            save_file({name: tensors[name] for name in names[part::2]}, str(out / f"r{rank}p{part}.st"))
    extra = {"pattern": "r{rank}p{part}.st"}
    assert served(out, load_format="sharded_state", model_loader_extra_config=extra) == served(source("llama"))
    extra["concurrency"] = 2
    assert served(out, load_format="runai_streamer_sharded", model_loader_extra_config=extra) == served(source("llama"))


@pytest.mark.parametrize("pattern", ["x.safetensors", "{part}{part}", "{rank}{rank}{part}", "../{part}", "a/{part}", 5])
def test_patterns_that_name_no_files_of_parts(tmp_path: Path, pattern: Any) -> None:
    with pytest.raises(ConfigError, match="'pattern' is the name of a file"):
        ShardedState().shapes(tmp_path, {"pattern": pattern})


def test_auto_takes_a_state_for_what_it_is(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, str(tmp_path / FIRST))
    assert Safetensors.refuses(tmp_path)
    assert ShardedState.refuses(tmp_path) is None
    assert RunaiStreamerSharded.refuses(tmp_path)


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(StartupError) as caught:
        served(folder, **options)
    return str(caught.value)


def test_missing_ranks_and_parts_are_named(tmp_path: Path, plugins: Plugins, source: Callable[[str], Path]) -> None:
    out = pack(plugins, source("llama"), tmp_path / "out", 4)
    (out / "model-rank-2-part-0.safetensors").unlink()
    assert "model-rank-2-part-0.safetensors is missing" in refusal(out)
    (out / "model-rank-1-part-0.safetensors").rename(out / "model-rank-1-part-1.safetensors")
    assert "model-rank-1-part-0.safetensors is missing" in refusal(out)
    (out / "model-rank-0-part-00.safetensors").write_bytes(b"")
    assert "the same number written in two ways" in refusal(out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "lack 'model.norm.weight'"),
        (lambda tensors: tensors["model.norm.weight"].add_(1), "is not divided, and differs among the 2 ranks"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(2, 64)}), "another shape or type in some"),
    ],
)
def test_ranks_that_contradict_each_other(
    tmp_path: Path, plugins: Plugins, source: Callable[[str], Path], change: Any, message: str
) -> None:
    out = pack(plugins, source("llama"), tmp_path / "out", 2)
    rewritten(out, change, "model-rank-1-part-0.safetensors")
    assert message in refusal(out)


def test_a_state_that_does_not_fit_its_configuration(
    tmp_path: Path, plugins: Plugins, source: Callable[[str], Path]
) -> None:
    out = pack(plugins, source("llama"), tmp_path / "out", 2)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "intermediate_size": 32}))
    assert "has the shape (96, 64) in each of 2 ranks, and the model needs 32" in refusal(out)
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(CheckpointError, match="laid out for vLLM's kernels"):
        ShardedState().shapes(out, {})


# ------------------------------------------------------------------------------------------------- ferrule pack


def test_what_cannot_be_written_is_refused_before_anything_is(
    tmp_path: Path, plugins: Plugins, source: Callable[[str], Path]
) -> None:
    out = tmp_path / "out"
    for argv, name, message in (
        (("-q", "int8"), "llama", "--format sharded_state writes float weights"),
        ((), "gpt2", "how vLLM divides embed_positions.weight"),
        (("--model-impl", "transformers"), "llama", "is not a native implementation"),
    ):
        with pytest.raises(ConfigError, match=message):
            pack(plugins, source(name), out, 2, *argv)
    with pytest.raises(ConfigError, match="320 heads or rows cannot be divided among 3 ranks"):
        pack(plugins, source("llama"), out, 3)
    with pytest.raises(ConfigError, match="packed weights are those of one worker"):
        PackCommand().run([str(source("llama")), str(out), "-tp", "2"], plugins)
    assert not out.exists()


def test_only_a_folder_of_ours_is_replaced(tmp_path: Path, plugins: Plugins, source: Callable[[str], Path]) -> None:
    out = pack(plugins, source("llama"), tmp_path / "out", 2)
    with pytest.raises(ConfigError, match="--force replaces it"):
        pack(plugins, source("llama"), out)
    pack(plugins, source("llama"), out, 1, "--force")
    assert [file.name for file in out.glob("*.safetensors")] == [FIRST]
    rewritten(out, lambda tensors: None)  # by another program
    with pytest.raises(ConfigError, match="is not a folder that `ferrule pack` wrote"):
        pack(plugins, source("llama"), out, 1, "--force")


def test_only_what_a_layer_declares_is_divided() -> None:
    spec = AttentionSpec(hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, block_size=16, out_bias=True)
    attention = Attention("layers.0.attn", spec)
    layers = {"a.qkv_proj": attention.qkv_proj, "a.o_proj": attention.o_proj, "b.qkv_proj": attention.qkv_proj}
    modules = {"a": attention, "c": Linear(8, 8), **layers}
    assert division(modules, "a.qkv_proj.weight") is not None
    assert division(modules, "a.o_proj.bias") == UNDIVIDED  # one rank adds it, and all have it
    assert division(modules, "b.qkv_proj.weight") is None  # of a block that vLLM may divide in another way
    assert division(modules, "c.weight") is None

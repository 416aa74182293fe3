"""`ferrule pack` and what reads its folders: the same bits as the checkpoint, and a refusal of all that is none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrule import LLM, SamplingParams
from ferrule.assembly.model import Loaded, load_model
from ferrule.config import CacheConfig, Config, LoadConfig, ModelConfig, SchedulerConfig
from ferrule.config.resolve import resolve
from ferrule.env import Environment
from ferrule.errors import CheckpointError, ConfigError, PluginError, StartupError
from ferrule.plugin import Plugins, discover
from ferrule_files.safetensors import read_header
from ferrule_files.safetensors_writer import write
from ferrule_kernels.cpu import dense
from ferrule_kernels.cpu.matmul import PackedMatrix
from ferrule_kernels.cpu.packed import layout
from ferrule_nn import Linear, PacksForCpu
from ferrule_plugins.command.pack import PackCommand
from ferrule_plugins.quantization.packed import METHOD
from ferrule_testkit.checkpoints import tiny_checkpoint
from ferrule_testkit.quantized import quantized_checkpoint
from tests.shared import grid

ENV = Environment(cpu_kvcache_space=0.01, cpu_omp_threads_bind="auto")
ONLINE = ("int8", "int4", "int8_per_channel_weight_only", "int4_weight_only")
pytestmark = pytest.mark.skipif(dense.unit() is None, reason="there are no kernels for bfloat16 weights here")


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return discover()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes folders of tiny checkpoints, each once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tiny_checkpoint(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def pack(plugins: Plugins, *argv: object) -> int:
    return PackCommand().run([*map(str, argv), "--no-use-tqdm-on-load"], plugins)


def loaded_from(folder: Path, plugins: Plugins, **model: Any) -> Loaded:
    config = resolve(
        Config(
            model=ModelConfig(**{"model": str(folder), "dtype": "bfloat16", **model}),
            load=LoadConfig(use_tqdm_on_load=False),
            scheduler=SchedulerConfig(max_num_seqs=2),
            cache=CacheConfig(),
            env=ENV,
        )
    )
    return load_model(config, plugins)


def same(one: Loaded, other: Loaded) -> int:
    """Count the matrices that are packed alike, byte by byte, like everything else in the models."""
    assert isinstance(one.model, torch.nn.Module)
    assert isinstance(other.model, torch.nn.Module)
    count, parts = 0, dict(other.model.named_modules())
    for name, part in one.model.named_modules():
        if not isinstance(part, Linear):
            continue
        ours, theirs = (getattr(layer.scheme, "matrix", None) for layer in (part, parts[name]))
        assert type(ours) is type(theirs)
        if isinstance(ours, PackedMatrix):
            assert ours.form == theirs.form
            assert (ours.factors is None) == (theirs.factors is None)
            assert ours.factors is None or torch.equal(ours.factors, theirs.factors)
        if ours is not None:
            assert torch.equal(ours.packed, theirs.packed), name
            count += 1
    filled = {name: held for name, held in one.model.named_parameters() if held.numel()}
    others = {name: held for name, held in other.model.named_parameters() if held.numel()}
    assert filled.keys() == others.keys()
    for name, held in filled.items():
        assert held.dtype == others[name].dtype
        assert torch.equal(held, others[name]), name
    return count


def answers(folder: Path, **options: Any) -> list[Any]:
    prompts: list[Any] = [{"prompt_token_ids": [1, *range(5, 5 + length)]} for length in (3, 17)]
    with LLM(str(folder), num_gpu_blocks_override=64, use_tqdm_on_load=False, **options) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1))
    return [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob) for output in outputs]


# ---------------------------------------------------------------------------------------- the same as the checkpoint


@grid({"name": ("llama-tied", "gpt2", "qwen3", "opt-postnorm", "gemma2", "phi3"), "method": (None, *ONLINE)})
def test_every_form_is_read_back_as_it_was_packed(
    name: str, method: str | None, source: Callable[[str], Path], plugins: Plugins, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert pack(plugins, source(name), out, "--dtype", "bfloat16", *(["-q", method] if method else [])) == 0
    expected = loaded_from(source(name), plugins, quantization=method)
    found = loaded_from(out, plugins)
    assert same(expected, found) > 4
    assert found.info.quantization == METHOD
    assert found.info.weight_bytes == expected.info.weight_bytes


@pytest.mark.parametrize("form", ["int8", "int8-weights", "gptq", "awq", "packed", "fp8-blocks", "fp8-channels"])
def test_a_quantized_checkpoint_is_packed_too(
    form: str, source: Callable[[str], Path], plugins: Plugins, tmp_path: Path
) -> None:
    made, out = tmp_path / "made", tmp_path / "out"
    quantized_checkpoint(source("llama"), made, form)
    assert pack(plugins, made, out, "--dtype", "bfloat16") == 0
    expected = loaded_from(made, plugins)
    assert same(expected, loaded_from(out, plugins)) > 4
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["layout"]) == (METHOD, layout())
    assert config["method"] == expected.info.quantization


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-tied", {"dtype": "bfloat16"}),
        ("llama-tied", {"dtype": "bfloat16", "quantization": "int4"}),
        ("gpt2", {"dtype": "float32", "quantization": "int8"}),
    ],
)
def test_tokens_and_their_logprobs_have_the_same_bits(
    name: str, options: dict[str, str], source: Callable[[str], Path], plugins: Plugins, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    assert pack(plugins, source(name), out, *words) == 0
    assert answers(out, dtype=options["dtype"]) == answers(source(name), **options)


def test_layers_that_are_not_packed_are_kept_beside(
    source: Callable[[str], Path], plugins: Plugins, tmp_path: Path
) -> None:
    """Write the head of this checkpoint as it came: it is float32, in an order of oneDNN's."""
    made, out = tmp_path / "made", tmp_path / "out"
    quantized_checkpoint(source("llama"), made, "gptq")
    assert pack(plugins, made, out, "--dtype", "float32") == 0
    assert torch.equal(load_file(out / "model.safetensors")["lm_head.weight"], _head(made).float())
    assert answers(out, dtype="float32") == answers(made, dtype="float32")


def _head(folder: Path) -> torch.Tensor:
    return load_file(folder / "model.safetensors")["lm_head.weight"]


def test_a_tied_table_is_written_and_kept_once(source: Callable[[str], Path], plugins: Plugins, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert pack(plugins, source("llama-tied"), out, "--dtype", "bfloat16") == 0
    tensors = load_file(out / "model.safetensors")
    assert not [name for name in tensors if "embed_tokens" in name]
    model = loaded_from(out, plugins).model
    assert isinstance(model, torch.nn.Module)
    head, table = model.get_submodule("lm_head"), model.get_submodule("embed_tokens")
    assert isinstance(head, Linear)
    assert isinstance(head.scheme, PacksForCpu)
    assert head.scheme.matrix is not None
    assert tuple(table.weight.shape) == (0, 64)
    ids = torch.tensor([0, 5, 319])
    assert torch.equal(table(ids), loaded_from(source("llama-tied"), plugins).model.get_submodule("embed_tokens")(ids))


def test_a_folder_of_shards(
    source: Callable[[str], Path], plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(write, "__defaults__", (40_000,))
    assert pack(plugins, source("llama"), out, "-q", "int8", "--dtype", "bfloat16") == 0
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    assert files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    assert all(sum(read_header(file).values()) <= 40_960 for file in files)  # the head alone is larger than a file
    assert same(loaded_from(source("llama"), plugins, quantization="int8"), loaded_from(out, plugins)) == 9


# ---------------------------------------------------------------------------------------- the folder


def test_the_folder_stands_for_itself(
    source: Callable[[str], Path], plugins: Plugins, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(source("llama"), folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors.index.json").write_text("{}")
    assert pack(plugins, folder, "-q", "int4", "--hf-overrides.rms_norm_eps", "0.5") == 0
    out = folder / "packed-int4"
    assert str(out) in capsys.readouterr().out
    there = {file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()}
    before = {file.name for file in source("llama").iterdir() if file.suffix}
    assert there == before | {"additional_chat_templates/rag.jinja"}
    assert json.loads((out / "config.json").read_text())["rms_norm_eps"] == 0.5
    assert not [file for file in folder.iterdir() if file.name.startswith(".")]


def test_what_a_link_leads_out_to_is_not_copied(
    source: Callable[[str], Path], plugins: Plugins, tmp_path: Path
) -> None:
    """Copy only links to blobs of the same repository, as a hub's cache makes them."""
    folder, secret = tmp_path / "models--x" / "snapshots" / "0", tmp_path / "secret"
    shutil.copytree(source("llama"), folder)
    blob = tmp_path / "models--x" / "blobs" / "1"
    blob.parent.mkdir()
    blob.write_text("of the model")
    (folder / "notes.md").symlink_to("../../blobs/1")
    (folder / "tokenizer.model.v7").write_bytes(b"of Mistral's")
    argv = folder, tmp_path / "out", "-q", "int8", "--dtype", "bfloat16"
    assert pack(plugins, *argv) == 0
    assert (tmp_path / "out" / "notes.md").read_text() == "of the model"
    assert (tmp_path / "out" / "tokenizer.model.v7").read_bytes() == b"of Mistral's"
    secret.write_text("of someone")
    (folder / "additional_chat_templates").mkdir()
    for link in (folder / "LICENSE", folder / "additional_chat_templates" / "rag.jinja"):
        link.symlink_to(secret)
        with pytest.raises(CheckpointError, match=f"{link.name} is a link to .*secret"):
            pack(plugins, *argv, "--force")
        link.unlink()
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_it_replaces_only_what_it_wrote(source: Callable[[str], Path], plugins: Plugins, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    assert pack(plugins, source("llama"), out, "-q", "int8") == 0
    with pytest.raises(ConfigError, match="--force replaces it"):
        pack(plugins, source("llama"), out, "-q", "int4")
    assert json.loads((out / "config.json").read_text())["quantization_config"]["method"] == "int8"
    assert pack(plugins, source("llama"), out, "-q", "int4", "--force") == 0
    assert json.loads((out / "config.json").read_text())["quantization_config"]["method"] == "int4"
    shutil.copytree(source("llama"), other)
    with pytest.raises(ConfigError, match="is not a folder that `ferrule pack` wrote"):
        pack(plugins, source("llama"), other, "-q", "int8", "--force")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


def test_a_run_that_fails_leaves_what_was_there(
    source: Callable[[str], Path], plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert pack(plugins, source("llama"), out, "-q", "int8") == 0
    before = (out / "model.safetensors").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "model.safetensors")

    monkeypatch.setattr("ferrule_files.safetensors_writer.write_file", full)
    with pytest.raises(ConfigError, match="cannot be written: No space left"):
        pack(plugins, source("llama"), out, "-q", "int4", "--force")
    assert (out / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--dtype", "float32"], "Nothing can be packed: .*float32"),
        (["--dtype", "bfloat16", "--model-impl", "transformers"], "Nothing can be packed"),
    ],
)
def test_what_has_no_packed_form(
    argv: list[str], text: str, source: Callable[[str], Path], plugins: Plugins, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=text):
        pack(plugins, source("llama"), tmp_path / "out", *argv)
    assert not list(tmp_path.iterdir())


def test_what_is_packed_is_not_packed_again(source: Callable[[str], Path], plugins: Plugins, tmp_path: Path) -> None:
    assert pack(plugins, source("llama"), tmp_path / "out", "-q", "int8", "--dtype", "bfloat16") == 0
    with pytest.raises(ConfigError, match="packed already"):
        pack(plugins, tmp_path / "out", tmp_path / "again", "--dtype", "bfloat16")
    with pytest.raises(ConfigError, match="MODEL is missing"):
        PackCommand().run([], plugins)


# ---------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def packed(source: Callable[[str], Path], plugins: Plugins, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "out"
    assert pack(plugins, source("llama-tied"), out, "-q", "int8", "--dtype", "bfloat16") == 0
    return out


def _truncated(out: Path) -> None:
    file = out / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _no_header(out: Path) -> None:
    (out / "model.safetensors").write_bytes(b"\xff" * 64)


def _tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        tensors = load_file(out / "model.safetensors")
        change(tensors)
        save_file(tensors, out / "model.safetensors")

    return damage


def _short(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.packed_weight"] = tensors["lm_head.packed_weight"][:-2].clone()


def _other_type(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.packed_weight"] = tensors["lm_head.packed_weight"].to(torch.int16)


def _lost(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["layers.1.self_attn.qkv_proj.packed_weight"]


def _a_part(tensors: dict[str, torch.Tensor]) -> None:
    whole = tensors.pop("layers.1.self_attn.qkv_proj.packed_weight")
    tensors["layers.1.self_attn.q_proj.packed_weight"] = whole.clone()


def _configured(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        config = json.loads((out / "config.json").read_text())
        change(config)
        (out / "config.json").write_text(json.dumps(config))

    return damage


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (_truncated, "truncated"),
        (_no_header, "not a safetensors file, or is truncated"),
        (_tensors(_short), "lm_head.packed_weight.*shape"),
        (_tensors(_other_type), "int16"),
        (_tensors(_lost), "lack.*layers.1.self_attn.qkv_proj.packed_weight"),
        (_tensors(_a_part), "q_proj.packed_weight.*shape"),
        (_configured(lambda config: config["quantization_config"].update(layout=3)), "layout 3, and 1 and 2"),
        (_configured(lambda config: config.update(hidden_size=96)), "'hidden_size' is 96"),
        (_configured(lambda config: config["quantization_config"]["forms"][0]["layers"].pop()), "does not have"),
    ],
)
def test_damage_is_told(
    damage: Callable[[Path], None], text: str, packed: Path, plugins: Plugins, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(packed, out)
    damage(out)
    with pytest.raises(CheckpointError, match=text):
        loaded_from(out, plugins)


def test_a_table_without_a_tied_model(source: Callable[[str], Path], plugins: Plugins, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert pack(plugins, source("llama-tied"), out, "--dtype", "bfloat16") == 0
    with pytest.raises(CheckpointError, match="not tied"):
        loaded_from(out, plugins, hf_overrides={"tie_word_embeddings": False})
    with pytest.raises(PluginError, match="--dtype bfloat16"):
        loaded_from(out, plugins, dtype="float32")
    with pytest.raises(StartupError, match="is quantized|does not read"):
        loaded_from(out, plugins, quantization="int8")


def test_factors_that_are_no_numbers_are_told(source: Callable[[str], Path], plugins: Plugins, tmp_path: Path) -> None:
    """Report damaged factors, which weights that were quantized before have: what the rounding of their scales took."""
    made, out = tmp_path / "made", tmp_path / "out"
    quantized_checkpoint(source("llama"), made, "int8")
    assert pack(plugins, made, out, "--dtype", "bfloat16") == 0

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.1.mlp.down_proj.packed_factors"][0] = torch.nan

    _tensors(spoil)(out)
    with pytest.raises(CheckpointError, match="is not a finite number"):
        loaded_from(out, plugins)

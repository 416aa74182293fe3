"""`ferrule pack` and what reads its folders: the same bits as the checkpoint, and a refusal of all that is none."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrule import LLM, SamplingParams
from ferrule.config import CacheConfig, Config, LoadConfig, ModelConfig, PluginConfig, SchedulerConfig
from ferrule.env import Environment
from ferrule.errors import CheckpointError, ConfigError, PluginError, StartupError
from ferrule.execution.load import Loaded, load
from ferrule.interfaces.platform import DeviceCaps
from ferrule.interfaces.quantization import LinearLayer
from ferrule.plugin import PluginSet, discover
from ferrule_kernels.cpu import dense, library
from ferrule_kernels.cpu.dense import DenseMatrix
from ferrule_kernels.cpu.matmul import PackedMatrix, Workspace
from ferrule_kernels.cpu.packed import LAYOUT, room
from ferrule_kernels.matmul import Form
from ferrule_nn import Dense, Linear
from ferrule_plugins.command.pack import PackCommand
from ferrule_plugins.command.pack.write import write
from ferrule_plugins.load_format.safetensors import read_header
from ferrule_plugins.quantization.packed import METHOD, FerrulePacked, Kept, read, stated
from ferrule_testkit.checkpoints import tiny_checkpoint
from ferrule_testkit.quantized import quantized_checkpoint

ENV = Environment(cpu_kvcache_space=0.01, cpu_omp_threads_bind="auto")
CPU = DeviceCaps("cpu", "a processor", 1 << 30)
ONLINE = ("int8", "int4", "int8_per_channel_weight_only", "int4_weight_only")
pytestmark = pytest.mark.skipif(dense.unit() is None, reason="there are no kernels for bfloat16 weights here")


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return discover(PluginConfig(), ENV)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of tiny checkpoints, each made once."""
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


def pack(plugins: PluginSet, *argv: object) -> int:
    return PackCommand().run([*map(str, argv), "--no-use-tqdm-on-load"], plugins)


def loaded_from(folder: Path, plugins: PluginSet, **model: Any) -> Loaded:
    config = Config(
        model=ModelConfig(**{"model": str(folder), "dtype": "bfloat16", **model}),
        load=LoadConfig(use_tqdm_on_load=False),
        scheduler=SchedulerConfig(max_num_seqs=2),
        cache=CacheConfig(),
        env=ENV,
    )
    return load(config, plugins)


def same(one: Loaded, other: Loaded) -> int:
    """How many matrices are packed alike, byte by byte, with everything else that the models hold."""
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


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "qwen3", "opt-postnorm", "gemma2", "phi3"])
@pytest.mark.parametrize("method", [None, *ONLINE])
def test_every_form_is_read_back_as_it_was_packed(
    name: str, method: str | None, source: Callable[[str], Path], plugins: PluginSet, tmp_path: Path
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
    form: str, source: Callable[[str], Path], plugins: PluginSet, tmp_path: Path
) -> None:
    made, out = tmp_path / "made", tmp_path / "out"
    quantized_checkpoint(source("llama"), made, form)
    assert pack(plugins, made, out, "--dtype", "bfloat16") == 0
    expected = loaded_from(made, plugins)
    assert same(expected, loaded_from(out, plugins)) > 4
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["layout"]) == (METHOD, LAYOUT)
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
    name: str, options: dict[str, str], source: Callable[[str], Path], plugins: PluginSet, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    assert pack(plugins, source(name), out, *words) == 0
    assert answers(out, dtype=options["dtype"]) == answers(source(name), **options)


def test_layers_that_are_not_packed_are_kept_beside(
    source: Callable[[str], Path], plugins: PluginSet, tmp_path: Path
) -> None:
    """The head of this checkpoint is float32, in an order of oneDNN's: it is written as it came."""
    made, out = tmp_path / "made", tmp_path / "out"
    quantized_checkpoint(source("llama"), made, "gptq")
    assert pack(plugins, made, out, "--dtype", "float32") == 0
    assert torch.equal(load_file(out / "model.safetensors")["lm_head.weight"], _head(made).float())
    assert answers(out, dtype="float32") == answers(made, dtype="float32")


def _head(folder: Path) -> torch.Tensor:
    return load_file(folder / "model.safetensors")["lm_head.weight"]


def test_a_tied_table_is_written_and_kept_once(
    source: Callable[[str], Path], plugins: PluginSet, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert pack(plugins, source("llama-tied"), out, "--dtype", "bfloat16") == 0
    tensors = load_file(out / "model.safetensors")
    assert not [name for name in tensors if "embed_tokens" in name]
    model = loaded_from(out, plugins).model
    assert isinstance(model, torch.nn.Module)
    head, table = model.get_submodule("lm_head"), model.get_submodule("embed_tokens")
    assert isinstance(head, Linear)
    assert isinstance(head.scheme, Dense)
    assert head.scheme.matrix is not None
    assert tuple(table.weight.shape) == (0, 64)
    ids = torch.tensor([0, 5, 319])
    assert torch.equal(table(ids), loaded_from(source("llama-tied"), plugins).model.get_submodule("embed_tokens")(ids))


def test_a_folder_of_shards(
    source: Callable[[str], Path], plugins: PluginSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    source: Callable[[str], Path], plugins: PluginSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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


def test_it_replaces_only_what_it_wrote(source: Callable[[str], Path], plugins: PluginSet, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    assert pack(plugins, source("llama"), out, "-q", "int8") == 0
    with pytest.raises(ConfigError, match="--force replaces it"):
        pack(plugins, source("llama"), out, "-q", "int4")
    assert json.loads((out / "config.json").read_text())["quantization_config"]["method"] == "int8"
    assert pack(plugins, source("llama"), out, "-q", "int4", "--force") == 0
    assert json.loads((out / "config.json").read_text())["quantization_config"]["method"] == "int4"
    shutil.copytree(source("llama"), other)
    with pytest.raises(ConfigError, match="no folder that `ferrule pack` wrote"):
        pack(plugins, source("llama"), other, "-q", "int8", "--force")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


def test_a_run_that_fails_leaves_what_was_there(
    source: Callable[[str], Path], plugins: PluginSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert pack(plugins, source("llama"), out, "-q", "int8") == 0
    before = (out / "model.safetensors").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "model.safetensors")

    monkeypatch.setattr("ferrule_plugins.command.pack.write.write_file", full)
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
    argv: list[str], text: str, source: Callable[[str], Path], plugins: PluginSet, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=text):
        pack(plugins, source("llama"), tmp_path / "out", *argv)
    assert not list(tmp_path.iterdir())


def test_what_is_packed_is_not_packed_again(source: Callable[[str], Path], plugins: PluginSet, tmp_path: Path) -> None:
    assert pack(plugins, source("llama"), tmp_path / "out", "-q", "int8", "--dtype", "bfloat16") == 0
    with pytest.raises(ConfigError, match="packed already"):
        pack(plugins, tmp_path / "out", tmp_path / "again", "--dtype", "bfloat16")
    with pytest.raises(ConfigError, match="MODEL is missing"):
        PackCommand().run([], plugins)


# ---------------------------------------------------------------------------------------- refusals and damage

KEPT = {"lm_head": Kept(None), "layers.0.mlp.up_proj": Kept(Form(4, 32), factors=False)}
CONFIG = stated(KEPT, torch.bfloat16, "int4")


def test_the_configuration_says_what_was_packed() -> None:
    assert read(json.loads(json.dumps(CONFIG))) == KEPT


@pytest.mark.parametrize(
    ("caps", "dtype", "config", "text"),
    [
        (DeviceCaps("cuda", "a GPU", 1 << 34), torch.bfloat16, CONFIG, "packed for CPUs"),
        (CPU, torch.float32, CONFIG, "--dtype bfloat16"),
        (CPU, torch.bfloat16, {}, "ferrule pack"),
    ],
)
def test_it_refuses(caps: DeviceCaps, dtype: torch.dtype, config: dict[str, Any], text: str) -> None:
    assert text in (FerrulePacked.refuses(config, caps, dtype) or "")
    assert FerrulePacked.refuses(CONFIG, CPU, torch.bfloat16) is None


def test_it_refuses_a_processor_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "unit", lambda: None)
    assert "none of AMX, AVX-512 and AVX2" in (FerrulePacked.refuses(CONFIG, CPU, torch.bfloat16) or "")
    integers = stated({"a": Kept(Form(8))}, torch.bfloat16, "int8")
    assert FerrulePacked.refuses(integers, CPU, torch.bfloat16) is None

    def none() -> None:
        raise library.KernelsUnavailableError("there is no C++ compiler")

    monkeypatch.setattr(library, "load", none)
    assert "no C++ compiler" in (FerrulePacked.refuses(integers, CPU, torch.bfloat16) or "")


@pytest.mark.parametrize(
    "change",
    [
        {"layout": LAYOUT + 1},
        {"layout": None},
        {"layout": True},
        {"dtype": "int8"},
        {"forms": []},
        {"forms": {}},
        {"forms": [7]},
        {"forms": [{"kind": "runes", "layers": ["lm_head"]}]},
        {"forms": [{"kind": "bfloat16", "table": 1, "layers": ["lm_head"]}]},
        {"forms": [{"kind": "bfloat16", "table": False, "layers": "lm_head"}]},
        {"forms": [{"kind": "integers", "bits": 4, "group": 3, "digits": 1, "factors": False, "layers": ["a"]}]},
        {"forms": [{"kind": "integers", "bits": 2, "group": 0, "digits": 1, "factors": False, "layers": ["a"]}]},
        {"forms": [{"kind": "integers", "bits": 8, "group": 0, "digits": 1, "layers": ["a"]}]},
        {"dtype": "float32", "forms": [{"kind": "bfloat16", "table": False, "layers": ["lm_head"]}]},
    ],
)
def test_a_configuration_that_is_none(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="ferrule pack"):
        FerrulePacked({**CONFIG, **change})


@pytest.fixture(scope="module")
def packed(source: Callable[[str], Path], plugins: PluginSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        (_no_header, "no safetensors file or is truncated"),
        (_tensors(_short), "lm_head.packed_weight.*shape"),
        (_tensors(_other_type), "int16"),
        (_tensors(_lost), "lack.*layers.1.self_attn.qkv_proj.packed_weight"),
        (_tensors(_a_part), "q_proj.packed_weight.*shape"),
        (_configured(lambda config: config["quantization_config"].update(layout=LAYOUT + 1)), "layout 2, and 1"),
        (_configured(lambda config: config.update(hidden_size=96)), "shape"),
        (_configured(lambda config: config["quantization_config"]["forms"][0]["layers"].pop()), "does not have"),
    ],
)
def test_damage_is_told(
    damage: Callable[[Path], None], text: str, packed: Path, plugins: PluginSet, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(packed, out)
    damage(out)
    with pytest.raises(CheckpointError, match=text):
        loaded_from(out, plugins)


def test_a_table_without_a_tied_model(source: Callable[[str], Path], plugins: PluginSet, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert pack(plugins, source("llama-tied"), out, "--dtype", "bfloat16") == 0
    with pytest.raises(CheckpointError, match="not tied"):
        loaded_from(out, plugins, hf_overrides={"tie_word_embeddings": False})
    with pytest.raises(PluginError, match="--dtype bfloat16"):
        loaded_from(out, plugins, dtype="float32")
    with pytest.raises(StartupError, match="is quantized|does not read"):
        loaded_from(out, plugins, quantization="int8")


# ---------------------------------------------------------------------------------------- the bytes


def test_the_order_of_bytes_is_that_of_the_layout() -> None:
    """When this fails the order has changed: count `LAYOUT` up, and take the new sums."""
    weight = (torch.arange(83 * 70) * 37 % 241 - 120).view(83, 70)
    scales = (torch.arange(83 * 3) % 8 + 1).view(83, 3) / 64
    four = PackedMatrix((weight % 16 - 8).to(torch.int8), Form(4, 32), None, Workspace(), scales)
    eight = PackedMatrix(weight.to(torch.int8), Form(8), None, Workspace(), scales[:, :1] / 3)
    floats = DenseMatrix(weight.bfloat16())
    assert four.factors is None
    assert eight.factors is not None
    packed = [matrix.packed.view(torch.uint8).numpy().tobytes() for matrix in (four, eight, floats)]
    sums = [hashlib.sha256(text).hexdigest()[:16] for text in packed]
    assert (LAYOUT, sums) == (1, ["d310ac53839f19a6", "9ebe8d2f832b75bc", "79884c3b6eeb7dd5"])


@pytest.mark.parametrize("bias", [False, True])
def test_a_matrix_is_made_of_what_was_packed(bias: bool) -> None:
    torch.manual_seed(3)
    weight, x = torch.randn(100, 72).bfloat16(), torch.randn(5, 72).bfloat16()
    added = torch.randn(100) if bias else None
    floats = DenseMatrix(weight, added)
    again = DenseMatrix.of_packed(floats.packed, (100, 72), added)
    assert torch.equal(again.multiply(x, torch.float32), floats.multiply(x, torch.float32))
    assert torch.equal(again.rows(torch.arange(100)), weight)
    assert again.nbytes == floats.nbytes
    scales = torch.rand(100, 1) / 50
    eight = PackedMatrix(
        torch.randint(-127, 128, (100, 72)).to(torch.int8), Form(8, digits=2), added, Workspace(), scales
    )
    same = PackedMatrix.of_packed(eight.packed, eight.factors, (100, 72), eight.form, added, Workspace())
    assert torch.equal(same.multiply(x), eight.multiply(x))
    for wrong in (eight.packed[:-1], eight.packed.to(torch.int16)):
        with pytest.raises(ValueError, match="a packed weight"):
            PackedMatrix.of_packed(wrong, eight.factors, (100, 72), eight.form, added, Workspace())
    with pytest.raises(ValueError, match="a packed weight"):
        DenseMatrix.of_packed(floats.packed, (120, 72))


def test_large_memory_is_like_any() -> None:
    for shape in ((3, 5), (1 << 21,), (0,)):
        memory = room(shape, torch.bfloat16)
        assert (tuple(memory.shape), memory.dtype) == (shape, torch.bfloat16)
        memory.fill_(3)
        assert bool((memory == 3).all())


def test_layers_that_no_form_names_are_left() -> None:
    method = FerrulePacked(CONFIG)
    assert method.scheme(LinearLayer("layers.9.mlp.up_proj", 64, 64)) is None
    with pytest.raises(CheckpointError, match="is no head"):
        FerrulePacked(stated({"a": Kept(None, table=True)}, torch.bfloat16, None)).scheme(LinearLayer("a", 64, 64))

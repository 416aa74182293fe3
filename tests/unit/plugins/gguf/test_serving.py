"""A file that is named in the place of a model folder: found, described, loaded, quantized, and multiplied by."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants

from ferrule.assembly.memory import weight_tensors
from ferrule.assembly.model import load_model
from ferrule.config import Config, DeviceConfig, LoadConfig, ModelConfig
from ferrule.config.resolve import resolve
from ferrule.errors import CheckpointError
from ferrule.frontend.inputs import open_inputs
from ferrule.interfaces.quantization import LinearLayer
from ferrule.locate.localise import localise
from ferrule.plugin import discover
from ferrule_files.gguf.names import Target
from ferrule_files.gguf.reader import TYPES, TensorInfo, read_model
from ferrule_kernels.cpu import library
from ferrule_kernels.matmul import Levels
from ferrule_nn import Linear
from ferrule_nn.ops import using
from ferrule_plugins.command.models.report import describe
from ferrule_plugins.command.pack import PackCommand
from ferrule_plugins.gguf.blocks import Decoded, decode, map_file, stored
from ferrule_plugins.gguf.tensors import Reader
from ferrule_plugins.platform import cpu_products
from ferrule_plugins.platform.cpu_kernels import cpu_kernels
from ferrule_plugins.platform.cuda_kernels import cuda_kernels
from ferrule_plugins.quantization.gguf import GgufMethod, form_of
from ferrule_testkit.checkpoints import SIZES
from ferrule_testkit.samples.quantization import levelled
from tests.unit.plugins.gguf import converted as c

CASE = c.Case("qwen3", {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": True})
RANDOM_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}
KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *RANDOM_SCALES)


def quantized(weight: np.ndarray, kind: str) -> np.ndarray:
    """Return the weight in blocks; of types that the oracle cannot make, random blocks of the same size."""
    number = GGMLQuantizationType[kind]
    if kind not in RANDOM_SCALES:
        return quants.quantize(weight, number)
    size, num_bytes = gguf.GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(len(kind)).integers(
        0, 256, (len(weight), weight.shape[1] // size, num_bytes), np.uint8
    )
    for at in RANDOM_SCALES[kind]:
        blocks[..., at : at + 2] = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
    return blocks.reshape(len(weight), -1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, *c.write_checkpoint(CASE, folder)


def write(checkpoint: Any, file: Path, kind: str, mixed: str | None = None, head: str | None = None) -> Path:
    """Write the checkpoint with matrices of one type, or its values of another; with a `head` of that type it is not
    tied.
    """
    folder, config, state = checkpoint
    writer = GGUFWriter(str(file), "qwen3")
    c.add_numbers(writer, config)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(vocabulary["model"]["vocab"].items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    padding = [f"[PAD{index}]" for index in range(len(tokens), SIZES["vocab_size"])]
    writer.add_token_list([token for token, _ in tokens] + padding)
    writer.add_token_types([3] * 5 + [1] * (len(tokens) - 5) + [5] * len(padding))
    writer.add_token_merges([" ".join(merge) for merge in vocabulary["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(json.loads((folder / "tokenizer_config.json").read_text())["chat_template"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2)
    for name, tensor in state.items():
        found = names.get_name(name, (".weight",))
        is_head = name.startswith("lm_head")
        if found is None or is_head and head is None:
            continue
        own = str(head) if is_head else mixed if mixed and "v_proj" in name else kind
        if tensor.dim() < 2 or own == "F32":
            writer.add_tensor(found, tensor.float().numpy())
        else:
            writer.add_tensor(found, quantized(tensor.float().numpy(), own), raw_dtype=GGMLQuantizationType[own])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config(model: Path | str, load_format: str = "auto", **changes: Any) -> Any:
    sections = ModelConfig(model=str(model), **changes), LoadConfig(load_format=load_format)
    return resolve(Config(model=sections[0], load=sections[1], device=DeviceConfig(device="cpu")))


def loaded(model: Path | str, load_format: str = "auto", **changes: Any) -> Any:
    return load_model(localise(config(model, load_format, **changes), discover()), discover())


def layer(model: Any, name: str) -> Any:
    return model.get_submodule(name)


@pytest.mark.parametrize("kind", KINDS)
def test_each_type_is_multiplied_by_nearly_as_by_its_floats(kind: str, checkpoint: Any, tmp_path: Path) -> None:
    file = write(checkpoint, tmp_path / "model.gguf", kind)
    found = loaded(file)
    assert found.info.quantization == "gguf"
    _, _, state = checkpoint
    name = "model.layers.0.mlp.down_proj.weight"
    rows = torch.from_numpy(quantized(state[name].float().numpy(), kind))
    weight = decode(kind, rows).widened()
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    y = layer(found.model, "layers.0.mlp.down_proj")(x).float()
    wanted = x.float() @ weight.t()
    assert float((y - wanted).norm() / wanted.norm()) < 0.012  # activations have 8 bits, the result 16


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_exactly_the_files(kind: str, checkpoint: Any, tmp_path: Path) -> None:
    """Multiply activations that are rounded to themselves: the products are those of the file's floats, but for sums of
    float32.
    """
    weight = torch.from_numpy(quantized(checkpoint[2]["model.layers.0.mlp.down_proj.weight"].float().numpy(), kind))
    found = layer(loaded(write(checkpoint, tmp_path / "model.gguf", kind)).model, "layers.0.mlp.down_proj")
    x = torch.randint(-127, 128, (5, 512), generator=torch.Generator().manual_seed(1)).float()
    x[:, ::16] = 127
    y = found.scheme.matrix.multiply(x)
    wanted = x.double() @ decode(kind, weight).widened().double().t()
    assert float((y - wanted).abs().max() / wanted.abs().max()) < 1e-5


SIZES_IN_BITS = {"Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5, "Q5_0": 5.5, "IQ4_NL": 4.5, "Q2_K": 2.625, "Q6_K": 6.5625}
STEPS_OF_8_BITS = {"Q4_K": 4.5, "Q5_K": 5.5, "Q3_K": 3.4375}  # which have 6 in the file


@pytest.mark.parametrize("kind", [*SIZES_IN_BITS, *STEPS_OF_8_BITS])
def test_memory_is_that_of_the_file(kind: str, checkpoint: Any, tmp_path: Path) -> None:
    found = loaded(write(checkpoint, tmp_path / "model.gguf", kind))
    tensors = layer(found.model, "layers.0.mlp.down_proj").packed_tensors()
    memory = sum(each.nbytes for each in tensors)
    if kind in SIZES_IN_BITS:
        assert memory == 256 * 512 * SIZES_IN_BITS[kind] / 8
    else:
        assert memory == 256 * 512 / 8 * (STEPS_OF_8_BITS[kind] + 0.125)
    assert found.info.weight_bytes == sum(each.nbytes for each in weight_tensors(found.model))


def test_types_may_differ_within_a_merged_layer(checkpoint: Any, tmp_path: Path) -> None:
    """Keep each projection as it is in the file, and compute what it computes alone."""
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    alike = layer(loaded(write(checkpoint, tmp_path / "alike.gguf", "Q4_0")).model, "layers.0.self_attn.qkv_proj")
    for mixed in ("Q6_K", "Q4_K", "F32"):
        file = write(checkpoint, tmp_path / f"{mixed}.gguf", "Q4_0", mixed=mixed)
        found = loaded(file)
        merged = layer(found.model, "layers.0.self_attn.qkv_proj")
        assert merged.q_proj.scheme.form == form_of("Q4_0")
        assert merged.v_proj.quantized == (mixed != "F32")
        values = merged.projections["v_proj"]
        y, other = merged(x), alike(x)
        assert y.shape == other.shape
        assert torch.equal(y[:, :-values], other[:, :-values])
        report = describe(localise(config(file), discover()), discover(), str(file))
        assert report.weights == {"gguf": pytest.approx(found.info.weight_bytes, rel=0.01)}


@pytest.mark.parametrize("mixed", [None, "Q6_K", "F32"])
def test_packed_folders_compute_what_the_file_does(mixed: str | None, checkpoint: Any, tmp_path: Path) -> None:
    file, folder = write(checkpoint, tmp_path / "model.gguf", "Q4_K", mixed=mixed), tmp_path / "packed"
    found = loaded(file)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert PackCommand().run([str(file), "--output", str(folder), "--no-use-tqdm-on-load"], discover()) == 0
    packed = loaded(folder)
    assert packed.info.weight_bytes == found.info.weight_bytes
    for name in ("layers.0.self_attn.qkv_proj", "layers.1.mlp.gate_up_proj"):
        assert torch.equal(layer(packed.model, name)(x), layer(found.model, name)(x))


def test_columns_in_another_order_keep_what_is_left_of_a_block(checkpoint: Any) -> None:
    rows = torch.from_numpy(quantized(torch.randn(3, 768).numpy(), "Q4_K"))
    columns = tuple(range(256, 384)) + tuple(range(256)) + tuple(range(384, 768))
    target = Target("out_proj.weight", columns=columns)
    info = TensorInfo("ssm_out", (3, 768), TYPES[12], Path("x"), 0)
    reader = Reader(None, {"out_proj": False}, torch.float32, False)  # type: ignore[arg-type]
    found = {name.rpartition(".")[2]: tensor for name, tensor in reader._numbers(info, "out_proj", rows, target)}
    assert target.block(256) == 128
    assert found["scales"].shape == (3, 6)
    given = (Levels(found[f"{name}s"], found[f"{name}_steps"]) for name in ("scale", "offset"))
    made = Decoded(found["numbers"], *given)
    assert torch.equal(made.widened(), decode("Q4_K", rows).widened()[:, list(columns)])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_whole_blocks_in_another_order_stay_blocks(kind: str) -> None:
    rows = torch.from_numpy(quantized(torch.randn(3, 768).numpy(), kind))
    columns = tuple(range(512, 768)) + tuple(range(512))
    info = TensorInfo("ssm_out", (3, 768), next(each for each in TYPES.values() if each.name == kind), Path("x"), 0)
    reader = Reader(None, {"out_proj": True}, torch.float32, False)  # type: ignore[arg-type]
    ((name, found),) = reader._quantized(info, "out_proj", rows, Target("out_proj.weight", columns=columns))
    assert name == "out_proj.blocks"
    assert torch.equal(decode(kind, found).widened(), decode(kind, rows).widened()[:, list(columns)])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_weights_are_the_same_where_all_rows_are_packed_at_once(
    kind: str, checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(checkpoint, tmp_path / "model.gguf", kind, mixed="Q6_K", head="Q6_K")
    found = list(weight_tensors(loaded(file).model))
    monkeypatch.setattr(cpu_products, "memory_nodes", lambda: (0, 1))
    others = list(weight_tensors(loaded(file).model))
    assert len(found) == len(others)
    assert all(torch.equal(*both) for both in zip(found, others, strict=True))


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_scale_that_is_no_number_is_refused_with_its_layer(
    nodes: int, checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(checkpoint, tmp_path / "model.gguf", "Q8_0")
    info = read_model([file]).tensors["blk.1.ffn_down.weight"]
    with file.open("r+b") as stream:
        stream.seek(info.start + 34 * 100)
        stream.write(np.float16(np.nan).tobytes())
    monkeypatch.setattr(cpu_products, "memory_nodes", lambda: tuple(range(nodes)))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj: A scale .* not a finite number"):
        loaded(file)


def stored_table(file: Path) -> torch.Tensor:
    """Return the embedding of a file, float32."""
    model = read_model([file])
    info = model.tensors["token_embd.weight"]
    return decode(info.type.name, stored(info, map_file(file))).widened()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K", "IQ4_NL"])
def test_a_tied_embedding_reads_its_rows_from_the_quantized_head(kind: str, checkpoint: Any, tmp_path: Path) -> None:
    file = write(checkpoint, tmp_path / "model.gguf", kind)
    found, table = loaded(file), stored_table(file).bfloat16()
    embedding = found.model.embed_tokens
    assert found.model.lm_head.quantized
    assert embedding.weight.shape == (0, 256)
    ids = torch.arange(320).flip(0)
    assert torch.equal(embedding(ids), table[ids])
    folder = tmp_path / "packed"
    assert PackCommand().run([str(file), "--output", str(folder), "--no-use-tqdm-on-load"], discover()) == 0
    packed, plain = loaded(folder), loaded(write(checkpoint, tmp_path / "floats.gguf", "F32"))
    assert packed.info.weight_bytes == found.info.weight_bytes
    assert packed.info.num_parameters == found.info.num_parameters == plain.info.num_parameters
    assert torch.equal(packed.model.embed_tokens(ids), table[ids])


def missing() -> None:
    raise library.KernelsUnavailableError("there is no compiler")


def test_a_tied_embedding_has_its_own_table_where_no_kernel_is(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(checkpoint, tmp_path / "model.gguf", "Q8_0")
    table = stored_table(file).bfloat16()
    monkeypatch.setattr(library, "load", missing)
    found = loaded(file)
    assert torch.equal(found.model.embed_tokens.weight, table)


def test_a_layer_that_will_be_on_a_gpu_gets_numbers() -> None:
    """Ask the layer what it stores before its weights are there; the CPU's kernel takes blocks."""
    stored = []
    for kernels in (cpu_kernels(), cuda_kernels()):
        with using(kernels):
            part = Linear(256, 64)
        part.weight = torch.nn.Parameter(part.weight.to("meta"), requires_grad=False)
        part.quantize("up", GgufMethod({"quant_method": "gguf", "types": {"Q4_K": ["up"]}}))
        stored.append([name for name, _ in part.named_parameters()])
    numbers = ["numbers", "scales", "scale_steps", "offsets", "offset_steps"]
    assert stored == [["blocks"] if library.available() else numbers, numbers]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q3_K", "Q6_K", "IQ4_NL"])
def test_an_embedding_beside_a_head_keeps_its_quantized_rows(kind: str, checkpoint: Any, tmp_path: Path) -> None:
    file = write(checkpoint, tmp_path / "model.gguf", kind, head="Q6_K")
    found, table, ids = loaded(file), stored_table(file).bfloat16(), torch.arange(320).flip(0)
    embedding, head = found.model.embed_tokens, found.model.lm_head
    assert head.tied is None
    assert embedding.table.scheme.form == form_of(kind)
    assert head.scheme.form == form_of("Q6_K")
    assert torch.equal(embedding(ids), table[ids])
    assert embedding(ids[:0]).shape == (0, 256)
    assert found.model.embed_size() == 256
    assert found.info.weight_bytes == sum(each.nbytes for each in weight_tensors(found.model))
    assert not any(each.shape == table.shape for each in weight_tensors(found.model))
    plain = loaded(write(checkpoint, tmp_path / "floats.gguf", "F32", head="F32"))
    report = describe(localise(config(file), discover()), discover(), str(file))
    assert report.parameters == found.info.num_parameters == plain.info.num_parameters
    assert report.weights == {"gguf": pytest.approx(found.info.weight_bytes, rel=0.01)}
    folder = tmp_path / "packed"
    assert PackCommand().run([str(file), "--output", str(folder), "--no-use-tqdm-on-load"], discover()) == 0
    packed, hidden = loaded(folder), torch.randn(3, 256).bfloat16()
    assert packed.info.weight_bytes == found.info.weight_bytes
    assert torch.equal(packed.model.embed_tokens(ids), table[ids])
    assert torch.equal(packed.model.logits(hidden), found.model.logits(hidden))


def test_an_embedding_beside_a_head_is_widened_where_no_kernel_is(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(checkpoint, tmp_path / "model.gguf", "Q8_0", head="Q8_0")
    monkeypatch.setattr(library, "load", missing)
    assert torch.equal(loaded(file).model.embed_tokens.weight, stored_table(file).bfloat16())


def test_the_folder_of_a_file_is_made_once_and_anew_when_the_file_says_something_else(
    checkpoint: Any, tmp_path: Path
) -> None:
    file = write(checkpoint, tmp_path / "model.gguf", "Q8_0")
    folders = [localise(config(file), discover()).model.model for _ in range(2)]
    assert folders[0] == folders[1]
    assert Path(folders[0]).name.startswith("model-")
    write(checkpoint, file, "Q4_0")
    assert localise(config(file), discover()).model.model != folders[0]


def test_a_folder_with_a_file_and_its_own_configuration_uses_that(checkpoint: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write(checkpoint, folder / "model.gguf", "Q8_0")
    assert localise(config(folder), discover()).model.model != str(folder)
    shutil.copy(checkpoint[0] / "config.json", folder)
    assert localise(config(folder), discover()).model.model == str(folder)
    found = loaded(folder)
    assert found.info.quantization is None  # its config.json does not say so
    assert loaded(folder, "gguf").info.quantization == "gguf"


def test_tokenizer_and_template_are_those_of_the_file(checkpoint: Any, tmp_path: Path) -> None:
    file = write(checkpoint, tmp_path / "model.gguf", "Q8_0")
    inputs = open_inputs(localise(config(file), discover()), discover())
    theirs = open_inputs(localise(config(checkpoint[0]), discover()), discover())
    assert inputs.tokenizer is not None
    assert theirs.tokenizer is not None
    text = "<|im_start|>The quick brown fox 123, user's"
    assert inputs.tokenizer.encode(text) == theirs.tokenizer.encode(text)
    assert inputs.templates == theirs.templates
    other = localise(config(file, tokenizer=str(checkpoint[0])), discover()).model
    assert (other.tokenizer, other.model) == (str(checkpoint[0]), localise(config(file), discover()).model.model)
    named = localise(config(checkpoint[0], tokenizer=str(file)), discover()).model
    assert (Path(named.tokenizer) / "tokenizer.json").is_file()


def test_a_report_needs_the_file_alone(checkpoint: Any, tmp_path: Path) -> None:
    file = write(checkpoint, tmp_path / "model.gguf", "Q4_0")
    report = describe(localise(config(file), discover()), discover(), str(file))
    assert (report.architecture, report.implementation, report.refusal) == ("Qwen3ForCausalLM", "native", "")
    loaded_bytes = loaded(file).info.weight_bytes
    assert report.weights == {"gguf": pytest.approx(loaded_bytes, rel=0.01)}


def test_what_is_no_model_is_refused_with_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(CheckpointError, match="has version 0"):
        localise(config(tmp_path / "model.gguf"), discover())
    with pytest.raises(CheckpointError, match="has version 0"):
        localise(config(tmp_path), discover())
    (tmp_path / "model.txt").write_text("text")
    with pytest.raises(CheckpointError, match=r"model\.txt is a file"):
        localise(config(tmp_path / "model.txt"), discover())
    writer = GGUFWriter(str(tmp_path / "model.gguf"), "clip")
    writer.add_tensor("v.weight", np.zeros((4, 4), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(CheckpointError, match="'clip' are not read from GGUF"):
        localise(config(tmp_path / "model.gguf"), discover())


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "Q2_K", "IQ4_XS", "Q8_0"])
def test_where_no_kernel_takes_them_weights_are_widened(kind: str) -> None:
    made = Linear(512, 48)
    form = form_of(kind)
    method = GgufMethod({"quant_method": "gguf", "types": {f"{kind}/{form.block or form.group}": ["mlp.up_proj"]}})
    assert made.quantize("mlp.up_proj", method)
    for name, tensor in levelled(torch.randn(48, 512, generator=torch.Generator().manual_seed(1)), form).items():
        made.get_parameter(name).data.copy_(tensor)
    own = {name: parameter.detach().clone() for name, parameter in made.named_parameters()}
    scales, offsets = (
        Levels(own[f"{name}s"], own.get(f"{name}_steps")) if f"{name}s" in own else None for name in ("scale", "offset")
    )
    assert scales is not None
    found = made.scheme.weights(made).integers().widened(torch.float32)  # type: ignore[attr-defined]
    meant = Decoded(own["numbers"], scales, offsets, form.table).widened()
    torch.testing.assert_close(found, meant, rtol=1e-5, atol=1e-5)
    assert method.scheme(LinearLayer("other", 64, 48)) is None


@pytest.mark.parametrize(
    ("types", "message"),
    [(None, "of what types"), ({"Q9_K": ["x"]}, "no GGUF file has"), ({"Q4_K/x": ["x"]}, "no GGUF file has")]
    + [({"Q4_K/100": ["x"]}, "not read: blocks are whole groups")],
)
def test_types_of_no_file_are_refused(types: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        GgufMethod({"quant_method": "gguf", "types": types})

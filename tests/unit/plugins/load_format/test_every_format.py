"""What every built-in load format does with the options that all of them get, and the two that read either kind."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrule.config import LoadConfig
from ferrule.errors import CheckpointError, ConfigError
from ferrule.interfaces.load_format import WeightSource
from ferrule.locate.weights import WeightFiles
from ferrule.plugin import discover
from ferrule_files import safetensors as safetensors_files
from ferrule_files import shards
from ferrule_tensorizer.write import write
from ferrule_testkit.checkpoints import tiny_checkpoint
from ferrule_testkit.harness import Harness
from ferrule_testkit.quantized import quantized_checkpoint

PLUGINS = discover()
WEIGHTS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.arange(16, dtype=torch.bfloat16).reshape(4, 4),
}
PROMPT = [5, 17, 200, 31, 99]


def safetensors(name: str) -> Callable[[Path], None]:
    return lambda folder: save_file(WEIGHTS, str(folder / name))


def pickled(folder: Path) -> None:
    torch.save(WEIGHTS, folder / "pytorch_model.bin")


def ggml(folder: Path) -> None:
    """Write a model that is as small as one can be."""
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), "llama")
    writer.add_block_count(1)
    for key in ("context_length", "embedding_length", "feed_forward_length", "head_count", "head_count_kv"):
        getattr(writer, f"add_{key}")(8 if key == "context_length" else 2 if "head" in key else 64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(4)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([b"a", b"b", b"c", b"d"])
    writer.add_tensor("token_embd.weight", np.ones((4, 64), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# How each format's files are written, and a pattern that all of them match.
LAYOUTS: Mapping[str, tuple[Callable[[Path], None] | None, str]] = {
    "safetensors": (safetensors("model.safetensors"), "model*"),
    "fastsafetensors": (safetensors("model.safetensors"), "*.safetensors"),
    "runai_streamer": (safetensors("model.safetensors"), "model*"),
    "mistral": (safetensors("consolidated.safetensors"), "consolidated*"),
    "sharded_state": (safetensors("model-rank-0-part-0.safetensors"), "model-rank-*"),
    "runai_streamer_sharded": (safetensors("model-rank-0-part-0.safetensors"), "*-part-0*"),
    "tensorizer": (lambda folder: write(folder / "model.tensors", WEIGHTS), "*.tensors"),
    "hf": (safetensors("model.safetensors"), "model*"),
    "bitsandbytes": (pickled, "*.bin"),
    "pt": (pickled, "*.bin"),
    "npcache": (pickled, "pytorch*"),
    "gguf": (ggml, "*.gguf"),
    "dummy": (None, ""),
}


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Linear(4, 4)


@pytest.fixture
def folder(tmp_path: Path, name: str) -> Path:
    write = LAYOUTS[name][0]
    if write is not None:
        write(tmp_path)
    return tmp_path


every = pytest.mark.parametrize("name", sorted(PLUGINS.names("load_format")))


def load(name: str, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    return dict(PLUGINS.make("load_format", name).tensors(folder, Small(), options))


@every
def test_its_files_are_read(name: str, folder: Path) -> None:
    found = load(name, folder)
    if name not in ("gguf", "dummy"):
        assert found.keys() == WEIGHTS.keys()
        assert all(torch.equal(found[each], value) for each, value in WEIGHTS.items())
    assert found


@every
def test_files_that_are_ignored_are_not_there(name: str, folder: Path) -> None:
    write, pattern = LAYOUTS[name]
    if write is None:
        pytest.skip("it reads no files")
    assert load(name, folder, ignore_patterns=("no-such-file*",))
    with pytest.raises(CheckpointError, match="has no"):
        load(name, folder, ignore_patterns=("x", pattern))


@every
def test_an_unknown_option_is_named(name: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model-loader-extra-config: unknown key 'no_such_option'"):
        load(name, folder, no_such_option=1)


class Clock:
    """A clock whose seconds pass by one each time somebody looks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        self.seconds += 1
        return self.seconds


@every
def test_loading_that_takes_seconds_ends_with_one_line_in_the_log(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shards, "time", Clock())
    with caplog.at_level("INFO", logger="ferrule"):
        load(name, folder, use_tqdm_on_load=False)  # the lines are no bar
    lines = [record.ferrule_fields for record in caplog.records if record.getMessage() == "loading weights"]
    renewed = name == "npcache"  # reads the files for its copy, and then the copy
    assert [line["done"] for line in lines] == ["100%"] * (1 + renewed)
    assert all(line["rate"].endswith(" MiB/s") for line in lines)


@every
def test_a_terminal_shows_a_bar_with_the_rate(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shards.sys.stderr, "isatty", lambda: True, raising=False)
    load(name, folder, use_tqdm_on_load=False)
    assert "Loading weights" not in capsys.readouterr().err
    load(name, folder)
    shown = capsys.readouterr().err
    assert "Loading weights: 100%" in shown
    assert "B/s" in shown


def test_what_takes_no_time_is_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pickled(tmp_path)
    with caplog.at_level("INFO", logger="ferrule"):
        load("pt", tmp_path)
    assert not [record for record in caplog.records if record.getMessage() == "loading weights"]


def test_a_copy_of_other_files_is_made_anew(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(2)}, tmp_path / "a.bin")
    torch.save({"b.weight": torch.ones(2)}, tmp_path / "b.bin")
    assert load("npcache", tmp_path, ignore_patterns=("b*",)).keys() == {"a.weight"}
    assert load("npcache", tmp_path).keys() == {"a.weight", "b.weight"}


# ------------------------------------------------------------------------------------------------- either kind


def test_hf_prefers_files_that_cannot_hold_code(tmp_path: Path) -> None:
    torch.save({"pickled": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert load("hf", tmp_path).keys() == {"pickled"}
    save_file({"plain": torch.ones(1)}, str(tmp_path / "model.safetensors"))
    assert load("hf", tmp_path).keys() == {"plain"}
    assert load("hf", tmp_path, ignore_patterns=("model.safetensors",)).keys() == {"pickled"}


def test_what_a_hub_is_asked_for() -> None:
    def wanted(name: str, names: list[str]) -> tuple[str, ...]:
        return WeightFiles.of(LoadConfig(load_format=name), PLUGINS).patterns(names)

    both = ["config.json", "a.safetensors", "a.bin"]
    for name in ("hf", "bitsandbytes", "auto"):
        assert wanted(name, both) == ("*.safetensors",)
        assert wanted(name, ["config.json", "a.bin"]) == ("*.bin", "*.pt")
    assert wanted("npcache", both) == ("*.bin", "*.pt")
    assert wanted("sharded_state", both) == wanted("runai_streamer", both) == ("*.safetensors",)
    assert wanted("dummy", both) == ()


@every
def test_what_a_format_states_is_read_without_an_import(name: str) -> None:
    cls = PLUGINS.load("load_format", name)
    for attribute in ("forms", "reserves", "describes", "streams_from"):
        usual = getattr(WeightSource, attribute)
        stated = PLUGINS.stated("load_format", name, attribute)
        assert getattr(cls, attribute) == (usual if stated is None else stated), attribute


def tokens(folder: Path, load_format: str = "auto", **model: Any) -> tuple[str | None, Any]:
    load = LoadConfig(load_format=load_format, use_tqdm_on_load=False)
    with Harness(folder, sections={"load": load}, **model) as harness:
        output = harness.engine().run([PROMPT], max_tokens=4, logprobs=1)[0]
        return harness.info.quantization, output.logprobs


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("floats"))


def test_bitsandbytes_quantizes_floats(floats: Path, tmp_path: Path) -> None:
    found = tokens(floats, "bitsandbytes")
    assert found[0] == "bitsandbytes"
    assert found == tokens(floats, quantization="bitsandbytes")
    assert found != tokens(floats)
    for file in floats.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save(load_file(floats / "model.safetensors"), tmp_path / "pytorch_model.bin")
    assert tokens(tmp_path, "bitsandbytes") == found


def test_bitsandbytes_reads_checkpoints_of_the_library(floats: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    quantized_checkpoint(floats, folder, "nf4")
    assert tokens(folder, "bitsandbytes") == tokens(folder)


def test_bitsandbytes_is_not_another_method(floats: Path) -> None:
    with pytest.raises(ConfigError, match="--load-format bitsandbytes is for weights quantized with bitsandbytes"):
        tokens(floats, "bitsandbytes", quantization="int8")
    assert tokens(floats, "bitsandbytes", quantization="bitsandbytes")[0] == "bitsandbytes"


# ------------------------------------------------------------------------------------------------- memory


def test_pages_of_a_pickled_file_are_dropped_and_read_again(tmp_path: Path) -> None:
    weights = {f"{name}.weight": torch.randn(400, 300) for name in "abc"}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    found = load("pt", tmp_path)  # all are dropped
    assert all(torch.equal(found[name], value) for name, value in weights.items())


def test_pickled_numbers_of_the_other_byte_order(tmp_path: Path) -> None:
    weight = torch.randn(400, 300)
    torch.save({"a.weight": weight}, tmp_path / "whole.bin")
    with (
        zipfile.ZipFile(tmp_path / "whole.bin") as whole,
        zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as turned,
    ):
        for entry in whole.infolist():
            content = whole.read(entry)
            if entry.filename.endswith("/byteorder"):
                content = b"big"
            elif "/data/" in entry.filename:
                content = np.frombuffer(content, dtype=np.float32).byteswap().tobytes()
            turned.writestr(entry.filename, content)
    (tmp_path / "whole.bin").unlink()
    assert torch.equal(load("pt", tmp_path)["a.weight"], weight)


def test_the_largest_tensors_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_files, "_MAPPED_BYTES", 64)
    weights = {name: torch.zeros(count) for name, count in (("a", 4), ("b", 20), ("c", 8), ("d", 30))}
    save_file(weights, str(tmp_path / "model.safetensors"))
    stored = list(safetensors_files.read_header(tmp_path / "model.safetensors"))
    small = [name for name in stored if name in "ac"]
    assert list(load("safetensors", tmp_path)) == ["d", "b", *small]

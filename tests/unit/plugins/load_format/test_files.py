"""Weights: what is whole loads bit-equal, and whatever is damaged is refused with the file and the tensor named."""

import json
import os
import pickle
import random
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ferrule.errors import CheckpointError, ConfigError
from ferrule_files import safetensors, shards
from ferrule_plugins.load_format.dummy import Dummy
from ferrule_plugins.load_format.fastsafetensors import FastSafetensors
from ferrule_plugins.load_format.npcache import NumpyCache
from ferrule_plugins.load_format.pt import PyTorchFiles, check_torch
from ferrule_plugins.load_format.runai_streamer import RunaiStreamer
from ferrule_plugins.load_format.safetensors import Safetensors

WEIGHTS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.arange(8, dtype=torch.bfloat16).reshape(2, 2, 2),
    "c": torch.tensor([], dtype=torch.int64),
}


class TwoLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = torch.nn.Linear(4, 4, bias=True, dtype=torch.bfloat16)
        self.norm = torch.nn.LayerNorm(4)


def load(source, folder, **options):
    return dict(source.tensors(folder, TwoLayers(), options))


def same(found, expected=WEIGHTS):
    return found.keys() == expected.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in expected.items()
    )


def test_a_file_is_mapped_anew_for_every_few_tensors(tmp_path, monkeypatch):
    save_file(WEIGHTS, str(tmp_path / "model.safetensors"))
    monkeypatch.setattr(safetensors, "_MAPPED_BYTES", 1)
    found = load(Safetensors(), tmp_path)
    assert same(found)  # after the mappings are closed: who holds a tensor holds its memory


def shard(folder, save, single, ending):
    """Write two files with an index, as transformers does."""
    files = {f"w-1{ending}": ["a.weight"], f"w-2{ending}": ["b.weight", "c"]}
    for file, names in files.items():
        save({name: WEIGHTS[name] for name in names}, str(folder / file))
    index = {"metadata": {}, "weight_map": {name: file for file, names in files.items() for name in names}}
    (folder / f"{single}.index.json").write_text(json.dumps(index))
    return index


def raw_safetensors(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(start, stop, shape=(2,), dtype="U8"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


# ------------------------------------------------------------------------------------------------- whole files


@pytest.mark.parametrize(
    ("source", "save", "single", "ending"),
    [
        (Safetensors(), save_file, "model.safetensors", ".safetensors"),
        (FastSafetensors(), save_file, "model.safetensors", ".safetensors"),
        (RunaiStreamer(), save_file, "model.safetensors", ".safetensors"),
        (PyTorchFiles(), torch.save, "pytorch_model.bin", ".bin"),
    ],
)
def test_single_and_sharded_files_load_bit_equal(tmp_path, source, save, single, ending):
    assert type(source).refuses(tmp_path) is not None
    with pytest.raises(CheckpointError, match="has no"):
        load(source, tmp_path)
    index = shard(tmp_path, save, single, ending)
    assert type(source).refuses(tmp_path) is None or type(source) in {FastSafetensors, RunaiStreamer}
    assert same(load(source, tmp_path))
    assert source.place == str(tmp_path)  # after the last tensor; before, its file
    places = {name: source.place for name, _ in source.tensors(tmp_path, TwoLayers(), {})}
    assert places == {name: str(tmp_path / file) for name, file in index["weight_map"].items()}
    save(WEIGHTS, str(tmp_path / single))
    assert same(load(source, tmp_path))
    with pytest.raises(ConfigError, match="unknown key 'speed'"):
        load(source, tmp_path, speed=2)


def test_files_without_an_index_and_another_layout_beside_them(tmp_path):
    save_file({"a": torch.ones(1)}, str(tmp_path / "x.safetensors"))
    save_file({"b": torch.ones(1)}, str(tmp_path / "y.safetensors"))
    save_file({"a": torch.zeros(1)}, str(tmp_path / "consolidated.safetensors"))
    assert load(Safetensors(), tmp_path) == {"a": torch.ones(1), "b": torch.ones(1)}
    assert load(Safetensors(), tmp_path, ignore_patterns=("y*",)) == {"a": torch.ones(1)}


@pytest.mark.advisory("CVE-2025-24357")
def test_safetensors_are_preferred_where_both_are_there(tmp_path):
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    assert PyTorchFiles.refuses(tmp_path) is None
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    assert "safetensors" in PyTorchFiles.refuses(tmp_path)
    assert Safetensors.refuses(tmp_path) is None


def test_old_pickle_files_that_cannot_be_mapped(tmp_path):
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert same(load(PyTorchFiles(), tmp_path))


@pytest.mark.parametrize("source", [FastSafetensors(), RunaiStreamer()])
def test_other_readers_of_safetensors_refuse_what_is_damaged_too(source, tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(WEIGHTS, file)
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="truncated"):
        load(source, tmp_path)


@pytest.mark.parametrize("value", [0, -1, True, "8", 1.5])
def test_options_of_the_streamer(value, tmp_path):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="'concurrency' must be a whole number"):
        load(RunaiStreamer(), tmp_path, concurrency=value)
    before = dict(os.environ)
    assert same(load(RunaiStreamer(), tmp_path, concurrency=2, memory_limit=1))
    assert dict(os.environ) == before


# ------------------------------------------------------------------------------------------------- numpy's copy


def test_a_copy_is_made_once_and_again_when_the_files_change(tmp_path):
    file, source = tmp_path / "pytorch_model.bin", NumpyCache()
    torch.save(WEIGHTS, file)
    assert same(load(source, tmp_path))
    made = (tmp_path / "np" / "a.weight").stat()
    assert same(load(source, tmp_path))
    assert (tmp_path / "np" / "a.weight").stat().st_ino == made.st_ino
    changed = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
    torch.save(changed, file)
    os.utime(file, ns=(1, 1))
    assert same(load(source, tmp_path), changed)


def test_a_copy_that_another_program_made_is_read(tmp_path):
    (tmp_path / "np").mkdir()
    for name in ("x", "y.z"):
        with (tmp_path / "np" / name).open("wb") as file:
            np.save(file, np.arange(3, dtype=np.float32))
    (tmp_path / "np" / "weight_names.json").write_text('["x", "y.z"]')
    found = load(NumpyCache(), tmp_path)
    assert list(found) == ["x", "y.z"]
    assert torch.equal(found["x"], torch.arange(3.0))


def test_an_unfinished_copy_is_never_found(tmp_path):
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    torch.save({"a.weight": torch.ones(1), "../out": torch.ones(1)}, tmp_path / "other.bin")
    os.rename(tmp_path / "other.bin", tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot be the name of a file"):
        load(NumpyCache(), tmp_path)
    assert not (tmp_path / "np").exists()
    assert not (tmp_path.parent / "out").exists()
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    assert (tmp_path / ".np" / "a.weight").exists()  # what the first try has left
    assert same(load(NumpyCache(), tmp_path))
    assert not (tmp_path / ".np").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be read"),
        (b"\x93NUMPY\x01\x00", "cannot be read"),
        (pickle.dumps({"a": 1}), "cannot be read"),  # not unpickled
        (None, "No such file"),
    ],
)
def test_a_damaged_copy_is_an_error_that_names_the_file(tmp_path, content, said):
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    load(NumpyCache(), tmp_path)
    file = tmp_path / "np" / "b.weight"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match="b.weight") as caught:
        load(NumpyCache(), tmp_path)
    assert said in str(caught.value)
    assert "Remove" in caught.value.hint


@pytest.mark.parametrize("names", ["{", "{}", '["../a"]', '["a/b"]', '[""]', "[1]", '["ferrule.json"]'])
def test_a_damaged_list_of_names(tmp_path, names):
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    load(NumpyCache(), tmp_path)
    (tmp_path / "np" / "weight_names.json").write_text(names)
    with pytest.raises(CheckpointError):
        load(NumpyCache(), tmp_path)


def test_dummy_is_seeded_and_never_chosen_automatically():
    assert Dummy.refuses(None) is not None
    first, again, other = load(Dummy(), None), load(Dummy(), None, seed=0), load(Dummy(), None, seed=1)
    assert first.keys() == dict(TwoLayers().named_parameters()).keys()
    assert same(first, again)
    assert not torch.equal(first["matrix.weight"], other["matrix.weight"])
    assert first["matrix.weight"].dtype == torch.bfloat16
    assert 0 < first["matrix.weight"].abs().max() <= 0.05
    assert torch.equal(first["norm.weight"], torch.ones(4))
    with pytest.raises(ConfigError, match="'seed'"):
        load(Dummy(), None, seed="x")


def test_progress_is_in_the_log_where_there_is_no_terminal(tmp_path, monkeypatch, caplog):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    monkeypatch.setattr(shards, "_TOLD_SECONDS", 0.0)
    with caplog.at_level("INFO", logger="ferrule"):
        load(Safetensors(), tmp_path)
    told = [record.ferrule_fields for record in caplog.records if record.getMessage() == "loading weights"]
    assert [fields["done"] for fields in told][-1] == "100%"
    assert told[0]["rate"].endswith("MiB/s")


# ------------------------------------------------------------------------------------------------- damaged ones


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "truncated"),
        (raw_safetensors({}, length=1 << 40), "truncated"),
        (raw_safetensors({}, length=(100 << 20) + 1), "truncated"),
        (raw_safetensors(b"{"), "damaged header"),
        (raw_safetensors(b"[" * 5000), "damaged header"),
        (raw_safetensors(b"[]"), "not a JSON object"),
        (raw_safetensors(b'{"w": 1, "w": 1}'), "twice"),
        (raw_safetensors({"w": 5}), "'w' has no valid shape"),
        (raw_safetensors({"w": entry(0, 2, shape=(-2,))}, b"12"), "'w' has no valid shape"),
        (raw_safetensors({"w": entry(0, 2, dtype="F7")}, b"12"), "'w' has the unknown type 'F7'"),
        (raw_safetensors({"w": entry(0, 2, shape=(3,))}, b"12"), "'w' of shape"),
        (raw_safetensors({"w": entry(2, 0)}, b"12"), "'w' of shape"),
        (raw_safetensors({"w": entry(0, 2)}, b"1"), "truncated: tensor 'w'"),
        (raw_safetensors({"w": entry(0, 2)}, b"123"), "1 bytes that belong to no tensor"),
        (raw_safetensors({"v": entry(0, 2), "w": entry(1, 3)}, b"123"), "'w' overlaps"),
        (raw_safetensors({"v": entry(0, 2), "w": entry(3, 5)}, b"12345"), "'w' leaves a hole"),
    ],
)
def test_damaged_safetensors(tmp_path, content, said):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=said) as caught:
        load(Safetensors(), tmp_path)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "save", "single", "ending"),
    [
        (Safetensors(), save_file, "model.safetensors", ".safetensors"),
        (PyTorchFiles(), torch.save, "pytorch_model.bin", ".bin"),
    ],
)
def test_an_index_that_does_not_fit_its_files(tmp_path, source, save, single, ending):
    index = shard(tmp_path, save, single, ending)

    def with_map(**changes):
        changed = {key: value for key, value in {**index["weight_map"], **changes}.items() if value is not None}
        (tmp_path / f"{single}.index.json").write_text(json.dumps({"weight_map": changed}))

    with_map(d=f"w-1{ending}")
    with pytest.raises(CheckpointError, match=rf"w-1\{ending} has no tensor 'd'"):
        load(source, tmp_path)
    with_map(c=None)
    with pytest.raises(CheckpointError, match=rf"w-2\{ending} holds the tensor 'c'"):
        load(source, tmp_path)
    with_map(d=f"w-3{ending}")
    with pytest.raises(CheckpointError, match=rf"w-3\{ending} is missing"):
        load(source, tmp_path)
    for outside in (f"../w-1{ending}", "/etc/passwd", "", f"x/w-1{ending}"):
        with_map(c=outside)
        with pytest.raises(CheckpointError, match="'c' is said to be in .* not a file name"):
            load(source, tmp_path)
    with_map()
    save({"a.weight": WEIGHTS["a.weight"], "b.weight": WEIGHTS["b.weight"]}, str(tmp_path / f"w-1{ending}"))
    with pytest.raises(CheckpointError, match=r"'b\.weight' is in .*w-1.* and .*w-2"):
        load(source, tmp_path)
    (tmp_path / f"{single}.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no 'weight_map'"):
        load(source, tmp_path)


@pytest.mark.parametrize("kind", ["flip", "cut"])
@pytest.mark.parametrize(("source", "save", "name"), [
    (Safetensors(), save_file, "model.safetensors"),
    (PyTorchFiles(), torch.save, "pytorch_model.bin"),
])  # fmt: skip
def test_damage_is_refused_or_changes_values_only(tmp_path, source, save, name, kind):
    """Raise CheckpointError, or read tensors of the same names, shapes and types, whatever byte is wrong."""
    file = tmp_path / name
    save(WEIGHTS, str(file))
    whole, draw, refused = file.read_bytes(), random.Random(7), 0
    for _ in range(100):
        at = draw.randrange(len(whole))
        flipped = whole[:at] + bytes([whole[at] ^ (1 << draw.randrange(8))]) + whole[at + 1 :]
        file.write_bytes(flipped if kind == "flip" else whole[:at])
        try:
            found = load(source, tmp_path)
        except CheckpointError as error:
            refused += name in str(error)
        else:
            assert all(isinstance(tensor, torch.Tensor) for tensor in found.values())
    assert refused == 100 if kind == "cut" else refused > 0


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.advisory("CVE-2025-24357", "CVE-2026-15976", "CVE-2025-67729")
@pytest.mark.parametrize("new_format", [True, False])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path, new_format):
    canary = tmp_path / "canary"
    evil = {"a": torch.ones(1), "b": Canary(str(canary))}
    torch.save(evil, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=new_format)
    for _ in range(2):  # and there is no other way to read it, for a second try
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin was refused") as caught:
            load(PyTorchFiles(), tmp_path)
        assert not canary.exists()
        assert "safetensors" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([torch.ones(1)], "holds a list"),
        ({"a": 1}, "'a' is not a dense tensor"),
        ({"a": torch.eye(2).to_sparse()}, "'a' is not a dense tensor"),
        ({1: torch.ones(1)}, "name is of the type int"),
    ],
)
def test_pickles_of_something_else(tmp_path, content, said):
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=said):
        load(PyTorchFiles(), tmp_path)


@pytest.mark.advisory("CVE-2025-32434")
@pytest.mark.parametrize("version", ["2.5.1", "1.13", "2.5.0+cu121", "unknown"])
def test_a_torch_whose_unpickler_can_be_escaped_is_refused(version):
    with pytest.raises(CheckpointError, match="cannot load pickle files safely"):
        check_torch(version)
    check_torch("2.6.0")
    check_torch("2.13.0+cpu")

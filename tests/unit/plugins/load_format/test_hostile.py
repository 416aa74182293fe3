"""Files made to do harm: one clear error each, and no memory for what a file only claims to hold."""

import io
import json
import pickle
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

from ferrule.errors import CheckpointError
from ferrule_files import shards
from ferrule_files.safetensors import read_header
from ferrule_plugins.load_format import npcache, pt
from ferrule_plugins.load_format.npcache import NumpyCache
from ferrule_plugins.load_format.safetensors import Safetensors
from tests.mutations import bounded_memory, fuzz, headed, mutated, rewritten

WEIGHTS = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}


def load(source, folder):
    return dict(source.tensors(folder, torch.nn.Module(), {"use_tqdm_on_load": False}))


def pickled(value, **options):
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def numpy_file(shape, data=b""):
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return stream.getvalue() + data


def index(content):
    return json.dumps({"weight_map": content}).encode()


def read_origin(file):
    (file.parent / "weight_names.json").touch()
    npcache._integers(file.parent)
    npcache._is_of(file.parent, {"m.bin": [1, 2]})


PARSERS = {
    "model.safetensors": (save(WEIGHTS), lambda file: load(Safetensors(), file.parent), mutated),
    "model.safetensors, other values": (save(WEIGHTS), lambda file: load(Safetensors(), file.parent), headed),
    "pytorch_model.bin": (pickled(WEIGHTS), pt.read_file, mutated),
    "pytorch_model.bin, before torch 1.6": (
        pickled(WEIGHTS, _use_new_zipfile_serialization=False),
        pt.read_file,
        mutated,
    ),
    "w": (numpy_file((2, 3), bytes(24)), lambda file: npcache._load(file, False), mutated),
    "weight_names.json": (b'["a.weight", "b"]', lambda file: npcache._names(file.parent), rewritten),
    "ferrule.json": (b'{"sources": {"m.bin": [1, 2]}, "bfloat16": ["a"]}', read_origin, rewritten),
    "x.index.json": (index({"a": "m-1.safetensors", "b": "m-2.safetensors"}), shards.weight_map, rewritten),
}


def survivors(folder, name, count, seed):
    whole, read, mutate = PARSERS[name]
    return fuzz(folder / name.partition(",")[0], whole, read, count, seed, mutate)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", PARSERS)
def test_mutated_files_are_read_or_refused(tmp_path, name):
    assert 0 < survivors(tmp_path, name, 500, 1) < 500


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", PARSERS)
def test_a_hundred_thousand_mutated_files_are_read_or_refused(tmp_path, name):
    with bounded_memory():
        assert 0 < survivors(tmp_path, name, 100_000, 2) < 100_000


@pytest.mark.advisory("CVE-2024-37032")
@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300, "..", ".", "/etc/passwd", "a\\b", "a\nb"])
def test_names_that_are_no_files(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_bytes(index({"a": name}))
    with pytest.raises(CheckpointError, match="which is not a file name"):
        load(Safetensors(), tmp_path)
    (tmp_path / "weight_names.json").write_text(json.dumps([name]))
    with pytest.raises(CheckpointError, match="cannot be the name of a file"):
        npcache._names(tmp_path)


@pytest.mark.parametrize("shape", [[0, 1 << 70], [0, 1 << 40, 1 << 40], [1] * 65])
def test_shapes_that_no_tensor_can_have(tmp_path, shape):
    size = 0 if 0 in shape else 1
    header = json.dumps({"a": {"dtype": "U8", "shape": shape, "data_offsets": [0, size]}}).encode()
    (tmp_path / "m").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    with pytest.raises(CheckpointError, match="'a' has a shape that no tensor can have"):
        read_header(tmp_path / "m")


def test_complex_numbers_are_no_weights(tmp_path):
    """Refuse complex numbers, which not every library that reads these files knows."""
    header = json.dumps({"a": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "m").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match="'a' has the unknown type 'C64'"):
        read_header(tmp_path / "m")


@pytest.mark.parametrize("content", [
    numpy_file((1 << 36,), b"1234"),  # 256 GiB in a file of 132 bytes
    numpy_file((-2, -3), bytes(24)),
    b"PK\3\4" + bytes(100),  # numpy takes it for an archive
])  # fmt: skip
def test_numpy_files_that_are_not_what_they_say(tmp_path, content):
    (tmp_path / "w").write_bytes(content)
    with pytest.raises(CheckpointError, match="w cannot be read"):
        npcache._load(tmp_path / "w", False)


def test_a_copy_whose_types_are_not_as_listed(tmp_path):
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    load(NumpyCache(), tmp_path)
    file = tmp_path / "np" / "ferrule.json"
    origin = json.loads(file.read_text())
    file.write_text(json.dumps({**origin, "bfloat16": ["a", "b"]}))
    with pytest.raises(CheckpointError, match="its type is float32, not int16"):
        load(NumpyCache(), tmp_path)
    file.write_text(json.dumps({**origin, "bfloat16": 1}))
    with pytest.raises(CheckpointError, match="'bfloat16' is not a list"):
        load(NumpyCache(), tmp_path)


@pytest.mark.parametrize("value", [torch.zeros(1).expand(1 << 40), torch.zeros(1 << 40, device="meta")])
def test_a_tensor_larger_than_its_bytes(tmp_path, value):
    (tmp_path / "m.bin").write_bytes(pickled({"a": value}))
    with pytest.raises(CheckpointError, match="'a' has fewer bytes than its shape"):
        pt.read_file(tmp_path / "m.bin")


@pytest.mark.advisory("CVE-2024-37032")
def test_a_compressed_archive_is_not_unpacked(tmp_path, monkeypatch):
    whole = zipfile.ZipFile(io.BytesIO(pickled(WEIGHTS)))
    with zipfile.ZipFile(tmp_path / "m.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        for entry in whole.infolist():
            archive.writestr(entry.filename, whole.read(entry))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("unpacked"))
    with pytest.raises(CheckpointError, match="m.bin was refused"):
        pt.read_file(tmp_path / "m.bin")


def doubled(times, end):
    """Return the pickle of a dictionary with a tuple that holds another one twice, and so on."""
    nested = b"".join(b"h" + bytes([place]) + b"\x86q" + bytes([place + 1]) for place in range(times))
    return b"\x80\x02}(K\x01K\x01\x86q\x00" + nested + end


@pytest.mark.parametrize("archived", [True, False])
@pytest.mark.parametrize("end", [b"K\x01u.", b"0X\x01\x00\x00\x00ah\x3cu."])
def test_tuples_that_take_endless_time(tmp_path, archived, end):
    """Refuse tuples that take endless time to hash as names, or to show in a message."""
    if archived:
        whole = zipfile.ZipFile(io.BytesIO(pickled(WEIGHTS)))
        with zipfile.ZipFile(tmp_path / "m.bin", "w") as archive:
            for entry in whole.infolist():
                own = entry.filename.endswith("data.pkl")
                archive.writestr(entry.filename, doubled(60, end) if own else whole.read(entry))
    else:
        head = b"".join(pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {}))
        (tmp_path / "m.bin").write_bytes(head + doubled(60, end) + pickle.dumps([], 2))
    with pytest.raises(CheckpointError, match="m.bin was refused") as told:
        pt.read_file(tmp_path / "m.bin")
    assert "a tuple of more than 1000 objects" in str(told.value.__cause__)
    assert len(str(told.value)) < 500


def test_a_folder_with_links_in_a_circle(tmp_path):
    save_file(WEIGHTS, str(tmp_path / "model.safetensors"))
    (tmp_path / "self").symlink_to(tmp_path)
    assert load(Safetensors(), tmp_path).keys() == WEIGHTS.keys()
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        load(Safetensors(), tmp_path)

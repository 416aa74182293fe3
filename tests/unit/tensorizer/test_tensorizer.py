"""tensorizer's files: the library's are read bit-equal, and it reads ours; what is damaged is one clear error."""

import os
import resource
import struct

import pytest
import torch

from ferrule.errors import CheckpointError, ConfigError
from ferrule_nn import ROWS, Embedding, Naming
from ferrule_tensorizer import layout
from ferrule_tensorizer.load_format import Tensorizer
from ferrule_tensorizer.read import Reading, read_tensors
from ferrule_tensorizer.write import write
from tests.mutations import fuzz

KEY = bytes(range(32))
WEIGHTS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.arange(8, dtype=torch.bfloat16).reshape(2, 2, 2),
    "f8": torch.ones(5).to(torch.float8_e4m3fn),
    "half": torch.ones(2, 1, dtype=torch.float16),
    "ids": torch.arange(3),
    "mask": torch.tensor([True, False]),
    "one": torch.tensor(2.5),
    "none": torch.empty(0, 3),
    "large": torch.arange(1_100_000, dtype=torch.int32).reshape(1100, 1000),  # several chunks of an encrypted file
}


def raw(tensor):
    return tensor.dtype, tuple(tensor.shape), bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def same(found, expected=WEIGHTS):
    return {name: raw(value) for name, value in found.items()} == {name: raw(value) for name, value in expected.items()}


def read(file, **how):
    return {entry.name: tensor for entry, tensor in read_tensors(file, Reading(**how))}


def load(folder, model=None, **options):
    return dict(Tensorizer().tensors(folder, model or torch.nn.Module(), options))


def keyed(folder, key=KEY):
    (folder / "key").write_bytes(key)
    return {"encryption_keyfile": str(folder / "key")}


# ------------------------------------------------------------------------------------------------- whole files


@pytest.mark.parametrize("key", [None, KEY])
def test_written_and_read_again(tmp_path, key):
    file = tmp_path / "model.tensors"
    write(file, WEIGHTS, key)
    assert same(read(file, readers=3, verify=True, key=key))
    options = keyed(tmp_path) if key else {}
    assert same(load(tmp_path, verify_hash=True, num_readers=2, **options))
    assert same(load(None, tensorizer_config={"tensorizer_dir": str(tmp_path), **options}))


@pytest.mark.parametrize("encrypted", [False, True])
def test_the_library_reads_what_we_write_and_writes_what_we_read(tmp_path, encrypted):
    tensorizer = pytest.importorskip("tensorizer")
    try:
        writing = tensorizer.EncryptionParams(KEY) if encrypted else None
        reading = tensorizer.DecryptionParams.from_key(KEY) if encrypted else None
    except (OSError, RuntimeError):
        pytest.skip("the library finds no libsodium here")
    key = KEY if encrypted else None
    weights = {name: value for name, value in WEIGHTS.items() if value.numel() or not encrypted}
    theirs, ours = tmp_path / "theirs.tensors", tmp_path / "ours.tensors"
    serializer = tensorizer.TensorSerializer(str(theirs), encryption=writing)
    serializer.write_state_dict(weights)
    serializer.close()
    assert same(read(theirs, verify=True, key=key), weights)
    write(ours, weights, key)
    opened = tensorizer.TensorDeserializer(str(ours), device="cpu", verify_hash=True, encryption=reading)
    assert same({name: opened[name].data for name in opened.keys()}, weights)  # noqa: SIM118
    opened.close()


def test_a_module_by_the_library(tmp_path):
    tensorizer = pytest.importorskip("tensorizer")
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    module.register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
    serializer = tensorizer.TensorSerializer(str(tmp_path / "model.tensors"))
    serializer.write_module(module)
    serializer.close()
    assert same(load(tmp_path, verify_hash=True), module.state_dict())


class Embedded(torch.nn.Module):
    naming = Naming()

    def __init__(self):
        super().__init__()
        self.embed_tokens = Embedding(70, 4, split=ROWS)


def test_a_file_of_vllms_worker(tmp_path):
    buffers = {"layer.rotary_emb.cos_sin_cache", "layer.attn._k_scale", "layer.bias_of_router"}
    kept = {"embed_tokens.weight", "layer.bias_of_router"}
    tensors = {
        "embed_tokens.weight": torch.arange(512.0).reshape(128, 4),
        **{name: torch.tensor(1.0) for name in sorted(buffers)},
    }
    file = tmp_path / "model.tensors"

    def saved(**more):
        write(file, {**tensors, **more})
        content = bytearray(file.read_bytes())
        for name in buffers:
            mark, start = struct.pack("<H", len(name)) + name.encode(), 0
            content[content.index(mark) + len(mark)] = layout.BUFFER  # in the index, and behind the kind in the header
            start = content.rindex(mark)
            content[start - 1] = layout.BUFFER
        file.write_bytes(content)

    saved()
    assert load(tmp_path, Embedded()).keys() == kept | {"layer.attn._k_scale"}
    assert load(tmp_path, Embedded())["embed_tokens.weight"].shape == (128, 4)
    cut = load(tmp_path, Embedded(), vllm_tensorized=True)
    assert torch.equal(cut["embed_tokens.weight"], tensors["embed_tokens.weight"][:70])
    assert Tensorizer().shapes(tmp_path, {}) is not None
    saved(**{".vllm_tensorized_marker": torch.ones(1)})
    found = load(tmp_path, Embedded())
    assert found.keys() == cut.keys() == kept
    assert found["embed_tokens.weight"].shape == (70, 4)
    assert Tensorizer().shapes(tmp_path, {}) is None
    stated = '{"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "gptq"}}'
    (tmp_path / "config.json").write_text(stated)
    with pytest.raises(CheckpointError, match="laid out for vLLM's kernels"):
        load(tmp_path, Embedded())


def test_it_is_chosen_where_there_is_nothing_else(tmp_path):
    assert "has no model.tensors" in Tensorizer.refuses(tmp_path)
    assert Tensorizer.refuses(None) is not None
    write(tmp_path / "model.tensors", WEIGHTS)
    assert Tensorizer.refuses(tmp_path) is None
    assert Tensorizer().shapes(tmp_path, {})["a.weight"] == (3, 4)
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert "other weights" in Tensorizer.refuses(tmp_path)


# ------------------------------------------------------------------------------------------------- options


def test_which_file(tmp_path):
    with pytest.raises(CheckpointError, match="has no .tensors file"):
        load(tmp_path)
    os.mkfifo(tmp_path / "pipe.tensors")
    write(tmp_path / "x.tensors", {"a": torch.ones(1)})
    assert load(tmp_path).keys() == {"a"}
    write(tmp_path / "y.tensors", {"b": torch.ones(1)})
    with pytest.raises(CheckpointError, match="several .tensors files: x.tensors, y.tensors"):
        load(tmp_path)
    assert load(tmp_path, tensorizer_uri=str(tmp_path / "y.tensors")).keys() == {"b"}
    with pytest.raises(CheckpointError, match="is not a file"):
        load(tmp_path, tensorizer_uri=str(tmp_path / "z.tensors"))
    write(tmp_path / "model-rank-000.tensors", {"b": torch.ones(1)})
    for options in ({}, {"tensorizer_uri": f"{tmp_path}/model-rank-%03d.tensors"}):
        with pytest.raises(CheckpointError, match="for several GPUs"):
            load(tmp_path, **options)
    with pytest.raises(ConfigError, match="only files and s3:// addresses are read"):
        load(tmp_path, tensorizer_uri="https://example.com/model.tensors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speed": 1}, "unknown key 'speed'"),
        ({"tensorizer_config": {"speed": 1}}, "unknown key 'speed'"),
        ({"tensorizer_config": "x"}, "'tensorizer_config' must be an object"),
        ({"num_readers": 0}, "'num_readers' must be a whole number from 1 to 64, not 0"),
        ({"num_readers": True}, "'num_readers' must be a whole number"),
        ({"verify_hash": "yes"}, "'verify_hash' must be true or false, not 'yes'"),
        ({"tensorizer_uri": ["a"]}, "'tensorizer_uri' must be a text"),
        ({"s3_secret_access_key": ["hidden"]}, "'s3_secret_access_key' must be a text.$"),
    ],
)
def test_settings_that_are_wrong(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, **options)


def test_keys(tmp_path):
    write(tmp_path / "model.tensors", WEIGHTS, KEY)
    with pytest.raises(CheckpointError, match="is encrypted"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="'a.weight' cannot be read: The key does not fit"):
        load(tmp_path, **keyed(tmp_path, bytes(32)))
    for wrong in (b"", KEY[:31], KEY + b"\n"):
        with pytest.raises(ConfigError, match="does not have 32 bytes"):
            load(tmp_path, **keyed(tmp_path, wrong))
    with pytest.raises(CheckpointError, match="is not a file"):
        load(tmp_path, encryption_keyfile=str(tmp_path / "none"))
    write(tmp_path / "model.tensors", WEIGHTS)
    with pytest.raises(CheckpointError, match="is not encrypted, and a key was given"):
        load(tmp_path, **keyed(tmp_path))


# ------------------------------------------------------------------------------------------------- hostile files

SMALL = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
MUTATED = {"plain": (None, False), "hashed": (None, True), "encrypted": (KEY, False)}


def mutations(folder, name, count, seed):
    key, verify = MUTATED[name]
    file = folder / "model.tensors"
    write(file, SMALL, key)
    return fuzz(file, file.read_bytes(), lambda place: read(place, key=key, verify=verify), count, seed)


@pytest.mark.parametrize("name", MUTATED)
def test_mutated_files_are_read_or_refused(tmp_path, name):
    assert 0 < mutations(tmp_path, name, 400, 1) < 400


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATED)
def test_a_hundred_thousand_mutated_files_are_read_or_refused(tmp_path, name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert 0 < mutations(tmp_path, name, 100_000, 2) < 100_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB


def entry(name, shape, header, data, size, stated=b"<f4", kind=0):
    named = struct.pack("<H", len(name)) + name
    return (
        named
        + bytes([kind, len(stated)])
        + stated
        + struct.pack(f"<B{len(shape)}I", len(shape), *shape)
        + (layout.PLACES.pack(header, data, size))
    )


def file_of(*entries, version=2, count=None, flags=0, length=None, data=bytes(400)):
    index = b"".join(entries)
    header = layout.HEADER.pack(version, flags.to_bytes(32, "little"), 0, len(entries) if count is None else count)
    return layout.MAGIC + header + struct.pack("<Q", len(index) if length is None else length) + index + data


HUGE = 0xFFFFFFFF
HOSTILE = {
    "an empty file": (b"", "first bytes"),
    "another format": (b"PK\3\4" * 40, "first bytes"),
    "a pickle": (b"\x80\4cos\nsystem\n" * 9, "first bytes"),
    "a later version": (file_of(version=6), "its version is 6"),
    "unknown flags": (file_of(version=5, flags=4), "unknown flags"),
    "flags of a later version": (file_of(version=4, flags=2), "do not belong to version 4"),
    "a large index": (file_of(length=1 << 62), "its index has"),
    "more tensors than bytes": (file_of(entry(b"a", (1,), 200, 210, 4), count=1 << 60), "it has 1152921504606846976"),
    "no tensors": (file_of(), "it has 0 tensors"),
    "an index that ends early": (file_of(entry(b"a", (1,), 200, 210, 4), count=2), "it ends too early"),
    "a type that is code": (file_of(entry(b"a", (1,), 200, 210, 4, b"|O")), "unknown type '|O'"),
    "a type of torch's that is none": (file_of(entry(b"a", (1,), 200, 210, 4, b"<V4\0torch.load")), "unknown type"),
    "an unknown kind": (file_of(entry(b"a", (1,), 200, 210, 4, kind=7)), "unknown kind 7"),
    "a size that overflows": (file_of(entry(b"a", (HUGE, HUGE, HUGE), 200, 210, 4)), "shape that no tensor can have"),
    "an empty tensor of great size": (file_of(entry(b"a", (0, HUGE, HUGE), 200, 210, 0)), "shape that no tensor"),
    "zeros that are not there": (file_of(entry(b"a", (HUGE, 16), 200, 210, 0)), "does not have 0 bytes"),
    "data behind the end": (file_of(entry(b"a", (1 << 30,), 200, 210, 4 << 30)), "truncated: tensor 'a'"),
    "data in the index": (file_of(entry(b"a", (1,), 5, 20, 4)), "begins where"),
    "a header behind the data": (file_of(entry(b"a", (1,), 210, 200, 4)), "begins where"),
    "a large header": (file_of(entry(b"a", (1,), 200, 1 << 40, 4)), "begins where"),
    "overlapping data": (
        file_of(entry(b"a", (9,), 200, 210, 36), entry(b"b", (9,), 220, 230, 36)),
        "tensor 'b' begins where",
    ),
    "a name twice": (file_of(entry(b"a", (1,), 200, 210, 4), entry(b"a", (1,), 220, 230, 4)), "'a' occurs twice"),
    "a name of control codes": (file_of(entry(b"a\n\x1b", (1,), 200, 210, 4)), "has the name"),
    "a name that is not text": (file_of(entry(b"\xff", (1,), 200, 210, 4)), "decode"),
    "a nested name": (file_of(entry(b'\x1e["a",0]', (1,), 200, 210, 4)), "dictionaries or lists"),
    "no header": (file_of(entry(b"a", (1,), 200, 210, 4)), "'a' is damaged"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files(tmp_path, what):
    content, message = HOSTILE[what]
    (tmp_path / "model.tensors").write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path / "model.tensors") in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB


def test_files_that_were_cut_or_changed(tmp_path):
    file = tmp_path / "model.tensors"
    write(file, SMALL)
    whole = file.read_bytes()
    os.truncate(file, len(whole) - 1)
    with pytest.raises(CheckpointError, match="truncated: tensor 'b'"):
        load(tmp_path)
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert load(tmp_path).keys() == SMALL.keys()
    with pytest.raises(CheckpointError, match="'b' is damaged: its CRC32"):
        load(tmp_path, verify_hash=True)


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    file = tmp_path / "model.tensors"
    write(file, SMALL)
    reading = read_tensors(file, Reading())
    next(reading)
    os.truncate(file, layout.read_index(file).entries[1].data)
    with pytest.raises(CheckpointError, match="'b' is damaged: the file ends within it"):
        next(reading)

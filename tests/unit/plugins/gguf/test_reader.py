"""Headers of GGUF files: what is read, and that whatever else a file says is one clear error."""

from __future__ import annotations

import resource
import struct
from pathlib import Path

import pytest

from ferrule.errors import CheckpointError
from ferrule_files.gguf.reader import find_files, read_header, read_model
from tests.mutations import HUGE, fuzz
from tests.unit.plugins.gguf.files import entry, file, tensor, text

F32, Q8_0, IQ1_S, F64 = 0, 8, 19, 28
ALL = [
    entry("general.architecture", "llama"),
    entry("llama.block_count", 3),
    entry("llama.rope.freq_base", 0.5),
    entry("tokenizer.ggml.add_bos_token", True),
    entry("tokenizer.ggml.tokens", ["a", "é"]),
    entry("tokenizer.ggml.scores", [1.0, -2.0]),
]
TWO = [tensor("b", (32, 2), Q8_0, 0), tensor("a", (4,), F32, 96)]  # 68 bytes, then 16


def written(folder: Path, content: bytes, name: str = "model.gguf") -> Path:
    place = folder / name
    place.write_bytes(content)
    return place


def test_metadata_and_tensors_are_read(tmp_path: Path) -> None:
    place = written(tmp_path, file(ALL, TWO, 112))
    metadata, infos = read_header(place)
    assert metadata["llama.block_count"] == 3
    assert metadata["llama.rope.freq_base"] == 0.5
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["tokenizer.ggml.tokens"] == ["a", "é"]
    assert metadata["tokenizer.ggml.scores"] == [1.0, -2.0]
    assert [(info.name, info.shape, info.num_bytes) for info in infos] == [("b", (2, 32), 68), ("a", (4,), 16)]
    assert place.read_bytes()[infos[1].start :][:3] == bytes((96, 97, 98))


def test_version_2_is_read_and_others_are_named(tmp_path: Path) -> None:
    assert read_header(written(tmp_path, file(version=2))) == ({}, [])
    for version, said in ((1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")):
        with pytest.raises(CheckpointError, match=said):
            read_header(written(tmp_path, file(version=version)))


ARRAY = struct.pack("<I", 9)
HOSTILE = {
    "no magic": (b"GGML" + file(ALL, TWO, 112)[4:], "not a GGUF file"),
    "empty": (b"", "empty"),
    "tensors": (file(ALL, TWO, 112, counts=(HUGE, 6)), "tensors do not fit"),
    "entries": (file(ALL, TWO, 112, counts=(2, HUGE)), "metadata entries do not fit"),
    "more tensors than there are": (file(ALL, TWO, 112, counts=(3, 6)), "damaged"),
    "string": (file([struct.pack("<Q", HUGE) + b"x"]), "a string has"),
    "string behind the end": (file([struct.pack("<Q", 200) + b"x"]), "ends behind it"),
    "array": (file([text("k") + ARRAY + struct.pack("<IQ", 8, HUGE)]), "the array 'k' has"),
    "array behind the end": (file([text("k") + ARRAY + struct.pack("<IQ", 8, 1 << 20)]), "ends behind it"),
    "numbers behind the end": (file([text("k") + ARRAY + struct.pack("<IQ", 10, 1 << 20)]), "ends behind it"),
    "nested arrays": (file([text("k") + ARRAY + struct.pack("<IQ", 9, 1) + ARRAY * 9]), "is of arrays"),
    "type of a value": (file([text("k") + struct.pack("<IQ", 99, 1)]), "unknown type 99"),
    "type of an array": (file([text("k") + ARRAY + struct.pack("<IQ", 99, 1)]), "unknown type 99"),
    "truth": (file([text("k") + struct.pack("<IB", 7, 2)]), "neither 0 nor 1"),
    "a key twice": (file([entry("k", 1), entry("k", 1)]), "'k' is there twice"),
    "a tensor twice": (file([], [TWO[1], TWO[1]], 512), "a tensor is there twice"),
    "no dimension": (file([], [tensor("a", (), F32, 0)], 64), "0 dimensions"),
    "many dimensions": (file([], [text("a") + struct.pack("<I", 1 << 31)], 64), "dimensions"),
    "dimension 0": (file([], [tensor("a", (0, 4), F32, 0)], 64), "shape"),
    "overflow": (file([], [tensor("a", (1 << 32, 1 << 32), F32, 0)], 64), "shape"),
    "dimension 2^63": (file([], [tensor("a", (HUGE,), F32, 0)], 64), "shape"),
    "rows that are not blocks": (file([], [tensor("a", (33, 2), Q8_0, 0)], 640), "not a multiple of 32"),
    "a type that is not read": (file([], [tensor("a", (256,), IQ1_S, 0)], 640), "type IQ1_S"),
    "a type of integers": (file([], [tensor("a", (256,), F64, 0)], 4096), "type F64"),
    "a type that is unknown": (file([], [tensor("a", (256,), 77, 0)], 640), "77, which is unknown"),
    "behind the end": (file([], [tensor("a", (32,), F32, 64)], 128), "behind the end"),
    "far behind the end": (file([], [tensor("a", (32,), F32, HUGE)], 128), "behind the end"),
    "misaligned": (file([], [tensor("a", (4,), F32, 16)], 128), "multiple of 32"),
    "overlapping": (file([], [TWO[0], tensor("a", (4,), F32, 64)], 128), "overlaps"),
    "alignment": (file([entry("general.alignment", 33)], TWO, 128), "alignment is 33"),
    "alignment of text": (file([entry("general.alignment", "x")], TWO, 128), "alignment is 'x'"),
}


@pytest.mark.advisory("CVE-2024-23605", "CVE-2024-37032")
@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_file_may_not_say_is_one_error_that_names_it(name: str, tmp_path: Path) -> None:
    content, said = HOSTILE[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=said) as caught:
        read_header(written(tmp_path, content))
    assert "model.gguf" in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


@pytest.mark.advisory("CVE-2024-23605")
def test_a_file_that_is_cut_anywhere_is_an_error(tmp_path: Path) -> None:
    whole = file(ALL, TWO, 112)
    for length in range(len(whole)):
        with pytest.raises(CheckpointError):
            read_header(written(tmp_path, whole[:length]))


# ------------------------------------------------------------------------------------------------ several files


def shard(number: int, count: int, name: str) -> bytes:
    keys = [entry("split.no", number), entry("split.count", count), *(ALL if not number else ())]
    return file(keys, [tensor(name, (8,), F32, 0)], 32)


def shards(folder: Path, names: str = "ab") -> list[Path]:
    return [
        written(folder, shard(n, len(names), name), f"m-{n + 1:05d}-of-{len(names):05d}.gguf")
        for n, name in enumerate(names)
    ]


def test_shards_are_one_model_whichever_is_named(tmp_path: Path) -> None:
    files = shards(tmp_path)
    for place in (*files, tmp_path):
        model = read_model(find_files(place))
        assert model.architecture == "llama"
        assert [(name, info.file) for name, info in model.tensors.items()] == [("a", files[0]), ("b", files[1])]


def test_shards_that_are_not_a_series_are_errors(tmp_path: Path) -> None:
    first, second = shards(tmp_path)
    second.write_bytes(shard(1, 3, "b"))
    with pytest.raises(CheckpointError, match="one of 3 files, not 2"):
        read_model(find_files(first))
    second.write_bytes(shard(1, 2, "a"))
    with pytest.raises(CheckpointError, match="'a' is there twice"):
        read_model(find_files(first))
    second.unlink()
    with pytest.raises(CheckpointError, match="00002-of-00002.gguf is missing"):
        find_files(first)
    second.symlink_to(second.name)  # a cycle
    with pytest.raises(CheckpointError, match="missing"):
        find_files(first)
    with pytest.raises(CheckpointError, match="its name does not say"):
        read_model(find_files(first.rename(tmp_path / "alone.gguf")))
    with pytest.raises(CheckpointError, match="number is 00003 of 00002"):
        find_files(tmp_path / "m-00003-of-00002.gguf")


def test_a_folder_with_several_models_names_them(tmp_path: Path) -> None:
    for name in ("m-Q4_0.gguf", "m-Q8_0.gguf", "mmproj-m.gguf", "m.mmproj-F16.gguf", "imatrix_m.gguf"):
        written(tmp_path, file(ALL), name)
    with pytest.raises(CheckpointError, match="m-Q4_0.gguf, m-Q8_0.gguf") as caught:
        find_files(tmp_path)
    assert "mmproj" not in str(caught.value)
    assert "imatrix" not in str(caught.value)
    assert [each.name for each in find_files(tmp_path, ["*Q4_0*"])] == ["m-Q8_0.gguf"]


# ------------------------------------------------------------------------------------------------ mutations


def check(place: Path) -> None:
    size = place.stat().st_size
    tensors = read_model([place]).tensors.values()
    assert all(0 < info.start <= info.start + info.num_bytes <= size for info in tensors)


@pytest.mark.advisory("CVE-2024-23605")
def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    assert 0 < fuzz(tmp_path / "model.gguf", file(ALL, TWO, 112), check, 2000, 1) < 2000


@pytest.mark.slow
def test_a_hundred_thousand_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert 0 < fuzz(tmp_path / "model.gguf", file(ALL, TWO, 112), check, 100_000, 2) < 100_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB

"""`--pt-load-map-location`: torch files state where their tensors were saved, and options where they go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule.config.locations import map_locations
from ferrule.errors import ConfigError
from ferrule_files import locations
from ferrule_plugins.load_format.npcache import NumpyCache
from ferrule_plugins.load_format.pt import PyTorchFiles

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4.0), "c": torch.arange(5, dtype=torch.int64)}
SAVED = {"a": "cuda:0", "b": "cuda:1", "c": "cpu"}


@pytest.fixture(params=[True, False], ids=["zip", "legacy"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a file that was saved on two GPUs and the host, as far as it says."""
    stated = {WEIGHTS[name].untyped_storage().data_ptr(): place for name, place in SAVED.items()}
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: stated[storage.data_ptr()])
        torch.save(WEIGHTS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=request.param)
    return tmp_path


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the meta device in place of a GPU, which this machine may not have."""
    monkeypatch.setattr(locations, "_device", lambda name: torch.device("meta" if name.startswith("cuda") else name))


def load(folder: Path, stated: str | None, source: Any = PyTorchFiles) -> dict[str, torch.Tensor]:
    options = {} if stated is None else {"pt_load_map_location": map_locations(stated)}
    return dict(source().tensors(folder, torch.nn.Module(), options))


def same(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == WEIGHTS.keys() and all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)


@pytest.mark.parametrize("stated", [None, "cpu", "CPU", '{"cuda:1": "cpu"}', '{"": "cpu"}', "{}"])
def test_a_file_of_a_gpu_is_read_without_one(folder: Path, stated: str | None) -> None:
    assert same(load(folder, stated))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("stated", "moved"),
    [
        ("cuda", {"a", "b", "c"}),
        ('{"": "CUDA"}', {"a", "b", "c"}),
        ('{"cuda:1": "cuda:0"}', {"b"}),
        ('{"cuda:0": "cpu", "": "cuda:0"}', {"b", "c"}),
        ('{"cpu": "cuda:0"}', {"c"}),
        ('{"xpu:0": "cuda:0"}', set()),
    ],
)
def test_tensors_are_put_where_the_option_says(folder: Path, stated: str, moved: set[str]) -> None:
    found = load(folder, stated)
    assert {name for name, tensor in found.items() if tensor.is_meta} == moved
    for name in WEIGHTS.keys() - moved:
        assert torch.equal(found[name], WEIGHTS[name])


@pytest.mark.usefixtures("stand_in")
def test_a_copy_for_numpy_is_made_in_the_hosts_memory(folder: Path) -> None:
    assert same(load(folder, "cuda", NumpyCache))


@pytest.mark.parametrize("stated", ["cuda:99", '{"cuda:1": "cuda:99"}', "gpu", "meta"])
def test_a_device_that_is_not_there_is_named(folder: Path, stated: str) -> None:
    with pytest.raises(ConfigError, match=r"--pt-load-map-location: .*(cuda:99|gpu|meta)"):
        load(folder, stated)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is not a device"),
        ("cuda:x", "'cuda:x' is not a device"),
        ('{"cuda:1": 0}', "0 is not a device"),
        ('{"a b": "cpu"}', "'a b' is not a location"),
        ('{"cuda:1": "cuda:0"', "begins as a JSON object"),
        ('{"a":' * 100_000, "begins as a JSON object"),
        (json.dumps({"cuda": {"x": 1}}), "is not a device"),
    ],
)
def test_what_is_not_a_location_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        map_locations(text)

"""SqueezeLLM's dense-and-sparse checkpoints: outliers are added to the tables' weights, or do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrule.errors import CheckpointError
from ferrule.interfaces.plugins import Plugins
from ferrule_plugins.quantization.tables import SqueezeLlm
from tests.unit.plugins.quantization.loading import load_folder
from tests.unit.plugins.quantization.packers import Tensors, loaded, merged, off, words

CONFIG = {"quant_method": "squeezellm", "wbits": 4, "include_sparse": True, "topX": 3}


def _layer(n: int, k: int, seed: int = 0) -> tuple[Tensors, torch.Tensor]:
    """Return a table, some outliers, and three outputs in full; and the weights that they encode."""
    draw = torch.Generator().manual_seed(seed)
    numbers, table = torch.randint(0, 16, (n, k), generator=draw), torch.randn((n, 16), generator=draw) * 0.02
    sparse = torch.randn((n, k), generator=draw) * (torch.rand((n, k), generator=draw) < 0.05)
    counts, full = sparse.count_nonzero(1), torch.randn((k, 3), generator=draw)
    rows = torch.randperm(n, generator=draw)[:3]
    made = {
        "qweight": words(numbers, 4).t(),
        "lookup_table": table,
        "rows": torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
        "cols": sparse.nonzero()[:, 1].int(),
        "vals": sparse[sparse != 0],
        "full_rows": full,
        "full_row_indices": rows.int(),
        "startrows": torch.zeros(128, dtype=torch.int32),
    }
    return made, (table.gather(1, numbers) + sparse).index_add(0, rows, full.t())


def test_outliers_are_added() -> None:
    tensors, meant = _layer(48, 96)
    assert off(loaded(SqueezeLlm(CONFIG), tensors, (48, 96)), meant) < 1e-5


def test_outliers_of_merged_projections() -> None:
    rows = {"q_proj": 64, "k_proj": 32}
    parts = {name: _layer(count, 64, seed=count) for name, count in rows.items()}
    layer = merged(SqueezeLlm(CONFIG), {name: made for name, (made, _) in parts.items()}, rows, 64)
    assert off(layer, torch.cat([meant for _, meant in parts.values()])) < 1e-5


def test_layers_without_an_outlier() -> None:
    tensors, _ = _layer(48, 96)
    table = tensors["lookup_table"].gather(1, loaded_numbers(tensors))
    empty = {"rows": torch.zeros(49, dtype=torch.int32), "cols": torch.zeros(0, dtype=torch.int32)}
    tensors = {**tensors, **empty, "vals": torch.zeros(0)}
    config = {**CONFIG, "topX": 0}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("full")}
    assert off(loaded(SqueezeLlm(config), tensors, (48, 96)), table) < 1e-5


def loaded_numbers(tensors: Tensors) -> torch.Tensor:
    packed = tensors["qweight"].t()
    return torch.stack([packed >> (4 * place) & 15 for place in range(8)], dim=-1).flatten(1).long()


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
@pytest.mark.parametrize("implementation", ["auto", "transformers"])
@pytest.mark.parametrize("where", ["config.json", "quant_config.json"])
def test_files_say_whether_there_are_outliers(
    folder: Path, plugins: Plugins, tmp_path: Path, ending: str, implementation: str, where: str
) -> None:
    """Find outliers in the files: their configurations have nothing but the number of bits."""
    made = tmp_path / "made"
    made.mkdir()
    for file in folder.glob("*.json"):
        shutil.copy(file, made)
    content: dict[str, Any] = {}
    meant: dict[str, torch.Tensor] = {}
    for number, (name, tensor) in enumerate(load_file(folder / "model.safetensors").items()):
        path = name.removesuffix(".weight")
        if not path.endswith("_proj"):
            content[name] = tensor
            continue
        own, meant[path] = _layer(*tensor.shape, seed=number)
        content |= {f"{path}.{end}": each.contiguous() for end, each in own.items()}
        if ending == ".pt":
            content[f"sparse_threshold.{path}"] = len(own["vals"])
    if ending == ".pt":
        torch.save(content, made / "sq-tiny-w4-s5.pt")
    else:
        save_file(content, made / "model.safetensors")
    if where == "config.json":
        config = json.loads((made / where).read_text())
        stated = {"quant_method": "squeezellm", "wbits": 4}
        (made / where).write_text(json.dumps({**config, "quantization_config": stated}))
    else:
        (made / where).write_text(json.dumps({"wbits": 4}))
    loaded = load_folder(made, plugins, quantization="squeezellm", model_impl=implementation)
    name = "layers.1.mlp.down_proj"
    assert isinstance(loaded.model, torch.nn.Module)
    layer = next(part for path, part in loaded.model.named_modules() if path.endswith(name))
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(layer(x), x @ meant[f"model.{name}"].t(), rtol=1e-4, atol=1e-4)


def test_random_weights(folder: Path, plugins: Plugins) -> None:
    loaded = load_folder(folder, plugins, load_format="dummy", hf_overrides={"quantization_config": CONFIG})
    assert loaded.info.quantization == "squeezellm"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("rows", torch.zeros(48, dtype=torch.int32), "not those of a sparse matrix"),
        ("rows", torch.arange(49, dtype=torch.int32).flip(0), "not those of a sparse matrix"),
        ("rows", torch.zeros(49, dtype=torch.int32), "not those of a sparse matrix"),
        ("rows", torch.zeros(5000, dtype=torch.int32), "cannot have"),
        ("cols", torch.full((7,), 2, dtype=torch.int32), "not those of a sparse matrix"),
        ("cols", torch.zeros(48 * 96 + 1, dtype=torch.int32), "cannot have"),
        ("cols", torch.zeros(7), "but the format has"),
        ("vals", torch.zeros(7, dtype=torch.int32), "but the format has"),
        ("full_rows", torch.zeros(3, 96), "another shape"),
        ("full_row_indices", torch.tensor([0, 1, 48], dtype=torch.int32), "not within its layer"),
        ("full_row_indices", torch.tensor([-1, 1, 2], dtype=torch.int32), "not within its layer"),
        ("full_row_indices", torch.tensor(3, dtype=torch.int32), "another shape"),
        ("vals", torch.tensor([float("nan")]), "not those of a sparse matrix"),
    ],
)
def test_outliers_that_do_not_fit_are_told(name: str, value: torch.Tensor, said: str) -> None:
    tensors, _ = _layer(48, 96)
    with pytest.raises(CheckpointError, match=said):
        loaded(SqueezeLlm(CONFIG), {**tensors, name: value}, (48, 96))


def test_columns_beyond_the_inputs_and_numbers_that_are_not_finite_are_told() -> None:
    tensors, _ = _layer(48, 96)
    for key, value in (("cols", tensors["cols"] + 96), ("vals", tensors["vals"] * float("inf"))):
        with pytest.raises(CheckpointError, match="not within its layer|not a finite number"):
            loaded(SqueezeLlm(CONFIG), {**tensors, key: value}, (48, 96))

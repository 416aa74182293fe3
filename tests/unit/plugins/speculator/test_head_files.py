"""Files of heads that do not fit: one clear error each, which names the folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from ferrule.config import Config, ModelConfig, SpeculativeConfig, WorkerSettings
from ferrule.config.resolve import resolve
from ferrule.errors import StartupError
from ferrule.execution import Worker
from ferrule.plugin import discover
from tests.fakes.heads import (
    HIDDEN,
    INNER_IDS,
    VOCAB,
    HeadHarness,
    Tensors,
    eagle3_tensors,
    eagle_tensors,
    head_config,
    medusa_tensors,
    mlp_tensors,
    random_tensors,
    write_head,
)

MLP = {"emb_dim": HIDDEN, "inner_dim": 48, "n_predict": 3, "vocab_size": VOCAB}
EAGLE3 = head_config(**INNER_IDS)


def without(name: str, tensors: Tensors) -> Tensors:
    return {own: tensor for own, tensor in tensors.items() if own != name}


def reduced(**more: torch.Tensor) -> Tensors:
    """Return the tensors of an eagle3 head that knows 80 ids."""
    return {**eagle3_tensors(lm_head__weight=(80, HIDDEN)), **more}


SMALL = random_tensors(1, **{f"{i}__0__linear__weight": (32, 32) for i in range(3)})
OTHER = " of 32, and the model has 64"
CASES: dict[str, tuple[str, dict[str, object], Tensors, str]] = {
    "medusa without weights": ("medusa", {}, {"other": torch.zeros(1)}, "has 0 heads"),
    "too few medusa heads": ("medusa", {}, medusa_tensors(2), "num_speculative_tokens 3: .* has 2 heads"),
    "a matrix": (
        "medusa",
        {},
        {**medusa_tensors(3), "0.1.weight": torch.zeros(VOCAB, 65)},
        "'0.1.weight' has the shape",
    ),
    "medusa's hidden size": ("medusa", {}, SMALL, "hidden size" + OTHER),
    "some matrices": ("medusa", {}, without("2.1.weight", medusa_tensors(3)), "for some heads only"),
    "too few stages": ("mlp_speculator", {**MLP, "n_predict": 2}, mlp_tensors(2, 2, 48), "has 2 heads"),
    "mlp's vocabulary": (
        "mlp_speculator",
        {**MLP, "vocab_size": 99},
        mlp_tensors(3, 3, 48),
        "of 99, and the model has 320",
    ),
    "no n_predict": ("mlp_speculator", {"emb_dim": HIDDEN}, mlp_tensors(3, 3, 48), "config.json has no 'n_predict'"),
    "mlp's sizes": ("mlp_speculator", MLP, mlp_tensors(3, 3, 40), "has the shape"),
    "a missing stage": ("mlp_speculator", MLP, mlp_tensors(2, 3, 48), "lack (emb|head|ln).2."),
    "no fc": ("eagle", head_config(), without("fc.weight", eagle_tensors()), "lack fc.weight"),
    "eagle's vocabulary": ("eagle", head_config(vocab_size=99), eagle_tensors(), "of 99, and the model has 320"),
    "eagle's hidden size": ("eagle", head_config(hidden_size=32), eagle_tensors(), "hidden size" + OTHER),
    "eagle's sizes": ("eagle", head_config(intermediate_size=32), eagle_tensors(), "has the shape"),
    "another tensor": (
        "eagle",
        head_config(),
        {**eagle_tensors(), "x.weight": torch.zeros(1)},
        "not have: 'x.weight'",
    ),
    "layers": ("eagle3", head_config(), eagle3_tensors(), "the layers 2, 1, -1, and the model has the layers 0 to 1"),
    "no fusion": ("eagle3", EAGLE3, without("fc.weight", eagle3_tensors()), "no matrix fc.weight"),
    "states": ("eagle3", EAGLE3, eagle3_tensors(fc__weight=(HIDDEN, 96)), "hidden size" + OTHER),
    "no d2t": ("eagle3", EAGLE3, reduced(), "80 rows for 320 ids, and there is no d2t"),
    "ids": ("eagle3", EAGLE3, reduced(d2t=torch.full((80,), 300)), "outside the vocabulary"),
    "d2t's length": ("eagle3", EAGLE3, reduced(d2t=torch.zeros(9)), "d2t is for 9 ids"),
}


@pytest.mark.parametrize("case", CASES)
def test_files_that_do_not_fit(tmp_path: Path, tiny_llama: Path, case: str) -> None:
    method, config, tensors, message = CASES[case]
    folder = write_head(tmp_path / "head", config, tensors)
    with pytest.raises(StartupError, match=message) as raised:
        HeadHarness(tiny_llama, method, 3, model=str(folder))
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator", "eagle", "eagle3"])
def test_a_head_without_a_folder(tiny_llama: Path, method: str) -> None:
    with pytest.raises(StartupError, match="needs the key 'model'"):
        HeadHarness(tiny_llama, method, 3)


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator", "eagle", "eagle3"])
def test_a_dry_run_compares_names_and_shapes(tmp_path: Path, tiny_llama: Path, method: str) -> None:
    """Check heads that fit and heads with a tensor too many, of which nothing is loaded."""
    made: dict[str, tuple[dict[str, object], Callable[[], Tensors]]] = {
        "medusa": ({}, partial(medusa_tensors, 3)),
        "mlp_speculator": (dict(MLP), partial(mlp_tensors, 3, 3, 48)),
        "eagle": (head_config(), eagle_tensors),
        "eagle3": (EAGLE3, eagle3_tensors),
    }
    config, tensors = made[method][0], made[method][1]()
    whole = write_head(tmp_path / "whole", config, tensors)
    less = write_head(tmp_path / "less", config, dict(list(tensors.items())[1:]))
    plugins = discover()

    def check(folder: Path) -> None:
        given = {"method": method, "num_speculative_tokens": 3, "model": str(folder)}
        model, guesses = ModelConfig(model=str(tiny_llama)), SpeculativeConfig(speculative_config=given)
        Worker(WorkerSettings.of(resolve(Config(model=model, speculative=guesses))), plugins).check_start()

    check(whole)
    with pytest.raises(StartupError, match="less"):
        check(less)

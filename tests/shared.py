"""What several areas use: things that are built once for all processes of a run, and grids that run in part."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from ferrule_nn import Linear
from tools import ROOT

Module = TypeVar("Module", bound=torch.nn.Module)
OURS = frozenset(
    {"ferrule", *(folder.name for folder in ROOT.glob("distributions/*"))}
)  # distributions of this repository


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the path `name` of this run, made by the first process that asks for it; the others wait until it exists.

    `make` gets the path and creates a file or a folder there. Under pytest-xdist each process has a temporary folder of
    its own, and the shared paths lie beside these folders.
    """
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return made(base / f"shared-{name}", make)


def made(path: Path, make: Callable[[Path], object]) -> Path:
    """Return `path`, which `make` creates if no process has done so yet; processes that ask meanwhile wait for it."""
    done = path.with_name(f"{path.name}.done")
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make(path)
            done.touch()
    return path


def allocated(module: Module) -> Module:
    """Return `module` with memory for its linear layers' weights, which on a GPU comes only with a checkpoint's
    tensors.
    """
    for layer in module.modules():
        if isinstance(layer, Linear):
            for name, _ in list(layer.named_parameters(recurse=False)):
                layer.materialize(name)
    return module


def some(values: Iterable[Any], every: int = 3) -> list[Any]:
    """Return the values of a parameter: one in `every` is tested in `make test`, the others in `make test-slow`."""
    return [pytest.param(value, marks=pytest.mark.slow if at % every else ()) for at, value in enumerate(values)]


def grid(axes: Mapping[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """Run a test with every combination of values, most of them in `make test-slow` only.

    `axes` maps an argument's name, or several with commas between them, to its values, or to tuples of values. As many
    combinations stay in `make test` as the longest axis has values: each value of each axis is in one of them.
    """
    kept = {tuple(i % len(values) for values in axes.values()) for i in range(max(map(len, axes.values())))}
    cases = []
    for indices in product(*(range(len(values)) for values in axes.values())):
        picked = [values[i] for i, values in zip(indices, axes.values(), strict=True)]
        parts = (value if "," in names else (value,) for names, value in zip(axes, picked, strict=True))
        cases.append(pytest.param(*chain(*parts), marks=[] if indices in kept else pytest.mark.slow))
    return pytest.mark.parametrize(",".join(axes), cases)

"""Real servers whose start something is wrong with; ``python -m tools.campaign.starts`` has many more."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from ferrule_testkit import server as servers
from tools.campaign.bad_models import changed, poisoned
from tools.campaign.bad_places import origins, plugin
from tools.campaign.case import Case, run
from tools.campaign.starts import CASES

SLEEPS = "import time\ntime.sleep(10**6)\n"
FAST = (
    Case("many-origins", prepare=origins(8_000)),
    Case("all-closed", shell='exec "$@" >&- 2>&- <&-'),
    Case("import-sleeps", "The import of plugin policy:odd of file .* within 1 s", plugin(SLEEPS, "1")),
)


@pytest.mark.parametrize("case", FAST, ids=lambda case: case.name)
def test_without_a_model(case: Case, tmp_path: Path) -> None:
    prepare = case.prepare
    case = dataclasses.replace(case, prepare=lambda folder: [*prepare(folder), *servers.WITHOUT_MODEL], seconds=240)
    result = run(case, tmp_path)
    assert not result.problem, result.text


@pytest.mark.parametrize(
    "case",
    [
        Case("nan", r"NaN or infinity in layers\.2\.mlp", poisoned("model.layers.2.mlp.down_proj.weight", math.nan)),
        Case("layers", "'num_hidden_layers' must be an integer", changed(num_hidden_layers=10**9)),
    ],
    ids=lambda case: case.name,
)
def test_with_a_model(case: Case, tmp_path: Path) -> None:
    result = run(dataclasses.replace(case, seconds=240, env=servers.LIMITS), tmp_path)
    assert not result.problem, result.text


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_start_comes_to_what_it_must(case: Case, tmp_path: Path) -> None:
    result = run(dataclasses.replace(case, seconds=4 * case.seconds), tmp_path)
    assert not result.problem, result.text

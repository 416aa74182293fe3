"""Every scheme of quantization loses what its bits imply: not more, and not so little that it cannot be quantized."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from ferrule.interfaces.plugins import Plugins
from ferrule.plugin import discover
from ferrule_contrib.tiny import path
from ferrule_files.gguf.reader import FLOATS, TYPES
from ferrule_testkit.quantized import FORMATS
from tools import ROOT
from tools.quality import __main__ as command
from tools.quality.layers import Measured, measure
from tools.quality.rounding import E4M3, Rounding, e2m1, floats, integers, ranged, relative
from tools.quality.schemes import FROM_FLOATS, Scheme, schemes
from tools.tiny import quantized

SCHEMES = dict(schemes())
LEAST = 435  # right answers of 500, by every method and format; floats give 454
OTHERWISE_ROUNDED = 8  # answers: processors with other units round products otherwise
SOME, LEAST_OF_SOME = 60, 50


@cache
def plugins() -> Plugins:
    return discover()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: layers are small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---------------------------------------------------------------------------------------- layers


@cache
def found(title: str, outliers: bool = False) -> Measured:
    return measure(SCHEMES[title], plugins(), outliers)


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("title", SCHEMES)
def test_a_layer_loses_what_its_bits_imply(title: str, outliers: bool) -> None:
    assert found(title, outliers).holds, found(title, outliers)


def test_every_plugin_and_format_is_in_the_table() -> None:
    """Require an entry in tools/quality/schemes.py for a new one."""
    registry = plugins()
    measured = {type_of(scheme.plugin) for scheme in SCHEMES.values()}
    assert {name for name in registry.names("quantization") if type_of(name) not in measured} == set()
    assert {f"`{name}`" for name in FORMATS} <= SCHEMES.keys()
    assert {f"GGUF {kind.name}" for kind in TYPES.values() if kind.name not in FLOATS} <= SCHEMES.keys()
    online = {type_of(scheme.plugin) for scheme in FROM_FLOATS.values()}
    made = [type_of(name) for name in registry.names("quantization")]
    assert all(each in online for each in made if getattr(each, "from_floats", False))


def type_of(name: str) -> type:
    found: type = plugins().load("quantization", name)
    return found


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        (Scheme("int8", (integers(4, 32),), integers(8)), "eight bits are not four"),
        (Scheme("int4_weight_only", (integers(8),)), "four bits are not eight"),
    ],
)
def test_other_bits_are_noticed(scheme: Scheme, said: str) -> None:
    assert not measure(scheme, plugins()).holds, said


def test_layers_that_are_not_quantized_are_noticed() -> None:
    """Notice a float layer, whose error is that of its result in bfloat16."""
    for title, scheme in SCHEMES.items():
        assert scheme.weights == () or not Measured(16, found(title).bound, 0.0016).holds, title


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_evenly_spaced_numbers_have_the_error_of_their_steps(bits: int) -> None:
    values = torch.rand(64, 4096, generator=torch.Generator().manual_seed(0)) * 2 - 1
    half, last = 127 if bits == 8 else 1 << (bits - 1), (1 << bits) - 1
    for rounding, step in ((integers(bits), 1 / half), (ranged(bits), 2 / last)):
        error = float((rounding(values) - values).square().mean().sqrt())
        assert error == pytest.approx(step / math.sqrt(12), rel=0.1 if bits < 4 else 0.02)


@pytest.mark.parametrize(("rounding", "fraction"), [(E4M3, 3), (floats(2, -14, 57344), 2)])
def test_floats_have_the_error_of_their_fraction(rounding: Rounding, fraction: int) -> None:
    """Round numbers of all sizes alike, in whole powers of two. The largest of both types is 1.75 times one."""
    draw = torch.Generator().manual_seed(0)
    values = torch.exp2(-8 * torch.rand(2, 4096, generator=draw)) / 1.75
    values[:, 0] = 1
    implied = 2.0**-fraction / math.sqrt(12) * math.sqrt(2 * math.log(2) / 3)
    assert relative(rounding(values), values) == pytest.approx(implied, rel=0.03)


def test_levels_are_those_of_the_types() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert set((every[every.isfinite()] / 448).tolist()) == set(torch.tensor(E4M3.levels).tolist())
    assert [round(6 * level, 6) for level in e2m1(32).levels] == [
        *(-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0),
        *(0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    ]


# ---------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_some_answers_stay_right(method: str) -> None:
    tests = quantized.held_out(count=SOME)
    assert quantized.measure(tests, method, path(), method).correct >= LEAST_OF_SOME


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_answers_stay_right() -> None:
    tests = quantized.held_out()
    found = [*quantized.rows(tests, quantized.METHODS), *command.checkpoints(tests)]
    assert {row.name: row.correct for row in found if row.correct < LEAST} == {}
    stated = documented_answers()
    assert [row.name for row in found] == list(stated)
    assert {row: stated[row.name] for row in found if abs(row.correct - stated[row.name]) > OTHERWISE_ROUNDED} == {}


def documented_answers() -> dict[str, int]:
    """Return how many answers docs/quantization.md says are right, by the name of the row."""
    lines = (ROOT / "docs" / "quantization.md").read_text().splitlines()
    rest = lines[lines.index(quantized.HEADING.splitlines()[0]) + 2 :]
    rows = [line.split(" | ") for line in rest[: rest.index("")]]
    return {name.removeprefix("| "): int(correct) for name, correct, *_ in rows}


def test_the_documentation_has_a_row_for_each_format() -> None:
    names = list(documented_answers())
    assert names[: 1 + len(quantized.METHODS)] == ["bfloat16", *quantized.METHODS]
    assert names[-len(command.CHECKPOINTS) :] == [f"checkpoint in `{name}`" for name in command.CHECKPOINTS]


def test_the_command_prints_what_the_documentation_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "measure", lambda scheme, registry, outliers: Measured(8, 0.2, 0.1))
    with pytest.raises(SystemExit):
        command.main(["speed"])
    assert "there is no table 'speed'" in capsys.readouterr().err
    assert command.main(["layers"]) == 0
    printed = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines() if line]
    documented = [line.split(" | ")[0] for line in (ROOT / "docs" / "quantization.md").read_text().splitlines()]
    start = documented.index(printed[2]) if printed[2] in documented else 0
    assert [title for title in printed[2:] if title not in documented[start:]] == []

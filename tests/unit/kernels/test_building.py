"""Which variants of the kernels an installation compiles. The compiler itself is run by every installation."""

from __future__ import annotations

from pathlib import Path

import pytest
from setuptools import Distribution, Extension
from setuptools.errors import OptionError

from ferrule_kernels.building import BuildKernels, chosen
from ferrule_kernels.cpu import library
from tools import ROOT

KNOWN = [name for name, *_ in library.VARIANTS]
ZEN4 = frozenset({"avx2", "fma", "f16c", "bmi2", "avx512_vnni", "avx512_bf16", *library._V4})


@pytest.mark.parametrize(
    ("wanted", "machine", "here", "variants"),
    [
        ("", "x86_64", ZEN4, ["_v4_bf16"]),
        ("", "x86_64", ZEN4 | library._TILES, ["_v4_amx"]),
        ("", "x86_64", ZEN4 - {"avx512_bf16", "avx512_vnni"}, ["_v4"]),
        ("", "AMD64", frozenset({"avx2", "fma", "f16c", "bmi2"}), ["_v3"]),
        ("", "x86_64", frozenset({"sse2"}), []),  # they are compiled at the first start
        ("", "aarch64", frozenset({"asimd"}), []),
        ("all", "aarch64", frozenset(), KNOWN),
        ("_v3, _v4_bf16", "x86_64", frozenset(), ["_v3", "_v4_bf16"]),
    ],
)
def test_an_installation_compiles_for_its_processor(
    wanted: str, machine: str, here: frozenset[str], variants: list[str]
) -> None:
    assert chosen(KNOWN, wanted, machine, here) == variants


def test_a_variant_that_does_not_exist_is_named() -> None:
    with pytest.raises(
        OptionError, match=r"FERRULE_KERNEL_VARIANTS: there is no variant '_v5': all, or some of _v4_amx"
    ):
        chosen(KNOWN, "_v3,_v5", "x86_64", ZEN4)


def test_the_command_compiles_the_listed_files_for_the_chosen_variants_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERRULE_KERNEL_VARIANTS", "_v4")
    command = BuildKernels(Distribution({"ext_modules": [Extension("ferrule_kernels.cpu.variants", [])]}))
    command.ensure_finalized()
    (only,) = command.extensions
    assert only.name == "ferrule_kernels.cpu._v4"
    assert only.extra_compile_args[-1] == "-march=x86-64-v4"
    sources, headers = ({ROOT / name for name in names} for names in (only.sources, only.depends))
    assert sources == set(library.HERE.glob("*.cpp"))
    assert headers == set(library.HERE.glob("*.h"))


def test_the_log_says_which_kernels_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loaded:
        _name = str(library.HERE / "_v4_bf16.cpython-311-x86_64-linux-gnu.so")

    monkeypatch.setattr(library, "load", Loaded)
    assert library.used() == "v4_bf16"
    Loaded._name = str(Path("/cache/0123.so"))
    assert library.used() == "compiled at first use (/cache/0123.so)"

    def missing() -> None:
        raise library.KernelsUnavailableError("there is no C++ compiler to build the kernels with")

    monkeypatch.setattr(library, "load", missing)
    assert library.used() == "those of torch (there is no C++ compiler to build the kernels with)"

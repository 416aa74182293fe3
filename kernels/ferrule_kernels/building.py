"""The compilation of the kernels by setuptools: chosen variants, as many files at once as there are cores.

An installation from source compiles the one variant that its processor uses, which takes less than a minute on two
cores. FERRULE_KERNEL_VARIANTS=all compiles every variant, for a wheel that other machines install (`make wheel`); it
may also list variants by name: `_v3,_v4_bf16`.

`ferrule_kernels.cpu.library` lists the variants, their sources and their options. pyproject.toml names this class; no
module imports it where Ferrule runs. Setuptools' own `parallel` compiles variants at once, but into one folder, where
their objects have the same names.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, OptionError

WANTED = "FERRULE_KERNEL_VARIANTS"  # "all", or names of variants, separated by commas; by default this processor's
_FOLDER = "kernels/ferrule_kernels/cpu"  # from the project's root, where setuptools runs


def chosen(known: Sequence[str], wanted: str, machine: str, here: frozenset[str]) -> list[str]:
    """Return the variants to compile, of the `known` ones, which are sorted from best to worst.

    `wanted` is the value of FERRULE_KERNEL_VARIANTS, `machine` is as `platform.machine()` says, and `here` are the
    processor's features. Another architecture than x86-64 has none: its kernels are compiled at the first start.
    Raises OptionError for a name that is not known.
    """
    if wanted == "all":
        return list(known)
    if wanted:
        names = [name.strip() for name in wanted.split(",")]
        if unknown := [name for name in names if name not in known]:
            raise OptionError(f"{WANTED}: there is no variant {unknown[0]!r}: all, or some of {', '.join(known)}")
        return names
    if machine not in ("x86_64", "AMD64"):
        return []
    return [name for name, needed, _ in _library().VARIANTS if name in known and needed <= here][:1]


def _library() -> Any:
    """Return the module `ferrule_kernels.cpu.library`, whose package cannot be imported during a build."""
    path = Path(__file__).with_name("cpu") / "library.py"
    spec = importlib.util.spec_from_file_location("_ferrule_kernels_library", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _extension(name: str, options: Sequence[str]) -> Extension:
    """Return what setuptools compiles for a variant. A failure leaves the variant out."""
    library = _library()
    return Extension(
        f"ferrule_kernels.cpu.{name}",
        sources=[f"{_FOLDER}/{file}" for file in library.SOURCES],
        depends=[f"{_FOLDER}/{file}" for file in library.HEADERS],
        extra_compile_args=[*library.FLAGS, *options],
        optional=True,
    )


class BuildKernels(build_ext):  # type: ignore[misc]  # setuptools has no types
    """The `build_ext` command that builds each variant of the kernels in a folder of its own."""

    extensions: list[Extension]

    def finalize_options(self) -> None:
        known = {name: _extension(name, options) for name, _, options in _library().VARIANTS}
        self.distribution.ext_modules = list(known.values())
        super().finalize_options()
        names = chosen(list(known), os.environ.get(WANTED, ""), platform.machine(), _library().features())
        self.extensions = [known[name] for name in names]
        self.announce(f"kernels are compiled for: {', '.join(names) or 'no processor'}", level=2)

    def build_extensions(self) -> None:
        self.check_extensions_list(self.extensions)
        if not self.extensions:
            return
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with ThreadPoolExecutor(cores) as files, ThreadPoolExecutor(len(self.extensions)) as variants:
            for done in [variants.submit(self._build, each, files) for each in self.extensions]:
                done.result()

    def _build(self, extension: Extension, files: ThreadPoolExecutor) -> None:
        """Build one variant. Raises CCompilerError when a variant that is not optional does not compile."""
        own = copy.copy(self)
        own.build_temp = str(Path(self.build_temp) / extension.name)
        own.compiler = copy.copy(self.compiler)
        own.compiler.compile = partial(_compile_at_once, self.compiler, files)
        try:
            own.build_extension(extension)
        except CCompilerError as error:
            if not extension.optional:
                raise
            self.warn(f"{extension.name} is left out: {error}")


def _compile_at_once(
    compiler: Any, files: ThreadPoolExecutor, sources: Sequence[str], *args: Any, **kwargs: Any
) -> list[str]:
    """Call `compiler.compile` for each of the files."""
    waited = [files.submit(compiler.compile, [source], *args, **kwargs) for source in sources]
    return [name for each in waited for name in each.result()]

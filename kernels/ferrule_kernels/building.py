"""How setuptools compiles the kernels: all files of all variants at once, as many as there are cores.

pyproject.toml names this class; nothing imports it where Ferrule runs. Setuptools' own `parallel` compiles variants at
once, but into one folder, where their objects have the same names.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError


class BuildKernels(build_ext):  # type: ignore[misc]  # setuptools has no types
    """Builds each variant in a folder of its own."""

    def build_extensions(self) -> None:
        self.check_extensions_list(self.extensions)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with ThreadPoolExecutor(cores) as files, ThreadPoolExecutor(len(self.extensions)) as variants:
            for done in [variants.submit(self._build, each, files) for each in self.extensions]:
                done.result()

    def _build(self, extension: Extension, files: ThreadPoolExecutor) -> None:
        """Raises for one that is not optional and does not compile."""
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
    """`compiler.compile` for each of the files."""
    waited = [files.submit(compiler.compile, [source], *args, **kwargs) for source in sources]
    return [name for each in waited for name in each.result()]

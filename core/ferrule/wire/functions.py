"""Functions as import paths, because no function crosses a process by its value: "module:name", or "module.name".

The other process imports the module and takes the attribute, so it calls the same code if it finds the same module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from importlib import import_module
from typing import Any

from ferrule.errors import RequestError

__all__ = ["find_function"]


def import_path(function: Callable[..., Any], param: str) -> str:
    """Return the path at which another process finds a function. Raises RequestError for one that it cannot import.

    Lambdas, functions inside functions, methods of objects, and functions of the main program cannot be imported.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    path = f"{module}:{name}"
    if module and name and module != "__main__":
        try:
            if find_function(path) is function:
                return path
        except (ImportError, AttributeError):
            pass  # "<lambda>" or "f.<locals>.g" is the name of no attribute
    shown = name or type(function).__name__
    raise RequestError(
        f"{param}: the engine runs in another process, which cannot import {shown!r:.80}. Define the function at the "
        "top level of a module that is not the main program, or run the engine in this process "
        "(FERRULE_ENABLE_V1_MULTIPROCESSING=0).",
        param,
    )


def find_function(path: str) -> Any:
    """Return the object that a path names: behind the colon, or else behind the last dot.

    Behind a dot there is one attribute of a module, and not of something that the module has imported. Raises
    ImportError, AttributeError.
    """
    module, colon, name = path.partition(":")
    if not colon:
        module, _, name = path.rpartition(".")
    if not module:
        raise ImportError(f"{path!r} is not module.name")
    return reduce(getattr, name.split("."), import_module(module))

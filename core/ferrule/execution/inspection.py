"""A worker that describes adapters, with profiles, and with calls of what users mix in.

A class that `--worker-extension-cls` names is a base class of the worker, behind the worker's own. Its public methods
can be called by name; in them, `self` is the worker: `self.model_runner.model` is the model, `self.config` the
`WorkerSettings`. Its `__init__` is not called.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import msgspec
from msgspec.structs import asdict

from ferrule.config import WorkerSettings
from ferrule.env import variable
from ferrule.errors import ConfigError, RequestError
from ferrule.execution.worker import Worker
from ferrule.interfaces.adapters import AdapterBank
from ferrule.interfaces.plugins import Plugins
from ferrule.log import Log
from ferrule.types import Adapter, AdapterInfo
from ferrule.wire.functions import find_function

_log = Log("worker")


class InspectedWorker(Worker):
    """A worker that records profiles, and runs methods and functions of the caller's."""

    calls = Worker.calls | {"start_profile", "stop_profile", "collective_rpc", "describe_adapter"}
    extension: type = object

    def __init__(self, config: WorkerSettings, plugins: Plugins, adapters: AdapterBank | None = None) -> None:
        super().__init__(config, plugins, adapters)
        self._profile: tuple[str, Callable[[], None]] | None = None  # the file's name, and what ends it

    def describe_adapter(self, name: str) -> dict[str, Any]:
        """Return the fields of the `AdapterInfo` of an adapter that was read."""
        info = AdapterInfo() if self._adapters is None else self._adapters.describe(Adapter(name=name))
        return asdict(info)

    def start_profile(self) -> None:
        """Record steps until `stop_profile`. Raises RequestError."""
        folder = self.config.env.torch_profiler_dir
        if folder is None:
            raise RequestError(f"There is no folder for traces: start with {variable('torch_profiler_dir')}=FOLDER.")
        if self._profile is not None:
            raise RequestError("A profile is being recorded already: stop it first.")
        file = Path(folder, f"ferrule-{os.getpid()}-{time.time_ns()}.pt.trace.json.gz")
        with _writing():
            self._profile = file.name, self.platform.execution().profile(file)

    def stop_profile(self) -> str:
        """Write the trace; its name in the folder for traces. Raises RequestError."""
        if self._profile is None:
            raise RequestError("No profile is being recorded.")
        name, end = self._profile
        self._profile = None
        with _writing():
            end()
        return name

    def collective_rpc(
        self, method: str | Mapping[str, str] | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a method of the extension, or (offline) a function with this worker, and return its result: plain data
        only.

        A function is given directly, or as {"function": import path}, which no client can send. Raises RequestError,
        also for any error inside the function: the fault is the caller's.
        """
        if isinstance(method, Mapping):
            name = method["function"]
            try:
                function: Callable[..., Any] = partial(find_function(name), self)
            except Exception as error:  # whatever the module raises while it is imported
                raise RequestError(f"The engine cannot import {name}: {type(error).__name__}: {error}") from error
        elif isinstance(method, str):
            offered = sorted(n for n in dir(self.extension) if n[:1] != "_" and callable(getattr(self.extension, n)))
            if method not in offered:
                hint = ", ".join(offered) or "start with --worker-extension-cls module.Class"
                raise RequestError(f"There is no method {method!r:.80} to call: {hint}.", "method")
            name, function = method, getattr(self, method)
        else:
            name, function = getattr(method, "__name__", "the function"), partial(method, self)
        try:
            return msgspec.msgpack.decode(msgspec.msgpack.encode(function(*args, **kwargs)))
        except (Exception, SystemExit) as error:
            _log.exception("collective_rpc failed", method=name)
            raise RequestError(f"{name} failed: {type(error).__name__}: {error}") from error


@contextmanager
def _writing() -> Iterator[None]:
    """Raise RequestError for a folder of traces that cannot be written."""
    try:
        yield
    except OSError as error:
        raise RequestError(f"The folder for traces cannot be written: {error}") from error


def open_worker(config: WorkerSettings, plugins: Plugins, adapters: AdapterBank | None = None) -> Worker:
    """Make a worker, not started, with the class of --worker-extension-cls mixed in. Raises ConfigError.

    The layers of its model are given their parts of the bank `adapters`.
    """
    target = config.parallel.worker_extension_cls
    if not target:
        return InspectedWorker(config, plugins, adapters)
    try:
        cls = resolve_name(target)
    except Exception as error:  # whatever the module raises while it is imported
        raise ConfigError(f"--worker-extension-cls {target}: {type(error).__name__}: {error}") from error
    if not isinstance(cls, type):
        raise ConfigError(f"--worker-extension-cls {target} is not a class.")
    taken = sorted(name for name in dir(cls) if hasattr(InspectedWorker, name) and not name.startswith("__"))
    if taken:
        raise ConfigError(f"--worker-extension-cls {target}: the worker has methods named {', '.join(taken)}.")
    try:
        extended = type("ExtendedWorker", (InspectedWorker, cls), {"extension": cls})
    except TypeError as error:
        raise ConfigError(f"--worker-extension-cls {target} cannot be mixed in: {error}.") from error
    worker: Worker = extended(config, plugins, adapters)
    return worker

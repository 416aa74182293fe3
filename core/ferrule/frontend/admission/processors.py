"""Logits processors of a request: plugins and import paths that clients name, and functions of offline callers.

All of them become (name, kwargs) of a plugin, which the engine makes anew. They are made here first, so that what is
wrong with them is told before the engine hears of the request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferrule import log
from ferrule.config import Resolved
from ferrule.errors import PluginError, RequestError
from ferrule.frontend.admission.validate import Rules
from ferrule.interfaces.plugins import Plugins
from ferrule.wire.functions import import_path

FUNCTION = "python_function"  # the plugin that makes one of a function; clients cannot name it

Processors = tuple[tuple[str, dict[str, Any]], ...]

_PARAM = "logits_processors"
_MOST = 16
_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")

_logger = log.get("frontend")


def find_processors(config: Resolved, plugins: Plugins) -> dict[str, Callable[..., Any]]:
    """The logits processors that requests may name: only those are imported. A broken one is left out and reported."""
    found: dict[str, Callable[..., Any]] = {}
    pattern = config.model.logits_processor_pattern
    for name in plugins.names("logits_processor"):
        if pattern is not None and name != FUNCTION and re.fullmatch(pattern, name):
            try:
                found[name] = plugins.factory("logits_processor", name)
            except PluginError as error:
                _logger.warning("a logits processor was left out: %s", error.message, processor=name)
    return found


def find_function_processor(plugins: Plugins) -> Callable[..., Any] | None:
    """The class of `FUNCTION`; None where the user denied it."""
    if FUNCTION not in plugins.names("logits_processor"):
        return None
    return plugins.factory("logits_processor", FUNCTION)


def check_processors(processors: Sequence[Any], rules: Rules) -> Processors:
    """What a client names, within the server's pattern: a plugin, or the import path of a function.

    An entry is a name, or {"qualname", "args", "kwargs"}: the function that such a path names makes the processor.
    Raises RequestError. Imports modules, so it may take long.
    """
    if not processors:
        return ()
    if rules.processor_pattern is None:
        raise RequestError("This server takes no logits_processors (--logits-processor-pattern).", _PARAM)
    if len(processors) > _MOST:
        raise RequestError(f"logits_processors may have at most {_MOST} entries.", _PARAM)
    return tuple(_named(entry, rules) for entry in processors)


def check_functions(functions: Sequence[Callable[..., Any]], rules: Rules, remote: bool) -> Processors:
    """`SamplingParams.logits_processors`. Raises RequestError, also for what a `remote` engine cannot import."""
    return tuple(
        _function(f"logits_processors[{number}]", rules, function=import_path(function, _PARAM) if remote else function)
        for number, function in enumerate(functions)
    )


def _named(entry: Any, rules: Rules) -> tuple[str, dict[str, Any]]:
    given = {"qualname": entry} if isinstance(entry, str) else entry
    name = given.get("qualname") if isinstance(given, Mapping) else None
    if isinstance(name, str) and re.fullmatch(rules.processor_pattern or "", name):
        args, kwargs = given.get("args") or [], given.get("kwargs") or {}
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise RequestError("logits_processors: args must be a list, and kwargs an object.", _PARAM)
        if name in rules.processors:
            if args:
                raise RequestError("logits_processors: a plugin takes its arguments by name, in kwargs.", _PARAM)
            _try(name, rules.processors[name], kwargs)
            return name, kwargs
        if _IMPORT_PATH.fullmatch(name):
            made = {} if isinstance(entry, str) else {"args": args, "kwargs": kwargs}
            return _function(name, rules, function=name, **made)
    raise RequestError("logits_processors names one that this server does not have.", _PARAM)


def _function(shown: str, rules: Rules, **kwargs: Any) -> tuple[str, dict[str, Any]]:
    if rules.function_processor is None:
        raise RequestError(f"logits_processors: the plugin logits_processor:{FUNCTION} is not allowed.", _PARAM)
    _try(shown, rules.function_processor, kwargs)
    return FUNCTION, kwargs


def _try(shown: str, factory: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    try:
        factory(**kwargs)
    except ValueError as error:  # the interface says that its message is for the client
        raise RequestError(f"logits_processors: {shown}: {error}", _PARAM) from None

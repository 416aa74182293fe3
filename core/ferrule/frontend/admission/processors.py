"""Logits processors of a request: plugins and import paths that clients name, and functions of offline callers.

All of them become (name, kwargs) of a plugin, which the engine makes anew. They are made here first, so that what is
wrong with them is told before the engine hears of the request.

The API process also imports those that `--logits-processor-pattern` allows: wrong arguments give a 400 and cost the
engine nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferrule.config import Resolved
from ferrule.config.chosen import allowed_processors
from ferrule.errors import RequestError
from ferrule.frontend.admission.validate import AdmissionRules
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.plugin.faults import failing_request
from ferrule.wire.functions import import_path

Trial = Callable[[Mapping[str, Any]], None]
"""Makes a processor of arguments and drops it. Raises ValueError for wrong ones, RequestFailed for any other fault."""

Processors = tuple[tuple[str, dict[str, Any]], ...]

_PARAM = "logits_processors"
_MOST = 16
_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def find_processors(config: Resolved, plugins: Plugins, tokenizer: Tokenizer | None) -> dict[str, Trial]:
    """Load the logits processors that requests may name; no others are imported."""
    names = (name for name in allowed_processors(config, plugins) if not _wraps_functions(plugins, name))
    return {name: _trial(plugins, name, tokenizer) for name in names}


def find_function_processor(plugins: Plugins, tokenizer: Tokenizer | None) -> tuple[str, Trial] | None:
    """Find the plugin that wraps functions, which clients cannot name; None where the user denied it."""
    names = (name for name in plugins.names("logits_processor") if _wraps_functions(plugins, name))
    return next(((name, _trial(plugins, name, tokenizer)) for name in names), None)


def _wraps_functions(plugins: Plugins, name: str) -> bool:
    return plugins.stated("logits_processor", name, "wraps_functions") is True


def check_processors(processors: Sequence[Any], rules: AdmissionRules) -> Processors:
    """Return the processors that a client names within the server's pattern: a plugin, or the import path of a
    function.

    An entry is a name, or {"qualname", "args", "kwargs"}: the function at such a path makes the processor. Raises
    RequestError. Imports modules, so it may take long.
    """
    if not processors:
        return ()
    if rules.processor_pattern is None:
        raise RequestError("This server takes no logits_processors (--logits-processor-pattern).", _PARAM)
    if len(processors) > _MOST:
        raise RequestError(f"logits_processors may have at most {_MOST} entries.", _PARAM)
    return tuple(_named(entry, rules) for entry in processors)


def check_functions(functions: Sequence[Callable[..., Any]], rules: AdmissionRules, remote: bool) -> Processors:
    """Return the processors of `SamplingParams.logits_processors`.

    Raises RequestError, also for a function that a `remote` engine cannot import.
    """
    return tuple(
        _function(f"logits_processors[{number}]", rules, function=import_path(function, _PARAM) if remote else function)
        for number, function in enumerate(functions)
    )


def _named(entry: Any, rules: AdmissionRules) -> tuple[str, dict[str, Any]]:
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


def _function(shown: str, rules: AdmissionRules, **kwargs: Any) -> tuple[str, dict[str, Any]]:
    if rules.function_processor is None:
        raise RequestError("logits_processors: the plugin that makes them of functions is not allowed.", _PARAM)
    name, trial = rules.function_processor
    _try(shown, trial, kwargs)
    return name, kwargs


def _try(shown: str, trial: Trial, kwargs: dict[str, Any]) -> None:
    try:
        trial(kwargs)
    except ValueError as error:  # the interface says that its message is for the client
        raise RequestError(f"logits_processors: {shown}: {error}", _PARAM) from None


def _trial(plugins: Plugins, name: str, tokenizer: Tokenizer | None) -> Trial:
    make, title = plugins.factory("logits_processor", name), plugins.title("logits_processor", name)

    def trial(arguments: Mapping[str, Any]) -> None:
        with failing_request(title, "a trial of a request's arguments", ValueError):
            make(**arguments).begin(tokenizer)

    return trial

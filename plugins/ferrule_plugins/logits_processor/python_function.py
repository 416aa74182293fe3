"""`python_function`: a function of vLLM's form as a logits processor. Requests cannot name it: the gate makes it.

It makes one for each entry of `SamplingParams.logits_processors`, which are functions of an offline caller, and for
each import path in the field ``logits_processors`` of an HTTP request.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ferrule import log
from ferrule.interfaces.sampler import LogitsProcessor
from ferrule.wire.functions import find_function

if TYPE_CHECKING:
    import torch

_logger = log.get("sampler")


class PythonFunction(LogitsProcessor):
    """A processor that calls ``function(output_ids, logits)`` or ``function(prompt_ids, output_ids, logits)`` for each
    token.

    `function` is what is called, or its import path. With `args` or `kwargs` it is a factory: it is called once, with
    these arguments, and makes what is called. A class is always called; what it makes may also be a `LogitsProcessor`.
    """

    wraps_functions = True

    def __init__(
        self,
        function: Callable[..., Any] | str | None = None,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> None:
        """Import or make the function. Raises ValueError when that fails, or when it takes neither two nor three
        arguments.
        """
        if unknown or function is None:
            raise ValueError("it takes function, args and kwargs")
        try:
            found = find_function(function) if isinstance(function, str) else function
            if args is not None or kwargs is not None or isinstance(found, type):
                found = found(*(args or ()), **(kwargs or {}))
        except Exception as error:  # whatever a module raises while it is imported, and a constructor
            _logger.warning("logits processor %s: %s: %s", function, type(error).__name__, error)
            raise ValueError("it cannot be imported, or does not take these arguments") from error
        self._processor = found if isinstance(found, LogitsProcessor) else None
        self._function = found
        self._with_prompt = self._processor is None and _num_arguments(found) == 3

    def apply(self, known_ids: Sequence[int], num_prompt: int, logits: torch.Tensor) -> torch.Tensor:
        if self._processor is not None:
            return self._processor.apply(known_ids, num_prompt, logits)
        prompt, output = list(known_ids[:num_prompt]), list(known_ids[num_prompt:])
        changed: torch.Tensor = (
            self._function(prompt, output, logits) if self._with_prompt else self._function(output, logits)
        )
        return changed


def _num_arguments(function: Any) -> int:
    """Return the fewest arguments that a function can be called with, 2 or 3. Raises ValueError."""
    if not callable(function):
        raise ValueError("it is not a function")
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C: nothing tells its arguments
        return 2
    for count in (2, 3):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count
    raise ValueError("it must take (output_ids, logits) or (prompt_ids, output_ids, logits)")

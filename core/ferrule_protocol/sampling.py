"""The conversion of a body's fields to sampling parameters, and of outputs to usage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrule.interfaces.service import Output, Service, Usage
from ferrule.sampling_params import SamplingFields, SamplingParams
from ferrule.structured_outputs import ConstraintFields, constraint_of

_FIELDS = frozenset(SamplingFields.model_fields)


def sampling(body: SamplingFields, service: Service, given: Mapping[str, Any]) -> SamplingParams:
    """Return the request's values over the model's defaults over the documented ones. `given` wins over the body."""
    own = {name: getattr(body, name) for name in body.model_fields_set & _FIELDS}
    return SamplingParams(**{**service.sampling_defaults(), **own, **given})


def spelling(body: ConstraintFields, **names: str) -> dict[str, str]:
    """Return `Generate.names`: those given, and the field of the body that demands a form of the output, if one
    does.
    """
    field = constraint_of(body)
    return {**names, "structured_outputs": field} if field else names


class Meter:
    """The usage of all choices so far. `count` choices are expected, `per_prompt` of them for each prompt."""

    def __init__(self, count: int, per_prompt: int) -> None:
        self._usages = [Usage()] * count
        self._per_prompt = per_prompt

    def see(self, output: Output) -> None:
        self._usages[output.index] = output.usage

    def of(self, index: int) -> Usage:
        """Return the usage of one choice, for streams that report it in each chunk."""
        return self._usages[index]

    def total(self) -> Usage:
        """Return the sum over choices; a prompt counts once, however many choices it has."""
        return Usage.total(self._usages, len(self._usages) // self._per_prompt)

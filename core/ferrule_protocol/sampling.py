"""The conversion of a body's fields to sampling parameters, and checks of the choice of tools, in any protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ferrule.config import RouterSettings
from ferrule.errors import RequestError, nearest
from ferrule.interfaces.service import Service
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


def check_tool_choice(
    tools: Sequence[dict[str, Any]] | None, choice: str | dict[str, Any] | None, config: RouterSettings
) -> None:
    """Check a choice, as `Generate.tool_choice` has it, against the functions and the server's options.

    Raises RequestError that names `tool_choice`.
    """
    if not tools:
        if choice not in (None, "none"):
            raise RequestError("tool_choice needs tools.", "tool_choice")
    elif choice in (None, "auto"):
        if not config.frontend.enable_auto_tool_choice:
            raise RequestError(
                'tool_choice "auto", the default with tools, needs a server that was started with '
                '--enable-auto-tool-choice and --tool-call-parser; with "none" the tools are only shown to the model.',
                "tool_choice",
            )
    elif isinstance(choice, dict):
        name, names = choice["function"]["name"], [tool["function"]["name"] for tool in tools]
        if name not in names:
            raise RequestError(
                f"tool_choice names {name!r:.80}, which is not one of the tools.{nearest(name, names)}", "tool_choice"
            )

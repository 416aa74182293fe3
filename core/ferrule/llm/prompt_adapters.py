"""`PromptAdapterRequest`: a prompt adapter as callers of the offline engine name it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ferrule.config import PromptAdapter
from ferrule.errors import RequestError
from ferrule.llm.prompts import Given

_PARAM = "prompt_adapter_request"


@dataclass(frozen=True)
class PromptAdapterRequest:
    """Virtual tokens to put before a prompt, from a folder as PEFT writes it. Nothing depends on the id."""

    prompt_adapter_name: str
    prompt_adapter_id: int
    prompt_adapter_local_path: str
    prompt_adapter_num_virtual_tokens: int


Adapters = PromptAdapterRequest | Sequence[PromptAdapterRequest | None] | None


def given_adapter(request: PromptAdapterRequest | None) -> PromptAdapter | None:
    """Return the adapter that a caller names. Raises RequestError."""
    if request is None:
        return None
    if not isinstance(request, PromptAdapterRequest):
        raise RequestError(f"{_PARAM} must be a PromptAdapterRequest.", _PARAM)
    name, path = request.prompt_adapter_name, request.prompt_adapter_local_path
    count = request.prompt_adapter_num_virtual_tokens
    if not isinstance(name, str) or not isinstance(path, str) or type(count) is not int or count < 1:
        raise RequestError(f"{_PARAM} needs a name and a path, and a positive number of virtual tokens.", _PARAM)
    return PromptAdapter(name=name, path=path, num_tokens=count)


def adapted(prompts: Sequence[Given], requests: Adapters) -> list[Given]:
    """Return the prompts with their adapters: one for all, or one for each. Raises RequestError."""
    each = [requests] * len(prompts) if requests is None or isinstance(requests, PromptAdapterRequest) else requests
    if len(each) != len(prompts):
        raise RequestError(f"{_PARAM} has {len(each)} entries for {len(prompts)} prompts.", _PARAM)
    return [
        prompt._replace(prompt_adapter=given_adapter(request)) for prompt, request in zip(prompts, each, strict=True)
    ]

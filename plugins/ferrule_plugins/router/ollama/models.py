"""The served models as Ollama lists and shows them."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from ferrule.errors import RequestError
from ferrule.interfaces.router import RouterContext
from ferrule.interfaces.service import Prompt
from ferrule.interfaces.tokenizer import ChatTokenizer
from ferrule_plugins.router.ollama.answers import (
    OllamaListedModel,
    OllamaModelDetails,
    OllamaRunningModel,
    OllamaShownModel,
)
from ferrule_plugins.router.ollama.form import now
from ferrule_protocol import choose_templates, fingerprint

_LATEST = ":latest"
_NEVER = "2300-01-01T00:00:00Z"  # when the model is unloaded; clients in some languages have no later years
_CLASS = re.compile(r"(For[A-Z]\w*|LMHead\w*|Model)$")
# Ollama's names of sampling parameters.
_NAMES = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}


class Models:
    """The served models: their names, and descriptions of them."""

    def __init__(self, ctx: RouterContext) -> None:
        self._service = ctx.service
        self._config = ctx.config
        self._modified = now()

    async def resolve(self, name: str) -> str:
        """Return the served name, or that of an adapter, that a name means: a name without a tag has the tag `latest`.

        Raises NotFoundError.
        """
        spellings, names = (name, name.removesuffix(_LATEST), name + _LATEST), self._names()
        return await self._service.resolve(next((each for each in spellings if each in names), name))

    def listed(self) -> list[OllamaListedModel]:
        return [self._listed(name, parent) for name, parent in self._names().items()]

    def running(self) -> list[OllamaRunningModel]:
        return [self._running(name, parent) for name, parent in self._names().items()]

    def _names(self) -> dict[str, str]:
        """Return the names that requests may use, each with the name of its base model: "" for the model itself."""
        adapters = {adapter.name: adapter.parent for adapter in self._service.adapters()}
        return dict.fromkeys(self._service.names, "") | adapters

    async def shown(self, name: str) -> OllamaShownModel:
        model = self._service.model
        family = self._details()["family"]
        info: dict[str, Any] = {
            "general.architecture": family,
            "general.parameter_count": model.num_parameters,
            f"{family}.context_length": model.max_model_len,
            f"{family}.vocab_size": model.vocab_size,
        }
        if model.hidden_size:
            info[f"{family}.embedding_length"] = model.hidden_size
        defaults = self._service.sampling_defaults().items()
        return {
            "modelfile": f"FROM {name}\n",
            "parameters": "\n".join(f"{_NAMES.get(key, key):<30} {value}" for key, value in defaults),
            "template": self._template(),
            "details": self._details(self._names().get(name, "")),
            "model_info": info,
            "capabilities": await self._capabilities(),
            "modified_at": self._modified,
        }

    @property
    def has_template(self) -> bool:
        """Whether conversations can be written as text."""
        tokenizer = self._service.tokenizer
        if tokenizer is None or isinstance(tokenizer, ChatTokenizer):
            return True
        return self._config.frontend.chat_template is not None or bool(tokenizer.chat_template)

    def _template(self) -> str:
        """Return the template that conversations are written with; empty where the server does not show it."""
        tokenizer, front = self._service.tokenizer, self._config.frontend
        if tokenizer is None or not front.enable_tokenizer_info_endpoint:
            return ""
        templates = choose_templates(front.chat_template, tokenizer.chat_template)
        return templates.get("default") or next(iter(templates.values()), "")

    async def _capabilities(self) -> list[str]:
        front, tasks = self._config.frontend, self._service.model.tasks
        found = {
            "completion": "generate" in tasks,
            "tools": "generate" in tasks and front.enable_auto_tool_choice,
            "thinking": "generate" in tasks and bool(front.reasoning_parser),
            "insert": "generate" in tasks and await self._infills(),
            "embedding": "embed" in tasks,
        }
        return [name for name, has in found.items() if has]

    async def _infills(self) -> bool:
        try:
            await self._service.tokenize(Prompt(text="a", suffix="b"))
        except RequestError:  # the tokenizer has no tokens for that
            return False
        return True

    def _details(self, parent: str = "") -> OllamaModelDetails:
        model = self._service.model
        family = _CLASS.sub("", model.architecture).lower()
        return {
            "parent_model": parent,
            "format": "",
            "family": family,
            "families": [family],
            "parameter_size": _size(model.num_parameters),
            "quantization_level": model.quantization or model.dtype,
        }

    def _listed(self, name: str, parent: str) -> OllamaListedModel:
        return {
            "name": name,
            "model": name,
            "modified_at": self._modified,
            "size": self._service.model.weight_bytes,
            "digest": self._digest(),
            "details": self._details(parent),
        }

    def _running(self, name: str, parent: str) -> OllamaRunningModel:
        model = self._service.model
        return {
            "name": name,
            "model": name,
            "size": model.weight_bytes,
            "digest": self._digest(),
            "details": self._details(parent),
            "expires_at": _NEVER,
            "size_vram": model.weight_bytes,
            "context_length": model.max_model_len,
        }

    def _digest(self) -> str:
        return hashlib.sha256(fingerprint(self._service).encode()).hexdigest()


def _size(num_parameters: int) -> str:
    """Return a number of parameters as Ollama writes it, such as 7.6B."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if num_parameters >= unit:
            return f"{num_parameters / unit:.1f}{name}"
    return str(num_parameters)

"""What both wrappers need: vLLM's view of tokenizer and request, and which methods a class has."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ferrule.interfaces.parsers import ChoiceContext
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule_plugins.compat_vllm.protocol import (
    ChatCompletionRequest,
    ChatCompletionToolsParam,
    FunctionDefinition,
)

_BASES = frozenset({"ToolParser", "ReasoningParser"})  # what they define only refuses
_FUNCTION = ("name", "description", "parameters", "strict")


class VllmTokenizer:
    """A tokenizer with the methods that parser files call."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.vocab_size = tokenizer.vocab_size
        self.all_special_ids = sorted(tokenizer.all_special_ids)

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def vocab(self) -> dict[str, int]:
        return self.get_vocab()

    @property
    def all_special_tokens(self) -> list[str]:
        return [self._tokenizer.token(token) or "" for token in self.all_special_ids]

    def get_vocab(self) -> dict[str, int]:
        return _vocabulary(self._tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return self._tokenizer.decode([ids] if isinstance(ids, int) else ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return an id, or a list of them; None for a text that is not a token."""
        vocabulary = self.get_vocab()
        return vocabulary.get(tokens) if isinstance(tokens, str) else [vocabulary.get(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int], **_: Any) -> Any:
        return self._tokenizer.token(ids) if isinstance(ids, int) else [self._tokenizer.token(one) for one in ids]


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    tokens = ((tokenizer.token(token_id), token_id) for token_id in range(tokenizer.vocab_size))
    return {token: token_id for token, token_id in tokens if token is not None}


def tokenizer_of(context: ChoiceContext) -> VllmTokenizer | None:
    return None if context.tokenizer is None else VllmTokenizer(context.tokenizer)


def request_of(context: ChoiceContext) -> ChatCompletionRequest:
    return ChatCompletionRequest(
        tools=[_tool(tool) for tool in context.tools] or None,
        tool_choice=context.tool_choice or ("auto" if context.tools else "none"),
        stream=context.streamed,
        chat_template_kwargs=dict(context.template_kwargs),
    )


def _tool(tool: dict[str, Any]) -> ChatCompletionToolsParam:
    function = tool["function"]
    known = {key: function[key] for key in _FUNCTION if key in function}
    return ChatCompletionToolsParam(function=FunctionDefinition(**known))


def has_parameter(found: type, name: str) -> bool:
    """Return whether the constructor of a class has a parameter of this name."""
    parameters = inspect.signature(found).parameters.values()
    return any(one.kind is one.VAR_KEYWORD or one.name == name for one in parameters)


def method_of(parser: Any, *names: str) -> Any:
    """Return the method that the most derived class defines under one of its names; None when only vLLM's base has
    it.
    """
    for owner in type(parser).__mro__:
        found = next((name for name in names if name in vars(owner)), None)
        if found is not None:
            return None if owner.__name__ in _BASES else getattr(parser, found)
    return None


def with_request(method: Any, num_arguments: int) -> Any:
    """Return the method so that it can be called with the request as last argument, also where it does not take one, as
    in vLLM 0.6.0.
    """
    parameters = inspect.signature(method).parameters.values()
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    enough = len(positional) >= num_arguments or any(one.kind is one.VAR_POSITIONAL for one in parameters)
    return method if enough else lambda *given: method(*given[:-1])

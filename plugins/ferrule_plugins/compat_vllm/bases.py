"""Stand-ins for the base classes and registries of vLLM's parsers, and for the helpers next to them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from ferrule_plugins.compat_vllm.protocol import (
    ChatCompletionRequest,
    DeltaMessage,
    ExtractedToolCallInformation,
)


class ToolParser:
    """What a tool parser derives from."""

    supports_required_and_named = True

    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        self.prev_tool_call_arr: list[dict[str, Any]] = []
        self.current_tool_id = -1
        self.current_tool_name_sent = False
        self.streamed_args_for_tool: list[str] = []
        self.model_tokenizer = tokenizer
        self.tools = tools

    @cached_property
    def vocab(self) -> dict[str, int]:
        return self.model_tokenizer.get_vocab()  # type: ignore[no-any-return]

    def adjust_request(self, request: ChatCompletionRequest) -> ChatCompletionRequest:
        return request

    def extract_tool_calls(self, model_output: str, request: ChatCompletionRequest) -> ExtractedToolCallInformation:
        raise NotImplementedError(f"{type(self).__name__}.extract_tool_calls")

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: ChatCompletionRequest,
    ) -> DeltaMessage | None:
        raise NotImplementedError(f"{type(self).__name__}.extract_tool_calls_streaming")


class ReasoningParser:
    """What a reasoning parser derives from. The methods that extract have an old name and a new one; either counts."""

    def __init__(self, tokenizer: Any, *_: Any, **__: Any) -> None:
        self.model_tokenizer = tokenizer

    @cached_property
    def vocab(self) -> dict[str, int]:
        return self.model_tokenizer.get_vocab()  # type: ignore[no-any-return]

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        raise NotImplementedError(f"{type(self).__name__}.is_reasoning_end")

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        raise NotImplementedError(f"{type(self).__name__}.extract_content_ids")

    def adjust_request(self, request: ChatCompletionRequest) -> ChatCompletionRequest:
        return request


class BaseThinkingReasoningParser(ReasoningParser):
    """Thoughts between two tokens, `start_token` and `end_token`."""

    start_token: str
    end_token: str

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self.start_token_id = self.vocab.get(self.start_token)
        self.end_token_id = self.vocab.get(self.end_token)
        if self.start_token_id is None or self.end_token_id is None:
            raise RuntimeError(f"the tokenizer has no token {self.start_token} or {self.end_token}")

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        marks = [token for token in input_ids if token in (self.start_token_id, self.end_token_id)]
        return bool(marks) and marks[-1] == self.end_token_id

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        if self.end_token_id not in input_ids:
            return []
        return list(input_ids[input_ids.index(self.end_token_id) + 1 :])

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        reasoning, content = self._split(model_output)
        return reasoning or None, content or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        before, now = self._split(previous_text), self._split(current_text)
        reasoning, content = (new[len(old) :] for old, new in zip(before, now, strict=True))
        if not reasoning and not content:
            return None
        return DeltaMessage(reasoning=reasoning or None, content=content or None)

    extract_reasoning_content = extract_reasoning
    extract_reasoning_content_streaming = extract_reasoning_streaming

    def _split(self, text: str) -> tuple[str, str]:
        reasoning, _, content = text.partition(self.end_token)
        return reasoning.replace(self.start_token, "", 1), content


class Manager:
    """A registry. Each file has its own; `namespace` is that of the file."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._found: dict[str, type | str] = {}

    def register_module(
        self, name: str | Iterable[str] | None = None, force: bool = True, module: type | None = None
    ) -> Callable[[type], type] | type:
        """A decorator, or a call with the class as `module`."""
        if isinstance(name, type):
            return self._register(name, [name.__name__])
        names = [name] if isinstance(name, str) else list(name or ())
        if module is not None:
            return self._register(module, names)
        return lambda found: self._register(found, names)

    def register_lazy_module(self, name: str, module_path: str, class_name: str) -> None:
        """The class is taken from the file that registers it."""
        self._found[name] = class_name

    def get_tool_parser(self, name: str) -> type:
        """Raises KeyError."""
        found = self._found[name]
        return self._namespace[found] if isinstance(found, str) else found

    get_reasoning_parser = get_tool_parser

    def _register(self, found: type, names: list[str]) -> type:
        for name in names or [found.__name__]:
            self._found[name] = found
        return found


class Logger(logging.LoggerAdapter[logging.Logger]):
    """A logger that also says things once."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._told: set[str] = set()

    def debug_once(self, message: str, *args: Any, **_: Any) -> None:
        self._once(logging.DEBUG, message, args)

    def info_once(self, message: str, *args: Any, **_: Any) -> None:
        self._once(logging.INFO, message, args)

    def warning_once(self, message: str, *args: Any, **_: Any) -> None:
        self._once(logging.WARNING, message, args)

    def _once(self, level: int, message: str, args: tuple[Any, ...]) -> None:
        if message not in self._told:
            self._told.add(message)
            self.log(level, message, *args)


def init_logger(name: str) -> Logger:
    return Logger(logging.getLogger(name))


# ------------------------------------------------------------------------------------------------ helpers


def find_common_prefix(s1: str, s2: str) -> str:
    return os.path.commonprefix([s1, s2])


def find_common_suffix(s1: str, s2: str) -> str:
    """The longest common ending without letters and digits: of ``{"a": "b"}`` and ``{"a": "bc"}`` it is ``"}``."""
    length = 0
    while length < min(len(s1), len(s2)) and s1[-1 - length] == s2[-1 - length] and not s1[-1 - length].isalnum():
        length += 1
    return s1[len(s1) - length :]


def extract_intermediate_diff(curr: str, old: str) -> str:
    """What `curr` has between the beginning and the ending that it shares with `old`."""
    suffix = find_common_suffix(curr, old)
    middle = curr.removesuffix(suffix)
    return middle[len(find_common_prefix(middle, old.removesuffix(suffix))) :]


def find_all_indices(string: str, substring: str) -> list[int]:
    return [at for at in range(len(string)) if string.startswith(substring, at)]


def is_complete_json(input_str: str) -> bool:
    try:
        json.loads(input_str)
    except ValueError:
        return False
    return True

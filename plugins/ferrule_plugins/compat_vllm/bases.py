"""Stand-ins for the base classes and registries of vLLM's parsers, and for its loggers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from ferrule_plugins.compat_vllm.protocol import (
    ChatCompletionRequest,
    DeltaMessage,
    ExtractedToolCallInformation,
)


class ToolParser:
    """The base class of tool parsers."""

    supports_required_and_named = True
    structural_tag_model: str | None = None

    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        self.prev_tool_call_arr: list[dict[str, Any]] = []
        self.current_tool_id = -1
        self.current_tool_name_sent = False
        self.streamed_args_for_tool: list[str] = []
        self.model_tokenizer = tokenizer
        self.tools = list(tools or ())

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

    def end_of_stream(self) -> DeltaMessage | None:
        """Return the text that was held back when the output has ended; vLLM's own parsers have no such method."""
        return None


class ReasoningParser:
    """The base class of reasoning parsers. The methods that extract have an old name and a new one; either counts."""

    def __init__(self, tokenizer: Any, *_: Any, **__: Any) -> None:
        self.model_tokenizer = tokenizer

    @cached_property
    def vocab(self) -> dict[str, int]:
        return self.model_tokenizer.get_vocab()  # type: ignore[no-any-return]

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        raise NotImplementedError(f"{type(self).__name__}.is_reasoning_end")

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        return self.is_reasoning_end(input_ids)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        raise NotImplementedError(f"{type(self).__name__}.extract_content_ids")

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        return 0

    def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
        """Note the prompt; called once, before the answer."""

    def adjust_request(self, request: ChatCompletionRequest) -> ChatCompletionRequest:
        return request


class Manager:
    """A registry. Each file has its own; `namespace` is that of the file."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._found: dict[str, type | str] = {}

    def register_module(
        self, name: str | Iterable[str] | None = None, force: bool = True, module: type | None = None
    ) -> Callable[[type], type] | type:
        """Register a class: as a decorator, or when called with the class as `module`."""
        if isinstance(name, type):
            return self._register(name, [name.__name__])
        names = [name] if isinstance(name, str) else list(name or ())
        if module is not None:
            return self._register(module, names)
        return lambda found: self._register(found, names)

    def register_lazy_module(self, name: str, module_path: str, class_name: str) -> None:
        """Register a class by its name; it is taken from the file that registers it."""
        self._found[name] = class_name

    def get_tool_parser(self, name: str) -> type:
        """Return the class of a name. Raises KeyError."""
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

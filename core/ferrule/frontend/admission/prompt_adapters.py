"""Prompt adapters: trained virtual tokens that stand before the prompts of requests which name the adapter.

A folder of PEFT has them: ``adapter_config.json``, and ``prompt_embeddings`` [virtual tokens, hidden] in
``adapter_model.safetensors`` or ``adapter_model.bin``. To the engine they are an item of kind "embeds" at the first
positions of a prompt, so they take part in cached prefixes, chunks and batches as any embeddings do.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ferrule import log
from ferrule.config import PromptAdapter, ResolvedPromptAdapters
from ferrule.errors import CheckpointError, ConfigError, ForbiddenError, RequestError, RequestFailed
from ferrule.frontend.admission.tensors import embeds_item, read_file
from ferrule.small_files import read_json, read_small
from ferrule.types import MediaItem, ModelInfo

_CONFIG = "adapter_config.json"
_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_TENSOR = "prompt_embeddings"
_KINDS = ("PROMPT_TUNING", "P_TUNING")
_REFUSED = {
    "PREFIX_TUNING": "it has keys and values for each layer, which are not tokens",
    "MULTITASK_PROMPT_TUNING": "its tokens differ by task",
    "LORA": "it belongs to --lora-modules",
}
_MAX_HEADER = 1 << 16  # bytes of a file besides its tensor

_logger = log.get("frontend")


class Description(NamedTuple):
    """The configuration of an adapter, and the file of its embeddings."""

    file: Path
    num_tokens: int
    width: int | None  # of an embedding, where the configuration has it


def describe(adapter: PromptAdapter, max_tokens: int) -> Description:
    """Read the configuration of an adapter, and find its file. Raises CheckpointError, which names the file."""
    folder = Path(adapter.path).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder.")
    config = read_json(folder / _CONFIG)
    kind, count, width = (config.get(key) for key in ("peft_type", "num_virtual_tokens", "token_dim"))
    if kind not in _KINDS:
        reason = _REFUSED.get(kind, "") if isinstance(kind, str) else ""
        raise CheckpointError(
            f"{folder / _CONFIG} has the peft_type {kind!r:.40}{reason and f': {reason}'}. Prompt adapters are of type "
            f"{' or '.join(_KINDS)}."
        )
    if type(count) is not int or count < 1:
        raise CheckpointError(f"{folder / _CONFIG}: num_virtual_tokens must be a positive integer, not {count!r:.40}.")
    if width is not None and type(width) is not int:
        raise CheckpointError(f"{folder / _CONFIG}: token_dim must be an integer, not {width!r:.40}.")
    if adapter.num_tokens not in (0, count):
        raise CheckpointError(f"{folder / _CONFIG} has {count} virtual tokens, not {adapter.num_tokens}.")
    if count > max_tokens:
        raise CheckpointError(
            f"{folder / _CONFIG} has {count} virtual tokens; --max-prompt-adapter-token is {max_tokens}."
        )
    for name in _FILES:
        if (folder / name).is_file():
            return Description(folder / name, count, width)
    raise CheckpointError(f"{folder} has neither {' nor '.join(_FILES)}.")


def read_adapter(adapter: PromptAdapter, max_tokens: int, size: int) -> MediaItem:
    """Read the virtual tokens of an adapter for embeddings of `size` values. Raises CheckpointError, which names the
    file.
    """
    file, count, width = describe(adapter, max_tokens)
    if width not in (None, size):
        raise CheckpointError(f"{file} belongs to another model: its embeddings have {width} values, not {size}.")
    try:
        content = read_small(file, 4 * count * size + _MAX_HEADER, f"file with {count} virtual tokens of this model")
        found = read_file(content, size, count, _TENSOR)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: {_TENSOR} must {error}.") from None
    if found.shape[0] != count:
        raise CheckpointError(f"{file} has {found.shape[0]} virtual tokens, and {_CONFIG} says {count}.")
    return embeds_item(found)


class PromptAdapters:
    """The prompt adapters of one process. Embeddings are read when they are first used, and the last ones are kept."""

    def __init__(self, settings: ResolvedPromptAdapters, hidden_size: int) -> None:
        self.named = {adapter.name: adapter for adapter in settings.modules}
        self._settings = settings
        self._size = hidden_size
        self._kept: OrderedDict[str, MediaItem] = OrderedDict()  # by path
        self._reading = asyncio.Lock()
        self.num_virtual: dict[str, int] = {}  # tokens of the server's own adapters, by name, once they are open

    async def get(self, adapter: PromptAdapter) -> MediaItem:
        """Return the virtual tokens of an adapter that the server has or that the caller gives.

        Raises RequestError for a given one that cannot be used, RequestFailed for the server's.
        """
        if not self._settings.enable_prompt_adapter:
            raise ForbiddenError("Prompt adapters are off (--enable-prompt-adapter).", "prompt_adapter_request")
        async with self._reading:
            if adapter.path not in self._kept or adapter.num_tokens not in (0, self._kept[adapter.path].count):
                self._keep(adapter.path, await self._read(adapter))
            self._kept.move_to_end(adapter.path)
            return self._kept[adapter.path]

    def open(self) -> None:
        """Read the server's adapters, to see that they can be used. Raises ConfigError."""
        for adapter in self.named.values():
            with _told(adapter):
                item = read_adapter(adapter, self._settings.max_prompt_adapter_token, self._size)
            self._keep(adapter.path, item)
            self.num_virtual[adapter.name] = item.count

    async def _read(self, adapter: PromptAdapter) -> MediaItem:
        try:
            most = self._settings.max_prompt_adapter_token
            return await asyncio.to_thread(read_adapter, adapter, most, self._size)
        except CheckpointError as error:
            if adapter == self.named.get(adapter.name):
                _logger.error("a prompt adapter cannot be read", name=adapter.name, error=error.message)
                raise RequestFailed(f"The prompt adapter {adapter.name!r} cannot be read.") from None
            raise RequestError(error.message, "prompt_adapter_request") from None

    def _keep(self, path: str, item: MediaItem) -> None:
        self._kept[path] = item
        if len(self._kept) > self._settings.max_prompt_adapters:
            self._kept.popitem(last=False)


@contextmanager
def _told(adapter: PromptAdapter) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise ConfigError(f"--prompt-adapters {adapter.name}: {error.message}") from None


def check_prompt_adapters(settings: ResolvedPromptAdapters) -> None:
    """Check what can be checked before the model is loaded. Raises ConfigError."""
    for adapter in settings.modules:
        with _told(adapter):
            describe(adapter, settings.max_prompt_adapter_token)


def open_prompt_adapters(settings: ResolvedPromptAdapters, model: ModelInfo) -> PromptAdapters:
    """Open the prompt adapters of a server. Raises ConfigError."""
    if settings.enable_prompt_adapter and not model.hidden_size:
        raise ConfigError(f"--enable-prompt-adapter: {model.implementation} takes no embeddings.")
    if settings.enable_prompt_adapter and "generate" not in model.tasks:
        raise ConfigError(f"--enable-prompt-adapter: {model.architecture} does not generate.")
    adapters = PromptAdapters(settings, model.hidden_size)
    adapters.open()
    return adapters

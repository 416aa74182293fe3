"""Asks resolvers for adapters that requests name: once for each name at a time, and for a bounded number at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from ferrule import log
from ferrule.config import Resolved
from ferrule.errors import FerruleError, OverloadedError, PluginError, RequestError
from ferrule.interfaces.lora_resolver import LoRAResolver, ResolverContext
from ferrule.interfaces.plugins import Plugins
from ferrule.locate.localise import fetch_files

_FORGET = 10.0  # seconds for which the answer to a name that led to no adapter counts
_MAX_UNKNOWN = 1024  # names that led to none
_MAX_AT_ONCE = 16
_logger = log.get("adapters")


class Resolvers:
    """The chosen resolvers. `load` makes an adapter of a folder that a resolver gives, and raises RequestError."""

    def __init__(
        self,
        resolvers: Sequence[tuple[str, LoRAResolver]],
        load: Callable[[str, Path], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resolvers = resolvers
        self._load = load
        self._clock = clock
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._unknown: dict[str, tuple[float, RequestError | None]] = {}  # until when, and what was wrong with it

    async def find(self, name: str) -> None:
        """Load the adapter of this name, if a resolver knows it.

        Raises RequestError for an adapter that cannot be loaded, OverloadedError when too many names are asked for.
        """
        if not self._resolvers:
            return
        until, error = self._unknown.get(name, (0.0, None))
        if self._clock() < until:
            if error is not None:
                raise error
            return
        task = self._asking.get(name)
        if task is None:
            if len(self._asking) >= _MAX_AT_ONCE:
                raise OverloadedError("Too many adapters are being looked for. Try again.")
            task = self._asking[name] = asyncio.get_running_loop().create_task(self._ask(name))
            task.add_done_callback(lambda _: self._asking.pop(name, None))
        await asyncio.shield(task)  # it goes on when a client leaves: others may wait for it

    async def close(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, name: str) -> None:
        for title, resolver in self._resolvers:
            try:
                folder = await resolver.resolve(name)
            except FerruleError as error:
                _logger.warning("the resolver %s cannot say whether it has %r: %s", title, name, error)
                continue
            except Exception:
                _logger.exception("the resolver %s failed", title)
                continue
            if folder is not None:
                try:
                    await self._load(name, folder)
                except RequestError as error:
                    self._remember(name, error)
                    raise
                return
        self._remember(name, None)

    def _remember(self, name: str, error: RequestError | None) -> None:
        self._unknown.pop(name, None)
        self._unknown[name] = (self._clock() + _FORGET, error)
        while len(self._unknown) > _MAX_UNKNOWN:
            del self._unknown[next(iter(self._unknown))]


def open_resolvers(config: Resolved, plugins: Plugins) -> list[tuple[str, LoRAResolver]]:
    """Make the chosen resolvers, each with its title. Raises PluginError for one that is named and refuses."""
    section = config.lora
    if not section.enable_lora:
        return []
    folder = section.lora_resolver_cache_dir
    context = ResolverContext(
        base_models=tuple(dict.fromkeys((*config.model.served_model_name, config.model.model))),
        cache_dir=None if folder is None else Path(folder).expanduser(),
        repositories=section.lora_resolver_hf_repo_list,
        fetch=lambda name, choose: fetch_files(config, plugins, name, choose),
    )
    named = {name.removeprefix("+") for name in section.lora_resolvers}
    found = []
    for name in plugins.chosen("lora_resolver", section.lora_resolvers):
        resolver: LoRAResolver = plugins.make("lora_resolver", name, context)
        reason = resolver.refuses()
        if reason is None:
            found.append((plugins.title("lora_resolver", name), resolver))
        elif name in named:
            raise PluginError(f"--lora-resolvers {name}: {reason}")
    return found

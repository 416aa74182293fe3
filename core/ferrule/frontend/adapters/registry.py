"""`Adapters`: from the name that a request gives as its model to an adapter of the engine."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakValueDictionary

from msgspec.structs import replace

from ferrule import log
from ferrule.client.base import EngineClient
from ferrule.config import Resolved
from ferrule.config.adapters import first_adapters, name_problem
from ferrule.errors import EngineDead, NotFoundError, OverloadedError, RequestError, UnavailableError
from ferrule.frontend.adapters.places import Places
from ferrule.frontend.adapters.resolving import Resolvers, open_resolvers
from ferrule.frontend.adapters.table import AdapterTable, Served
from ferrule.interfaces.plugins import Plugins
from ferrule.types import Adapter, AdapterInfo

_MAX_ADAPTERS = 4096  # names in the table
_MAX_LOADS = 1024  # that are being loaded, or wait for it, in this process
_SHOWN = 20  # names that an error lists
_NONE = "This server has no adapters: start it with --enable-lora."
_logger = log.get("adapters")


class Adapters:
    """The adapters of one API process. One event loop owns it.

    An adapter's identity (`Adapter.name`) is another one after each load, so what the cache has of an earlier one is
    never found. Requests that run keep the adapter that they have begun with.
    """

    def __init__(
        self,
        config: Resolved,
        plugins: Plugins,
        client: EngineClient,
        check: Callable[[Served], Awaitable[object]] | None = None,
    ) -> None:
        """Make the resolvers. `check` raises RequestError for an adapter that was read and cannot be served. Raises
        PluginError.
        """
        self._check = check
        self._names = config.model.served_model_name
        self._enabled = config.lora.enable_lora
        self._client = client
        first = zip(config.lora.modules, first_adapters(config.lora), strict=True)
        entries = [
            Served(
                name=module.name,
                adapter=adapter,
                parent=module.base_model_name or self._names[0],
                info=client.info.adapters.get(adapter.name, AdapterInfo()),
            )
            for module, adapter in first
        ]
        entries += [Served(name=one.name, prompt=one, parent=self._names[0]) for one in config.prompt_adapter.modules]
        self._table = AdapterTable(client.board, entries)
        self._places = Places(config.lora)
        self._resolvers = Resolvers(open_resolvers(config, plugins), self._add_found)
        self._loading = 0
        self._reading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by path

    def all(self) -> list[Served]:
        return list(self._table.entries().values())

    def known(self, model: str | None) -> Served | None:
        """Return the adapter that a request's model stands for; None for the model itself. Raises NotFoundError."""
        if not model or model in self._names:
            return None
        entries = self._table.entries()
        if model not in entries:
            names = [*self._names, *entries]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            listed = ", ".join(names[:_SHOWN])
            raise NotFoundError(f"The model {model!r:.120} does not exist. Valid names: {listed}{more}.", "model")
        return entries[model]

    async def find(self, model: str | None) -> Served | None:
        """Do as `known`, and ask resolvers for a name that is not. Raises RequestError, NotFoundError."""
        try:
            return self.known(model)
        except NotFoundError:
            if not self._enabled or model is None or name_problem(model):
                raise
        await self._resolvers.find(model)
        return self.known(model)

    async def for_vectors(self, model: str | None) -> Served | None:
        """Do as `find`. Raises RequestError for a prompt adapter, too."""
        served = await self.find(model)
        if served is not None and served.prompt is not None:
            raise RequestError("A prompt adapter is for generating, and not for vectors.", "model")
        return served

    async def load(self, name: str, path: str, in_place: bool = False) -> None:
        """Read and check an adapter, and serve it. A failed load changes nothing.

        Raises RequestError, for a name that is taken too unless it is an adapter's and `in_place`.
        """
        self._check_enabled()
        with self._one_more():
            folder = await asyncio.to_thread(self._places.folder, path)
            await self._add(name, folder, in_place)

    async def ensure(self, name: str, path: str, again: bool = False) -> None:
        """Load an adapter from any folder, for a caller who is the operator, unless it is loaded from there.

        Raises RequestError, also for a name that is in use for another folder; with `again` it is replaced.
        """
        self._check_enabled()
        folder = Path(path).expanduser().absolute()
        loaded = self._table.entries().get(name)
        if again or loaded is None or loaded.path != str(folder):
            await self._add(name, folder, again)

    async def unload(self, name: str) -> None:
        """Forget an adapter. Requests that use it go on. Raises NotFoundError."""
        self._check_enabled()
        async with self._table.changing() as entries:
            if name not in entries or entries[name].adapter is None:
                raise NotFoundError(f"There is no adapter {name!r:.120}.", "lora_name")
            self._table.replace(entry for entry in entries.values() if entry.name != name)
        _logger.info("adapter removed", name=name)

    async def close(self) -> None:
        await self._resolvers.close()

    def _check_enabled(self) -> None:
        if not self._enabled:
            raise RequestError(_NONE)

    async def _add_found(self, name: str, folder: Path) -> None:
        """Add what a resolver has found, unless another process has done so."""
        try:
            await self._add(name, folder, in_place=False)
        except RequestError as error:
            if name not in self._table.entries():
                raise error.about("model") from None

    async def _add(self, name: str, folder: Path, in_place: bool) -> None:
        if problem := name_problem(name):
            raise RequestError(f"lora_name {problem}.", "lora_name")
        if name in self._names:
            raise RequestError(f"lora_name {name!r:.120} is a name of the model.", "lora_name")
        adapter = Adapter(name=f"{name}@{secrets.token_hex(8)}", path=str(folder), served=name)
        _check_free(name, self._table.entries(), in_place)
        async with self._reading.setdefault(adapter.path, asyncio.Lock()):  # a folder that hangs takes one place
            info = await self._read(adapter)
        served = Served(name=name, adapter=adapter, parent=self._names[0], info=info)
        if self._check is not None:
            await self._checked(served, self._check)
        async with self._table.changing() as entries:
            _check_free(name, entries, in_place)
            if name in entries:
                served = replace(served, parent=entries[name].parent)
            self._table.replace({**entries, name: served}.values())
        _logger.info("adapter loaded", name=name, path=adapter.path)

    async def _read(self, adapter: Adapter) -> AdapterInfo:
        """Have the engine read and check an adapter, and describe it."""
        try:
            await self._client.call("read_adapter", adapter.name, adapter.path, adapter.served)
            return AdapterInfo(**await self._client.call("describe_adapter", adapter.name))
        except EngineDead:
            raise UnavailableError("The engine is not running.") from None
        except RequestError as error:
            raise error.about("lora_path") from None

    async def _checked(self, served: Served, check: Callable[[Served], Awaitable[object]]) -> None:
        try:
            await check(served)
        except RequestError as error:
            raise error.about("lora_path") from None

    @contextmanager
    def _one_more(self) -> Iterator[None]:
        if self._loading >= _MAX_LOADS:
            raise OverloadedError(f"{_MAX_LOADS} adapters wait to be loaded. Try again.")
        self._loading += 1
        try:
            yield
        finally:
            self._loading -= 1


def _check_free(name: str, entries: Mapping[str, Served], in_place: bool) -> None:
    """Raise RequestError for a name that an adapter cannot get now."""
    if name in entries and entries[name].adapter is None:
        raise RequestError(f"lora_name {name!r:.120} is the name of a prompt adapter.", "lora_name")
    if name in entries and not in_place:
        raise RequestError(
            f"The adapter {name!r:.120} is loaded already. With load_inplace true it is replaced.", "lora_name"
        )
    if len(entries) >= _MAX_ADAPTERS and name not in entries:
        raise RequestError(f"At most {_MAX_ADAPTERS} adapters can be loaded: unload one first.", "lora_name")

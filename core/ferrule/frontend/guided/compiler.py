"""`GrammarCompiler`: constraints of requests to what the engine takes, compiled once and in children.

Each API process keeps 256 MiB of compiled constraints, by use, and none over a restart. A schema of 20 fields compiles
in 3 to 10 ms with `guidance`, which `auto` asks first, and in 70 to 200 ms with `xgrammar`. A cache on the disk would
save that once for each schema and restart; in exchange the engine would load files that anybody with access to the
folder has written.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import msgspec
from msgspec.structs import replace

from ferrule.config.resolved import ResolvedDecoding
from ferrule.errors import PluginError, RequestError, nearest
from ferrule.forms import GrammarSpec
from ferrule.frontend.children.pool import ChildPool, pack
from ferrule.frontend.guided.work import Setup
from ferrule.interfaces.guided_decoding import Vocabulary
from ferrule.interfaces.plugins import Plugins
from ferrule.types import CompiledGrammar

_TASK = "ferrule.frontend.guided.work:CompileTask"
_MEMORY_BYTES = 1 << 30  # that a child may write
_SECONDS = 5.0  # for one constraint
_CHILDREN = 2  # of each backend
_CACHE_BYTES = 256 << 20
_MAX_SPEC_BYTES = 1 << 20  # of a constraint as it is sent to a child
_MAX_COMPILED_BYTES = 8 << 20  # sent to the engine with each of a request's choices


class GrammarCompiler:
    """A compiler of constraints, owned by one event loop. `vocabulary` is called when the first constraint comes, in a
    thread; None without one.

    `expect` is told a backend when its first constraint comes, while its child starts: the engine opens it meanwhile.
    """

    def __init__(
        self,
        plugins: Plugins,
        settings: ResolvedDecoding,
        vocabulary: Callable[[], Vocabulary] | None,
        expect: Callable[[str], None] = lambda backend: None,
    ) -> None:
        self._plugins = plugins
        self._settings = settings
        self._read_vocabulary = vocabulary
        self._expect = expect
        self._vocabulary: asyncio.Task[Vocabulary] | None = None
        self._pools: dict[str, ChildPool] = {}
        self._compiled: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._compiling: dict[bytes, asyncio.Task[CompiledGrammar]] = {}

    @property
    def pids(self) -> frozenset[int]:
        """Child processes that can still run."""
        return frozenset[int]().union(*(pool.pids for pool in self._pools.values()))

    async def compile(self, spec: GrammarSpec, param: str) -> CompiledGrammar:
        """Return the constraint, compiled now or before. Raises RequestError that names `param`, OverloadedError.

        Requests with the same constraint wait for one compilation, which continues when they leave.
        """
        spec = self._under_settings(spec)
        body = pack(spec, param)
        if len(body) > _MAX_SPEC_BYTES:
            raise RequestError(f"The constraint has more than {_MAX_SPEC_BYTES >> 20} MiB.", param)
        key = hashlib.sha256(body).digest()
        known = self._compiled.get(key)
        if known is not None:
            self._compiled.move_to_end(key)
            return known
        task = self._compiling.get(key)
        if task is None:
            task = self._compiling[key] = asyncio.get_running_loop().create_task(self._compile(spec, key, param))
            task.add_done_callback(lambda task: self._compiled_now(key, task))
        return await asyncio.shield(task)

    def _compiled_now(self, key: bytes, task: asyncio.Task[CompiledGrammar]) -> None:
        del self._compiling[key]
        if not task.cancelled():
            task.exception()  # all who waited may have left

    async def close(self) -> None:
        """End the children. Idempotent."""
        tasks = [*self._compiling.values(), *([self._vocabulary] if self._vocabulary else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pool in self._pools.values():
            await pool.close()

    # ------------------------------------------------------------------------------------ one constraint

    def _under_settings(self, spec: GrammarSpec) -> GrammarSpec:
        own = self._settings
        return replace(
            spec,
            backend=spec.backend or own.backend,
            any_whitespace=spec.any_whitespace and own.any_whitespace,
            bounded_whitespace=spec.bounded_whitespace and own.bounded_whitespace,
            additional_properties=spec.additional_properties and own.additional_properties,
            fallback=spec.fallback and own.fallback,
        )

    async def _compile(self, spec: GrammarSpec, key: bytes, param: str) -> CompiledGrammar:
        refusals, wrong = [], []
        for name in self._candidates(spec.backend or "auto", spec.fallback):
            answer = await self._ask(name, spec, param)
            match answer:
                case ["data", bytes(data)] if len(data) > _MAX_COMPILED_BYTES:
                    refusals.append(f"{name}: it takes more than {_MAX_COMPILED_BYTES >> 20} MiB when it is compiled")
                case ["data", bytes(data)]:
                    compiled = CompiledGrammar(backend=name, digest=key, data=data)
                    self._keep(compiled)
                    return compiled
                case ["refused", str(reason)]:
                    refusals.append(f"{name}: {reason}")
                case ["wrong", str(reason)]:  # for this library: another one may know more
                    wrong.append(reason)
                case _:
                    raise RequestError("The constraint cannot be processed.", param)
        if wrong:
            raise RequestError(f"The constraint cannot be used: {wrong[0]}", param)
        raise RequestError(f"The constraint cannot be enforced here. {'; '.join(refusals)}.", param)

    @cached_property
    def _every(self) -> Sequence[str]:
        """The backends that `auto` asks, in order, which is read from their source."""
        return self._plugins.defaults("guided_decoding")

    def _candidates(self, asked: str, fallback: bool) -> Sequence[str]:
        """Return backends in the order in which they are asked. Raises RequestError for an unknown one."""
        every = self._every
        if asked == "auto":
            return every
        if asked not in self._plugins.names("guided_decoding"):
            raise RequestError(
                f"Unknown guided decoding backend {asked!r:.60}.{nearest(asked, every)} "
                f"Known backends: auto, {', '.join(every)}.",
                "guided_decoding_backend",
            )
        return tuple(dict.fromkeys([asked, *(every if fallback else ())]))

    async def _ask(self, name: str, spec: GrammarSpec, param: str) -> Any:
        pool = self._pools.get(name) or self._open_pool(name, param)
        try:
            return await pool.run(spec, _SECONDS, "The constraint", param)
        except PluginError as error:  # a library that is not installed
            return ["refused", error.message]

    def _open_pool(self, name: str, param: str) -> ChildPool:
        """Open the children of a backend. While the first one starts, the vocabulary is read and the engine opens the
        backend.
        """
        if self._read_vocabulary is None:
            raise RequestError("This server runs without a tokenizer: it cannot constrain output.", param)
        self._expect(name)
        if self._vocabulary is None:
            work = asyncio.to_thread(self._read_vocabulary)
            self._vocabulary = asyncio.get_running_loop().create_task(work)
        setup = partial(self._setup, name, self._vocabulary)
        self._pools[name] = ChildPool(
            _TASK, size=_CHILDREN, memory_bytes=_MEMORY_BYTES, niceness=5, setup=setup, patient=True
        )
        return self._pools[name]

    async def _setup(self, name: str, vocabulary: asyncio.Task[Vocabulary]) -> bytes:
        return msgspec.msgpack.encode(Setup(self._plugins, name, await asyncio.shield(vocabulary)))

    def _keep(self, compiled: CompiledGrammar) -> None:
        self._compiled[compiled.digest] = compiled
        size = sum(len(one.data) for one in self._compiled.values())
        while size > _CACHE_BYTES and len(self._compiled) > 1:
            size -= len(self._compiled.popitem(last=False)[1].data)

"""`batches`: OpenAI's Files and Batches, in a folder of the server.

The routes are off until a folder is named, because they write what clients send to a disk::

    ferrule serve --plugin-config.router:batches.folder /var/lib/ferrule

Decisions that concern the modules of this package together:

- A line that is broken has its error in the error file, as `ferrule run-batch` has it; OpenAI fails the whole batch. A
  batch fails only if no line can be sent.
- Every line is in the output file or in the error file, once, however the batch ended.
- Files and batches belong to the name of the API key that made them; for all other keys they do not exist.
- When the store is full a new file is refused. No file is removed before it expires, except by its owner. Of batches
  the one that ended first makes room for a new one: its owner could not delete it.
- Lines come after requests of clients: few are in flight while those have any (`work`), they may use half of the queue,
  and they have a lower priority.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from ferrule.interfaces.router import Router, RouterContext
from ferrule_plugins.router.batches.options import StoreOptions

if TYPE_CHECKING:
    from ferrule_plugins.router.batches.work import Worker

_OFF = (
    "This server stores no files: start it with --plugin-config.router:batches.folder FOLDER, or run a batch without a "
    "server: ferrule run-batch -i IN.jsonl -o OUT.jsonl --model MODEL."
)


class Batches(Router):
    Options = StoreOptions

    def __init__(self, options: StoreOptions | None = None) -> None:
        self._options = options or StoreOptions()

    def router(self, ctx: RouterContext) -> APIRouter:
        if self._options.folder is None:
            return APIRouter()
        # imported here, because a server without a folder needs none of it
        from ferrule_plugins.router.batches.routes import batch_routes, file_routes
        from ferrule_plugins.router.batches.store import open_store
        from ferrule_plugins.router.batches.work import Worker

        store = open_store(self._options.folder, self._options)
        worker = Worker(ctx, store, self._options)
        routes = APIRouter(tags=["batches"], lifespan=_lifespan(worker))
        file_routes(routes, store, self._options)
        batch_routes(routes, ctx, store, worker, self._options)
        return routes

    def absent(self, ctx: RouterContext) -> Mapping[str, str]:
        return {} if self._options.folder else {"/v1/files/": _OFF, "/v1/batches/": _OFF}


def _lifespan(worker: Worker) -> Any:
    """Return a lifespan of a router, during which the worker runs."""

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        worker.start()
        try:
            yield
        finally:
            await worker.close()

    return lifespan

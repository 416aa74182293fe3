"""The routes of Files and Batches. What blocks is done in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse
from pydantic import BaseModel

from ferrule.errors import NotFoundError, RequestError
from ferrule.interfaces.router import Access, CurrentRequest, RouterContext, needs
from ferrule_plugins.batch.local import served_urls
from ferrule_plugins.router.batches.objects import Stored
from ferrule_plugins.router.batches.options import StoreOptions
from ferrule_plugins.router.batches.schema import BatchBody, BatchObject, FileDeleted, FileObject, Page
from ferrule_plugins.router.batches.store import CANCELLABLE, BatchRecord, FileRecord, Store
from ferrule_plugins.router.batches.upload import FORM_BYTES, receive
from ferrule_plugins.router.batches.work import Worker

_HOURS = {"h": 1, "d": 24}
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary", "description": "JSON lines, each a request."},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
                    },
                }
            }
        },
    }
}

S = TypeVar("S", bound=Stored)
M = TypeVar("M", bound=BaseModel)

Order = Annotated[Literal["asc", "desc"], Query(description="By the time of creation.")]
After = Annotated[str | None, Query(description="The last id of the part of the list before.")]


def file_routes(routes: APIRouter, store: Store, options: StoreOptions) -> None:
    """Add the routes of /v1/files."""

    @routes.post(
        "/v1/files",
        dependencies=[needs(Access.KEY, max_body_bytes=options.max_file_bytes + FORM_BYTES)],
        summary="Upload a file of requests for a batch.",
        openapi_extra=_FORM,
    )
    async def upload(request: Request, info: CurrentRequest) -> FileObject:
        pieces = request.stream()
        return FileObject.of(await receive(pieces, info.headers, store, info.key_name, options.max_file_bytes))

    @routes.get("/v1/files", summary="The stored files.")
    async def files(
        info: CurrentRequest,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        after: After = None,
        order: Order = "desc",
        purpose: Annotated[str | None, Query(description="Only files of this purpose.")] = None,
    ) -> Page[FileObject]:
        def mine(record: FileRecord) -> bool:
            wanted = purpose is None or record.purpose == purpose
            return wanted and record.key == info.key_name and record.expires > store.now

        every = await asyncio.to_thread(store.files.records)
        found = [record for record in every if mine(record)]
        return _page(Page[FileObject], found, FileObject.of, _Part(limit, after, order))

    @routes.get("/v1/files/{file_id}", summary="One file.")
    async def file(file_id: str, info: CurrentRequest) -> FileObject:
        return FileObject.of(await asyncio.to_thread(store.file, file_id, info.key_name))

    @routes.delete("/v1/files/{file_id}", summary="Delete a file. Batches that were made of it go on.")
    async def delete(file_id: str, info: CurrentRequest) -> FileDeleted:
        record = await asyncio.to_thread(store.file, file_id, info.key_name)
        await asyncio.to_thread(store.remove_file, record)
        return FileDeleted(id=record.id)

    @routes.get(
        "/v1/files/{file_id}/content",
        summary="The content of a file.",
        response_class=FileResponse,
        responses={200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}},
    )
    async def content(file_id: str, info: CurrentRequest) -> FileResponse:
        record = await asyncio.to_thread(store.file, file_id, info.key_name)
        return FileResponse(
            store.content(record),
            media_type="application/octet-stream",
            filename=record.filename,
            headers={"x-content-type-options": "nosniff"},
        )


def batch_routes(routes: APIRouter, ctx: RouterContext, store: Store, worker: Worker, options: StoreOptions) -> None:
    """Add the routes of /v1/batches."""

    @routes.post("/v1/batches", summary="Run a file of requests.")
    async def create(body: BatchBody, info: CurrentRequest) -> BatchObject:
        urls = await served_urls(ctx.app)
        if body.endpoint not in urls:
            raise RequestError(f"endpoint must be one of {', '.join(sorted(urls))}.", "endpoint")
        source = await asyncio.to_thread(store.file, body.input_file_id, info.key_name, "input_file_id")
        if source.purpose != "batch":
            raise RequestError(f"The file has the purpose {source.purpose}; it must be batch.", "input_file_id")
        created = store.clock()
        record = BatchRecord(
            id=store.batches.new_id(),
            key=info.key_name,
            created=created,
            expires=created // 10**9 + _seconds(body.completion_window, options),
            input_file_id=source.id,
            endpoint=body.endpoint,
            completion_window=body.completion_window,
            metadata=body.metadata,
            output_seconds=body.output_expires_after.seconds if body.output_expires_after else None,
            model=ctx.service.names[0],
        )
        await asyncio.to_thread(store.begin, record, source)
        worker.wake()
        return BatchObject.of(record)

    @routes.get("/v1/batches", summary="The batches.")
    async def batches(
        info: CurrentRequest, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: After = None
    ) -> Page[BatchObject]:
        def read() -> list[BatchRecord]:
            return [store.as_asked(record) for record in store.batches.records() if record.key == info.key_name]

        return _page(Page[BatchObject], await asyncio.to_thread(read), BatchObject.of, _Part(limit, after))

    @routes.get("/v1/batches/{batch_id}", summary="One batch.")
    async def batch(batch_id: str, info: CurrentRequest) -> BatchObject:
        return BatchObject.of(await asyncio.to_thread(store.batch, batch_id, info.key_name))

    @routes.post("/v1/batches/{batch_id}/cancel", summary="Cancel a batch; answers that came are kept.")
    async def cancel(batch_id: str, info: CurrentRequest) -> BatchObject:
        record = await asyncio.to_thread(store.batch, batch_id, info.key_name)
        if record.status not in CANCELLABLE:
            raise RequestError(f"The batch is {record.status}: it cannot be cancelled.")
        if record.status != "cancelled":
            await asyncio.to_thread(store.cancel, record)
            worker.wake()
        return BatchObject.of(await asyncio.to_thread(store.batch, batch_id, info.key_name))


def _seconds(window: str, options: StoreOptions) -> int:
    """Return the seconds of a completion window, such as 24h. Raises RequestError for one that is too long."""
    seconds = int(window[:-1]) * _HOURS[window[-1]] * 3600
    if seconds > options.max_age:
        hours = options.max_age // 3600
        raise RequestError(f"completion_window may be up to {hours}h on this server.", "completion_window")
    return seconds


@dataclass(frozen=True)
class _Part:
    """The part of a list that a client asks for: at most `limit` objects behind the one with the id `after`."""

    limit: int
    after: str | None
    order: str = "desc"


def _page(page: type[Page[M]], records: Sequence[S], shown: Callable[[S], M], part: _Part) -> Page[M]:
    """Return a part of records that are sorted by age. Raises NotFoundError if `after` is not among them."""
    ordered = list(records) if part.order == "asc" else list(reversed(records))
    if part.after is not None:
        places = {record.id: place for place, record in enumerate(ordered)}
        if part.after not in places:
            raise NotFoundError(f"The list has no {part.after[:64]!r} to go on after.", "after")
        ordered = ordered[places[part.after] + 1 :]
    found = ordered[: part.limit]
    return page(
        data=[shown(record) for record in found],
        first_id=found[0].id if found else None,
        last_id=found[-1].id if found else None,
        has_more=len(ordered) > len(found),
    )

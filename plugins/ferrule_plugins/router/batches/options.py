"""The options of the router `batches`: where the store is, and its bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

_DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    folder: Annotated[
        str | None, Meta(description="Folder of files and batches, made if need be. Without it the routes are off.")
    ] = None
    max_files: Annotated[int, Meta(ge=1, description="Files that are kept, and batches as many.")] = 1000
    max_bytes: Annotated[int, Meta(ge=1, description="Bytes of all files; more uploads are refused.")] = 8 << 30
    max_file_bytes: Annotated[int, Meta(ge=1, description="Bytes of one uploaded file.")] = 200 << 20
    max_lines: Annotated[int, Meta(ge=1, description="Requests of one batch.")] = 50_000
    max_age: Annotated[int, Meta(ge=3600, description="Seconds after which a file or an ended batch is removed.")] = (
        30 * _DAY
    )
    max_inflight: Annotated[
        int, Meta(ge=0, description="Requests of batches in flight at once; 0 stands for half of --max-num-seqs.")
    ] = 0
    max_beside_clients: Annotated[
        int, Meta(ge=1, description="The same while clients have requests, and for ten seconds after that.")
    ] = 8

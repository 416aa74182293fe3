"""Files of configuration, which are small, and are files: not pipes, devices, or terabytes of nothing."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from ferrule.errors import CheckpointError

MAX_BYTES = 64 << 20  # of one JSON file; real ones have kilobytes, an index of shards a few megabytes


def read_json(file: Path, limit: int = MAX_BYTES) -> dict[str, Any]:
    """Read one JSON object from a file of at most `limit` bytes. Raises CheckpointError naming the file."""
    try:
        content = json.loads(read_small(file, limit, "configuration"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist.") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__} where an object is expected.")
    return content


def read_small(file: Path, limit: int, what: str) -> bytes:
    """Read the bytes of a file, which errors name as `what`. Raises OSError, and CheckpointError: for a file with more
    bytes than `limit`, and for a pipe or a device, which might never end.
    """
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file} cannot be read: it is not a file.")
    if status.st_size > limit:
        raise CheckpointError(f"{file} has {status.st_size} bytes; no {what} is larger than {limit}.")
    return file.read_bytes()

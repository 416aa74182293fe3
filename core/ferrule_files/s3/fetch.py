"""Objects to files of a folder in the user's cache.

A folder belongs to one listing: its name has a hash of all names, sizes and ETags, so that it is never a mixture of two
states of the bucket, and one that is in use is not changed. A file is there when all of it is: it is downloaded beside
its place, continued where an earlier download ended, and renamed. A file that another listing had, with the same ETag,
is linked and not downloaded again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferrule.env import caches
from ferrule.errors import CheckpointError
from ferrule.log import Log
from ferrule.small_files import read_json
from ferrule_files.s3.store import Access, Object, Place, Store, is_relative, place, refusal
from ferrule_files.shards import progress

LISTING = ".ferrule-s3.json"  # in each folder: what the bucket has, downloaded or not
_LOCK = ".ferrule-s3.lock"
_log = Log("hub")
_BLOCK = 1 << 20  # bytes
_FILES = 4  # that are downloaded at a time
_TRIES = 3
_SPARE = 64 << 20  # bytes of free space that are left


def fetch(store: Store, objects: Mapping[str, Object], names: Iterable[str], root: Path | None = None) -> Path:
    """Fetch the files of these names into the folder that belongs to a listing, and return the folder.

    `root` is for all downloads; None is the user's cache. Raises CheckpointError, before anything is written, for a
    name that leads out of the folder.
    """
    wanted = sorted(names)
    for name in wanted:
        if not is_relative(name) or name.split("/")[0] in (LISTING, _LOCK):
            raise CheckpointError(f"{store.at} has an object whose name cannot be that of a file: {name!r:.200}.")
    folder = _folder(store.at, objects, root)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(folder):
            _write_listing(folder, store.at, objects)
            _link_known(folder, objects, wanted)
            missing = [name for name in wanted if not _is_there(folder / name, objects[name])]
            _download_all(store, objects, missing, folder)
    except OSError as error:
        raise CheckpointError(
            f"{store.at} cannot be written to {folder}: {error.strerror}.", "--download-dir names another folder."
        ) from None
    return folder


def _folder(at: Place, objects: Mapping[str, Object], root: Path | None) -> Path:
    digest = hashlib.sha256()
    for part in (str(at), *(f"{name}\0{each.size}\0{each.etag}" for name, each in sorted(objects.items()))):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    readable = str(at).removeprefix("s3://").replace("/", "--")
    where = hashlib.sha256(str(at).encode()).hexdigest()[:8]
    return (root or Path(caches()) / "s3") / f"{readable[-100:]}-{where}" / digest.hexdigest()[:16]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock by which one process at a time writes to a folder; others wait."""
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("waiting for another process that fetches the same files", folder=str(folder))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_listing(folder: Path, at: Place, objects: Mapping[str, Object]) -> None:
    if (folder / LISTING).is_file():
        return
    listed = {name: [each.size, each.etag] for name, each in objects.items()}
    text = json.dumps({"bucket": at.bucket, "prefix": at.prefix, "objects": listed})
    unfinished = folder / f"{LISTING}.part"
    unfinished.write_text(text, encoding="utf-8", errors="surrogatepass")
    unfinished.replace(folder / LISTING)


@dataclass(frozen=True)
class Remote:
    """A folder's listing: where the folder comes from, and all objects that exist there."""

    at: Place
    objects: Mapping[str, Object]


def remote(folder: Path) -> Remote | None:
    """Return where a folder was fetched from; None for any other folder. Raises CheckpointError for a damaged listing.

    A folder's name has the hash of its listing. A folder without it was not fetched here: a model from elsewhere may
    have such a file too, and would name a bucket that is then asked with the user's credentials.
    """
    file = folder / LISTING
    if not file.is_file():
        return None
    stated = read_json(file)
    try:
        objects = {str(name): Object(int(size), str(etag)) for name, (size, etag) in stated["objects"].items()}
        found = Remote(Place(str(stated["bucket"]), str(stated["prefix"])), objects)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(f"{file} is damaged.", "Remove its folder: it is fetched anew.") from None
    place = folder.resolve()
    return found if _folder(found.at, objects, place.parent.parent) == place else None


def _is_there(file: Path, wanted: Object) -> bool:
    return file.is_file() and file.stat().st_size == wanted.size


def _link_known(folder: Path, objects: Mapping[str, Object], names: Iterable[str]) -> None:
    """Link files from folders of other listings, which have them with the same ETag."""
    missing = [name for name in names if not _is_there(folder / name, objects[name])]
    for other in sorted(folder.parent.iterdir()) if missing else ():
        if other == folder or not other.is_dir():
            continue
        try:
            known = remote(other)
        except CheckpointError:
            continue  # it is not of use, and nobody's error here
        for name in missing:
            same = known is not None and known.objects.get(name) == objects[name]
            if same and _is_there(other / name, objects[name]) and not (folder / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(other / name, folder / name)
                except OSError:
                    return  # a file system without links: everything is downloaded


def _download_all(store: Store, objects: Mapping[str, Object], names: list[str], folder: Path) -> None:
    if not names:
        return
    total = sum(objects[name].size for name in names)
    free = shutil.disk_usage(folder).free
    if total + _SPARE > free:
        raise CheckpointError(
            f"{store.at} has {total / 1e9:.2f} GB to download, and {folder} {free / 1e9:.2f} GB of free space.",
            "--download-dir names another folder.",
        )
    with progress({}, total, "fetching weights") as bar, ThreadPoolExecutor(_FILES) as pool:
        running = [pool.submit(_download, store, name, objects[name], folder / name, bar) for name in names]
        try:
            for each in running:
                each.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _download(store: Store, name: str, wanted: Object, file: Path, bar: Any) -> None:
    """Download one object, in several attempts if it comes short. Raises CheckpointError, OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    state = hashlib.sha256(f"{wanted.etag}\0{wanted.size}".encode()).hexdigest()[:16]
    part = file.parent / f".{hashlib.sha256(file.name.encode()).hexdigest()[:16]}.{state}.part"
    with part.open("ab") as output:
        if output.tell() > wanted.size:
            output.truncate(0)
        bar.update(output.tell())
        for attempt in range(_TRIES):
            if output.tell() == wanted.size:
                break
            try:
                _append(store, name, wanted, output, bar)
            except CheckpointError:
                if attempt == _TRIES - 1:
                    raise
        if output.tell() != wanted.size:
            raise CheckpointError(
                f"{store.at}/{name} is truncated: the store gave {output.tell()} of {wanted.size} bytes."
            )
    part.replace(file)


def _append(store: Store, name: str, wanted: Object, output: Any, bar: Any) -> None:
    with store.reading(name, wanted, output.tell()) as stream:
        while output.tell() < wanted.size:
            block = stream.read(min(_BLOCK, wanted.size - output.tell()))
            if not block:
                return
            output.write(block)
            bar.update(len(block))


def fetch_one(address: str, access: Access) -> Path:
    """Fetch one object, ``s3://BUCKET/FOLDER/NAME``, into the user's cache, and return its file. Raises
    CheckpointError.
    """
    folder, _, name = address.rpartition("/")
    reason = refusal(folder)
    if reason is not None or not name:
        raise CheckpointError(f"{address!r} is not the address of an object: s3://BUCKET/FOLDER/NAME.")
    store = Store(place(folder), access)
    found = store.object(name)
    return fetch(store, {name: found}, [name]) / name

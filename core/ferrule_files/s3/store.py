"""One bucket's part under a prefix, as a folder: what it has, and the bytes of its objects.

The protocol: https://docs.aws.amazon.com/AmazonS3/latest/API/Welcome.html. boto3 signs requests and finds
credentials, in the order that it documents: variables, profiles, and what the machine or container was given.
https://boto3.amazonaws.com/v1/documentation/api/latest/guide/credentials.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ferrule.env import object_store
from ferrule.errors import CheckpointError, PluginError

SCHEME = "s3://"
MAX_OBJECTS = 10_000  # of one model: a repository of it has some hundreds of files
_MAX_PAGES = 100
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_CODE = re.compile(r"[A-Za-z0-9.]{1,64}")
_MAX_KEY = 1024  # bytes, as S3 has it
_MAX_PART = 255  # bytes of one name of a file system


@dataclass(frozen=True)
class Place:
    """A folder of a bucket: `prefix` has no slash at its ends, and is empty for the whole bucket."""

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.prefix}".rstrip("/")

    def key(self, name: str) -> str:
        """Return the key of the object that this folder has under a name."""
        return f"{self.prefix}/{name}" if self.prefix else name


@dataclass(frozen=True)
class Object:
    size: int
    etag: str


@dataclass(frozen=True)
class Access:
    """The access that the caller states; None leaves a field to environment variables and boto3's own settings."""

    endpoint: str | None = None
    key_id: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)


def refusal(name: str) -> str | None:
    """Return why a name is not a folder of a bucket, or None."""
    if not name.startswith(SCHEME):
        return f"does not accept this name: expected {SCHEME}BUCKET/FOLDER"
    bucket, _, prefix = name.removeprefix(SCHEME).partition("/")
    if not _BUCKET.fullmatch(bucket) or ".." in bucket:
        return "does not accept this name: a bucket has 3 to 63 lower-case letters, digits, dots and hyphens"
    if prefix.strip("/") and not is_relative(prefix.strip("/")) or ":" in prefix:
        return "does not accept this name: the folder's name has a part that is empty, '.', '..' or not printable"
    return None


def place(name: str) -> Place:
    """Return the folder of a name that has no `refusal`."""
    bucket, _, prefix = name.removeprefix(SCHEME).partition("/")
    return Place(bucket, prefix.strip("/"))


def is_relative(name: str) -> bool:
    """Return whether a name with slashes leads to a file within a folder, on every file system, and cannot lead out of
    it.
    """
    if not name.isprintable() or "\\" in name or len(name.encode("utf-8", "replace")) > _MAX_KEY:
        return False
    return all(part not in ("", ".", "..") and len(part.encode()) <= _MAX_PART for part in name.split("/"))


@dataclass(frozen=True)
class Stream:
    """The bytes of an object. `read` raises CheckpointError where the connection breaks off."""

    store: Store
    name: str
    body: Any

    def read(self, size: int) -> bytes:
        return self.store.read(self.name, self.body, size)


class Store:
    """Requests for one folder of a bucket. Every method raises CheckpointError, which names it and never a key."""

    def __init__(self, at: Place, access: Access | None = None) -> None:
        self.at = at
        self._access = access or Access()
        with self._explained():
            self._client = self._connect()

    def objects(self) -> Mapping[str, Object]:
        """Return every object under the folder by its name within, without objects that only mark a folder.

        A name may be anything: see `is_relative`.
        """
        found: dict[str, Object] = {}
        prefix = f"{self.at.prefix}/" if self.at.prefix else ""
        asked: dict[str, Any] = {"Bucket": self.at.bucket, "Prefix": prefix}
        for _ in range(_MAX_PAGES):
            with self._explained():
                page = self._client.list_objects_v2(**asked)
            for entry in page.get("Contents", ()):
                key = entry["Key"]
                if key.startswith(prefix) and not key.endswith("/"):
                    found[key.removeprefix(prefix)] = Object(int(entry["Size"]), str(entry["ETag"]))
            if len(found) > MAX_OBJECTS:
                break
            if not page.get("IsTruncated"):
                return found
            asked["ContinuationToken"] = page.get("NextContinuationToken", "")
        raise CheckpointError(
            f"{self.at} has more than {MAX_OBJECTS} objects, or a listing without end.",
            "Name the folder of one model.",
        )

    def object(self, name: str) -> Object:
        """Return one object of the folder."""
        with self._explained(name):
            found = self._client.head_object(Bucket=self.at.bucket, Key=self.at.key(name))
        return Object(int(found["ContentLength"]), str(found["ETag"]))

    @contextmanager
    def reading(self, name: str, wanted: Object, start: int = 0, stop: int | None = None) -> Iterator[Stream]:
        """Open a stream of bytes [start, stop) of an object, if it is still the one that was listed."""
        asked: dict[str, Any] = {"Bucket": self.at.bucket, "Key": self.at.key(name), "IfMatch": wanted.etag}
        if start or stop is not None:
            asked["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        with self._explained(name):
            answer = self._client.get_object(**asked)
        try:
            if str(answer["ETag"]) != wanted.etag:
                raise self.changed(name)
            if start and not str(answer.get("ContentRange", "")).startswith(f"bytes {start}-"):
                raise CheckpointError(f"{self.at}/{name}: the store does not give a part of an object.")
            yield Stream(self, name, answer["Body"])
        finally:
            answer["Body"].close()

    def changed(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self.at}/{name} was changed while it was read.", "Start again.")

    def read(self, name: str, stream: Any, size: int) -> bytes:
        """Return the next bytes of a stream, up to `size`."""
        with self._explained(name):
            return bytes(stream.read(size))

    def _connect(self) -> Any:
        try:
            import boto3
            from botocore import UNSIGNED
            from botocore.config import Config
        except ImportError:
            raise PluginError(
                f"{self.at}: models of an S3 store need boto3, which is not installed.",
                'pip install "ferrule[s3]" installs it.',
            ) from None
        said = object_store()
        session = boto3.Session(self._access.key_id, self._access.secret)
        self._anonymous = said.unsigned or session.get_credentials() is None  # a public bucket needs none
        self._endpoint = self._access.endpoint or said.endpoint
        config = Config(
            signature_version=UNSIGNED if self._anonymous else None,
            connect_timeout=10,
            read_timeout=60,
            retries={"mode": "standard", "max_attempts": 3},
            s3={"addressing_style": "path" if said.path_style else "auto"},
        )
        return session.client(
            "s3",
            region_name=said.region or session.region_name or "us-east-1",
            endpoint_url=self._endpoint,
            config=config,
        )

    @contextmanager
    def _explained(self, name: str = "") -> Iterator[None]:
        """Turn errors of the library into one sentence about the place. A store's own words are not repeated, except
        codes.
        """
        what = f"{self.at}/{name}" if name else str(self.at)
        try:
            yield
        except (CheckpointError, PluginError):
            raise
        except Exception as error:
            explained = self._explain(what, name, error)
            if explained is None:
                raise
            raise explained from None

    def _explain(self, what: str, name: str, error: Exception) -> CheckpointError | None:
        from botocore import exceptions

        if isinstance(error, exceptions.ClientError):
            return self._refused(what, name, error.response)
        if isinstance(error, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)):
            return CheckpointError(f"{what} cannot be fetched: credentials are missing or incomplete.", _CREDENTIALS)
        known = (exceptions.BotoCoreError, OSError, ValueError)
        network = (exceptions.HTTPClientError, exceptions.ConnectionError, ConnectionError, TimeoutError)
        if isinstance(error, network) or type(error).__module__.startswith("urllib3"):
            where = _host(self._endpoint) if getattr(self, "_endpoint", None) else "AWS"
            return CheckpointError(
                f"{what} cannot be fetched: the store at {where} cannot be reached, or the connection broke off.",
                "Check the network, and AWS_ENDPOINT_URL for a store that is not AWS.",
            )
        if isinstance(error, known):
            return CheckpointError(f"{what} cannot be fetched: {type(error).__name__}.", "Check the AWS_* variables.")
        return None

    def _refused(self, what: str, name: str, response: Mapping[str, Any]) -> CheckpointError:
        code = str(response.get("Error", {}).get("Code", ""))
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if code == "NoSuchBucket":
            return CheckpointError(f"{what} cannot be fetched: there is no bucket {self.at.bucket!r}.", _ENDPOINT)
        if name and status == 412:
            return self.changed(name)
        if name and status == 404:
            return CheckpointError(f"{what} does not exist, or was removed meanwhile.", _ENDPOINT)
        if status in (401, 403):
            reason = "no credentials were found" if self._anonymous else "the credentials do not allow it"
            return CheckpointError(f"{what} cannot be fetched: {reason}.", _CREDENTIALS)
        shown = code if _CODE.fullmatch(code) else "an unknown code"
        return CheckpointError(f"{what} cannot be fetched: the store answered {status}, {shown}.", _ENDPOINT)


_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile (AWS_PROFILE) or a role of the machine give them."
)
_ENDPOINT = "Check the name, AWS_REGION, and AWS_ENDPOINT_URL for a store that is not AWS."


def _host(endpoint: str | None) -> str:
    """Return the host and port of an address, without what may be secret in it."""
    try:
        parts = urlsplit(endpoint or "")
        return f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
    except ValueError:
        return "AWS_ENDPOINT_URL"

"""An S3 store on loopback, as far as models need it, which remembers every request and can misbehave."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

KEY_ID, SECRET = "AKIAOFTHETESTS", "secret-of-the-tests"
_SIGNED = re.compile(rf"AWS4-HMAC-SHA256 Credential={KEY_ID}/\d{{8}}/[a-z0-9-]+/s3/aws4_request")
_Answer = tuple[int, dict[str, str], bytes]


def etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


class FakeS3:
    """A store on this machine. `objects` are contents by key by bucket. Buckets of `public` need no signature.

    `requests` has (method, path). `disturb` is called with a key before each answer about an object, and may change the
    store, or return the bytes after which the connection breaks off. `listed` replaces what listings say.
    """

    def __init__(self, objects: dict[str, dict[str, bytes]], page: int = 1000) -> None:
        self.objects, self.page = objects, page
        self.public: set[str] = set()
        self.requests: list[tuple[str, str]] = []
        self.disturb: Callable[[str], int | None] = lambda key: None
        self.listed: Callable[[str], bytes] | None = None
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # headers and content are written one after the other

            def log_message(self, *args: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer()

            def do_GET(self) -> None:
                self.answer()

            def answer(self) -> None:
                parts = urlsplit(self.path)
                bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
                store.requests.append((self.command, f"{bucket}/{key}"))
                cut = store.disturb(key) if key else None
                status, headers, content = store._route(bucket, key, parse_qs(parts.query), dict(self.headers))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content[:cut])
                if cut is not None:
                    self.close_connection = True

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fetched(self) -> list[str]:
        """Return the keys of the objects that were asked for since the last call."""
        found = sorted({path for method, path in self.requests if method == "GET" and not path.endswith("/")})
        self.requests.clear()
        return [path.split("/", 1)[1] for path in found]

    def _route(self, bucket: str, key: str, query: dict[str, list[str]], headers: dict[str, str]) -> _Answer:
        if not _SIGNED.match(headers.get("Authorization", "")) and bucket not in self.public:
            return _error(403, "AccessDenied")
        if bucket not in self.objects:
            return _error(404, "NoSuchBucket")
        if not key:
            return 200, {"Content-Type": "application/xml"}, self._listing(bucket, query)
        content = self.objects[bucket].get(key)
        if content is None:
            return _error(404, "NoSuchKey")
        if headers.get("If-Match", etag(content)) != etag(content):
            return _error(412, "PreconditionFailed")
        about = {"ETag": etag(content), "Accept-Ranges": "bytes", "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("Range", ""))
        if wanted is None:
            return 200, about, content
        start, stop = int(wanted[1]), min(int(wanted[2] or len(content)) + 1, len(content))
        return 206, {**about, "Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}, content[start:stop]

    def _listing(self, bucket: str, query: dict[str, list[str]]) -> bytes:
        prefix, after = query.get("prefix", [""])[0], query.get("continuation-token", [""])[0]
        if self.listed is not None:
            return self.listed(prefix)
        keys = [key for key in sorted(self.objects[bucket]) if key.startswith(prefix) and key > after]
        page = keys[: self.page]
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if len(keys) > len(page) else ""
        return listing(((key, self.objects[bucket][key]) for key in page), more)


def listing(objects: Any, more: str = "") -> bytes:
    entries = "".join(
        f"<Contents><Key>{escape(key)}</Key><ETag>{escape(etag(content))}</ETag><Size>{len(content)}</Size></Contents>"
        for key, content in objects
    )
    truncated = "true" if more else "false"
    return f"<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{more}{entries}</ListBucketResult>".encode()


def _error(status: int, code: str) -> _Answer:
    text = f"<Error><Code>{code}</Code><Message>of no use: {KEY_ID}</Message></Error>"
    return status, {"Content-Type": "application/xml"}, text.encode()


@contextmanager
def fake_s3(objects: dict[str, dict[str, bytes]], page: int = 1000) -> Iterator[FakeS3]:
    store = FakeS3(objects, page)
    try:
        yield store
    finally:
        store.close()


def environment(store: FakeS3) -> dict[str, str]:
    """Return the variables with which Ferrule uses this store, and no settings or roles of the machine."""
    return {
        "AWS_ENDPOINT_URL": store.url,
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "eu-north-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    }

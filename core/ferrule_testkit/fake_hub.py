"""A Hugging Face hub on loopback that remembers every request."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

Files = Mapping[str, bytes]
_Answer = tuple[int, dict[str, str], bytes]
_LARGE = 1000  # bytes from which a file is redirected to the other hub


def commit(revision: str) -> str:
    """Return the commit that a branch or tag stands for, in every repository."""
    return hashlib.sha1(revision.encode()).hexdigest()


class FakeHub:
    """A hub on this machine. `repositories` are files by revision by id. `elsewhere` is another hub, which stores large
    files.

    `requests` has (method, path, authorization); `status` (status, X-Error-Code) for ids that are to fail.
    """

    def __init__(
        self, repositories: Mapping[str, Mapping[str, Files]] | None = None, elsewhere: FakeHub | None = None
    ) -> None:
        self.requests: list[tuple[str, str, str | None]] = []
        self.status: dict[str, tuple[int, str]] = {}
        self.elsewhere = elsewhere
        self._repositories = repositories or {}
        self._blobs: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, body: bool) -> None:
                path = unquote(self.path.split("?")[0])
                hub.requests.append((self.command, path, self.headers.get("Authorization")))
                status, headers, content = hub._route(path)
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if body:
                    self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _route(self, path: str) -> _Answer:
        parts = path.strip("/").split("/")
        if parts[0] == "blob":
            return 200, {"ETag": f'"{parts[1]}"'}, self._blobs[parts[1]]
        api = parts[:2] == ["api", "models"]
        name, rest = "/".join(parts[2:4] if api else parts[:2]), (parts[4:] if api else parts[2:])
        if name in self.status or name not in self._repositories:
            status, code = self.status.get(name, (404, "RepoNotFound"))
            return status, {"X-Error-Code": code}, b"{}"
        revision = rest[1] if len(rest) > 1 else "main"
        known = {key: each for each in self._repositories[name] for key in (each, commit(each))}
        if revision not in known:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files, sha = self._repositories[name][known[revision]], commit(known[revision])
        if not api:
            return self._file(files["/".join(rest[2:])], sha)
        listing: Any = {"id": name, "sha": sha, "siblings": [{"rfilename": file} for file in files]}
        if rest and rest[0] == "tree":
            listing = [
                {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for file, content in files.items()
            ]
        return 200, {"Content-Type": "application/json"}, json.dumps(listing).encode()

    def _file(self, content: bytes, sha: str) -> _Answer:
        etag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": sha}
        if self.elsewhere is None or len(content) < _LARGE:
            return 200, headers, content
        self.elsewhere._blobs[etag] = content
        headers["X-Linked-Size"], headers["X-Linked-Etag"] = str(len(content)), f'"{etag}"'
        return 302, {**headers, "Location": f"{self.elsewhere.url}/blob/{etag}"}, b""


@contextmanager
def fake_hub(repositories: Mapping[str, Mapping[str, Files]]) -> Iterator[FakeHub]:
    """Run a hub, and a second one behind it for its blobs, for the length of a block."""
    blobs = FakeHub()
    hub = FakeHub(repositories, blobs)
    try:
        yield hub
    finally:
        hub.close()
        blobs.close()

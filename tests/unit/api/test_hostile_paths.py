"""A path is what the request line says, whatever other parts of a request claim: without the key nothing is served."""

from __future__ import annotations

import pytest

from tests.unit.api.test_server import running

PATHS = ("/v1/models", "/tokenize", "/metrics", "/sleep", "/v1/chat/completions")


def requests(path: str) -> dict[str, bytes]:
    """Return ways to name a protected path, by what is odd about them."""

    def line(target: str, host: str = "localhost", method: str = "POST", more: str = "", version: str = "1.1") -> bytes:
        head = f"{method} {target} HTTP/{version}\r\nhost: {host}\r\ncontent-length: 0\r\n"
        return f"{head}{more}connection: close\r\n\r\n".encode()

    return {
        **{
            f"host {host}": line(path, host)
            for host in ("x/?", "x/health?", "localhost/health#", "a@b", "x\\y", "localhost:0/health", " ", "health")
        },
        "two hosts": line(path, more="host: other\r\n"),
        "no host": f"POST {path} HTTP/1.0\r\ncontent-length: 0\r\n\r\n".encode(),
        "absolute": line(f"http://localhost{path}"),
        "absolute to a public one": line(f"http://localhost/health?{path}", host=path),
        "two slashes": line(f"/{path}"),
        "dot": line(f"/.{path}"),
        "back": line(f"/health/..{path}"),
        "encoded back": line(f"/health/%2e%2e{path}"),
        "encoded": line("/%2e" + path),
        "semicolon": line(f"{path};/health"),
        "parameter": line(f"/health;{path}"),
        "case": line(path.upper()),
        "slash": line(f"{path}/"),
        "query": line(f"{path}?/health"),
        "fragment": line(f"{path}#/health"),
        "nul": line(f"{path}%00/health"),
        "override": line(
            path, more="x-http-method-override: OPTIONS\r\nx-original-url: /health\r\nx-rewrite-url: /health\r\n"
        ),
        "prefix": line(path, more="x-forwarded-prefix: /health\r\nx-script-name: /health\r\n"),
        "upgrade": line(
            path,
            method="GET",
            more="upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n",
        ),
        "http 1.0": line(path, version="1.0"),
        "options": line(path, method="OPTIONS"),
        "head": line(path, method="HEAD"),
        "empty key": line(path, more="authorization: Bearer \r\n"),
        "two keys": line(path, more="authorization: Bearer secret\r\nauthorization: Bearer other\r\n"),
    }


@pytest.mark.advisory("CVE-2026-48746")
async def test_without_the_key_no_odd_request_is_served() -> None:
    async with running(api_key=("secret",)) as server:
        for path in PATHS:
            for name, data in requests(path).items():
                answer = await server.raw(data)
                assert answer[9:12] in {b"400", b"401", b"403", b"404", b"405"}, (name, path, answer[:300])
                assert answer[9:12] in {b"400", b"401", b"403"} or b"health" in data.split(b"\r\n")[0], (
                    name,
                    path,
                    answer[:300],
                )
        assert (await server.http.get("/health")).status_code == 200
        known = await server.http.get("/v1/models", headers={"authorization": "Bearer secret"})
        assert known.status_code == 200

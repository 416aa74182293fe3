"""What browsers send for pages of others: Host by another domain, and requests that nobody was asked for."""

from __future__ import annotations

from typing import Any

import pytest

from ferrule.api.origin import Hosts, check_origin, host_of
from ferrule.errors import ForbiddenError, RequestError
from tests.unit.api.test_app import CHAT, Site, check_error

LOCAL = ("localhost", "127.0.0.1", "10.1.2.3", "[::1]", "vllm", "a.svc", "a.b.svc.cluster.local", "box.local", "")


@pytest.mark.parametrize("host", LOCAL)
def test_names_that_no_outsider_can_own(host: str) -> None:
    Hosts(()).check(host)


@pytest.mark.advisory("CVE-2024-37032")
def test_domains_must_be_told() -> None:
    for hosts, host in (
        (Hosts(()), "evil.example"),
        (Hosts(("llm.example.com",)), "example.com"),
        (Hosts(("*.example.com",)), "example.com"),
        (Hosts(("*.example.com",)), "notexample.com"),
        (Hosts(()), "127.0.0.1.evil.example"),
        (Hosts(()), "localhost.evil.example"),
    ):
        with pytest.raises(ForbiddenError, match="--allowed-hosts"):
            hosts.check(host)
    Hosts(("LLM.example.com.",)).check("llm.example.com")
    Hosts(("*.example.com",)).check("a.b.example.com")
    Hosts(("*",)).check("evil.example")


@pytest.mark.parametrize(
    ("value", "host"),
    [
        (b"Example.COM:8000", "example.com"),
        (b"[::1]:80", "[::1]"),
        (b"a.example.", "a.example"),
    ],
)
def test_host_of(value: bytes, host: str) -> None:
    assert host_of([value]) == host


@pytest.mark.advisory("CVE-2026-48746")
@pytest.mark.parametrize(
    "values",
    [[b"a", b"b"], [b""], [b"a b"], [b"a/b"], [b"user@a"], [b"a:99999"], [b"a:x"], [b"[::1"], [b"a,b"], [b"\xff"]],
)
def test_no_host(values: list[bytes]) -> None:
    with pytest.raises(RequestError):
        host_of(values)
    assert host_of([]) == ""


@pytest.mark.advisory("CVE-2023-48022")
@pytest.mark.parametrize(
    ("origin", "content_type", "authorised", "allowed", "refused"),
    [
        ("", "text/plain", False, "*", False),  # not a browser
        ("http://server:8000", "", False, "*", False),  # the same origin
        ("http://evil.example", "application/json", False, "*", False),  # the browser has asked
        ("http://evil.example", "", True, "*", False),
        ("http://evil.example", "", False, "*", True),
        ("http://evil.example", "text/plain; charset=utf-8", False, "*", True),
        ("null", "text/plain", False, "*", True),
        ("http://evil.example", "application/json", False, "http://good.example", True),
        ("http://good.example", "application/json", False, "http://good.example", False),
        ("http://server:8000@evil.example", "", False, "*", True),
        ("http://[", "", False, "*", True),
    ],
)
def test_requests_of_other_origins(
    origin: str, content_type: str, authorised: bool, allowed: str, refused: bool
) -> None:
    def check() -> None:
        check_origin(origin, "server:8000", content_type, authorised, (allowed,))

    if refused:
        with pytest.raises(ForbiddenError):
            check()
    else:
        check()


@pytest.mark.advisory("CVE-2023-48022")
async def test_the_server_asks_for_both() -> None:
    site = Site()

    async def asked(site: Site, **headers: str) -> Any:
        return await site.http.post("/v1/chat/completions", json=CHAT, headers=headers)

    check_error(await asked(site, host="evil.example"), 403, "Host")
    check_error(await asked(site, host="a b"), 400, "Host")
    assert (await asked(site, host="10.0.0.1:8000")).status_code == 200
    assert (await site.http.get("/health", headers={"host": "evil.example"})).status_code == 200
    check_error(await site.http.get("/v1/models", headers={"host": "evil.example"}), 403, "Host")
    plain = {"origin": "http://evil.example", "content-type": "text/plain"}
    check_error(await asked(site, **plain), 403, "Origin")
    assert (await asked(site, origin="http://evil.example")).status_code == 200

    told = Site(allowed_hosts=("llm.example",), allowed_origins=("http://good.example",))
    assert (await asked(told, host="llm.example")).status_code == 200
    check_error(await asked(told, origin="http://evil.example"), 403, "Origin")

    keyed = Site(api_key=("k",))  # a page does not have the key
    assert (await asked(keyed, host="evil.example", authorization="Bearer k")).status_code == 200

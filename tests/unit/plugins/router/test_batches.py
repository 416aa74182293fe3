"""Files and Batches in one process: the store, uploads, the states of batches, and what survives a kill."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from ferrule.errors import ConfigError, NotFoundError
from ferrule.interfaces.service import Generate
from ferrule_plugins.batch.drive import Asker
from ferrule_plugins.batch.rows import AppResponse
from ferrule_plugins.router.batches import work
from ferrule_plugins.router.batches.options import StoreOptions
from ferrule_plugins.router.batches.run import Run
from ferrule_plugins.router.batches.store import BatchRecord, FileRecord, Store, open_store
from ferrule_plugins.router.batches.usage import Tokens, tokens_of
from ferrule_testkit.service import echo_script
from tests.fakes.batches import URL, BatchSite, ids, line

GONE = "file-" + "0" * 32
Still = tuple[BatchSite, Path]
BROKEN = (
    b"{\n"
    + b"[1]\n"
    + line("x", url="/v1/chat/completions")
    + line("")
    + line("s", stream=True)
    + line("g", background=True)
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
async def site(folder: Path) -> AsyncIterator[BatchSite]:
    made = BatchSite(folder)
    async with made.running():
        yield made


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> tuple[BatchSite, Path]:
    """Make one site for the cases that need no worker and leave nothing: making it is most of a case's time."""
    folder = tmp_path_factory.mktemp("still")
    return BatchSite(folder), folder


def left(folder: Path) -> list[str]:
    """Return the names of unfinished things in the store."""
    return [path.name for path in folder.rglob(".*")]


# ------------------------------------------------------------------------------------------------------------- files


async def test_a_file_is_stored_listed_read_and_deleted(site: BatchSite) -> None:
    content = os.urandom(3 << 20) + b"\r\n--not-the-boundary\r\n"
    made = (await site.upload(content)).json()
    assert {key: made[key] for key in ("object", "bytes", "filename", "purpose")} == {
        "object": "file",
        "bytes": len(content),
        "filename": "in.jsonl",
        "purpose": "batch",
    }
    assert (await site.http.get(f"/v1/files/{made['id']}")).json() == made
    answer = await site.http.get(f"/v1/files/{made['id']}/content")
    assert answer.content == content
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert (await site.http.delete(f"/v1/files/{made['id']}")).json() == {
        "id": made["id"],
        "object": "file",
        "deleted": True,
    }
    for path in (f"/v1/files/{made['id']}", f"/v1/files/{made['id']}/content"):
        assert (await site.http.get(path)).status_code == 404
    assert (await site.http.delete(f"/v1/files/{made['id']}")).status_code == 404


async def test_lists_are_read_in_parts(site: BatchSite) -> None:
    made = [(await site.upload(b"{}")).json()["id"] for _ in range(5)]
    first = (await site.http.get("/v1/files?limit=2")).json()
    assert [one["id"] for one in first["data"]] == made[:2:-1]
    assert (first["first_id"], first["last_id"], first["has_more"]) == (made[4], made[3], True)
    rest = (await site.http.get(f"/v1/files?after={made[3]}&limit=3")).json()
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == (made[2::-1], False)
    older = (await site.http.get(f"/v1/files?order=asc&after={made[2]}")).json()
    assert [one["id"] for one in older["data"]] == made[3:]
    assert (await site.http.get("/v1/files?purpose=batch_output")).json()["data"] == []
    for query in ("limit=0", "limit=10001", "order=up", "limit=x"):
        assert (await site.http.get(f"/v1/files?{query}")).status_code == 400
    assert (await site.http.get(f"/v1/files?after={GONE}")).status_code == 404


async def test_objects_belong_to_the_key_that_made_them(site: BatchSite) -> None:
    other = site.client("k2")
    batch = await site.create(line("a"))
    await site.ended(batch["id"])
    file = batch["input_file_id"]
    assert (await other.get("/v1/files")).json()["data"] == []
    assert (await other.get("/v1/batches")).json()["data"] == []
    for method, path in (
        ("GET", f"/v1/files/{file}"),
        ("GET", f"/v1/files/{file}/content"),
        ("DELETE", f"/v1/files/{file}"),
        ("GET", f"/v1/batches/{batch['id']}"),
        ("POST", f"/v1/batches/{batch['id']}/cancel"),
    ):
        assert (await other.request(method, path)).status_code == 404, path
    body = {"input_file_id": file, "endpoint": URL, "completion_window": "24h"}
    assert (await other.post("/v1/batches", json=body)).json()["error"]["param"] == "input_file_id"


@pytest.mark.parametrize("id", ["..", "%2e%2e", "file-..%2f..%2fx", "file-" + "A" * 32, "file-", ".new-1", GONE])
async def test_an_id_is_never_a_path(still: Still, id: str) -> None:
    site, _ = still
    for path in (f"/v1/files/{id}", f"/v1/files/{id}/content", f"/v1/batches/{id}"):
        answer = await site.http.get(path)
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "NotFoundError"


async def test_a_name_from_a_client_is_only_told(site: BatchSite, folder: Path) -> None:
    for name, told in (("../../x\n.jsonl", "x.jsonl"), ("..\\y", "y"), ("é" * 300, "é" * 255), ("a/", "file")):
        file = {"file": (name, b"{}")}
        answer = await site.http.post("/v1/files", data={"purpose": "batch"}, files=file)
        assert answer.json()["filename"].replace("%0A", "") == told
    assert {path.name for path in folder.parent.iterdir()} == {"store"}


def form(*parts: tuple[str, bytes], boundary: bytes = b"B", end: bytes = b"--\r\n") -> bytes:
    made = b"".join(
        b"--" + boundary + b"\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + body + b"\r\n"
        for head, body in parts
    )
    return made + b"--" + boundary + end


FILE = ('name="file"; filename="a"', b"{}")
PURPOSE = ('name="purpose"', b"batch")
ANCHOR = ('name="expires_after[anchor]"', b"created_at")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (form(FILE), "purpose"),
        (form(PURPOSE), "file"),
        (form(FILE, ('name="purpose"', b"fine-tune")), "purpose"),
        (form(FILE, FILE, PURPOSE), "file"),
        (form(('name="file"', b"{}"), PURPOSE), "file"),
        (form(FILE, PURPOSE, PURPOSE), None),
        (form(FILE, PURPOSE, ('name="color"', b"red")), None),
        (form(FILE, PURPOSE, ANCHOR), "expires_after.seconds"),
        (form(FILE, PURPOSE, ANCHOR, ('name="expires_after[seconds]"', b"60")), "expires_after.seconds"),
        (form(FILE, PURPOSE, ('name="expires_after[seconds]"', b"7200")), "expires_after.anchor"),
        (form(FILE, ('name="purpose"', b"x" * 2000)), None),
        (form(FILE, PURPOSE, end=b""), None),
        (form(FILE, *[(f'name="{n}"', b"") for n in range(20)]), None),
        (form((f'name="{"n" * 9000}"', b"")), None),
        (form(FILE, PURPOSE, boundary=b"C"), None),
        (form(FILE, PURPOSE, ("", b"x")), None),
        (form(('name="file"; filename="a"\r\nContent-Transfer-Encoding: base64', b"e30="), PURPOSE), None),
        (b"", None),
        (b"{}", None),
    ],
)
async def test_a_wrong_form_is_refused(still: Still, body: bytes, param: str | None) -> None:
    site, folder = still
    headers = {"content-type": "multipart/form-data; boundary=B"}
    answer = await site.http.post("/v1/files", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert left(folder) == []


async def test_an_upload_must_be_a_form(still: Still) -> None:
    site, _ = still
    for kind in ("application/json", "multipart/form-data", "multipart/form-data; boundary=" + "x" * 300):
        answer = await site.http.post("/v1/files", content=b"{}", headers={"content-type": kind})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Content-Type")


async def test_the_limits_of_the_store(folder: Path) -> None:
    site = BatchSite(folder, max_files=3, max_bytes=1 << 20, max_file_bytes=600_000, max_age=7200)
    assert (await site.upload(b"x" * 600_001)).status_code == 413
    made = (await site.upload(b"x" * 600_000)).json()
    assert made["expires_at"] == made["created_at"] + 7200
    assert (await site.upload(b"x" * 600_000)).status_code == 413
    short: dict[str, Any] = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    soon = (await site.upload(b"x", **short)).json()
    assert soon["expires_at"] == soon["created_at"] + 3600
    assert (await site.upload(b"x")).status_code == 200
    assert "limit" in (await site.upload(b"x")).json()["error"]["message"]
    assert left(folder) == []
    await site.http.delete(f"/v1/files/{made['id']}")
    assert (await site.upload(b"x")).status_code == 200


async def test_an_upload_of_unknown_length_has_limits_too(folder: Path) -> None:
    site = BatchSite(folder, max_file_bytes=1 << 20)
    head = b'--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'

    async def endless() -> AsyncIterator[bytes]:
        yield head
        while True:
            yield b"x" * 65_536

    headers = {"content-type": "multipart/form-data; boundary=B"}
    answer = await site.http.post("/v1/files", content=endless(), headers=headers)
    assert answer.status_code == 413
    assert left(folder) == []


@pytest.mark.parametrize("name", ["fsync", "truncate"])
async def test_a_full_disk_is_an_error_of_the_upload(still: Still, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    site, folder = still
    monkeypatch.setattr(os, name, _full)
    answer = await site.upload(b"{}")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "60")
    assert "full" in answer.json()["error"]["message"]
    monkeypatch.undo()
    assert left(folder) == []
    assert (await site.http.post(URL, json={"prompt": "hi"})).status_code == 200


async def test_a_disk_that_cannot_be_written_is_an_error_of_each_call(
    still: Still, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, _ = still
    file, batch = (await site.upload(line("a"))).json()["id"], await site.create(line("a"))

    def read_only(*args: Any, **kwargs: Any) -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("mkdir", "rename", "touch"):
        monkeypatch.setattr(Path, name, read_only)
    body = {"input_file_id": file, "endpoint": URL, "completion_window": "24h"}
    for answer in (
        await site.upload(b"{}"),
        await site.http.delete(f"/v1/files/{file}"),
        await site.http.post("/v1/batches", json=body),
        await site.http.post(f"/v1/batches/{batch['id']}/cancel"),
    ):
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "60")
        assert "cannot write" in answer.json()["error"]["message"]
    monkeypatch.undo()
    assert (await site.http.get(f"/v1/batches/{batch['id']}")).json() == batch
    for id in (file, batch["input_file_id"]):
        assert (await site.http.delete(f"/v1/files/{id}")).status_code == 200
    (folder,) = (still[1] / "batches").glob("batch_*")
    shutil.rmtree(folder)


def _full(*args: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, "")


def test_a_folder_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"router:batches\.folder"):
        open_store(str(tmp_path / "file" / "store"), StoreOptions())


def test_a_file_system_without_hard_links_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise OSError(errno.EPERM, "")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ConfigError, match="not permitted") as caught:
        open_store(str(tmp_path / "store"), StoreOptions())
    assert "hard links" in (caught.value.hint or "")
    assert left(tmp_path) == []


# ----------------------------------------------------------------------------------------------------------- batches


async def test_a_batch_runs_and_each_line_is_in_one_of_two_files(site: BatchSite) -> None:
    content = line("a") + BROKEN + line("b", model="none") + b"\n" + line("a") + line("c")
    made = await site.create(content, metadata={"for": "test"})
    assert (made["status"], made["metadata"], made["endpoint"]) == ("validating", {"for": "test"}, URL)
    done = await site.ended(made["id"])
    assert done["status"] == "completed"
    assert done["request_counts"] == {"total": 10, "completed": 2, "failed": 8}
    output, errors = await site.lines(done, "output"), await site.lines(done, "error")
    assert ids(output) == ["a", "c"]
    assert all(one["response"]["status_code"] == 200 and one["error"] is None for one in output)
    codes = ["invalid_json_line", "invalid_json_line", "invalid_url", "missing_required_parameter"]
    codes += ["stream_unsupported", "background_unsupported", "NotFoundError", "duplicate_custom_id"]
    assert [one["error"]["code"] for one in errors] == codes
    for name in ("in_progress_at", "finalizing_at", "completed_at"):
        assert done[name] >= made["created_at"]
    assert made["usage"] is None
    assert done["usage"] == {
        "input_tokens": 4,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 6,
    }
    listed = (await site.http.get("/v1/batches")).json()
    assert listed["data"] == [done]
    assert (await site.http.post(f"/v1/batches/{made['id']}/cancel")).status_code == 400


async def test_conversations_of_anthropic_run_too(site: BatchSite) -> None:
    body = {"model": "fake", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
    made = await site.create(line("m", url="/v1/messages", **body), endpoint="/v1/messages")
    done = await site.ended(made["id"])
    answer = (await site.lines(done, "output"))[0]
    assert (answer["custom_id"], answer["response"]["body"]["type"]) == ("m", "message")
    told = answer["response"]["body"]["usage"]
    asked = told["input_tokens"] + told["cache_read_input_tokens"]
    assert (done["usage"]["input_tokens"], done["usage"]["output_tokens"]) == (asked, told["output_tokens"])


def test_tokens_are_those_of_every_protocol() -> None:
    chat = {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    responses = {
        "input_tokens": 50,
        "input_tokens_details": {"cached_tokens": 20},
        "output_tokens": 30,
        "output_tokens_details": {"reasoning_tokens": 10},
    }
    messages = {"input_tokens": 100, "cache_read_input_tokens": 200, "output_tokens": 400}
    vectors = {"prompt_tokens": 1000, "total_tokens": 1000, "prompt_tokens_details": None}
    bodies: list[Any] = [{"usage": usage} for usage in (chat, responses, messages, vectors, None, "much")]
    results = [json.dumps({"response": {"body": body}, "error": None}).encode() for body in [*bodies, {}, "text"]]
    assert tokens_of(results) == Tokens(input=1355, cached=222, output=433, reasoning=11)


@pytest.mark.parametrize(
    ("content", "code", "count"),
    [
        (b"", "empty_file", 1),
        (b"\n \n", "empty_file", 1),
        (bytes(range(256)), "invalid_json_line", None),
        (b"{\n" * 300, "invalid_json_line", 100),
        (b"".join(line(n) for n in "abcd"), "too_many_tasks", 1),
        (b'{"custom_id": "' + b"x" * 300_000 + b'"}', "line_too_long", 1),
    ],
)
async def test_a_file_without_a_request_fails(folder: Path, content: bytes, code: str, count: int | None) -> None:
    site = BatchSite(folder, max_lines=3 if code == "too_many_tasks" else 1000, limits={"max_body_bytes": 200_000})
    async with site.running():
        done = await site.ended((await site.create(content))["id"])
    assert (done["status"], done["output_file_id"], done["error_file_id"]) == ("failed", None, None)
    assert done["errors"]["data"][0]["code"] == code
    assert count is None or len(done["errors"]["data"]) == count
    assert done["failed_at"] >= done["created_at"]


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"input_file_id": GONE}, 404, "input_file_id"),
        ({"input_file_id": "../x"}, 404, "input_file_id"),
        ({"endpoint": "/tokenize"}, 400, "endpoint"),
        ({"endpoint": "/v1/batches"}, 400, "endpoint"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"completion_window": "0h"}, 400, "completion_window"),
        ({"completion_window": "90d"}, 400, "completion_window"),
        ({"metadata": {str(n): "" for n in range(17)}}, 400, "metadata"),
        ({"metadata": {"a": "x" * 513}}, 400, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after.seconds"),
    ],
)
async def test_a_batch_that_cannot_be_is_refused(still: Still, change: dict[str, Any], status: int, param: str) -> None:
    site, _ = still
    body = {"input_file_id": (await site.upload(line("a"))).json()["id"], "endpoint": URL, "completion_window": "24h"}
    answer = await site.http.post("/v1/batches", json=body | change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert (await site.http.get("/v1/batches")).json()["data"] == []


async def test_outputs_have_the_lifetime_that_was_asked_for_and_are_no_inputs(site: BatchSite) -> None:
    made = await site.create(line("a"), output_expires_after={"anchor": "created_at", "seconds": 3600})
    done = await site.ended(made["id"])
    file = (await site.http.get(f"/v1/files/{done['output_file_id']}")).json()
    assert file["expires_at"] == file["created_at"] + 3600
    body = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
    assert (await site.http.post("/v1/batches", json=body)).json()["error"]["param"] == "input_file_id"


class Held:
    """A service's script that holds answers back until `go` is set, from the one numbered `after` on."""

    def __init__(self, site: BatchSite, after: int = 1) -> None:
        self.asked = 0
        self.go = asyncio.Event()
        admit = site.service.admit

        async def held(request: Generate) -> Any:
            self.asked += 1
            if self.asked > after:
                await self.go.wait()
            return await admit(request)

        site.service.admit = held  # type: ignore[method-assign]

    async def reached(self, count: int) -> None:
        while self.asked < count:
            await asyncio.sleep(0.005)


async def test_a_batch_goes_on_when_its_input_is_deleted(site: BatchSite) -> None:
    held = Held(site)
    made = await site.create(b"".join(line(f"r{n}") for n in range(40)))
    await held.reached(2)
    assert (await site.http.delete(f"/v1/files/{made['input_file_id']}")).status_code == 200
    held.go.set()
    assert (await site.ended(made["id"]))["request_counts"] == {"total": 40, "completed": 40, "failed": 0}


async def test_a_batch_is_cancelled_and_what_was_answered_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ferrule_plugins.router.batches.run._GRACE", 0.0)
    site = BatchSite(folder, max_inflight=1)
    async with site.running():
        held = Held(site, after=3)
        made = await site.create(b"".join(line(f"r{n}") for n in range(9)))
        await held.reached(4)
        first = (await site.http.post(f"/v1/batches/{made['id']}/cancel")).json()
        assert (first["status"], first["cancelled_at"]) == ("cancelling", None)
        again = (await site.http.post(f"/v1/batches/{made['id']}/cancel")).json()
        assert again["cancelling_at"] == first["cancelling_at"]
        done = await site.ended(made["id"])
        assert (done["status"], done["completed_at"]) == ("cancelled", None)
        assert done["cancelled_at"] >= done["cancelling_at"] == first["cancelling_at"]
        assert (await site.http.post(f"/v1/batches/{made['id']}/cancel")).json() == done
    assert ids(await site.lines(done, "output")) == ["r0", "r1", "r2"]
    errors = await site.lines(done, "error")
    assert ids(errors) == [f"r{n}" for n in range(3, 9)]
    assert {(one["error"]["code"], one["response"]) for one in errors} == {("batch_cancelled", None)}


async def test_a_batch_expires(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ferrule_plugins.router.batches.run._GRACE", 0.0)
    site = BatchSite(folder, max_inflight=1)
    async with site.running():
        held = Held(site, after=1)
        made = await site.create(line("a") + line("b") + b"{\n", completion_window="1h")
        await held.reached(2)
        later = time.time_ns() + 3601 * 10**9
        monkeypatch.setattr(Store, "now", property(lambda store: later // 10**9))
        done = await site.ended(made["id"])
    assert done["status"] == "expired"
    assert done["expired_at"] == later // 10**9
    assert ids(await site.lines(done, "output")) == ["a"]
    codes = [one["error"]["code"] for one in await site.lines(done, "error")]
    assert codes == ["batch_expired", "invalid_json_line"]


async def test_a_stopped_server_goes_on_where_it_was(folder: Path) -> None:
    first = BatchSite(folder, max_inflight=1)
    async with first.running():
        held = Held(first, after=3)
        made = await first.create(b"".join(line(f"r{n}") for n in range(9)))
        await held.reached(4)
    second = BatchSite(folder)
    again = Held(second, after=100)
    async with second.running():
        done = await second.ended(made["id"])
    assert ids(await second.lines(done, "output")) == [f"r{n}" for n in range(9)]
    assert again.asked == 6


async def test_a_draining_server_gives_no_line_an_error(folder: Path) -> None:
    first = BatchSite(folder, max_inflight=2)
    async with first.running():
        held = Held(first, after=3)
        made = await first.create(b"".join(line(f"r{n}") for n in range(9)))
        await held.reached(5)
        first.lifecycle.drain()
        held.go.set()
        while first.lifecycle.num_open:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
    second = BatchSite(folder)
    async with second.running():
        done = await second.ended(made["id"])
    assert done["request_counts"] == {"total": 9, "completed": 9, "failed": 0}


async def test_one_of_several_processes_runs_a_batch_and_all_can_cancel_it(folder: Path) -> None:
    sites = [BatchSite(folder) for _ in range(3)]
    counts = [Held(site, after=10_000) for site in sites]
    async with contextlib.AsyncExitStack() as stack:
        for site in sites:
            await stack.enter_async_context(site.running())
        made = [await sites[n % 3].create(b"".join(line(f"{n}-{m}") for m in range(30))) for n in range(6)]
        for batch in made:
            done = await sites[0].ended(batch["id"])
            assert done["request_counts"]["completed"] == 30
        assert sum(count.asked for count in counts) == 180
        for count in counts:
            count.asked = 100_000
        long = await sites[0].create(line("x"))
        await sites[2].http.post(f"/v1/batches/{long['id']}/cancel")
        for count in counts:
            count.go.set()
        assert (await sites[1].ended(long["id"]))["status"] in ("cancelled", "completed")


async def test_a_disk_that_fills_up_delays_a_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_PAUSE", 0.01)
    monkeypatch.setattr(work, "_LOOK", 0.02)
    site = BatchSite(folder)
    real, tried = os.pwrite, []

    def sometimes(fd: int, data: Any, place: int) -> int:
        tried.append(place)
        return real(fd, data, place) if len(tried) > 3 else _full()

    async with site.running():
        monkeypatch.setattr(os, "pwrite", sometimes)
        made = await site.create(b"".join(line(f"r{n}") for n in range(20)))
        done = await site.ended(made["id"])
        assert (await site.http.post(URL, json={"prompt": "hi"})).status_code == 200
    assert len(tried) > 3
    assert ids(await site.lines(done, "output")) == [f"r{n}" for n in range(20)]


async def test_a_fault_of_the_server_is_tried_again_and_then_told(site: BatchSite) -> None:
    asked: list[str] = []

    def script(request: Generate, index: int, given: tuple[int, ...]) -> Any:
        text = "".join(map(chr, given))
        asked.append(text)
        if text == "bad" or asked.count(text) < 3:
            raise RuntimeError("planted")
        return echo_script(request, index, given)

    site.service.script = script
    made = await site.create(line("good", prompt="good", max_tokens=9) + line("bad", prompt="bad"))
    done = await site.ended(made["id"])
    assert ids(await site.lines(done, "output")) == ["good"]
    assert [one["response"]["status_code"] for one in await site.lines(done, "error")] == [500]
    assert asked.count("bad") == 3


async def test_lines_leave_room_for_requests_of_clients(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_QUIET", 0.0)
    site = BatchSite(folder, max_inflight=6, max_beside_clients=2)
    async with site.running():
        held = Held(site, after=0)
        chat = asyncio.create_task(site.http.post(URL, json={"prompt": "hi"}))
        await held.reached(1)
        made = await site.create(b"".join(line(f"r{n}") for n in range(20)))
        await held.reached(3)
        await asyncio.sleep(0.3)
        assert held.asked == 3  # that of the client, and two lines
        chat.cancel()
        await held.reached(7)
        await asyncio.sleep(0.3)
        assert held.asked == 7
        held.go.set()
        assert (await site.ended(made["id"]))["request_counts"]["completed"] == 20


async def test_lines_leave_their_key_a_place(folder: Path) -> None:
    site = BatchSite(folder, limits={"max_key_requests": 3})
    async with site.running():
        held = Held(site, after=0)
        made = await site.create(b"".join(line(f"r{n}") for n in range(9)))
        await held.reached(2)
        chat = asyncio.create_task(site.http.post(URL, json={"prompt": "hi"}))
        await held.reached(3)
        assert (await site.http.post(URL, json={"prompt": "hi"})).status_code == 429
        held.go.set()
        assert (await chat).status_code == 200
        assert (await site.ended(made["id"]))["request_counts"]["completed"] == 9


async def test_a_key_that_is_gone_stops_its_batch(folder: Path) -> None:
    first = BatchSite(folder)
    made = await first.create(line("a"))
    second = BatchSite(folder, keys=("k9",))
    record = Store(folder, StoreOptions()).batches.read(made["id"])
    assert record is not None
    assert record.key == "key-1"
    async with BatchSite(folder, keys=()).running():  # without keys the name is unknown
        while Store(folder, StoreOptions()).batches.read(made["id"]).ended_at is None:  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
    done = await second.client("k9").get(f"/v1/batches/{made['id']}")
    assert done.json()["request_counts"] == {"total": 1, "completed": 0, "failed": 1}


async def test_the_batch_that_ended_first_makes_room(folder: Path) -> None:
    site = BatchSite(folder, max_files=4)
    async with site.running():
        made = []
        for name in "abcde":
            made.append((await site.create(line(name)))["id"])
            await site.ended(made[-1])
            for file in (await site.http.get("/v1/files")).json()["data"]:
                await site.http.delete(f"/v1/files/{file['id']}")
        assert (await site.http.get(f"/v1/batches/{made[0]}")).status_code == 404
        listed = (await site.http.get("/v1/batches")).json()["data"]
        assert [one["id"] for one in listed] == made[:0:-1]


# -------------------------------------------------------------------------------------- a process that is killed


class Killed(BaseException):
    """The end of a process, as code in it would see it, if it could."""


class Kill:
    """The functions that change a folder, of which the one numbered `place` and all later ones do nothing but raise."""

    NAMES = ("fsync", "rename", "replace", "pwrite", "unlink", "mkdir", "rmdir", "link", "truncate", "ftruncate")

    def __init__(self, place: int) -> None:
        self.count = 0
        self.place = place
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in self.NAMES:
                patch.setattr(os, name, partial(self._call, getattr(os, name)))
            yield

    def _call(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self.count += 1
            if self.count > self.place:
                raise Killed
        return real(*args, **kwargs)


def kills(act: Callable[[int], None]) -> Iterator[int]:
    """Call `act(n)` under a kill at every place that it has; yield the number of each place after its kill."""
    place = 0
    while True:
        kill = Kill(place)
        with kill.armed(), contextlib.suppress(BaseException):
            act(place)
        yield place
        if kill.count <= place:
            return
        place += 1


def receive(store: Store, content: bytes) -> FileRecord:
    with store.receiving(len(content)) as (path, file):
        file.write(content)
        return store.keep(path, file, store.new_file("", "in.jsonl", "batch"))


def begin(store: Store, source: FileRecord, **changes: Any) -> BatchRecord:
    created = store.clock()
    fields = {"completion_window": "24h", "metadata": None, "output_seconds": None, "model": "m", "endpoint": URL}
    times = {"created": created, "expires": created // 10**9 + 86_400}
    record = BatchRecord(id=store.batches.new_id(), key="", input_file_id=source.id, **{**fields, **times, **changes})
    store.begin(record, source)
    return record


def check_whole(store: Store) -> None:
    """Check that every object of the store has what its record says, and nothing else is there."""
    for file in store.files.records():
        data = store.content(file).read_bytes()
        assert len(data) == file.bytes
        assert not data or data.endswith(b"\n")
    assert len(store.files.records()) == len(store.files.ids())
    assert len(store.batches.records()) == len(store.batches.ids())


def test_a_kill_leaves_whole_files_or_none(folder: Path) -> None:
    def act(place: int) -> None:
        store = Store(folder, StoreOptions())
        file = receive(store, line("a"))
        begin(store, file)
        store.files.remove(file.id)

    for _ in kills(act):
        check_whole(Store(folder, StoreOptions()))
    store = Store(folder, StoreOptions())
    store.sweep()
    assert left(folder) == []
    check_whole(store)


@pytest.mark.parametrize("how", ["completed", "cancelled", "expired"])
def test_a_batch_that_is_killed_at_any_place_loses_no_line(folder: Path, how: str) -> None:
    content = b"".join(line(f"r{n}") for n in range(4)) + b"{\n" + line("r1")
    records: list[BatchRecord] = []
    answers: list[str] = []

    async def ask(url: str, body: bytes) -> AppResponse:
        answers.append(url)
        return AppResponse(200 if len(answers) % 5 else 400, "r", b'{"x": 1}')

    def run(store: Store, id: str) -> None:
        one = Run(id, store, lambda id, key: Asker(ask, lambda: True), lambda: 2, 1000, 10)
        with store.batches.claimed(id) as mine:
            assert mine
            asyncio.run(one.work(lambda: True))
        assert one.ended

    def act(place: int) -> None:
        run(Store(folder, StoreOptions()), records[place].id)

    store = Store(folder, StoreOptions())
    file = receive(store, content)

    def fresh() -> None:
        changes = {"expires": 1} if how == "expired" else {}
        records.append(begin(store, file, **changes))
        if how == "cancelled":
            store.cancel(records[-1])

    fresh()
    for place in kills(act):
        check_whole(store)
        run(Store(folder, StoreOptions()), records[place].id)
        record = store.batches.read(records[place].id)
        assert record is not None
        assert record.status == how
        assert (record.total, record.completed + record.failed) == (6, 6)
        found = []
        for id in (record.output_file_id, record.error_file_id):
            if id is not None:
                found += store.content(store.file(id, "")).read_bytes().splitlines()
        customs = [json.loads(one)["custom_id"] or "" for one in found]
        assert sorted(customs) == ["", "r0", "r1", "r1", "r2", "r3"]
        assert len({json.loads(one)["id"] for one in found}) == 6
        assert (
            sorted(path.name for path in store.batches.path(record.id).iterdir() if path.name != "cancel")
            == ["record.json"]
            or how
        )
        fresh()
    assert len(records) > 20


def test_what_has_expired_is_gone(folder: Path) -> None:
    now = [time.time_ns()]
    store = Store(folder, StoreOptions(max_age=3600), lambda: now[0])
    file = receive(store, line("a"))
    record = begin(store, file)
    now[0] += 3601 * 10**9
    with pytest.raises(NotFoundError):
        store.file(file.id, "")
    store.sweep()
    assert store.files.ids() == []
    assert store.batches.ids() == [record.id]  # it has not ended
    store.batches.write(msgspec.structs.replace(record, status="failed", failed_at=store.now - 3600))
    store.sweep()
    assert store.batches.ids() == []


def test_a_damaged_record_is_an_object_that_is_not_there(folder: Path) -> None:
    store = Store(folder, StoreOptions())
    file = receive(store, b"x\n")
    (store.files.path(file.id) / "record.json").write_bytes(b'{"id": 1')
    with pytest.raises(NotFoundError):
        store.file(file.id, "")
    assert store.files.records() == []

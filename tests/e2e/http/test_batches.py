"""Files and Batches with OpenAI's client, over a server that is killed."""

from __future__ import annotations

import io
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from ferrule_testkit import server as servers

ENDED = {"completed", "failed", "expired", "cancelled"}


def serving(folder: Path, *more: str) -> Any:
    args = [*servers.WITHOUT_MODEL, "--api-key", "k", "--plugin-config.router:batches.folder", str(folder / "store")]
    return servers.running([*args, *more], folder / "log")


def client_of(server: servers.Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", timeout=servers.PATIENCE)


def row(custom_id: str, **body: Any) -> str:
    body = {"model": "ferrule-tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **body}
    url = "/v1/chat/completions"
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def begin(client: openai.OpenAI, rows: str) -> openai.types.Batch:
    file = client.files.create(file=io.BytesIO(rows.encode()), purpose="batch")
    assert client.files.retrieve(file.id) == file
    return client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")


def ended(client: openai.OpenAI, id: str, patience: float = servers.PATIENCE) -> openai.types.Batch:
    assert servers.until(lambda: client.batches.retrieve(id).status in ENDED, patience)
    return client.batches.retrieve(id)


def names(client: openai.OpenAI, file_id: str | None) -> list[str]:
    assert file_id is not None
    return [json.loads(line)["custom_id"] for line in client.files.content(file_id).text.splitlines()]


def test_a_killed_server_loses_no_line_and_answers_none_twice(tmp_path: Path) -> None:
    count = 200
    rows = "".join(row(f"r{n}") if n % 10 else row(f"r{n}", model="nobody") for n in range(count))
    journal: list[Path] = []
    with serving(tmp_path) as server:
        batch = begin(client_of(server), rows)
        assert batch.status == "validating"
        journal.append(tmp_path / "store" / "batches" / batch.id / "journal")
        assert servers.until(lambda: journal[0].is_file() and journal[0].read_bytes().count(b"\n") > 20)
        for pid in [*servers.descendants(server.process.pid), server.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        server.process.wait()
    done_before = journal[0].read_bytes().count(b"\n") - 1
    assert 20 <= done_before < count
    with serving(tmp_path, "--api-server-count", "2") as server, client_of(server) as client:
        done = ended(client, batch.id)
        counts = done.request_counts
        assert counts is not None
        assert (done.status, counts.total, counts.completed, counts.failed) == ("completed", count, 180, 20)
        assert names(client, done.output_file_id) == [f"r{n}" for n in range(count) if n % 10]
        assert names(client, done.error_file_id) == [f"r{n}" for n in range(0, count, 10)]
        listed = [file.id for file in client.files.list(limit=2)]
        assert set(listed) == {done.error_file_id, done.output_file_id, batch.input_file_id}
        assert [one.id for one in client.batches.list(limit=1)] == [batch.id]
        other = begin(client, rows)
        client.batches.cancel(other.id)
        stopped = ended(client, other.id)
        assert stopped.status in ("cancelled", "completed")
        for id in listed:
            assert client.files.delete(id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(listed[0])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_thousand_lines_of_which_some_are_broken(tmp_path: Path) -> None:
    broken = ["{\n", "[]\n", row("x").replace("/v1/chat", "/v2/chat"), row("r1"), row("m", model="nobody")]
    rows = [broken[n // 10 % 5] if n % 10 == 0 else row(f"r{n}", max_tokens=1) for n in range(50_000)]
    talk: Any = [{"role": "user", "content": "hi"}]
    with serving(tmp_path) as server, client_of(server) as client:
        batch = begin(client, "".join(rows))
        assert servers.until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        for _ in range(30):  # none of them is refused
            client.with_options(max_retries=0).chat.completions.create(
                model="ferrule-tiny", messages=talk, max_tokens=2
            )
        assert client.batches.retrieve(batch.id).status == "in_progress"
        done = ended(client, batch.id, 1700)
        assert done.request_counts is not None
        assert (done.request_counts.completed, done.request_counts.failed) == (45_000, 5_000)
        assert names(client, done.output_file_id) == [f"r{n}" for n in range(50_000) if n % 10]
        assert len(names(client, done.error_file_id)) == 5000

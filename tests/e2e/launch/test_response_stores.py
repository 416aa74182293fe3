"""Stored responses of a real server: several API processes, a server that is killed, and a start that is refused."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from ferrule_testkit import server as servers

TWO = ("--api-server-count", "2")
LONG: dict[str, Any] = {"input": "hello", "background": True, "stream": True, "max_output_tokens": 1000}


@contextmanager
def serving(log: Path, *args: str) -> Iterator[tuple[servers.Server, str]]:
    with servers.running([*servers.WITHOUT_MODEL, *args], log, {"OMP_NUM_THREADS": "1"}) as server:
        yield server, f"{server.url}/v1/responses"


def post(url: str, **body: Any) -> dict[str, Any]:
    """Post over a connection of its own: any API process may take it."""
    response = httpx.post(url, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return dict(response.json())


def get(url: str) -> dict[str, Any]:
    return dict(httpx.get(url, timeout=60).json())


def test_responses_belong_to_the_server_and_outlive_it(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    gate = servers.Gate(tmp_path)
    options = (*gate.args, "--plugin-config", f"response_store:sqlite={json.dumps({'path': str(path)})}")
    with serving(tmp_path / "first", *TWO, *options) as (server, url):
        answers = [post(url, input=f"hello {number}", max_output_tokens=2) for number in range(8)]
        made = {answer["id"]: answer for answer in answers}
        for name in [*made] * 3:  # of two processes, either is asked
            assert get(f"{url}/{name}") == made[name]
        for name in made:
            assert (
                post(url, input="more", max_output_tokens=2, previous_response_id=name)["previous_response_id"] == name
            )
        with gate.shut(after=5):
            with httpx.stream("POST", url, json=LONG, timeout=60) as stream:
                begun = next(line for line in stream.iter_lines() if line.startswith("data: "))
            running = json.loads(begun.removeprefix("data: "))["response"]["id"]
            for _ in range(8):
                assert get(f"{url}/{running}")["status"] in ("queued", "in_progress")
            queued = post(url, **LONG | {"stream": False})["id"]
            for _ in range(8):
                assert post(f"{url}/{queued}/cancel")["status"] == "cancelled"
            for pid in [*servers.descendants(server.process.pid), server.process.pid]:
                os.kill(pid, signal.SIGKILL)
            server.process.wait(60)
    with serving(tmp_path / "second", *options, "--response-store", "sqlite") as (server, url):
        for name in made:
            assert get(f"{url}/{name}") == made[name]
        gone = get(f"{url}/{running}")
        assert gone["status"] == "failed"
        assert "before the response was finished" in gone["error"]["message"]
        rest = httpx.get(f"{url}/{running}?stream=true", timeout=60).text.strip().split("\n\n")
        events = [json.loads(block.partition("data: ")[2]) for block in rest]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert (events[-1]["type"], events[-1]["response"]) == ("response.failed", gone)
        assert post(url, input="more", max_output_tokens=2, previous_response_id=name)["previous_response_id"] == name
        with gate.shut():
            left = post(url, **LONG | {"stream": False})["id"]
            assert server.stop() == 0
    with serving(tmp_path / "third", *options, "--response-store", "sqlite") as (_, url):
        assert get(f"{url}/{left}")["status"] == "failed"

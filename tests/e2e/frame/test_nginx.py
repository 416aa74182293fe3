"""Behind a real nginx that serves the API below a prefix: routes, docs, streams without buffering, clients that leave.

Needs Debian's package nginx-light; nginx runs as a child with a configuration and a folder of its own.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator

import httpx
import openai
import pytest

from ferrule_testkit import server as servers

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")

# Nothing about buffering or HTTP versions: as it comes, nginx must do.
CONFIG = """
daemon off;
worker_processes 1;
pid {folder}/pid;
error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location /strip/ {{ proxy_pass {url}/; }}
    location /llm/ {{ proxy_pass {url}; }}
    location /modern/ {{
      proxy_pass {url}/;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
    }}
  }}
}}
"""
LONG = {"prompt": "Hello", "max_tokens": 1900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> servers.Gate:
    return servers.Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def server(gate: servers.Gate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    args = ["--root-path", "/llm", "--enable-server-load-tracking", "--max-num-seqs", "1", "--sse-keepalive", "0.2"]
    args += [*servers.WITHOUT_MODEL, *gate.args]
    with servers.running(args, tmp_path_factory.mktemp("server") / "log", {"OMP_NUM_THREADS": "1"}) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(server: servers.Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run nginx, and yield its URL."""
    folder = tmp_path_factory.mktemp("nginx")
    config = folder / "nginx.conf"
    command = [str(NGINX), "-p", str(folder), "-c", str(config), "-e", str(folder / "error.log")]
    with servers.own_port() as port:
        config.write_text(CONFIG.format(folder=folder, port=port, url=server.url))
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        try:
            assert servers.until(lambda: process.poll() is not None or answers(port))
            assert process.poll() is None, (folder / "error.log").read_text()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(240)


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 60).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("prefix", ["strip", "llm", "modern"])
def test_the_official_client_below_a_prefix(proxy: str, prefix: str) -> None:
    with openai.OpenAI(base_url=f"{proxy}/{prefix}/v1", api_key="none", max_retries=0, timeout=240) as client:
        assert client.models.list().data[0].id == "ferrule-tiny"
        messages = [{"role": "user", "content": "Hello!"}]
        whole = client.chat.completions.create(
            model="ferrule-tiny",
            messages=messages,  # type: ignore[arg-type]
            seed=7,
        )
        stream = client.chat.completions.create(
            model="ferrule-tiny",
            messages=messages,  # type: ignore[arg-type]
            seed=7,
            stream=True,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)  # type: ignore[union-attr]
        assert text == whole.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="needs task embed"):
            client.embeddings.create(model="ferrule-tiny", input="a")


def test_docs_and_description_know_the_prefix(proxy: str) -> None:
    page = httpx.get(f"{proxy}/llm/docs", timeout=240).text
    link = re.search(r"url: '([^/']*openapi\.json)'", page)
    assert link is not None  # relative, so right below any prefix
    spec = httpx.get(f"{proxy}/llm/{link.group(1)}", timeout=240).json()
    assert spec["servers"] == [{"url": "/llm"}]
    for path in ("/v1/models", "/health"):
        assert path in spec["paths"]
        assert httpx.get(f"{proxy}{spec['servers'][0]['url']}{path}", timeout=240).status_code == 200
    assert httpx.get(f"{proxy}/llm//v1/models", timeout=240).json()["error"]["code"] == 404


@pytest.mark.parametrize("prefix", ["strip", "llm", "modern"])
def test_streams_are_not_buffered_and_leaving_reaches_the_engine(
    proxy: str, server: servers.Server, gate: servers.Gate, prefix: str
) -> None:
    """Receive the comments of a queued stream one by one while another request runs; then both clients leave."""

    def load() -> int:
        return int(httpx.get(f"{server.url}/load", timeout=240).json()["server_load"])

    left = gone(server)
    url = f"{proxy}/{prefix}/v1/completions"
    with gate.shut(after=4), httpx.stream("POST", url, json=LONG, timeout=240) as running:
        events = (line for line in running.iter_lines() if line and line != ": ping")
        assert json.loads(next(events).removeprefix("data: "))["choices"][0]["finish_reason"] is None
        with httpx.stream("POST", url, json=LONG, timeout=240) as queued:
            assert queued.headers["cache-control"] == "no-cache"
            assert queued.headers["content-type"].startswith("text/event-stream")
            lines = queued.iter_lines()
            assert [next(lines), next(lines), next(lines)] == [": ping", "", ": ping"]
            assert load() == 2
        assert servers.until(lambda: load() == 1)
    assert servers.until(lambda: load() == 0)
    assert servers.until(lambda: gone(server) == left + 2)
    assert servers.until(lambda: idle(httpx.get(f"{server.url}/metrics", timeout=240).text))


def gone(server: servers.Server) -> int:
    """Return how many clients have left, by the log."""
    return len(re.findall(r'"POST \S*/v1/completions HTTP/1.[01]" 499', server.text()))


def idle(metrics: str) -> bool:
    found = re.findall(r"^vllm:num_requests_running\{[^}]*\} (\S+)$", metrics, re.MULTILINE)
    return bool(found) and not any(map(float, found))

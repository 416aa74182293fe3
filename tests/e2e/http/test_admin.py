"""Routes for administration, on the real server, with two processes and with one."""

from __future__ import annotations

import gzip
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ferrule_testkit import server as servers
from tests.fakes.serving import Here

EXTENSION = """
class Extension:
    def double(self, number, *, add=0):
        return [2 * number + add, self.config.model.dtype]

    def fail(self):
        raise RuntimeError("on purpose")

    def wait(self, path):
        import pathlib
        import time
        while not pathlib.Path(path).exists():
            time.sleep(0.01)
"""
PROMPT = {"prompt": [5, 6, 7, 8], "max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 2}


@pytest.fixture(scope="module", params=["processes", pytest.param("one-process", marks=pytest.mark.slow)])
def dev(request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("dev")
    (folder / "tests_extension.py").write_text(EXTENSION)
    args = [str(tiny_llama), "--dtype", "float32", "--served-model-name", "tiny", "--num-gpu-blocks-override", "512"]
    args += ["--enable-sleep-mode", "--worker-extension-cls", "tests_extension.Extension", "--api-key", "k-secret-1"]
    args += ["--admin-key", "a-secret-2"]
    if request.param == "one-process":
        args.append("--disable-frontend-multiprocessing")
    env = {
        "OMP_NUM_THREADS": "1",
        "FERRULE_SERVER_DEV_MODE": "1",
        "FERRULE_TORCH_PROFILER_DIR": str(folder / "traces"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])),
    }
    with servers.running(args, folder / "log", env) as server:
        server.folder = folder
        yield server


@pytest.fixture
def admin(dev: Any) -> Iterator[httpx.Client]:
    headers = {"Authorization": "Bearer a-secret-2"}
    with httpx.Client(base_url=dev.url, headers=headers, timeout=240) as client:
        yield client


@pytest.fixture
def user(dev: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=dev.url, headers={"Authorization": "Bearer k-secret-1"}, timeout=240) as client:
        yield client


def _says(client: httpx.Client) -> Any:
    response = client.post("/v1/completions", json={"model": "tiny", **PROMPT})
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def _error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


ROUTES = [
    ("POST", "/reset_prefix_cache"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
    ("POST", "/collective_rpc"),
    ("GET", "/server_info"),
    ("GET", "/v1/plugins"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_only_the_admin_key_opens_them(dev: Any, user: httpx.Client, method: str, path: str) -> None:
    assert _error(user.request(method, path), 401)["type"] == "AuthenticationError"
    assert _error(httpx.request(method, dev.url + path, timeout=240), 401)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_unknown_query_parameters_are_refused(admin: httpx.Client, method: str, path: str) -> None:
    body = {"json": {"method": "double"}} if path == "/collective_rpc" else {}
    assert "Unknown query parameter" in _error(admin.request(method, f"{path}?levle=1", **body), 400)["message"]


@pytest.mark.parametrize("level", [1, 2])
def test_outputs_after_sleep_are_those_before(admin: httpx.Client, user: httpx.Client, level: int) -> None:
    before = _says(user)
    assert admin.get("/is_sleeping").json() == {"is_sleeping": False}
    assert admin.post(f"/sleep?level={level}").json() == {"is_sleeping": True}
    assert admin.get("/is_sleeping").json() == {"is_sleeping": True}
    assert admin.get("/health").status_code == 200
    assert admin.post("/wake_up?tags=weights").json() == {"is_sleeping": True}
    assert admin.post("/wake_up?tags=kv_cache").json() == {"is_sleeping": False}
    assert _says(user) == before
    assert admin.post("/sleep").json() == {"is_sleeping": True}
    assert admin.post("/wake_up?tags=weights&tags=kv_cache").json() == {"is_sleeping": False}
    assert _says(user) == before


def test_requests_wait_until_it_wakes_up(admin: httpx.Client, user: httpx.Client) -> None:
    before = _says(user)
    admin.post("/sleep")
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(_says(user)))
    thread.start()
    try:
        assert servers.until(lambda: re.search(r"^vllm:num_requests_waiting{.*} 1.0$", user.get("/metrics").text, re.M))
        assert answers == []
    finally:
        admin.post("/wake_up")
        thread.join()
    assert answers == [before]


@pytest.mark.parametrize("query", ["level=3", "level=0", "level=one", "level="])
def test_levels_that_do_not_exist(admin: httpx.Client, query: str) -> None:
    assert _error(admin.post(f"/sleep?{query}"), 400)["param"] == "level"
    assert admin.get("/is_sleeping").json() == {"is_sleeping": False}


def test_tags_that_do_not_exist(admin: httpx.Client) -> None:
    assert "weights, kv_cache" in _error(admin.post("/wake_up?tags=weights&tags=lora"), 400)["message"]


def test_a_profile(dev: Any, admin: httpx.Client, user: httpx.Client) -> None:
    assert "No profile" in _error(admin.post("/stop_profile"), 400)["message"]
    assert admin.post("/start_profile").json() == {"recording": True}
    assert "already" in _error(admin.post("/start_profile"), 400)["message"]
    _says(user)
    name = admin.post("/stop_profile").json()["file"]
    (file,) = (dev.folder / "traces").iterdir()
    assert file.name == name
    assert json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    file.unlink()


def test_calls_on_the_workers(dev: Any, admin: httpx.Client, user: httpx.Client) -> None:
    def call(status: int, **body: Any) -> Any:
        response = admin.post("/collective_rpc", json=body)
        assert response.status_code == status, response.text
        return response.json()

    assert call(200, method="double", args=[4], kwargs={"add": 1}) == {"results": [[9, "float32"]]}
    assert "double, fail, wait" in call(400, method="__init__")["error"]["message"]
    assert "double, fail, wait" in call(400, method="execute")["error"]["message"]
    assert "RuntimeError: on purpose" in call(400, method="fail")["error"]["message"]
    assert "TypeError" in call(400, method="double")["error"]["message"]
    assert call(400, method=5)["error"]["param"] == "method"
    assert call(400, method={"function": "os:getcwd"})["error"]["param"] == "method"  # that is for the offline API
    assert call(400, args=[])["error"]["param"] == "method"
    assert call(400, method="double", timeout=-1)["error"]["param"] == "timeout"
    end = dev.folder / "end"
    assert "goes on" in call(408, method="wait", args=[str(end)], timeout=0.05)["error"]["message"]
    end.touch()
    assert _says(user)
    end.unlink()


def test_the_prefix_cache_is_reset(admin: httpx.Client, user: httpx.Client) -> None:
    assert admin.post("/reset_prefix_cache").json() == {"reset": True}


def test_what_runs_here(dev: Any, admin: httpx.Client) -> None:
    told = admin.get("/server_info?config_format=json")
    assert "secret" not in told.text
    info = told.json()
    assert info["vllm_config"]["num_gpu_blocks_override"] == 512
    assert info["vllm_config"]["admin_key"] == "(hidden)"
    assert info["vllm_config"]["max_num_seqs"] == 256  # resolved
    assert (info["model"]["architecture"], info["served_names"]) == ("LlamaForCausalLM", ["tiny"])
    assert "LlamaForCausalLM" in info["plugins"]["model"]
    assert info["environment"]["FERRULE_SERVER_DEV_MODE"] == "1"
    text = admin.get("/server_info").json()["vllm_config"]
    assert "num_gpu_blocks_override=512" in text
    assert "secret" not in text
    assert _error(admin.get("/server_info?config_format=yaml"), 400)["param"] == "config_format"


def test_plugins_with_their_origin(admin: httpx.Client) -> None:
    told = admin.get("/v1/plugins").json()
    rows = {row["id"]: row for row in told["data"]}
    assert rows["router:admin"]["builtin"] is True
    assert rows["router:admin"]["origin"].startswith("ferrule ")
    assert rows["router:admin"]["state"] == "available"
    assert told["object"] == "list"
    assert isinstance(told["refusals"], list)


def test_what_was_not_switched_on_says_how(generous_server: Here) -> None:
    with httpx.Client(base_url=generous_server.url, timeout=240) as client:
        for path in ("/sleep", "/wake_up"):
            error = _error(client.post(path), 403)
            assert "--enable-sleep-mode" in error["message"]
        assert client.get("/is_sleeping").json() == {"is_sleeping": False}
        assert "FERRULE_TORCH_PROFILER_DIR" in _error(client.post("/start_profile"), 400)["message"]
        error = _error(client.post("/collective_rpc", json={"method": "double"}), 400)
        assert "--worker-extension-cls" in error["message"]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_without_development_mode_they_are_not_there(server: servers.Server, method: str, path: str) -> None:
    response = httpx.request(method, server.url + path, timeout=240)
    assert "FERRULE_SERVER_DEV_MODE=1" in _error(response, 404)["message"]

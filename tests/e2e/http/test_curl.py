"""Every route of docs/http.md, asked with curl: the documented status, and the documented answer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.serving import Here, serving_here
from tools import ROOT

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")

PAGE = ROOT / "docs" / "http.md"
TALK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
PROMPT = {"prompt": "hello", "max_tokens": 2}
ANSWER = {"input": "hello", "max_output_tokens": 2}
COUNTED = {"model": "tiny", "messages": TALK["messages"]}
BATCH = {"input_file_id": "{file}", "endpoint": "/v1/completions", "completion_window": "24h"}
ROW = {"custom_id": "N", "method": "POST", "url": "/v1/completions", "body": PROMPT}
# route → path as it is asked, body (a tuple: the fields of a form), where in the answer to look (a name, or a text of a
# page), the documented value. {file} and {batch} are those that were made last.
CASES: dict[str, list[tuple[str, Any, str, Any]]] = {
    "GET /v1/models": [("/v1/models", None, "object", "list")],
    "GET /v1/models/{model}": [("/v1/models/tiny", None, "id", "tiny")],
    "POST /v1/completions": [("/v1/completions", PROMPT, "object", "text_completion")],
    "POST /v1/chat/completions": [("/v1/chat/completions", TALK, "object", "chat.completion")],
    "POST /v1/messages": [("/v1/messages", TALK | {"model": "tiny"}, "type", "message")],
    "POST /v1/messages/count_tokens": [("/v1/messages/count_tokens", COUNTED, "input_tokens", int)],
    "POST /v1/responses": [("/v1/responses", ANSWER | {"request_id": "one"}, "object", "response")],
    "POST /v1/responses/input_tokens": [("/v1/responses/input_tokens", {"input": "hello"}, "input_tokens", int)],
    "GET /v1/responses/{response_id}": [("/v1/responses/resp_one", None, "id", "resp_one")],
    "GET /v1/responses/{response_id}/input_items": [("/v1/responses/resp_one/input_items", None, "has_more", False)],
    "DELETE /v1/responses/{response_id}": [("/v1/responses/resp_one", None, "deleted", True)],
    "POST /v1/responses/{response_id}/cancel": [
        ("/v1/responses", ANSWER | {"request_id": "two", "background": True}, "status", "queued"),
        ("/v1/responses/resp_two/cancel", None, "background", True),
    ],
    "POST /v1/files": [("/v1/files", ("purpose=batch", "file=@{input}"), "object", "file")],
    "GET /v1/files": [("/v1/files?limit=5", None, "object", "list")],
    "GET /v1/files/{file_id}": [("/v1/files/{file}", None, "purpose", "batch")],
    "GET /v1/files/{file_id}/content": [("/v1/files/{file}/content", None, '"custom_id"', None)],
    "POST /v1/batches": [("/v1/batches", BATCH, "status", "validating")],
    "POST /v1/batches/{batch_id}/cancel": [("/v1/batches/{batch}/cancel", None, "cancelling_at", int)],
    "GET /v1/batches": [("/v1/batches", None, "object", "list")],
    "GET /v1/batches/{batch_id}": [("/v1/batches/{batch}", None, "endpoint", "/v1/completions")],
    "DELETE /v1/files/{file_id}": [("/v1/files/{file}", None, "deleted", True)],
    "POST /api/chat": [("/api/chat", COUNTED | {"stream": False, "options": {"num_predict": 2}}, "done", True)],
    "POST /api/generate": [("/api/generate", PROMPT | {"model": "tiny", "stream": False}, "done", True)],
    "POST /api/embed": [("/api/embed", {"model": "tiny", "input": []}, "embeddings", [])],
    "POST /api/embeddings": [("/api/embeddings", {"model": "tiny"}, "embedding", [])],
    "POST /api/show": [("/api/show", {"model": "tiny"}, "capabilities", list)],
    "GET /api/tags": [("/api/tags", None, "models", list)],
    "GET /api/ps": [("/api/ps", None, "models", list)],
    "GET /api/version": [("/api/version", None, "version", str)],
    "GET /": [("/", None, "Ollama is running", None)],
    "POST /invocations": [
        ("/invocations", PROMPT, "object", "text_completion"),
        ("/invocations", TALK, "object", "chat.completion"),
    ],
    "POST /tokenize": [("/tokenize", {"prompt": "hello"}, "count", int)],
    "POST /detokenize": [("/detokenize", {"tokens": [40]}, "prompt", str)],
    "GET /tokenizer_info": [("/tokenizer_info", None, "chat_template", str)],
    "GET /health": [("/health", None, "status", "ready")],
    "GET /ping": [("/ping", None, "status", "ready")],
    "POST /ping": [("/ping", None, "status", "ready")],
    "GET /version": [("/version", None, "version", str)],
    "GET /load": [("/load", None, "server_load", 0)],
    "GET /metrics": [("/metrics", None, "# TYPE vllm:num_requests_running gauge", None)],
    "GET /openapi.json": [("/openapi.json", None, "openapi", "3.1.0")],
    "GET /docs": [("/docs", None, "<html>", None)],
    "GET /redoc": [("/redoc", None, "<html>", None)],
    "GET /ui": [("/ui", None, "<title>Ferrule</title>", None)],
    "GET /ui/api/plugins": [("/ui/api/plugins", None, "data", list)],
    "GET /ui/api/options": [("/ui/api/options", None, "options", list)],
    "GET /ui/api/live": [("/ui/api/live", None, "figures", dict)],
    "POST /reset_prefix_cache": [("/reset_prefix_cache", None, "reset", bool)],
    "POST /sleep": [("/sleep?level=1", None, "is_sleeping", True)],
    "GET /is_sleeping": [("/is_sleeping", None, "is_sleeping", True)],
    "POST /wake_up": [("/wake_up", None, "is_sleeping", False)],
    "POST /start_profile": [("/start_profile", None, "recording", True)],
    "POST /stop_profile": [("/stop_profile", None, "recording", False)],
    "POST /collective_rpc": [("/collective_rpc", {"method": "answer"}, "results", [42])],
    "GET /server_info": [("/server_info?config_format=json", None, "vllm_config", dict)],
    "GET /v1/plugins": [("/v1/plugins", None, "data", list)],
}
ADMIN = list(CASES)[list(CASES).index("POST /reset_prefix_cache") :]


def documented() -> set[str]:
    """Return the routes in the page's tables."""
    found = set()
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        first = line.split("|")[1] if line.startswith("| `") else ""
        if not re.match(r" `(GET|POST|DELETE) ", first):
            continue
        methods: list[str] = []
        for method, path in re.findall(r"(GET|POST|DELETE)|(/[\w./{}]*)", first):
            if path:
                found |= {f"{each} {path}" for each in methods[-2:] or ["GET"]}
                methods = methods[-1:]
            else:
                methods.append(method)
    return found


def test_the_list_is_that_of_the_page() -> None:
    assert documented() == set(CASES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("curl")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Here]:
    (folder / "curled.py").write_text("class Extension:\n    def answer(self) -> int:\n        return 42\n")
    flags = "--api-key sesame --admin-key open --served-model-name tiny --enable-tokenizer-info-endpoint"
    rows = "".join(json.dumps(ROW | {"custom_id": str(number)}) + "\n" for number in range(3000))
    (folder / "input").write_text(rows)  # many, so that the batch is still there to be cancelled
    more = "--enable-sleep-mode --worker-extension-cls curled.Extension"
    more += f" --plugin-config.router:batches.folder {folder}/store"
    around = {"FERRULE_SERVER_DEV_MODE": "1", "FERRULE_TORCH_PROFILER_DIR": str(folder)}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        with serving_here([*flags.split(), *more.split()], around) as running:
            yield running


def curl(url: str, method: str, body: Any, key: str | None) -> tuple[int, str]:
    command = ["curl", "-sS", "--max-time", "60", "-X", method, "-w", "\n%{http_code}", url]
    command += ["-H", f"Authorization: Bearer {key}"] if key else []
    if isinstance(body, tuple):
        command += [part for field in body for part in ("-F", field)]
    elif body is not None:
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    text, _, status = done.stdout.rpartition("\n")
    return int(status), text


def filled(value: Any, made: dict[str, str]) -> Any:
    """Return a value with the names of what was made in its texts."""
    if isinstance(value, str):
        return re.sub(r"\{(input|file|batch)\}", lambda name: made[name[1]], value)
    if isinstance(value, tuple):
        return tuple(filled(part, made) for part in value)
    return {key: filled(part, made) for key, part in value.items()} if isinstance(value, dict) else value


def test_every_route(server: Here, folder: Path) -> None:
    """Call every route in this order: a model that sleeps is woken up."""
    made = {"input": str(folder / "input")}
    for route, cases in CASES.items():
        method, key = route.split(" ")[0], "open" if route in ADMIN else "sesame"
        for path, body, name, value in cases:
            path, body = filled(path, made), filled(body, made)
            status, text = curl(server.url + path, method, body, key)
            assert status == 200, (route, text)
            if value is None:
                assert name in text, route
            else:
                answer = json.loads(text)
                made |= {answer["object"]: answer["id"]} if "object" in answer and "id" in answer else {}
                found = answer[name]
                assert isinstance(found, value) if isinstance(value, type) else found == value, (route, found)
            public = path in {"/health", "/ping", "/version", "/ui"}
            status, text = curl(server.url + path, method, body, None)
            assert status == (200 if public else 401), route
            if not public:
                error = json.loads(text)["error"]
                if isinstance(error, str):
                    assert "A valid API key is needed" in error, route
                else:
                    assert error.get("code") == 401 or error["type"] == "authentication_error", route

"""Fetching from a hub: a fake one on loopback records every request."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ferrule.config import Config, LoadConfig, ModelConfig, hub
from ferrule.errors import CheckpointError

COMMITS = {"main": "a" * 40, "v1": "b" * 40}
TOKEN = "hf_" + "x" * 16


class FakeHub:
    """Repositories as {id: {file: bytes}}; answers what huggingface_hub asks, and remembers it."""

    def __init__(self, repositories, elsewhere=None):
        self.requests = []  # (method, path, authorization)
        self.status = {}  # repository id -> (status, X-Error-Code)
        hub_ = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_HEAD(self):
                self.answer(body=False)

            def do_GET(self):
                self.answer(body=True)

            def answer(self, body):
                path = self.path.split("?")[0]
                hub_.requests.append((self.command, path, self.headers.get("Authorization")))
                status, headers, content = hub_.route(path)
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if body:
                    self.wfile.write(content)

        self.repositories = repositories
        self.elsewhere = elsewhere  # another FakeHub that stores large files
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def route(self, path):
        parts = path.strip("/").split("/")
        if parts[0] == "blob":
            return 200, {"ETag": f'"{parts[1]}"'}, self.repositories["blobs"][parts[1]]
        api = parts[:2] == ["api", "models"]
        name, rest = "/".join(parts[2:4] if api else parts[:2]), (parts[4:] if api else parts[2:])
        if name in self.status or name not in self.repositories:
            status, code = self.status.get(name, (404, "RepoNotFound"))
            return status, {"X-Error-Code": code}, b"{}"
        files = self.repositories[name]
        revision = rest[1] if len(rest) > 1 else "main"
        commit = COMMITS.get(revision, revision)
        if commit not in COMMITS.values():
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if not api:
            return self.resolve(files["/".join(rest[2:])], commit)
        if rest and rest[0] == "tree":
            tree = [
                {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for file, content in files.items()
            ]
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        info = {"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files]}
        return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()

    def resolve(self, content, commit):
        etag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit}
        if self.elsewhere is None or len(content) < 1000:
            return 200, headers, content
        self.elsewhere.repositories["blobs"][etag] = content
        headers["X-Linked-Size"], headers["X-Linked-Etag"] = str(len(content)), f'"{etag}"'
        return 302, {**headers, "Location": f"{self.elsewhere.url}/blob/{etag}"}, b""

    def close(self):
        self.server.shutdown()
        self.server.server_close()


CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"]}).encode()
FILES = {
    "config.json": CONFIG,
    "tokenizer.json": b"{}",
    "model.safetensors": b"s" * 5000,
    "pytorch_model.bin": b"p" * 5000,
    "consolidated.safetensors": b"c" * 5000,
    "original/params.json": b"{}",
    "README.md": b"text",
    "modeling.py": b"raise SystemExit",
}


@pytest.fixture
def fake_hub():
    blobs = FakeHub({"blobs": {}})
    pickled = {"config.json": CONFIG, "pytorch_model.bin": b"p"}
    server = FakeHub({"org/model": dict(FILES), "org/words": {"tokenizer.json": b"{}"}, "org/old": pickled}, blobs)
    yield server
    server.close()
    blobs.close()


@pytest.fixture
def localise(tmp_path, fake_hub):
    """Run `hub.localise` in a process of its own, as huggingface_hub reads its settings when it is imported."""
    script = (
        "import json, sys\n"
        "from ferrule.config import Config, LoadConfig, ModelConfig, hub\n"
        "from ferrule.errors import CheckpointError\n"
        "model, load = json.loads(sys.argv[1])\n"
        "try:\n"
        "    found = hub.localise(Config(model=ModelConfig(**model), load=LoadConfig(**load)))\n"
        "    print(json.dumps([found.model.model, found.model.tokenizer]))\n"
        "except CheckpointError as error:\n"
        "    print(json.dumps({'error': str(error)}))\n"
    )

    def run(model, load=None, at=None, **variables):
        settings = {"HF_ENDPOINT": fake_hub.url, "HF_HOME": str(tmp_path / "home")}
        settings |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        done = subprocess.run(
            [sys.executable, "-c", script, json.dumps([model, load or {}])],
            env={**clean, **settings, **variables},
            cwd=at,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        return json.loads(done.stdout.splitlines()[-1])

    return run


def names(folder):
    return {os.path.relpath(os.path.join(at, file), folder) for at, _, files in os.walk(folder) for file in files}


def test_every_fetch_is_pinned_and_the_token_goes_nowhere_else(fake_hub, localise, tmp_path):
    downloads = str(tmp_path / "downloads")
    model, tokenizer = localise(
        {
            "model": "org/model",
            "revision": "v1",
            "hf_token": TOKEN,
            "tokenizer": "org/words",
            "tokenizer_revision": "v1",
        },
        {"download_dir": downloads},
    )
    assert model.startswith(downloads)
    assert tokenizer.startswith(downloads)
    assert names(model) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert fake_hub.requests
    for method, path, authorization in fake_hub.requests:
        assert "/v1" in path or f"/{COMMITS['v1']}" in path, (method, path)
        assert COMMITS["main"] not in path
        assert authorization == f"Bearer {TOKEN}", (method, path)
    stored_elsewhere = fake_hub.elsewhere.requests
    assert stored_elsewhere
    assert all(authorization is None for _, _, authorization in stored_elsewhere)


def test_pickles_only_without_safetensors_and_code_only_with_trust(fake_hub, localise):
    folder, tokenizer = localise({"model": "org/old"})
    assert tokenizer == folder
    assert names(folder) == {"config.json", "pytorch_model.bin"}
    trusted, _ = localise({"model": "org/model", "trust_remote_code": True}, {"load_format": "dummy"})
    assert names(trusted) == {"config.json", "tokenizer.json", "modeling.py"}


def test_a_format_of_another_package_gets_every_file():
    assert hub.weight_patterns(["x.tensors"], "tensors") == ("*",)
    assert hub.weight_patterns(["a.safetensors", "a.bin"], "auto") == ("*.safetensors",)
    assert hub.weight_patterns(["consolidated.safetensors", "a.bin"], "auto") == ("*.bin", "*.pt")


def test_a_complete_copy_in_the_cache_serves_without_the_hub(fake_hub, localise):
    online = localise({"model": "org/model"})
    before = len(fake_hub.requests)
    assert localise({"model": "org/model"}, HF_HUB_OFFLINE="1") == online
    assert len(fake_hub.requests) == before
    assert localise({"model": "org/model"}, HF_ENDPOINT="http://127.0.0.1:9") == online
    fake_hub.status = {"org/model": (503, "Busy")}
    assert localise({"model": "org/model"}) == online


@pytest.mark.parametrize(
    ("model", "variables", "said"),
    [
        ({"model": "org/none"}, {}, ["'org/none'", "no such repository", "--hf-token"]),
        ({"model": "org/model", "revision": "v9"}, {}, ["revision v9", "no such revision", "--revision"]),
        ({"model": "org/gated"}, {}, ["'org/gated'", "gated", "--hf-token"]),
        ({"model": "org/broken"}, {}, ["'org/broken'", "answered 418"]),
        ({"model": "org/model"}, {"HF_HUB_OFFLINE": "1"}, ["HF_HUB_OFFLINE", "folder"]),
        ({"model": "org/model"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, ["127.0.0.1:9", "cannot be reached", "proxy"]),
        ({"model": "org/model", "hf_token": ""}, {}, ["no token is stored", "--hf-token"]),
    ],
)
def test_what_cannot_be_had_is_one_readable_block(fake_hub, localise, model, variables, said):
    fake_hub.status = {"org/gated": (403, "GatedRepo"), "org/broken": (418, "Teapot")}
    message = localise(model, **variables)["error"]
    assert all(word in message for word in said), message
    assert len(message.splitlines()) <= 3
    assert "Traceback" not in message


def test_a_relative_folder_that_is_mistyped_and_a_place_that_cannot_be_written(localise, tmp_path):
    (tmp_path / "models" / "llama-tiny").mkdir(parents=True)
    assert "Did you mean models/llama-tiny?" in localise({"model": "models/lama-tiny"}, at=tmp_path)["error"]
    (tmp_path / "file").touch()
    message = localise({"model": "org/model"}, {"download_dir": str(tmp_path / "file" / "cache")})["error"]
    assert "--download-dir" in message


def test_a_folder_passes_through_and_a_mistyped_one_gets_a_suggestion(tmp_path):
    (tmp_path / "llama-tiny").mkdir()
    (tmp_path / "llama-tiny" / "config.json").write_bytes(CONFIG)

    def fetch(name):
        return hub.fetch(Config(model=ModelConfig(model=str(tmp_path / name)), load=LoadConfig()))

    assert fetch("llama-tiny") == (tmp_path / "llama-tiny").resolve()
    with pytest.raises(CheckpointError, match="Did you mean .*llama-tiny"):
        fetch("lama-tiny")
    with pytest.raises(CheckpointError, match=r"no config\.json[^$]*'llama-tiny'"):
        fetch("")
    with pytest.raises(CheckpointError, match="is a file"):
        fetch("llama-tiny/config.json")


@pytest.mark.parametrize("name", ["../up", "a/b/c", "org/..", "http://x/y", "org/na me", "C:\\models"])
def test_what_cannot_be_a_repository_id_never_reaches_the_hub(name):
    with pytest.raises(CheckpointError, match="cannot be a hub id"):
        hub.fetch(Config(model=ModelConfig(model=name)))

"""Fetching from a hub: a fake one on loopback records every request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ferrule.config import Config, LoadConfig, ModelConfig
from ferrule.config.resolve import resolve
from ferrule.errors import CheckpointError, PluginError
from ferrule.locate.localise import check_remote, localise
from ferrule.locate.weights import WeightFiles
from ferrule.plugin import discover
from ferrule_testkit.fake_hub import FakeHub, commit, fake_hub
from tests.unit.plugins.gguf.files import entry, file, tensor
from tools.wheels import Distribution

TOKEN = "hf_" + "x" * 16

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


Fetch = Callable[..., Any]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    repositories = {
        "org/model": FILES,
        "org/words": {"tokenizer.json": b"{}"},
        "org/old": {"config.json": CONFIG, "pytorch_model.bin": b"p"},
        "org/mistral": {
            "params.json": b'{"dim": 8, "n_layers": 1, "n_heads": 1, "hidden_dim": 8, "vocab_size": 8}',
            "tekken.json": b"{}",
            "tokenizer.model.v7": b"t",
            "consolidated.safetensors": b"c" * 5000,
        },
    }
    with fake_hub({name: {"main": files, "v1": files} for name, files in repositories.items()}) as running:
        yield running


# Each task is `localise` in a process of its own, as huggingface_hub reads its settings when it is imported: a copy of
# this one, which has imported what that is made of.
FETCHING = """
import json, os, sys
import filelock, fsspec, httpx, tqdm, yaml
from ferrule.config import Config, LoadConfig, ModelConfig
from ferrule.config.resolve import resolve
from ferrule.errors import StartupError
from ferrule.locate.localise import check_remote, localise
from ferrule.plugin import discover

def fetched(model, load, fetches):
    try:
        config = resolve(Config(model=ModelConfig(**model), load=LoadConfig(**load)))
        if not fetches:
            return {"unknown": check_remote(config, discover())}
        found = localise(config, discover())
        return [found.model.model, found.model.tokenizer]
    except StartupError as error:
        return {"error": str(error)}

for line in sys.stdin:
    task = json.loads(line)
    if os.fork() == 0:
        os.environ.clear()
        os.environ.update(task["environment"])
        os.chdir(task["at"])
        print(json.dumps(fetched(*task["what"])), flush=True)
        os._exit(0)
    if os.wait()[1]:
        sys.exit(1)
"""


@pytest.fixture(scope="module")
def fetcher() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", FETCHING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        yield running
        running.communicate(timeout=240)


@pytest.fixture
def fetch(tmp_path: Path, hub: FakeHub, fetcher: subprocess.Popen[str]) -> Fetch:
    """Run `localise` in a process of its own."""

    def run(
        model: Mapping[str, Any],
        load: Mapping[str, Any] | None = None,
        at: Path | None = None,
        fetches: bool = True,
        **variables: str,
    ) -> Any:
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        settings |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        settings |= {"HF_HUB_ETAG_TIMEOUT": "240", "HF_HUB_DOWNLOAD_TIMEOUT": "240"}
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        task = {
            "environment": {**clean, **settings, **variables},
            "at": str(at or Path.cwd()),
            "what": [model, load or {}, fetches],
        }
        assert fetcher.stdin is not None
        assert fetcher.stdout is not None
        print(json.dumps(task), file=fetcher.stdin, flush=True)
        while line := fetcher.stdout.readline():
            if line.startswith(("[", "{")):
                return json.loads(line)
        raise RuntimeError("the process that fetches has ended")

    return run


def names(folder: str) -> set[str]:
    return {os.path.relpath(os.path.join(at, file), folder) for at, _, files in os.walk(folder) for file in files}


@pytest.mark.advisory("CVE-2026-47155", "CVE-2024-37032")
def test_every_fetch_is_pinned_and_the_token_goes_nowhere_else(hub: FakeHub, fetch: Fetch, tmp_path: Path) -> None:
    downloads = str(tmp_path / "downloads")
    model, tokenizer = fetch(
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
    assert hub.requests
    for method, path, authorization in hub.requests:
        assert "/v1" in path or f"/{commit('v1')}" in path, (method, path)
        assert commit("main") not in path
        assert authorization == f"Bearer {TOKEN}", (method, path)
    stored_elsewhere = hub.elsewhere.requests
    assert stored_elsewhere
    assert all(authorization is None for _, _, authorization in stored_elsewhere)


def test_pickles_only_without_safetensors_and_code_only_with_trust(hub: FakeHub, fetch: Fetch) -> None:
    folder, tokenizer = fetch({"model": "org/old"})
    assert tokenizer == folder
    assert names(folder) == {"config.json", "pytorch_model.bin"}
    trusted, _ = fetch({"model": "org/model", "trust_remote_code": True}, {"load_format": "dummy"})
    assert names(trusted) == {"config.json", "tokenizer.json", "modeling.py"}


def test_weights_are_of_the_first_format_that_the_repository_has() -> None:
    def chosen(*files: str) -> tuple[str, ...]:
        return WeightFiles.of(LoadConfig(), discover()).patterns(["config.json", *files])

    mistral = ("consolidated*.safetensors",)
    assert chosen("consolidated.safetensors", "params.json") == mistral
    beside = ("training_args.bin", "onnx/model.bin", "adapter_model.safetensors", "consolidated.safetensors.index.json")
    assert chosen("consolidated-00001-of-00002.safetensors", *beside) == mistral
    assert chosen("consolidated.safetensors", "model.safetensors", "model.bin") == ("*.safetensors",)
    assert chosen("model.tensors") == ("*.tensors",)
    assert chosen("consolidated.safetensors", "a.bin") == ("*.bin", "*.pt")
    assert set(chosen()) == {"*.safetensors", "*.bin", "*.pt", "*.tensors", *mistral}


def test_mistral_s_own_layout_is_fetched_where_there_is_no_other_and_where_it_is_asked_for(
    hub: FakeHub, fetch: Fetch
) -> None:
    wanted = {"params.json", "tekken.json", "tokenizer.model.v7", "consolidated.safetensors"}
    assert fetch({"model": "org/mistral"}, fetches=False) == {"unknown": []}
    folder, tokenizer = fetch({"model": "org/mistral"})
    assert folder == tokenizer
    assert names(folder) == wanted
    assert fetch({"model": "org/mistral"}, HF_HUB_OFFLINE="1") == [folder, tokenizer]
    hub._repositories["org/index"] = {"main": {**FILES, "consolidated.safetensors.index.json": b"{}", "a[1].json": b""}}  # type: ignore[index]
    mixed, _ = fetch({"model": "org/index"})
    assert names(mixed) == {"config.json", "tokenizer.json", "model.safetensors", "a[1].json"}
    ignored, _ = fetch({"model": "org/model", "revision": "v1"}, {"ignore_patterns": ["model*", "*.bin", "original/*"]})
    assert names(ignored) == {"config.json", "tokenizer.json", "consolidated.safetensors"}
    both, tokenizer = fetch({"model": "org/model"}, {"load_format": "mistral"})
    assert names(both) == {"config.json", "tokenizer.json", "consolidated.safetensors"}
    assert fetch({"model": "org/model"}, HF_HUB_OFFLINE="1") == [both, tokenizer]
    refused = fetch({"model": "org/mistral", "config_format": "hf"}, fetches=False)
    assert "has no config.json" in refused["error"]


def test_a_complete_copy_in_the_cache_serves_without_the_hub(hub: FakeHub, fetch: Fetch) -> None:
    online = fetch({"model": "org/model"})
    before = len(hub.requests)
    assert fetch({"model": "org/model"}, HF_HUB_OFFLINE="1") == online
    assert len(hub.requests) == before
    assert fetch({"model": "org/model"}, HF_ENDPOINT="http://127.0.0.1:9") == online
    hub.status = {"org/model": (503, "Busy")}
    assert fetch({"model": "org/model"}) == online


@pytest.mark.parametrize(
    ("model", "variables", "said"),
    [
        ({"model": "org/none"}, {}, ["'org/none'", "the repository does not exist", "--hf-token"]),
        ({"model": "org/model", "revision": "v9"}, {}, ["revision v9", "does not have this revision", "--revision"]),
        ({"model": "org/gated"}, {}, ["'org/gated'", "gated", "--hf-token"]),
        ({"model": "org/broken"}, {}, ["'org/broken'", "answered 418"]),
        ({"model": "org/model"}, {"HF_HUB_OFFLINE": "1"}, ["HF_HUB_OFFLINE", "folder"]),
        ({"model": "org/model"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, ["127.0.0.1:9", "cannot be reached", "proxy"]),
        ({"model": "org/model", "hf_token": ""}, {}, ["no token is stored", "--hf-token"]),
    ],
)
def test_what_cannot_be_had_is_one_readable_block(
    hub: FakeHub, fetch: Fetch, model: dict[str, Any], variables: dict[str, str], said: list[str]
) -> None:
    hub.status = {"org/gated": (403, "GatedRepo"), "org/broken": (418, "Teapot")}
    message = fetch(model, **variables)["error"]
    assert all(word in message for word in said), message
    assert len(message.splitlines()) <= 3
    assert "Traceback" not in message


def test_a_check_asks_the_hub_and_fetches_nothing(hub: FakeHub, fetch: Fetch) -> None:
    hub.status = {"org/busy": (503, "Busy")}
    gone = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert fetch({"model": "org/model", "revision": "v1"}, fetches=False) == {"unknown": []}
    assert [(method, "/resolve/" in path) for method, path, _ in hub.requests] == [("GET", False)] * len(hub.requests)
    assert "no config.json" in fetch({"model": "org/words"}, fetches=False)["error"]
    assert "does not exist" in fetch({"model": "org/none"}, fetches=False)["error"]
    assert fetch({"model": "org/busy"}, fetches=False) == {"unknown": ["org/busy"]}
    assert fetch({"model": "org/model"}, fetches=False, **gone) == {"unknown": ["org/model"]}
    assert "HF_HUB_OFFLINE" in fetch({"model": "org/model"}, fetches=False, HF_HUB_OFFLINE="1")["error"]
    fetch({"model": "org/model"})
    for variables in (gone, {"HF_HUB_OFFLINE": "1"}):  # the copy in the cache is what a start would use
        assert fetch({"model": "org/model"}, fetches=False, **variables) == {"unknown": []}


def test_a_relative_folder_that_is_mistyped_and_a_place_that_cannot_be_written(fetch: Fetch, tmp_path: Path) -> None:
    (tmp_path / "models" / "llama-tiny").mkdir(parents=True)
    assert "Did you mean models/llama-tiny?" in fetch({"model": "models/lama-tiny"}, at=tmp_path)["error"]
    (tmp_path / "file").touch()
    message = fetch({"model": "org/model"}, {"download_dir": str(tmp_path / "file" / "cache")})["error"]
    assert "--download-dir" in message


def test_a_folder_passes_through_and_a_mistyped_one_gets_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "llama-tiny").mkdir()
    (tmp_path / "llama-tiny" / "config.json").write_bytes(CONFIG)

    def found(name: str) -> str:
        return localise(resolve(Config(model=ModelConfig(model=str(tmp_path / name)))), discover()).model.model

    assert found("llama-tiny") == str((tmp_path / "llama-tiny").resolve())
    with pytest.raises(CheckpointError, match="Did you mean .*llama-tiny"):
        found("lama-tiny")
    with pytest.raises(CheckpointError, match="has llama-tiny"):
        found("other")
    with pytest.raises(CheckpointError, match="does not exist either"):
        found("none/other")
    with pytest.raises(CheckpointError, match=r"no config\.json[^$]*'llama-tiny'"):
        found("")
    with pytest.raises(CheckpointError, match="is a file"):
        found("llama-tiny/config.json")


@pytest.mark.advisory("CVE-2024-37032")
@pytest.mark.parametrize("name", ["../up", "a/b/c", "org/..", "http://x/y", "org/na me", "C:\\models"])
def test_what_cannot_be_a_repository_id_never_reaches_the_hub(name: str) -> None:
    with pytest.raises(CheckpointError, match="is not a folder on this machine"):
        localise(resolve(Config(model=ModelConfig(model=name))), discover())


# ------------------------------------------------------------------------------------------------ GGUF


def gguf_file(kind: int) -> bytes:
    """Return a model of one tensor, whose type is `kind`."""
    numbers = {"block_count": kind, "embedding_length": 32, "attention.head_count": 1}
    keys = [entry("general.architecture", "llama"), *(entry(f"llama.{key}", n) for key, n in numbers.items())]
    return file(keys, [tensor("token_embd.weight", (32, 4), 0, 0)], 512)


SEVERAL = {
    "README.md": b"text",
    "m-Q4_K_M.gguf": gguf_file(4),
    "m-IQ4_XS.gguf": gguf_file(5),
    "mmproj-Q8_0.gguf": b"x",
    "m-q8_0/m-q8_0-00001-of-00001.gguf": gguf_file(8),
}


def test_a_kind_behind_the_name_is_one_file_of_the_repository(hub: FakeHub, fetch: Fetch, tmp_path: Path) -> None:
    hub._repositories["org/several"] = {"main": SEVERAL}  # type: ignore[index]
    hub._repositories["org/one"] = {"main": {"m-Q4_0.gguf": gguf_file(2)}}  # type: ignore[index]
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    for name, layers in (("org/several:Q4_K_M", 4), ("org/several:q4_k_m", 4), ("org/several:Q8_0", 8), ("org/one", 2)):
        model, tokenizer = fetch({"model": name}, **cache)
        assert model == tokenizer
        assert json.loads((Path(model) / "config.json").read_bytes())["num_hidden_layers"] == layers
    asked = [path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET"]
    assert {name for name in asked if name.endswith(".gguf")} == {
        "m-Q4_K_M.gguf",
        "m-q8_0-00001-of-00001.gguf",
        "m-Q4_0.gguf",
    }


def test_a_kind_that_is_missing_is_told_with_those_that_are_there(hub: FakeHub, fetch: Fetch) -> None:
    hub._repositories["org/several"] = {"main": SEVERAL}  # type: ignore[index]
    listed = "IQ4_XS, Q4_K_M, q8_0"
    for fetches in (True, False):
        assert listed in fetch({"model": "org/several:Q5_K"}, fetches=fetches)["error"]
        assert f"Name one, as :KIND behind it: {listed}" in fetch({"model": "org/several"}, fetches=fetches)["error"]
    assert fetch({"model": "org/several:Q8_0"}, fetches=False) == {"unknown": []}
    assert "no model of the kind 'Q8_0'" in fetch({"model": "org/model:Q8_0"})["error"]


# ------------------------------------------------------------------------------------------------ another hub

SHELF = """
import json
from pathlib import Path

from ferrule.errors import CheckpointError
from ferrule.interfaces.hub import ModelHub


class Shelf(ModelHub):
    def refuses(self, name):
        return None if name.startswith("shelf:") else "has names that begin with shelf:"

    def fetch(self, repository, choose):
        with Path(__file__).with_name("asked.jsonl").open("a") as log:
            asked = {name: str(value) for name, value in vars(repository).items()}
            print(json.dumps({**asked, "patterns": list(choose(["x.safetensors", "model.py"]))}), file=log)
        folder = Path(repository.name.removeprefix("shelf:")) / str(repository.revision)
        if not folder.is_dir():
            raise CheckpointError(f"{repository.name} has no revision {repository.revision}.", "Look at the shelf.")
        return folder
"""


@pytest.fixture
def shelf(site: Any, tmp_path: Path) -> Path:
    """Put a model on the shelf, and install the stranger's package that finds it."""
    entry = {"ferrule.v1.hub": {"shelf": "shelf_hub:Shelf"}}
    site.install(Distribution(name="shelf-hub", entry_points=entry, files={"shelf_hub.py": SHELF}))
    folder = tmp_path / "shelf" / "small" / "v2"
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(CONFIG)
    return folder.parent


def test_a_hub_of_another_package_is_asked_for_exactly_what_the_user_pinned(shelf: Path, site: Any) -> None:
    plugins = site.discover()
    model = {"model": f"shelf:{shelf}", "revision": "v2", "hub": "shelf", "hf_token": TOKEN}
    found = localise(resolve(Config(model=ModelConfig(**model))), plugins)
    assert found.model.model == found.model.tokenizer == str(shelf / "v2")
    words = {"tokenizer": f"shelf:{shelf}", "tokenizer_revision": "v3", "trust_remote_code": True}
    with pytest.raises(CheckpointError, match="has no revision v3") as caught:
        localise(resolve(Config(model=ModelConfig(**{**model, **words}))), plugins)
    assert caught.value.hint == "Look at the shelf."
    asked = [json.loads(line) for line in (site.folder / "asked.jsonl").read_text().splitlines()]
    assert [(each["revision"], each["token"]) for each in asked] == [("v2", TOKEN), ("v2", TOKEN), ("v3", TOKEN)]
    assert ["*.safetensors" in each["patterns"] for each in asked] == [True, True, False]
    assert ["*.py" in each["patterns"] for each in asked] == [False, True, True]
    with pytest.raises(CheckpointError, match="the hub shelf has names that begin with shelf:"):
        localise(resolve(Config(model=ModelConfig(model="org/model", hub="shelf"))), plugins)


# ------------------------------------------------------------------------------------------------ another format

FORMATS = """
from ferrule.interfaces.load_format import Description, WeightSource


class Acme(WeightSource):
    forms = (("*.acme", "*.onnx"),)
    describes = True

    @classmethod
    def refuses(cls, folder):
        return None if folder and [*folder.glob("*.acme")] else "there is no .acme file"

    @classmethod
    def describe(cls, place):
        return Description({"config.json": b'{"architectures": ["LlamaForCausalLM"]}'}, tuple(place.glob("*.acme")))

    def tensors(self, folder, model, options):
        yield from ()


class Silent(Acme):
    forms = None
    describes = False

    @classmethod
    def describe(cls, place):
        return None
"""


@pytest.fixture
def formats(site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a package with two formats, a broken one, and a hub whose repositories are folders."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    entry = {
        "ferrule.v1.load_format": {"acme": "acme_f:Acme", "silent": "acme_f:Silent", "broken": "nowhere:Broken"},
        "ferrule.v1.hub": {"copies": "acme_hub:Copies"},
    }
    site.install(Distribution(name="acme-f", entry_points=entry, files={"acme_f.py": FORMATS, "acme_hub.py": COPIES}))
    return site.discover()


COPIES = """
import shutil
from fnmatch import fnmatch
from pathlib import Path

from ferrule.interfaces.hub import ModelHub


class Copies(ModelHub):
    def refuses(self, name):
        return None

    def files(self, repository):
        at = Path(repository.name.removeprefix("copies:"))
        return [file.relative_to(at).as_posix() for file in sorted(at.rglob("*")) if file.is_file()]

    def fetch(self, repository, choose):
        names = self.files(repository)
        patterns = choose(names)
        for name in names:
            wanted = any(fnmatch(name, each) for each in patterns)
            if wanted and not any(fnmatch(name, each) for each in repository.ignore):
                target = repository.folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path(repository.name.removeprefix("copies:")) / name, target)
        return repository.folder
"""

PLAIN = ("config.json", "model.acme", "model.onnx", "README.md")


@pytest.mark.parametrize(
    ("load_format", "files", "fetched"),
    [
        ("auto", PLAIN, {"config.json", "model.acme", "model.onnx"}),
        ("auto", (*PLAIN, "model.safetensors"), {"config.json", "model.safetensors"}),
        ("auto", ("model.acme", "README.md"), {"model.acme"}),
        ("acme", (*PLAIN, "model.safetensors"), {"config.json", "model.acme", "model.onnx"}),
        ("acme", (*PLAIN, "consolidated.safetensors"), {"config.json", "model.acme", "model.onnx"}),
        ("silent", (*PLAIN, "consolidated.acme"), {*PLAIN, "consolidated.acme"} - {"model.onnx"}),
    ],
)
def test_a_format_of_another_package_gets_the_files_that_it_names(
    formats: Any, tmp_path: Path, load_format: str, files: tuple[str, ...], fetched: set[str]
) -> None:
    for name in files:
        (tmp_path / "repository").mkdir(exist_ok=True)
        (tmp_path / "repository" / name).write_bytes(CONFIG if name == "config.json" else b"weights")
    model = ModelConfig(model=f"copies:{tmp_path / 'repository'}", hub="copies")
    load = LoadConfig(load_format=load_format, download_dir=str(tmp_path / "found"))
    config = resolve(Config(model=model, load=load))
    assert check_remote(config, formats) == []
    localise(config, formats)
    assert names(str(tmp_path / "found")) == fetched


def test_a_repository_without_files_of_any_format_is_told_of_all(formats: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(CONFIG)
    model = ModelConfig(model=f"copies:{tmp_path}", hub="copies")
    with pytest.raises(CheckpointError, match=r"\*\.safetensors or .* or \*\.acme or \*\.onnx\."):
        check_remote(resolve(Config(model=model)), formats)
    with pytest.raises(PluginError, match="broken"):
        check_remote(resolve(Config(model=model, load=LoadConfig(load_format="broken"))), formats)


def test_a_hub_that_nobody_offers_is_named_by_what_there_is(shelf: Path, site: Any) -> None:
    with pytest.raises(PluginError, match="no hub plugin 'shel'. Did you mean 'shelf'"):
        localise(resolve(Config(model=ModelConfig(model=f"shelf:{shelf}", hub="shel"))), site.discover())

"""Adapters through a whole server with two API processes: named, loaded, reloaded, found and unloaded."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrule.config.parse import parse
from ferrule.errors import FerruleError, exit_status
from ferrule.launch import cli
from ferrule.llm.offline import LLM
from ferrule.plugin import discover
from ferrule.sampling_params import SamplingParams
from ferrule_testkit import server as servers
from tests.fakes.lora_files import merged, write_adapter

PROMPT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on."
ADMIN = {"authorization": "Bearer open"}
USER = {"authorization": "Bearer sesame"}
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class World:
    """Folders of adapters, and what the model says with each merged into it, by its name; "tiny": with none."""

    root: Path
    said: dict[str, str]

    def folder(self, name: str) -> str:
        return str(self.root / "allowed" / name)


@pytest.fixture(scope="module")
def world(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("adapters")
    made = {
        "one": write_adapter(tiny_llama, root / "modules" / "one", 1),
        "two": write_adapter(tiny_llama, root / "modules" / "two", 2, rank=8),
        "three": write_adapter(tiny_llama, root / "allowed" / "three", 3),
        "four": write_adapter(tiny_llama, root / "allowed" / "four", 4),
        "found": write_adapter(tiny_llama, root / "cache" / "found", 5),
    }
    write_adapter(tiny_llama, root / "cache" / "foreign", 6, base="another/model")
    write_adapter(tiny_llama, root / "outside" / "five", 7)
    said = {"tiny": _said(tiny_llama)}
    for name, folder in made.items():
        said[name] = _said(merged(tiny_llama, folder, root / "merged" / name))
    assert len(set(said.values())) == len(said)
    return World(root, said)


def _said(folder: Path) -> str:
    with LLM(str(folder), dtype="float32", num_gpu_blocks_override=64) as llm:
        (output,) = llm.generate(PROMPT, SamplingParams(**GREEDY), use_tqdm=False)
        return output.outputs[0].text


@pytest.fixture(scope="module")
def server(world: World, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    root = world.root
    second = json.dumps({"name": "two", "local_path": str(root / "modules/two"), "base_model_name": "tiny"})
    args = [str(tiny_llama), "--served-model-name", "tiny", "--dtype", "float32", "--num-gpu-blocks-override", "256"]
    args += ["--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", "8"]
    args += ["--lora-modules", f"one={root}/modules/one", second, "--allowed-lora-path", f"{root}/allowed"]
    args += ["--lora-resolver-cache-dir", f"{root}/cache", "--api-server-count", "2", "--engine-restarts", "2"]
    args += ["--api-key", "sesame", "--admin-key", "open", "--enable-prompt-tokens-details"]
    around = {"OMP_NUM_THREADS": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with servers.running(args, tmp_path_factory.mktemp("server") / "log", around) as running:
        yield running


@pytest.fixture
def admin(server: servers.Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120, headers=ADMIN) as client:
        yield client


def load(admin: httpx.Client, name: Any, path: Any, **more: Any) -> httpx.Response:
    return admin.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})


def unload(admin: httpx.Client, name: str, **more: Any) -> httpx.Response:
    return admin.post("/v1/unload_lora_adapter", json={"lora_name": name, **more})


def ask(server: servers.Server, model: str | None, **more: Any) -> httpx.Response:
    """Ask over a connection of its own, so that each API process comes to answer."""
    body = {"model": model, "prompt": PROMPT, **GREEDY, **more}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=USER, timeout=120)


def text(server: servers.Server, model: str, **more: Any) -> str:
    answer = ask(server, model, **more)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    said: str = answer.json()["choices"][0]["text"]
    return said


def error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


# ------------------------------------------------------------------------------------------------ named


def test_the_official_client_lists_adapters_and_asks_them(server: servers.Server, world: World) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame")
    listed = {model.id: model.model_dump() for model in client.models.list()}
    assert list(listed) == ["tiny", "one", "two"]
    assert [listed[name]["parent"] for name in listed] == [None, "tiny", "tiny"]
    assert listed["two"]["root"] == str(world.root / "modules/two")
    assert client.models.retrieve("one").model_dump() == listed["one"]
    for name in listed:
        answer = client.completions.create(
            model=name,
            prompt=PROMPT,
            extra_body={"ignore_eos": True},
            **{key: value for key, value in GREEDY.items() if key != "ignore_eos"},
        )
        assert (answer.model, answer.choices[0].text) == (name, world.said[name])


async def test_adapters_and_none_share_steps_and_cached_prefixes_stay_apart(
    server: servers.Server, world: World
) -> None:
    names = ["tiny", "one", "two", "three-not", "one", "tiny", "two", "two"]
    async with httpx.AsyncClient(base_url=server.url, timeout=120, headers=USER) as http:
        bodies = [{"model": name, "prompt": PROMPT, **GREEDY} for name in names]
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
        for name, answer in zip(names, answers, strict=True):
            if name in world.said:
                assert answer.json()["choices"][0]["text"] == world.said[name], name
            else:
                assert error(answer, 404)["param"] == "model"
        again = await http.post("/v1/completions", json={**bodies[0], "prompt": "again " * 40})
        first = await http.post("/v1/completions", json={**bodies[1], "prompt": "again " * 40})
        second = await http.post("/v1/completions", json={**bodies[1], "prompt": "again " * 40})
    cached = [one.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (again, first, second)]
    assert cached[:2] == [0, 0]
    assert cached[2] > 0


def test_every_protocol_takes_an_adapter(server: servers.Server) -> None:
    talk = [{"role": "user", "content": "hello"}]
    calls: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": talk, "max_tokens": 3},
        "/v1/responses": {"input": "hello", "max_output_tokens": 3},
        "/v1/messages": {"messages": talk, "max_tokens": 3},
        "/api/chat": {"messages": talk, "stream": False, "options": {"num_predict": 3}},
        "/tokenize": {"prompt": "hello"},
    }
    for path, body in calls.items():
        found = httpx.post(server.url + path, json={"model": "two", **body}, headers=USER, timeout=120)
        assert found.status_code == 200, (path, found.text)
        assert found.json().get("model", "two") == "two", path
        refused = httpx.post(server.url + path, json={"model": "nobody", **body}, headers=USER, timeout=120)
        assert refused.status_code == 404, (path, refused.text)
    tags = httpx.get(f"{server.url}/api/tags", headers=USER).json()["models"]
    assert [(one["name"], one["details"]["parent_model"]) for one in tags[:3]] == [
        ("tiny", ""),
        ("one", "tiny"),
        ("two", "tiny"),
    ]


def test_beams_and_constraints_are_those_of_the_adapter(server: servers.Server) -> None:
    chosen = text(server, "one", guided_choice=["yes it is", "no"])
    assert chosen in ("yes it is", "no")
    beams = [ask(server, name, use_beam_search=True, n=2, max_tokens=6).json() for name in ("tiny", "one", "one")]
    texts = [[choice["text"] for choice in found["choices"]] for found in beams]
    assert texts[1] == texts[2]
    assert texts[0] != texts[1]


# ------------------------------------------------------------------------------------------------ loaded


def test_an_adapter_is_loaded_replaced_and_unloaded(server: servers.Server, world: World, admin: httpx.Client) -> None:
    loaded = load(admin, "mine", world.folder("three"))
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'mine' added successfully.")
    assert [text(server, "mine") for _ in range(6)] == [world.said["three"]] * 6  # whichever process answers
    assert "load_inplace" in error(load(admin, "mine", world.folder("four")), 400)["message"]
    assert text(server, "mine") == world.said["three"]
    assert load(admin, "mine", world.folder("four"), load_inplace=True).status_code == 200
    assert [text(server, "mine") for _ in range(6)] == [world.said["four"]] * 6
    gone = unload(admin, "mine", lora_int_id=1)
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'mine' removed successfully.")
    for _ in range(6):
        assert "'mine' does not exist" in error(ask(server, "mine"), 404)["message"]
    assert error(unload(admin, "mine"), 404)["param"] == "lora_name"


def test_an_adapter_that_is_unloaded_finishes_first(server: servers.Server, world: World, admin: httpx.Client) -> None:
    assert load(admin, "leaving", world.folder("three")).status_code == 200
    body = {"model": "leaving", "prompt": PROMPT, **GREEDY, "max_tokens": 150, "stream": True}
    with (
        httpx.Client(base_url=server.url, timeout=120, headers=USER) as client,
        client.stream("POST", "/v1/completions", json=body) as stream,
    ):
        lines = stream.iter_lines()
        first = next(line for line in lines if line.startswith("data: "))
        assert unload(admin, "leaving").status_code == 200
        assert error(ask(server, "leaving"), 404)
        rest = [line for line in lines if line.startswith("data: ")]
    said = "".join(json.loads(line[6:])["choices"][0]["text"] for line in [first, *rest[:-1]])
    assert rest[-1] == "data: [DONE]"
    assert said.startswith(world.said["three"])


def damaged(world: World) -> dict[str, tuple[Any, Any, int, str]]:
    """Make folders with adapters that cannot be used; by what is wrong: name, path, status and the field at fault."""
    allowed, outside = world.root / "allowed", world.root / "outside" / "five"
    whole = allowed / "three"

    def copy(name: str) -> Path:
        return Path(shutil.copytree(whole, allowed / name, dirs_exist_ok=True))

    def settings(name: str, value: Any) -> str:
        folder = copy(name)
        (folder / "adapter_config.json").write_text(value if isinstance(value, str) else json.dumps(value))
        return str(folder)

    def tensors(name: str, change: Any) -> str:
        folder = copy(name)
        found = load_file(folder / "adapter_model.safetensors")
        change(found)
        save_file(found, folder / "adapter_model.safetensors")
        return str(folder)

    def first(found: dict[str, torch.Tensor]) -> str:
        return next(iter(found))

    config = json.loads((whole / "adapter_config.json").read_text())
    empty, link, cut = allowed / "empty", allowed / "link", copy("cut")
    empty.mkdir(exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(outside)
    linked = copy("linked")
    (linked / "adapter_model.safetensors").unlink()
    (linked / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    weights = cut / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    at = "lora_path"
    return {
        "no name": (None, str(whole), 400, "lora_name"),
        "no path": ("x", None, 400, at),
        "a name of the model": ("tiny", str(whole), 400, "lora_name"),
        "a name with spaces around": (" x", str(whole), 400, "lora_name"),
        "a long name": ("x" * 300, str(whole), 400, "lora_name"),
        "a relative path": ("x", "three", 400, at),
        "no text": ("x", 5, 400, at),
        "a zero in the path": ("x", "/a\0b", 400, at),
        "another folder": ("x", str(outside), 403, at),
        "the root": ("x", "/etc", 403, at),
        "a path that leads out": ("x", f"{allowed}/../outside/five", 403, at),
        "a link that leads out": ("x", str(link), 403, at),
        "a file that leads out": ("x", str(linked), 403, at),
        "nothing there": ("x", str(allowed / "no-such"), 400, at),
        "an empty folder": ("x", str(empty), 400, at),
        "a file cut short": ("x", str(cut), 400, at),
        "a rank above the maximum": ("x", settings("rank", config | {"r": 64}), 400, at),
        "settings that are not an object": ("x", settings("list", "[]"), 400, at),
        "settings that are nested deeply": ("x", settings("deep", "[" * 100_000), 400, at),
        "settings with a huge number": ("x", settings("huge", '{"peft_type": "LORA", "r": 1e999}'), 400, at),
        "another kind of adapter": ("x", settings("kind", config | {"peft_type": "IA3"}), 400, at),
        "weights that are not numbers": ("x", tensors("nan", lambda t: t[first(t)].fill_(float("nan"))), 400, at),
        "a tensor that is not there": ("x", tensors("lost", lambda t: t.pop(first(t))), 400, at),
        "a module that is not there": (
            "x",
            tensors("module", lambda t: t.update({first(t).replace("layers.0", "layers.99"): t[first(t)].clone()})),
            400,
            at,
        ),
        "other sizes": ("x", tensors("sizes", lambda t: t.update({first(t): t[first(t)][:, :-1].clone()})), 400, at),
    }


@pytest.mark.advisory("CVE-2023-43654")
def test_what_cannot_be_loaded_is_one_clear_error_and_changes_nothing(
    server: servers.Server, world: World, admin: httpx.Client
) -> None:
    before = admin.get("/v1/models", headers=USER).json()["data"]
    for what, (name, path, status, param) in damaged(world).items():
        answer = load(admin, name, path)
        found = error(answer, status)
        assert found["param"] == param, (what, found)
        assert str(world.root) not in found["message"], (what, found)
    assert [one["id"] for one in admin.get("/v1/models", headers=USER).json()["data"]] == [one["id"] for one in before]
    assert text(server, "one") == world.said["one"]


@pytest.mark.advisory("CVE-2023-43654")
def test_only_an_administrator_loads(server: servers.Server, world: World) -> None:
    body = {"lora_name": "x", "lora_path": world.folder("three")}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        for headers in ({}, USER):
            assert error(httpx.post(server.url + path, json=body, headers=headers), 401)


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
async def test_many_loads_at_once_are_all_answered(server: servers.Server, world: World, count: int) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=300, headers=ADMIN) as http:
        names = [f"many-{number % 20}" for number in range(count)]
        bodies = [{"lora_name": name, "lora_path": world.folder("three")} for name in names]
        answers = await asyncio.gather(*(http.post("/v1/load_lora_adapter", json=body) for body in bodies))
        codes = [answer.status_code for answer in answers]
        assert set(codes) <= {200, 400, 429}
        assert codes.count(200) == 20
        for name in sorted(set(names)):
            assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": name})).status_code == 200


# ------------------------------------------------------------------------------------------------ found


@pytest.mark.advisory("CVE-2023-43654")
def test_a_name_is_looked_for_in_the_folder_of_the_resolver(
    server: servers.Server, world: World, admin: httpx.Client
) -> None:
    assert [text(server, "found") for _ in range(4)] == [world.said["found"]] * 4
    for name in ("foreign", "../allowed/three", "cache/found", "..", "found/"):
        assert error(ask(server, name), 404)["param"] == "model"
    assert unload(admin, "found").status_code == 200
    assert text(server, "found") == world.said["found"]  # it is looked for again
    assert unload(admin, "found").status_code == 200


def test_figures_tell_which_adapters_are_at_work(server: servers.Server) -> None:
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            text(server, "one", max_tokens=150)

    def line() -> str:
        lines = httpx.get(f"{server.url}/metrics", headers=USER).text.splitlines()
        return next((one for one in lines if one.startswith("vllm:lora_requests_info{")), "")

    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(work) for _ in range(2)]
        try:
            assert servers.until(lambda: 'running_lora_adapters="one"' in line(), 20)
            assert 'max_lora="2"' in line()
        finally:
            ended.set()
        assert [task.result() for task in tasks] == [None, None]
    assert servers.until(lambda: 'running_lora_adapters=""' in line(), 20)


# ------------------------------------------------------------------------------------------------ lost


def test_after_a_restart_of_the_engine_the_adapters_are_there(
    server: servers.Server, world: World, admin: httpx.Client
) -> None:
    """Run last: it ends the engine. A folder that has vanished is no reason not to start."""
    assert load(admin, "stays", world.folder("four")).status_code == 200
    folder = world.root / "modules" / "one"
    folder.rename(folder.with_name("gone"))
    engine = server.children()["engine"]
    os.kill(engine, signal.SIGKILL)
    assert servers.until(lambda: server.children().get("engine", engine) != engine, 60)
    assert servers.until(lambda: httpx.get(f"{server.url}/health").status_code == 200, 60)
    assert text(server, "stays") == world.said["four"]
    assert text(server, "two") == world.said["two"]
    assert error(ask(server, "one"), 400)["message"] == "The adapter 'one' cannot be loaded: its folder does not exist."
    folder.with_name("gone").rename(folder)
    assert text(server, "one") == world.said["one"]
    assert unload(admin, "stays").status_code == 200


def starting(world: World, tiny_llama: Path, *options: str) -> list[str]:
    """Return the words of a start with adapters; OUTSIDE stands for the folder of one."""
    given = [option.replace("OUTSIDE", str(world.root / "outside/five")) for option in options]
    return [str(tiny_llama), "--served-model-name", "tiny", "--num-gpu-blocks-override", "64", *given]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--lora-modules", "a=/nowhere"], "--lora-modules needs --enable-lora"),  # by the launcher
        (["--enable-lora", "--max-lora-rank", "2", "--lora-modules", "a=OUTSIDE"], "--lora-modules: a: "),
    ],
)
def test_options_that_contradict_stop_the_start(
    options: list[str], said: str, world: World, tiny_llama: Path, tmp_path: Path
) -> None:
    args = starting(world, tiny_llama, *options)
    with servers.started(args, tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as server:
        assert server.process.wait(120) in (1, 2)
    assert said in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        # What the options alone tell is in tests/unit/config/test_adapter_options.py, too.
        (["--lora-modules", "tiny=OUTSIDE"], "is the name of the model"),
        (["--lora-modules", "a=OUTSIDE", "a=OUTSIDE"], "twice"),
        (["--lora-modules", "a"], "expected name=path"),
        (["--lora-modules", '{"name": "a", "pathh": "x"}'], "Did you mean 'path'?"),
        (["--lora-modules", "a=./nowhere"], "'./nowhere' is not a folder"),
        (["--max-loras", "4", "--max-cpu-loras", "2"], "must be at least --max-loras"),
        (["--lora-resolvers", "filesystem"], "it needs --lora-resolver-cache-dir"),
        (["--long-lora-scaling-factors", "0.5"], "--long-lora-scaling-factors"),
    ],
)
def test_options_that_contradict_are_told(options: list[str], said: str, world: World, tiny_llama: Path) -> None:
    """Start in this process: which process of a server finds it is no matter here."""
    args = starting(world, tiny_llama, "--enable-lora", *options)
    with pytest.raises(FerruleError) as told:
        LLM.from_config(parse(args).config, discover())
    assert exit_status(told.value) in (1, 2)
    assert said in str(told.value)


def test_a_batch_of_rows_has_adapters(world: World, tiny_llama: Path, tmp_path: Path) -> None:
    names = ["tiny", "one", "found", "nobody"]
    shutil.copytree(world.root / "modules/one", tmp_path / "resolved/found")
    rows = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": name, "prompt": PROMPT, **GREEDY},
        }
        for name in names
    ]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, rows)))
    args = ["run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--model", str(tiny_llama)]
    args += ["--served-model-name", "tiny", "--dtype", "float32", "--num-gpu-blocks-override", "64", "--enable-lora"]
    args += ["--lora-modules", f"one={world.root}/modules/one", "--lora-resolver-cache-dir", str(tmp_path / "resolved")]
    assert cli.main(args) == 0
    found = {row["custom_id"]: row["response"] for row in map(json.loads, (tmp_path / "out").read_text().splitlines())}
    assert [found[name]["status_code"] for name in names] == [200, 200, 200, 404]
    texts = [found[name]["body"]["choices"][0]["text"] for name in names[:3]]
    assert texts == [world.said[name] for name in ("tiny", "one", "one")]

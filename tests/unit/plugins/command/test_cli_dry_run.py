"""`ferrule serve --dry-run`: the resolved configuration with origins, and the processes; nothing starts."""

from __future__ import annotations

import json
import shlex
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrule import log
from ferrule.launch import cli
from ferrule_contrib import tiny
from ferrule_plugins.hub.huggingface import HuggingFace
from ferrule_plugins.load_format.safetensors import Safetensors
from tests.fakes.added_tokens import make_adapter
from tests.fakes.lora_files import write_adapter


@pytest.fixture(autouse=True)
def listing(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Return the files of repositories by name; those of others cannot be known now."""
    found: dict[str, list[str]] = {}
    monkeypatch.setattr(HuggingFace, "files", lambda hub, repository: found.get(repository.name))
    monkeypatch.setattr(HuggingFace, "fetch", lambda *given: pytest.fail("the model was fetched"))
    return found


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(["serve", *argv]) == 0
    return capsys.readouterr().out


def rows(text: str) -> dict[str, list[str]]:
    """Return the other columns by the first one."""
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith("  ")}


def test_what_is_not_the_default_is_shown_with_its_origin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-num-seqs: 3\nhost: 127.0.0.1\nport: 1\n")
    monkeypatch.setenv("FERRULE_PORT", "9001")
    monkeypatch.setenv("FERRULE_CPU_KVCACHE_SPACE", "0.5")
    out = run(capsys, "org/name", "--dry-run", "--config", str(file), "--api-key", "hunter2", "--swap-space", "9")
    found = rows(out)
    assert found["--max-num-seqs"] == ["3", f"{file}:1"]
    assert found["--port"] == ["9001", "environment"]
    assert found["--model"] == ["org/name", "command", "line"]
    assert found["--served-model-name"] == ["org/name", "resolved"]
    assert found["--max-num-batched-tokens"] == ["2048", "resolved"]
    assert found["--swap-space"] == ["9.0", "command", "line"]
    assert found["--api-key"] == ["(hidden)", "command", "line"]
    assert found["FERRULE_CPU_KVCACHE_SPACE"] == ["0.5", "environment"]
    assert "hunter2" not in out
    assert "--dtype" not in found


def test_the_process_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FERRULE_CPU_KVCACHE_SPACE")  # which tests/conftest.py sets
    found = rows(run(capsys, "--dry-run", "--api-server-count", "3", "--host", "127.0.0.1"))
    assert found["FERRULE_CPU_KVCACHE_SPACE"] == ["0.5", "resolved"]  # of the embedded model
    assert [name for name in found if not name.startswith(("-", "FERRULE"))] == [
        "launcher",
        "engine-0",
        "api-0",
        "api-1",
        "api-2",
    ]
    assert " ".join(found["api-2"]) == "api HTTP on 127.0.0.1, port 8000 (python -m ferrule.launch.child api)"
    found = rows(run(capsys, "--dry-run", "--disable-frontend-multiprocessing"))
    assert [name for name in found if not name.startswith(("-", "FERRULE"))] == ["launcher"]


def test_all_values(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(run(capsys, "--dry-run=all"))
    assert found["--dtype"] == ["auto", "default"]
    assert found["--api-key"] == ["(none)", "default"]
    assert found["--tensor-parallel-size"] == ["1", "default"]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "--dry-run=json", "--port", "7"))
    assert found["configuration"]["port"] == {"value": 7, "origin": "command line"}
    assert found["configuration"]["dtype"] == {"value": "auto", "origin": "default"}
    assert [process["role"] for process in found["processes"]] == ["supervisor", "engine", "api"]


def test_the_word_behind_it_is_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert rows(run(capsys, "--dry-run", "org/name"))["--model"][0] == "org/name"
    assert cli.main(["serve", "--dry-run=some"]) == 2
    assert "expected one of: changed, all, json" in capsys.readouterr().err


def test_contradictions_and_names_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--dry-run", "--device", "gpu"]) == 2
    assert "no platform plugin 'gpu'" in capsys.readouterr().err
    assert cli.main(["serve", "--dry-run", "--max-num-seqs", "8", "--max-num-batched-tokens", "7"]) == 2


def test_nothing_is_bound_or_loaded(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.path()
    monkeypatch.setattr(Safetensors, "tensors", lambda *given: pytest.fail("weights were read"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run(capsys, str(model), "--dry-run", "--host", "127.0.0.1", "--port", str(taken.getsockname()[1]))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["./missing"], "The model './missing' is not a folder on this machine"),
        (["--tokenizer", "./missing"], "The tokenizer './missing' is not a folder on this machine"),
        (["--ssl-certfile", "./missing.pem"], "The --ssl options do not work"),
        (["--ssl-keyfile", "./missing.pem"], "The --ssl options need --ssl-certfile"),
        (["--middleware", "missing.Layer"], "--middleware missing.Layer cannot be loaded"),
        (["--worker-extension-cls", "missing.Extension"], "No module named 'missing'"),
        (["--worker-extension-cls", "json.Extension"], "has no attribute 'Extension'"),
        (["--worker-extension-cls", "json.dumps"], "json.dumps is not a class"),
        (["--max-model-len", "1000000"], "is more than the 2048 tokens that the checkpoint was made for"),
        (
            ["--model-impl", "native", "--hf-overrides", '{"architectures": ["Nope"]}'],
            "no native implementation of Nope",
        ),
        (["--quantization", "gptq"], "--quantization gptq: "),
        (["--chat-template", "./missing.jinja"], "'./missing.jinja' is neither a file nor a known template"),
        (["--chat-template", "{% for %}"], "The chat template has a syntax error in line 1"),
        (["--generation-config", "./missing"], "./missing has no generation_config.json"),
        (["--override-generation-config", '{"temprature": 1}'], "has no 'temprature'. Did you mean 'temperature'?"),
        (["--tool-parser-plugin", "./missing.py", "--tool-call-parser", "mine"], "missing.py"),
    ],
)
def test_what_a_start_refuses_before_weights(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    assert cli.main(["serve", "--dry-run", *argv]) != 0
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (["--kv-cache-memory-bytes", "1k"], 2, "The KV cache has room for 0 tokens"),
        (["--kv-cache-memory-bytes", "900G"], 2, "The KV cache is to have 900.00 GiB"),
        (["--num-gpu-blocks-override", "2000000000"], 2, "The KV cache is to have"),
        (["--no-enable-chunked-prefill", "--max-num-batched-tokens", "300"], 2, "a prompt must fit into one step"),
        (["--load-format", "pt"], 1, "has no .bin or .pt file"),
        (["--load-format", "npcache"], 1, "has no .bin or .pt file"),
        (["--load-format", "gguf"], 1, "has no .gguf file"),
        (["--host", "no.such.host.invalid"], 1, "Cannot listen on no.such.host.invalid"),
        (["--uds", "/no/such/folder/socket"], 1, "Cannot listen on /no/such/folder/socket"),
        (["--device", "cpu", "--attention-backend", "flash_attn"], 2, "--attention-backend flash_attn: "),
        (
            ["--hf-overrides", '{"architectures": ["NopeForCausalLM"], "model_type": "nope"}'],
            1,
            "transformers has no model type 'nope'",
        ),
        (
            ["--hf-overrides", '{"architectures": ["Qwen3ForCausalLM"]}'],
            1,
            "lack layers.0.self_attn.k_norm.weight, layers.0.self_attn.q_norm.weight",
        ),
        (["--hf-overrides.num_hidden_layers", "1"], 1, "holds a tensor that the model does not have"),
        (["--hf-overrides.num_key_value_heads", "2"], 1, "but the model needs"),
    ],
)
def test_what_a_start_refuses_while_it_loads(
    capsys: pytest.CaptureFixture[str], argv: list[str], status: int, said: str
) -> None:
    assert cli.main(["serve", "--dry-run", *argv]) == status
    assert said in capsys.readouterr().err


def test_a_parser_plugin_that_is_broken_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from ferrule.interfaces.parsers import ToolParser\n1 / 0\nclass Mine(ToolParser):\n    name = 'mine'\n"
    )
    argv = ["serve", "--dry-run", "--tool-parser-plugin", str(file), "--tool-call-parser", "mine"]
    assert cli.main(argv) != 0
    assert "division by zero" in capsys.readouterr().err


def test_a_broken_configuration_of_the_model_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert cli.main(["serve", "--dry-run", str(tmp_path)]) != 0
    assert "config.json" in capsys.readouterr().err


def test_a_folder_without_weights_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shutil.copytree(tiny.path(), tmp_path, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    assert cli.main(["serve", "--dry-run", str(tmp_path)]) == 1
    assert "has no .safetensors file" in capsys.readouterr().err


def test_all_documented_defaults_together_fit_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(__file__).parents[2] / "config" / "data" / "documented_defaults.txt"
    words: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        flag, _, text = line.partition(" ")
        if not line.startswith("#"):
            words += [flag, *([] if not text else [text] if text[0] in "[{" else shlex.split(text))]
    assert len(words) > 200
    run(capsys, "--dry-run", *words)


def test_a_hub_that_cannot_be_asked_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--dry-run", "org/name", "--tokenizer", "org/other"]) == 0
    log.flush()
    out, err = capsys.readouterr()
    assert rows(out)["--tokenizer"][0] == "org/other"
    assert "whether it has org/name," in err
    assert "whether it has org/other," in err


def test_a_hub_is_asked_for_the_files(capsys: pytest.CaptureFixture[str], listing: dict[str, list[str]]) -> None:
    listing["org/name"] = ["config.json", "tokenizer.json", "model.safetensors"]
    assert cli.main(["serve", "--dry-run", "org/name"]) == 0
    assert "cannot be asked" not in capsys.readouterr().err
    assert cli.main(["serve", "--dry-run", "org/name", "--load-format", "pt"]) == 1
    assert "no weights for --load-format pt: no file matches *.bin or *.pt" in capsys.readouterr().err
    assert cli.main(["serve", "--dry-run", "org/name", "--ignore-patterns", "model*"]) == 1
    assert "no weights for --load-format auto" in capsys.readouterr().err
    listing["org/words"] = ["tokenizer.json"]
    assert cli.main(["serve", "--dry-run", "org/name", "--tokenizer", "org/words"]) == 0
    assert cli.main(["serve", "--dry-run", "org/words"]) == 1
    assert "The repository 'org/words' has no config.json" in capsys.readouterr().err


def test_a_name_that_no_hub_can_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--dry-run", "a/b/c"]) == 1
    assert "the hub huggingface does not accept this name" in capsys.readouterr().err


def test_a_router_that_cannot_be_served_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from ferrule.interfaces.router import Router\n"
        "class Mine(Router):\n    name = 'mine'\n    def router(self, ctx):\n        raise ValueError('no routes')\n"
    )
    assert cli.main(["serve", "--dry-run", "--plugin", f"router={file}", "--routers", "+mine"]) == 1
    assert "no routes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ('api-key: ""\n', 1, "--api-key"),
        ('seed: 1\nchat-template: ""\n', 2, "--chat-template: '' is neither a file nor a known template."),
        ("tool-call-parser: nope\n", 1, "--tool-call-parser: no tool_parser plugin 'nope'"),
        ("max-model-len: 1000000\n", 1, "--max-model-len 1000000 is more than"),
        ("hf-overrides:\n  a: 1\n  rope_parameters: 3\n", 3, "With --hf-overrides: "),
        ("override-generation-config:\n  top_k: x\n", 2, "--override-generation-config: 'top_k' must be a number"),
        ("plugin-config:\n  policy:fcfs: {width: 1}\n", 2, "--plugin-config policy:fcfs"),
    ],
)
def test_errors_begin_with_file_and_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, line: int, part: str
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    status = 1 if "hf-overrides" in text else 2  # where the file of the model may be at fault
    assert cli.main(["serve", str(tiny.path()), "--dry-run", "--config", str(file)]) == status
    assert f"error:\n  {file}:{line}: {part}" in capsys.readouterr().err


def virtual(folder: Path, tokens: int, width: int) -> Path:
    """Write a prompt adapter."""
    folder.mkdir()
    config = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": tokens}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({"prompt_embeddings": torch.zeros(tokens, width)}, folder / "adapter_model.safetensors")
    return folder


def test_adapters_and_a_draft_model_are_read_and_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Safetensors, "tensors", lambda *given: pytest.fail("weights were read"))
    width = json.loads((tiny.path() / "config.json").read_text())["hidden_size"]
    plain, dora = write_adapter(tiny.path(), tmp_path / "plain", 1), write_adapter(tiny.path(), tmp_path / "dora", 2)
    content = load_file(dora / "adapter_model.safetensors")
    names = [name.removesuffix(".lora_B.weight") for name in content if name.endswith(".lora_B.weight")]
    content |= {f"{name}.lora_magnitude_vector": torch.ones(len(content[f"{name}.lora_B.weight"])) for name in names}
    save_file(content, dora / "adapter_model.safetensors")
    config = json.loads((dora / "adapter_config.json").read_text())
    (dora / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    poet = virtual(tmp_path / "poet", 3, width)
    argv = ["--dry-run", "--enable-lora", "--lora-modules", f"a={plain}", f"b={dora}", "c=org/adapter"]
    argv += ["--enable-prompt-adapter", "--max-prompt-adapter-token", "4", "--prompt-adapters", f"poet={poet}"]
    argv += ["--speculative-config", json.dumps({"model": str(tiny.path()), "num_speculative_tokens": 2})]
    found = rows(run(capsys, *argv))
    assert found["a"] == ["LoRA", "adapter", str(plain)]
    assert found["b"] == ["LoRA", "adapter", str(dora)]
    assert found["c"] == ["LoRA", "adapter", "org/adapter"]
    assert found["poet"] == ["prompt", "adapter", str(poet)]
    assert found["draft_model"] == ["speculator", f"{tiny.path()},", "at", "most", "2", "guesses"]
    argv[0] = "--dry-run=json"
    made = json.loads(run(capsys, *argv))["companions"]
    assert [each["name"] for each in made] == ["a", "b", "c", "poet", "draft_model"]


def test_whole_tables_of_an_adapter_wait_for_the_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With no weights of the model to compare them with, what else an adapter with added tokens has is checked."""
    adapter = make_adapter(tiny.path(), tmp_path / "more", 3, target_modules=["q_proj"])
    argv = ["--dry-run", "--enable-lora", "--lora-modules", f"more={adapter.path}"]
    assert rows(run(capsys, *argv))["more"] == ["LoRA", "adapter", adapter.path]
    assert cli.main(["serve", *argv, "--lora-extra-vocab-size", "2"]) == 2
    assert "it adds 3 tokens, and --lora-extra-vocab-size is 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"lora": {"r": 3}}, "--lora-modules: mine: The adapter 'mine' cannot be loaded: adapter_config.json has the"),
        ({"lora": {}, "argv": ["--max-lora-rank", "2"]}, "its rank is 4"),
        ({"width": 7}, "--prompt-adapters mine: "),
        ({"draft": True}, "draft have no tensor of this size"),
        ({"argv": ["--enable-lora", "--lora-modules", "mine=org/model"]}, "'org/model' has no adapter_config.json"),
    ],
)
def test_what_a_start_refuses_of_adapters_and_drafts(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    listing: dict[str, list[str]],
    wrong: dict[str, Any],
    said: str,
) -> None:
    listing["org/model"] = ["config.json"]
    argv = [*wrong.get("argv", ())]
    if "lora" in wrong:
        folder = write_adapter(tiny.path(), tmp_path / "mine", 1, **wrong["lora"])
        argv += ["--enable-lora", "--lora-modules", f"mine={folder}"]
    if "width" in wrong:
        folder = virtual(tmp_path / "mine", 3, wrong["width"])
        argv += ["--enable-prompt-adapter", "--max-prompt-adapter-token", "4", "--prompt-adapters", f"mine={folder}"]
    if "draft" in wrong:
        shutil.copytree(tiny.path(), tmp_path / "draft")
        config = json.loads((tmp_path / "draft/config.json").read_text())
        (tmp_path / "draft/config.json").write_text(json.dumps(config | {"hidden_size": 7}))
        argv += ["--speculative-config", json.dumps({"model": str(tmp_path / "draft")})]
    assert cli.main(["serve", "--dry-run", *argv]) in (1, 2)
    assert said in capsys.readouterr().err

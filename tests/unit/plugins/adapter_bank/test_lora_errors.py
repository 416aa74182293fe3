"""Adapters that do not fit, or are no adapters: one clear error each, and nothing of them is left."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrule.errors import RequestError, UnavailableError
from ferrule.interfaces.adapters import BankContext
from ferrule.types import Adapter
from ferrule_nn import Embedding, Linear, MergedLinear
from ferrule_plugins.adapter_bank.lora import LoraBank
from ferrule_plugins.adapter_bank.lora import bank as bank_module
from ferrule_plugins.adapter_bank.lora.reading import FolderReads
from ferrule_testkit.adapters import write_adapter

MODULES = [("layers.0.q_proj", 16, 24), ("layers.0.v_proj", 16, 8), ("layers.0.o_proj", 24, 16)]
FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Change = Callable[[Path], object]


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = MergedLinear(16, {"q_proj": 24, "k_proj": 8, "v_proj": 8})
        self.o_proj = Linear(24, 16)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = Embedding(32, 16)
        self.layers = torch.nn.ModuleList([Layer()])


def bank_of(**changes: Any) -> LoraBank:
    context = {"num_slots": 2, "max_rank": 8, "max_host": 2, "dtype": torch.float32, "device": torch.device("cpu")}
    bank = LoraBank(BankContext(**context | changes))
    for name, part in Model().named_modules():
        if isinstance(part, Linear | Embedding):
            part.adapt(name, bank)
    return bank


def config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        stated = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**stated, **changes}))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def changed(folder: Path) -> None:
        content = load_file(folder / FILE)
        change(content)
        save_file(content, folder / FILE)

    return changed


def key(module: str, which: str) -> str:
    return f"base_model.model.layers.0.{module}.{which}"


def set_to(name: str, tensor: torch.Tensor) -> Change:
    return tensors(lambda content: content.__setitem__(name, tensor))


def text(name: str, content: str | bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


A, B = "lora_A.weight", "lora_B.weight"
FAULTS: dict[str, tuple[Change, str]] = {
    "no config": (lambda folder: (folder / CONFIG).unlink(), "adapter_config.json does not exist"),
    "no weights": (lambda folder: (folder / FILE).unlink(), "has neither adapter_model.safetensors nor"),
    "not json": (text(CONFIG, "{"), "is not valid JSON"),
    "deep json": (text(CONFIG, '{"a":' * 20_000), "is not valid JSON"),
    "large json": (text(CONFIG, b" " * (1 << 19)), "no configuration is larger"),
    "a list": (text(CONFIG, "[]"), "holds a list"),
    "another kind": (config(peft_type="PROMPT_TUNING"), "peft_type 'PROMPT_TUNING'"),
    "huge rank": (config(r=10**400), "has the rank 1000"),
    "text as rank": (config(r="4"), "r must be of the type int"),
    "true as rank": (config(r=True), "r must be of the type int"),
    "no rank": (config(r=None), "r must be of the type int"),
    "rank zero": (config(r=0), "the rank r = 0"),
    "endless alpha": (
        text(CONFIG, '{"peft_type": "LORA", "r": 4, "lora_alpha": 1e999}'),
        "lora_alpha must be a number",
    ),
    "alpha not a number": (text(CONFIG, '{"peft_type": "LORA", "r": 4, "lora_alpha": NaN}'), "lora_alpha must be"),
    "list of alphas": (config(alpha_pattern=[1]), "alpha_pattern must be of the type dict"),
    "large expression": (config(alpha_pattern={"(a{999}){999}": 1}), "not a regular expression.*too long"),
    "bad expression": (config(alpha_pattern={"(": 1}), "not a regular expression"),
    "whole weights": (config(modules_to_save=["lm_head"]), "modules_to_save"),
    "replicated layers": (config(layer_replication=[[0, 1]]), "'layer_replication'"),
    "damaged weights": (text(FILE, b"\xff" * 64), "is not a safetensors file"),
    "no tensors": (tensors(lambda content: content.clear()), "no tensors"),
    "rank above the most": (
        lambda folder: write_adapter(folder, MODULES, rank=9),
        r"its rank is 9 \(.*--max-lora-rank is 8",
    ),
    "other rank than stated": (config(r=3), "has the rank 3, and the tensors of .* have 4"),
    "another base": (
        lambda folder: write_adapter(folder, [("layers.0.o_proj", 48, 16)]),
        r"has the shape \(4, 48\), and the model needs \(4, 24\)",
    ),
    "unknown module": (
        lambda folder: write_adapter(folder, [*MODULES, ("layers.7.q_proj", 16, 24)]),
        "changes 'layers.7.q_proj', and the model has no such layer",
    ),
    "A without B": (tensors(lambda content: content.pop(key("o_proj", B))), "no matrix B for 'layers.0.o_proj'"),
    "B without A": (tensors(lambda content: content.pop(key("o_proj", A))), "no matrix A for 'layers.0.o_proj'"),
    "ranks that differ": (set_to(key("o_proj", B), torch.zeros(16, 3)), "the ranks of A and B differ"),
    "no rank at all": (set_to(key("o_proj", A), torch.zeros(0, 24)), "has the rank 0"),
    "one dimension": (set_to(key("o_proj", A), torch.zeros(24)), "has the shape"),
    "left over": (set_to("base_model.model.layers.0.norm.weight", torch.zeros(16)), "is not one of a LoRA adapter's"),
    "an embedding's for a layer": (
        set_to("base_model.model.layers.0.o_proj.lora_embedding_A", torch.zeros(4, 24)),
        "mean the same",
    ),
    "not a number": (set_to(key("o_proj", A), torch.full((4, 24), float("nan"))), "lora_A.* not finite"),
    "endless": (set_to(key("o_proj", B), torch.full((16, 4), float("inf"))), "lora_B.* not finite"),
    "integers": (set_to(key("o_proj", A), torch.zeros(4, 24, dtype=torch.int8)), "is of torch.int8"),
    "magnitude without dora": (set_to(key("o_proj", "lora_magnitude_vector"), torch.ones(16)), "use_dora is False"),
    "dora without magnitude": (config(use_dora=True), "use_dora is True"),
    "a bias": (set_to(key("o_proj", "lora_B.bias"), torch.ones(16)), "--enable-lora-bias"),
    "no file of rows": (text("new_embeddings.safetensors", b""), "is not a safetensors file"),
    "no head for rows": (
        lambda folder: save_file({"input_embeddings": torch.zeros(1, 16)}, folder / "new_embeddings.safetensors"),
        "adds tokens .* the model has no embedding and head",
    ),
    "a pickle": (
        lambda folder: (
            (folder / FILE).unlink(),
            (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'x'\ntR."),
        ),
        "was refused",
    ),
    "layer twice": (
        lambda folder: write_adapter(folder, [*MODULES, ("layers.0.qkv_proj", 16, 40)]),
        "are the same layer",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    return Adapter(name="good", path=str(write_adapter(tmp_path_factory.mktemp("good") / "good", MODULES)))


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_one_clear_error(tmp_path: Path, good: Adapter, what: str) -> None:
    change, message = FAULTS[what]
    folder, bank = write_adapter(tmp_path / "bad", MODULES), bank_of()
    bank.load(1, good)
    change(folder)
    for call in (bank.read, lambda adapter: bank.load(2, adapter)):
        with pytest.raises(RequestError, match=message) as raised:
            call(Adapter(name="bad", path=str(folder)))
        assert raised.value.param == "model"
        assert raised.value.message.startswith("The adapter 'bad' cannot be loaded: ")
        assert len(raised.value.message) < 900
    assert list(bank._host) == [good.name]
    for weights in bank._matrices.values():
        assert not weights.ranks[2].any()
    assert bank._matrices["layers.0.qkv_proj"].ranks[1].tolist() == [4, 0, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("value", "alpha"), [(float("nan"), 4), (float("inf"), 4), (3e38, 1000)])
def test_no_type_hides_what_is_not_finite(tmp_path: Path, dtype: torch.dtype, value: float, alpha: int) -> None:
    folder = write_adapter(tmp_path / "bad", MODULES, lora_alpha=alpha)
    set_to(key("o_proj", B), torch.full((16, 4), value))(folder)
    with pytest.raises(RequestError, match="not finite"):
        bank_of(dtype=dtype).read(Adapter(name="bad", path=str(folder)))


def test_paths_that_are_no_folders(tmp_path: Path) -> None:
    bank = bank_of()
    (tmp_path / "file").write_text("{}")
    for path, message in (("none", "does not exist"), ("file", "is not a folder")):
        with pytest.raises(RequestError, match=message):
            bank.read(Adapter(name="x", path=str(tmp_path / path)))


def test_a_thousand_bad_loads_leave_nothing(tmp_path: Path, good: Adapter) -> None:
    bank = bank_of()
    bad = write_adapter(tmp_path / "bad", [("layers.0.o_proj", 48, 16)])
    bank.read(good)
    for number in range(1000):
        with pytest.raises(RequestError):
            bank.load(1, Adapter(name=f"bad-{number}", path=str(bad)))
    assert list(bank._host) == [good.name]
    assert not any(weights.ranks.any() for weights in bank._matrices.values())


def test_a_name_keeps_its_weights_when_files_change_or_vanish(tmp_path: Path) -> None:
    bank = bank_of()
    folder = write_adapter(tmp_path / "one", MODULES, seed=1)
    old, new = (Adapter(name=name, path=str(folder), served="one") for name in ("one", "one again"))
    bank.load(1, old)
    up = bank._matrices["layers.0.o_proj"].up
    first = up[1, :4].clone()
    write_adapter(folder, MODULES, seed=2)
    bank.load(2, new)
    assert not torch.equal(up[2, :4], first)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    bank.load(2, old)
    assert torch.equal(up[2, :4], first)
    with pytest.raises(RequestError, match="The adapter 'one' cannot be loaded: .* does not exist"):
        bank.read(Adapter(name="another", path=str(folder), served="one"))


def test_the_host_keeps_those_that_were_used_last(tmp_path: Path) -> None:
    bank = bank_of()
    adapters = [
        Adapter(name=str(seed), path=str(write_adapter(tmp_path / str(seed), MODULES, seed=seed))) for seed in range(3)
    ]
    for adapter in (adapters[0], adapters[1], adapters[0], adapters[2]):
        bank.read(adapter)
    assert list(bank._host) == ["0", "2"]


def test_adapters_of_types_and_ranks_share_slots(tmp_path: Path) -> None:
    bank = bank_of(dtype=torch.bfloat16)
    for slot, rank in ((1, 8), (2, 1)):
        folder = write_adapter(tmp_path / str(rank), MODULES, rank=rank)
        content = {name: tensor.half() for name, tensor in load_file(folder / FILE).items()}
        save_file(content, folder / FILE)
        bank.load(slot, Adapter(name=str(rank), path=str(folder)))
    assert bank._matrices["layers.0.qkv_proj"].ranks.tolist() == [[0, 0, 0], [8, 0, 8], [1, 0, 1]]
    bank.load(1, Adapter(name="1", path=str(tmp_path / "1")))
    assert bank._matrices["layers.0.qkv_proj"].ranks.tolist() == [[0, 0, 0], [1, 0, 1], [1, 0, 1]]


def test_a_folder_that_does_not_answer_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_settings, answers = bank_module.read_settings, threading.Event()

    def slow(folder: Path) -> Any:
        assert folder.name != "share" or answers.wait(30)
        return read_settings(folder)

    monkeypatch.setattr(bank_module, "read_settings", slow)
    share, disk = (Adapter(name=name, path=str(write_adapter(tmp_path / name, MODULES))) for name in ("share", "disk"))
    bank = bank_of()
    with ThreadPoolExecutor(1) as other:
        waits = other.submit(bank.load, 1, share)
        bank.load(2, disk)
        assert not waits.done()
        with bank.lock:  # as when the model's weights are given back
            answers.set()
        waits.result(30)
    assert bank._matrices["layers.0.qkv_proj"].ranks.tolist() == [[0, 0, 0], [4, 0, 4], [4, 0, 4]]
    answers.clear()
    bank._reads = FolderReads(patience=0.05)
    later = Adapter(name="later", path=share.path)
    for _ in range(2):  # the second one at once
        with pytest.raises(UnavailableError, match="does not answer"):
            bank.load(1, later)
    assert bank._matrices["layers.0.qkv_proj"].ranks.tolist() == [[0, 0, 0], [0, 0, 0], [4, 0, 4]]
    assert len(bank._reads._given_up) == 1
    answers.set()
    (left,) = bank._reads._given_up.values()
    left.result(30)
    bank.load(1, later)
    assert not bank._reads._given_up


def test_a_folder_that_gives_tensors_is_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_tensors, pause = bank_module.read_tensors, threading.Event()

    def slow(file: Any, contents: Any, limits: Any, pace: Any) -> None:
        for _ in range(20):
            pause.wait(0.05)
            pace.rest()
        read_tensors(file, contents, limits, pace)

    monkeypatch.setattr(bank_module, "read_tensors", slow)
    bank = bank_of()
    bank._reads = FolderReads(patience=0.5)
    bank.read(Adapter(name="x", path=str(write_adapter(tmp_path / "x", MODULES))))
    assert list(bank._host) == ["x"]

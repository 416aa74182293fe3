"""Tokenizers of adapters that add tokens: which are refused, and that each is opened once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ferrule.assembly.vocabulary import open_tokenizer
from ferrule.config import Resolved
from ferrule.config.parse import parse
from ferrule.config.resolve import resolve
from ferrule.env import Environment
from ferrule.errors import RequestError
from ferrule.frontend.adapters.table import Served
from ferrule.frontend.adapters.tokenizers import adapter_tokenizer
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.plugin import Plugins, discover
from ferrule.types import Adapter, AdapterInfo
from tests.fakes.added_tokens import add_tokens, full_checkpoint

SIZE = 320


@pytest.fixture(scope="module")
def base(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return full_checkpoint(tiny_llama, tmp_path_factory.mktemp("full") / "base")


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return discover()


def config(base: Path) -> Resolved:
    return resolve(parse([str(base), "--enable-lora"], env=Environment()).config)


def served(folder: Path, count: int = 2) -> Served:
    info = AdapterInfo(num_added=count)
    return Served(name="a", parent="m", adapter=Adapter(name="a@1", path=str(folder)), info=info)


def opened(base: Path, plugins: Plugins, folder: Path, count: int = 2) -> Tokenizer:
    given = config(base)
    model = open_tokenizer(given, plugins, base)
    assert model is not None
    return adapter_tokenizer(given, plugins, SIZE, served(folder, count), model)


def test_added_tokens_are_read_and_written(base: Path, plugins: Plugins, tmp_path: Path) -> None:
    add_tokens(base, tmp_path, {"<sql>": SIZE, "<end>": SIZE + 1})
    tokenizer = opened(base, plugins, tmp_path)
    ids = tokenizer.encode("a<sql>b<end>", add_special_tokens=False)
    assert {SIZE, SIZE + 1} <= set(ids)
    assert tokenizer.decode([SIZE, SIZE + 1]) == "<sql><end>"
    assert opened(base, plugins, tmp_path, 64).token(SIZE + 60) is None  # rows that pad a table have no names


def rewrite(change: Callable[[dict[str, list[dict[str, object]]]], object]) -> Callable[[Path], object]:
    def changed(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        change(content)
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return changed


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "none": (lambda folder: [file.unlink() for file in folder.glob("token*")], "its folder has none"),
    "too many": (
        rewrite(
            lambda content: content["added_tokens"].append(
                {**content["added_tokens"][-1], "id": SIZE + 2, "content": "<more>"}
            )
        ),
        f"it has ids up to {SIZE + 2}, and the last one is {SIZE + 1}",
    ),
    "other ids": (
        rewrite(lambda content: content["added_tokens"][-3].update(content="<another>")),
        f"its token {SIZE - 1} is '<another>', and the model's is '<unused{SIZE - 1}>'",
    ),
    "not json": (lambda folder: (folder / "tokenizer.json").write_text("{"), "cannot be used: tokenizer.json"),
    "deep json": (
        lambda folder: (folder / "tokenizer.json").write_text('{"a":' * 20_000),
        "cannot be used: tokenizer.json",
    ),
    "a list": (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "tokenizer_config.json"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_one_clear_error(base: Path, plugins: Plugins, tmp_path: Path, what: str) -> None:
    change, message = FAULTS[what]
    add_tokens(base, tmp_path, {"<sql>": SIZE, "<end>": SIZE + 1})
    change(tmp_path)
    with pytest.raises(
        RequestError, match="^The adapter 'a' adds 2 tokens, and its tokenizer cannot be used: "
    ) as found:
        opened(base, plugins, tmp_path)
    assert message in found.value.message
    assert str(tmp_path) not in found.value.message
    assert len(found.value.message) < 600


def test_code_of_an_adapter_does_not_run(base: Path, plugins: Plugins, tmp_path: Path) -> None:
    """Trusting the model's code does not trust that of an adapter."""
    settings = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    shutil.copy(base / "config.json", tmp_path)
    given = resolve(parse([str(base), "--enable-lora", "--trust-remote-code"], env=Environment()).config)
    model = open_tokenizer(given, plugins, base)
    assert model is not None
    with pytest.raises(RequestError, match="its tokenizer cannot be used"):
        adapter_tokenizer(given, plugins, SIZE, served(tmp_path), model)
    assert not (tmp_path / "ran").exists()

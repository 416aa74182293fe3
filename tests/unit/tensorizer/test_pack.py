"""`ferrule pack --format tensorizer`: the checkpoint's tensors bit for bit, encrypted where that is asked for."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ferrule.errors import ConfigError, StartupError
from ferrule.plugin import discover
from ferrule_plugins.command.pack import PackCommand
from ferrule_tensorizer.load_format import Tensorizer

PLUGINS = discover()


def pack(*words: Any) -> int:
    return PackCommand().run([str(word) for word in words], PLUGINS)


def load(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    return dict(Tensorizer().tensors(folder, torch.nn.Module(), {"verify_hash": True, **options}))  # type: ignore[arg-type]


def same(found: dict[str, torch.Tensor], source: Path) -> bool:
    expected = load_file(source / "model.safetensors")
    return found.keys() == expected.keys() and all(torch.equal(found[name], each) for name, each in expected.items())


def test_a_checkpoint_is_written_and_replaced(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, keyfile = tmp_path / "out", tmp_path / "key"
    assert pack(tiny_llama, out, "--format", "tensorizer") == 0
    assert f"Serve it: ferrule serve {out}\n" in capsys.readouterr().out
    assert same(load(out), tiny_llama)
    assert {"config.json", "model.tensors", "tokenizer.json"} <= {file.name for file in out.iterdir()}
    encrypted = (tiny_llama, out, "--format", "tensorizer", "--encryption-keyfile", keyfile)
    with pytest.raises(ConfigError, match="--force replaces it"):
        pack(*encrypted)
    assert not keyfile.exists()
    assert pack(*encrypted, "--force") == 0
    assert "encryption_keyfile" in capsys.readouterr().out
    assert stat.S_IMODE(keyfile.stat().st_mode) == 0o600
    key = keyfile.read_bytes()
    assert same(load(out, encryption_keyfile=str(keyfile)), tiny_llama)
    assert pack(*encrypted, "--force") == 0
    assert keyfile.read_bytes() == key


def test_what_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    def refused(*words: Any) -> str:
        with pytest.raises(StartupError) as caught:
            pack(tiny_llama, tmp_path / "out", *words)
        assert not (tmp_path / "out" / "model.tensors").exists()
        return str(caught.value)

    assert "--format packed does not encrypt" in refused("--encryption-keyfile", tmp_path / "key")
    assert "cannot be written" in refused("--format", "npcache")
    assert "no load_format plugin 'tensorize'. Did you mean 'tensorizer'?" in refused("--format", "tensorize")
    assert "as they are" in refused("--format", "tensorizer", "-q", "int8")
    assert "none of its own" in refused("--format", "tensorizer", "--load-format", "dummy")
    (tmp_path / "key").write_bytes(b"short")
    assert "does not have 32 bytes" in refused("--format", "tensorizer", "--encryption-keyfile", tmp_path / "key")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    assert "is not a folder that `ferrule pack` wrote" in refused("--format", "tensorizer", "--force")

"""How the conformance kit makes a folder of this tokenizer. No server imports this."""

from __future__ import annotations

from pathlib import Path


def write(folder: Path) -> None:
    (folder / "bytes.json").write_text('{"eos_token": "<|end|>"}')


SETTINGS = {"write": (write,)}

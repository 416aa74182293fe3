"""Every file of a model's folder that is parsed here, damaged in many ways: it is read, or it is one clear error.

Parsers of weights have the same tests beside their own (load_format/test_hostile.py, gguf/test_reader.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ferrule import checkpoint
from ferrule.errors import CheckpointError, RequestError
from ferrule.launch.supervisor import how
from ferrule_plugins.tokenizer.auto import AutoTokenizers
from ferrule_plugins.tokenizer.files import read_template
from ferrule_testkit.tokenizers import write_tokenizer
from tests.fakes.tokenizers import byte_fallback, metaspace
from tests.mutations import bounded_memory, fuzz
from tests.unit.parsers_of_files import CONFIG, PARSERS, written


def survivors(folder: Path, name: str, count: int, seed: int) -> int:
    parser = PARSERS[name]
    parser.prepare(folder)
    place = folder / parser.name
    whole = place.read_bytes()
    parser.read(place)
    return fuzz(place, whole, parser.read, count, seed, parser.mutate, parser.refusals)


@pytest.mark.advisory("CVE-2023-6730")
@pytest.mark.parametrize("name", PARSERS)
def test_damaged_files_are_read_or_refused(tmp_path: Path, name: str) -> None:
    count = PARSERS[name].quick
    assert 0 < survivors(tmp_path, name, count, 1) < count


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_a_hundred_thousand_damaged_files_are_read_or_refused(tmp_path: Path, name: str) -> None:
    with bounded_memory():
        assert 0 < survivors(tmp_path, name, 100_000, 2) < 100_000


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["pipe", "device", "circle", "folder"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, name: str, kind: str) -> None:
    place = tmp_path / name
    match kind:
        case "pipe":
            os.mkfifo(place)
        case "device":
            place.symlink_to("/dev/zero")
        case "circle":
            place.symlink_to(name)
        case "folder":
            place.mkdir()
    read = checkpoint.read_json if name.endswith("json") else read_template
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: "):
        read(place)


@pytest.mark.advisory("CVE-2023-6730")
def test_a_template_without_end_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "t.jinja").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="no chat template is larger"):
        read_template(tmp_path / "t.jinja")


def test_mapped_weights_that_become_shorter_end_the_process_by_a_signal(tmp_path: Path) -> None:
    """End by the signal, which the launcher names; a process cannot continue from there."""
    save_file({name: torch.ones(1 << 18) for name in "ab"}, tmp_path / "model.safetensors")
    script = (
        "import os, pathlib, sys, torch\n"
        "from ferrule_plugins.load_format.safetensors import Safetensors\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "for _, tensor in Safetensors().tensors(folder, torch.nn.Module(), {'use_tqdm_on_load': False}):\n"
        "    os.truncate(folder / 'model.safetensors', 4096)\n"
        "    tensor.sum()\n"
    )
    status = subprocess.run([sys.executable, "-c", script, tmp_path], check=False).returncode
    assert status == -signal.SIGBUS
    assert how(status) == (
        f"status=-{signal.SIGBUS:d} (SIGBUS: a file that it was reading, such as one with weights, became shorter, or "
        "its disk failed)"
    )
    assert how(3) == "status=3"


# What such files once did: ended the process, never ended, or raised something else.
FOUND: dict[str, tuple[str, Callable[[Any], object], str]] = {
    "merges through a character": (
        "tokenizer.json of bytes",
        lambda whole: whole["model"].update(continuing_subword_prefix="0"),
        "does not begin with '0'",
    ),
    "special tokens without end": (
        "tekken.json",
        lambda whole: whole["config"].update(default_num_special_tokens=10**12),
        "1000000000000 special ones",
    ),
    "bytes without a token": (
        "tekken.json",
        lambda whole: whole["config"].update(default_vocab_size=100),
        "80 tokens and 20 special ones",
    ),
    "code that is text": (
        "tiktoken.model, its settings",
        lambda whole: whole.update(auto_map="x"),
        "how texts are cut",
    ),
    "code that is a number": (
        "tiktoken.model, its settings",
        lambda whole: whole.update(auto_map={"AutoTokenizer": 7}),
        "how texts are cut",
    ),
    "half a character": (
        "tokenizer_config.json",
        lambda whole: whole.update(bos_token="\ud800"),
        "is not Unicode text",
    ),
    "a role that is no text": (
        "tokenizer_config.json",
        lambda whole: whole.update(extra_special_tokens={"x": {"content": "y", "special": 1}, "z": "\udc00"}),
        "is not Unicode text",
    ),
    "windows that are lists": ("params.json", lambda whole: whole.update(sliding_window=[[1], [2]]), "several widths"),
    "no window": ("params.json", lambda whole: whole.update(sliding_window=[None]), "several widths"),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_mutations_found(tmp_path: Path, name: str) -> None:
    of, change, said = FOUND[name]
    parser = PARSERS[of]
    parser.prepare(tmp_path)
    place = tmp_path / parser.name
    whole = json.loads(place.read_bytes())
    change(whole)
    place.write_text(json.dumps(whole))
    with pytest.raises(CheckpointError, match=said):
        parser.read(place)


def test_special_tokens_may_have_spaces(tmp_path: Path) -> None:
    """Keep them as they are in the template of what surrounds a text."""
    write_tokenizer(tmp_path, byte_fallback(), bos_token="<the beginning>", eos_token="{{ y }}", add_bos_token=True)
    tokenizer = AutoTokenizers().open(tmp_path, {})
    assert tokenizer.encode("the")[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokenizer.encode("the"), skip_special_tokens=False).startswith("<the beginning>")


def test_a_text_that_a_vocabulary_lacks_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, metaspace())
    whole = json.loads((tmp_path / "tokenizer.json").read_bytes())
    whole["model"]["unk_id"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    tokenizer = AutoTokenizers().open(tmp_path, {})
    with pytest.raises(RequestError, match="cannot encode this text"):
        tokenizer.encode("人")


def test_a_scaling_without_its_length_takes_the_usual_one(tmp_path: Path) -> None:
    written(
        "config.json", {**CONFIG, "max_position_embeddings": None, "rope_scaling": {"type": "yarn", "factor": 2.0}}
    )(tmp_path)
    assert checkpoint.max_length(checkpoint.read(tmp_path), sliding_window=True) == 2 * 2048

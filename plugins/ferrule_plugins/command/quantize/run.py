"""One run: choose layers from the headers, then read, quantize and write one tensor after the other."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ferrule import __version__
from ferrule.assembly.choose import Chooser
from ferrule.assembly.model import outline
from ferrule.checkpoint import read, read_json
from ferrule.config import Resolved
from ferrule.env import before_libraries
from ferrule.errors import CheckpointError, ConfigError
from ferrule.interfaces.plugins import Plugins
from ferrule.launch.localise import localise
from ferrule_plugins.command.folder import beside, beside_file, copy_others
from ferrule_plugins.command.pack.write import write_data, write_header
from ferrule_plugins.command.quantize import gguf_file
from ferrule_plugins.command.quantize.layers import Chosen, check_float, choose
from ferrule_plugins.command.quantize.options import QuantizeConfig
from ferrule_plugins.command.quantize.perplexity import perplexity, text_of
from ferrule_plugins.command.quantize.source import SINGLE, check_finite, file_sizes
from ferrule_plugins.command.quantize.targets import Target, target_of
from ferrule_plugins.load_format.safetensors import Safetensors
from ferrule_plugins.load_format.shards import progress

_CONFIG, _MARK = "config.json", "quantized_by"
Tensors = Mapping[str, torch.Tensor]


def quantize(options: QuantizeConfig, config: Resolved, plugins: Plugins) -> int:
    """Read the model's float weights, and write them with fewer bits. Raises StartupError."""
    before_libraries()
    start = time.monotonic()
    out = Path(options.output or "").expanduser()
    mix = gguf_file.MIXES.get(options.to or "")
    if options.skip_tokenizer and not mix:
        raise ConfigError(f"--skip-tokenizer is for GGUF files: --to {', '.join(gguf_file.MIXES)}.")
    (gguf_file.check_place if mix else _check_place)(out, options.force)
    text = text_of(options.evaluate)
    named, config = config.model.model, localise(config, plugins)
    source = Path(config.model.model)
    check_float(read(source))
    choice, _ = outline(config, Chooser(plugins))
    before = None if text is None else perplexity(source, text)
    with beside_file(out) if mix else beside(out) as place:
        if mix:
            old, new = gguf_file.write(source, place, mix, choice, options.ignore, tokenizer=not options.skip_tokenizer)
        else:
            old, new = write(source, place, target_of(options.to or "", options.group_size), options.ignore)
        after = None if text is None else perplexity(place, text, source if options.skip_tokenizer else None)
    seconds = time.monotonic() - start
    print(f"{named}, {options.to}: {old / 1e6:.1f} MB before, {new / 1e6:.1f} MB after, {seconds:.1f} s.")
    if before is not None and after is not None:
        print(f"Perplexity: {before:.4f} before, {after:.4f} after ({after / before - 1:+.2%}).")
    tokenizer = f" --tokenizer {shlex.quote(named)}" if options.skip_tokenizer and named else ""
    print(f"Serve it: ferrule serve {shlex.quote(str(out))}{tokenizer}")
    return 0


def write(source: Path, folder: Path, target: Target, ignore: tuple[str, ...] = ()) -> tuple[int, int]:
    """Fill the folder; returns bytes of weights before and after. Raises CheckpointError, ConfigError, OSError."""
    sizes = file_sizes(source)
    files = list(sizes)
    # Mapped tensors are not read until their numbers are needed.
    forms = {file: {name: _form(tensor) for name, tensor in _tensors(file, sizes[file])} for file in files}
    chosen = choose({name: form for file in files for name, form in forms[file].items()}, target, ignore)
    results = {file: _results(forms[file], target, chosen) for file in files}
    new = sum(tensor.nbytes for tensors in results.values() for tensor in tensors.values())
    free = shutil.disk_usage(folder).free
    if new > free:
        raise ConfigError(f"{folder.parent} has {free / 1e9:.2f} GB of free space; {new / 1e9:.2f} GB are needed.")
    copy_others(source, folder)
    old = sum(sum(tensors.values()) for tensors in sizes.values())
    with progress({}, old) as bar:
        for file in files:
            with (folder / file.name).open("wb") as stream:
                write_header(stream, results[file])
                for name, tensor in _tensors(file, sizes[file]):
                    check_finite(file, name, tensor)
                    for result in _results({name: tensor}, target, chosen).values():
                        write_data(stream, result)
                    bar.update(sizes[file][name])
    if len(files) > 1:
        _write_index(folder, results, new)
    _write_config(source, folder, target.config(chosen.ignored))
    return old, new


def _tensors(file: Path, sizes: Mapping[str, int]) -> Any:
    return Safetensors().read(file, sizes, {})


def _form(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def _results(tensors: Tensors, target: Target, chosen: Chosen) -> dict[str, torch.Tensor]:
    """What these tensors are in the new files, in the same order."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer = chosen.layer(name)
        if layer is None:
            found[name] = tensor
        else:
            found.update((f"{layer}.{suffix}", part) for suffix, part in target.quantized(tensor).items())
    return found


def _write_index(folder: Path, results: Mapping[Path, Tensors], size: int) -> None:
    places = {name: file.name for file, tensors in results.items() for name in tensors}
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / f"{SINGLE}.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_config(source: Path, folder: Path, quantization: Mapping[str, Any]) -> None:
    values = {**read_json(source / _CONFIG), "quantization_config": quantization, _MARK: f"ferrule {__version__}"}
    (folder / _CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _check_place(out: Path, force: bool) -> None:
    """Raises ConfigError where something is that may not be replaced."""
    if not out.exists() and not out.is_symlink():
        return
    if out.is_symlink() or not _is_ours(out):
        raise ConfigError(f"{out} is not a folder that `ferrule quantize` wrote.", "--output FOLDER names another one.")
    if not force:
        raise ConfigError(f"{out} exists.", "--force replaces it; --output FOLDER names another one.")


def _is_ours(out: Path) -> bool:
    try:
        return _MARK in read_json(out / _CONFIG)
    except CheckpointError:  # whatever it is, it is not ours to remove
        return False

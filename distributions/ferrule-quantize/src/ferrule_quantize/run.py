"""One run: choose layers from the headers, then read, quantize and write one tensor after the other."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from ferrule.checkpoint import read
from ferrule.config import Resolved
from ferrule.errors import CheckpointError, ConfigError
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.tokenizer import TokenizerSource
from ferrule.small_files import read_json
from ferrule_files.folder import beside, beside_file, copy_others
from ferrule_files.offline import Outline, localise, outline
from ferrule_files.safetensors import read_tensors
from ferrule_files.safetensors_writer import write_data, write_header
from ferrule_files.shards import progress
from ferrule_quantize import gguf_file
from ferrule_quantize.calibrated.methods import check_model, method_of
from ferrule_quantize.calibrated.prompts import Prompts
from ferrule_quantize.calibrated.run import Calibrated
from ferrule_quantize.calibrated.walk import Walk
from ferrule_quantize.config_files import CONFIG, MARK, write_config, write_index
from ferrule_quantize.layers import Chosen, check_float, choose
from ferrule_quantize.options import CALIBRATED, QuantizeConfig, check
from ferrule_quantize.perplexity import perplexity, text_of
from ferrule_quantize.source import check_finite, file_sizes
from ferrule_quantize.targets import Target, target_of

Tensors = Mapping[str, torch.Tensor]


def quantize(options: QuantizeConfig, config: Resolved, plugins: Plugins) -> int:
    """Read the model's float weights, and write them with fewer bits. Raises StartupError."""
    start = time.monotonic()
    check(options)
    out = Path(options.output or "").expanduser()
    mix = gguf_file.MIXES.get(options.to or "")
    (gguf_file.check_place if mix else _check_place)(out, options.force)
    text = text_of(options.evaluate)
    prompts = _prompts(options)
    named, config = config.model.model, localise(config, plugins)
    source = Path(config.model.model)
    check_float(read(source))
    model = outline(config, plugins)
    job = None if prompts is None else _calibrated(options, source, model)
    samples = [] if prompts is None else prompts.samples(config, plugins, model.context.max_model_len)
    if job is not None:
        job.check(samples)
    before = None if text is None else perplexity(source, text)
    report = ""
    with beside_file(out) if mix else beside(out) as place:
        if mix:
            source_of_tokens: TokenizerSource | None = None
            if not options.skip_tokenizer:
                source_of_tokens = plugins.make("tokenizer", "auto")
            old, new = gguf_file.write(source, place, mix, model, source_of_tokens, options.ignore)
        elif job is not None:
            old, new, told = job.write(place, samples)
            report = str(told)
        else:
            old, new = write(source, place, target_of(options.to or "", options.group_size), options.ignore)
        after = None if text is None else perplexity(place, text, source if options.skip_tokenizer else None)
    seconds = time.monotonic() - start
    print(f"{named}, {options.to}: {old / 1e6:.1f} MB before, {new / 1e6:.1f} MB after, {seconds:.1f} s.")
    if report:
        print(report)
    if before is not None and after is not None:
        print(f"Perplexity: {before:.4f} before, {after:.4f} after ({after / before - 1:+.2%}).")
    tokenizer = f" --tokenizer {shlex.quote(named)}" if options.skip_tokenizer and named else ""
    print(f"Serve it: ferrule serve {shlex.quote(str(out))}{tokenizer}")
    return 0


def _prompts(options: QuantizeConfig) -> Prompts | None:
    """Return the calibration texts; None for a format that needs none. Raises ConfigError."""
    if options.to not in CALIBRATED:
        return None
    return Prompts(options.calibration, options.calibration_samples, options.calibration_length)


def _calibrated(options: QuantizeConfig, source: Path, model: Outline) -> Calibrated:
    """Prepare a calibrated run. Raises CheckpointError, ConfigError for a model that cannot be quantized with texts."""
    method = method_of(options.to or "", options.bits, options.group_size, options.desc_act)
    walk = Walk(model.model, model.context, model.architecture)
    check_model(method, walk.model, model.architecture)
    return Calibrated(source, walk, method, options.ignore)


def write(source: Path, folder: Path, target: Target, ignore: tuple[str, ...] = ()) -> tuple[int, int]:
    """Fill the folder; returns bytes of weights before and after. Raises CheckpointError, ConfigError, OSError."""
    sizes = file_sizes(source)
    files = list(sizes)
    # Mapped tensors are not read until their numbers are needed.
    forms = {file: {name: _form(tensor) for name, tensor in read_tensors(file, sizes[file])} for file in files}
    chosen = choose({name: form for file in files for name, form in forms[file].items()}, target, ignore)
    results = {file: _results(forms[file], target, chosen) for file in files}
    new = sum(tensor.nbytes for tensors in results.values() for tensor in tensors.values())
    free = shutil.disk_usage(folder).free
    if new > free:
        raise ConfigError(f"{folder.parent} has {free / 1e9:.2f} GB of free space; {new / 1e9:.2f} GB are needed.")
    copy_others(source, folder)
    old = sum(sum(tensors.values()) for tensors in sizes.values())
    with progress({}, old, "quantizing") as bar:
        for file in files:
            with (folder / file.name).open("wb") as stream:
                write_header(stream, results[file])
                for name, tensor in read_tensors(file, sizes[file]):
                    check_finite(file, name, tensor)
                    for result in _results({name: tensor}, target, chosen).values():
                        write_data(stream, result)
                    bar.update(sizes[file][name])
    if len(files) > 1:
        write_index(folder, {file.name: tensors for file, tensors in results.items()}, new)
    write_config(source, folder, target.config(chosen.ignored))
    return old, new


def _form(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def _results(tensors: Tensors, target: Target, chosen: Chosen) -> dict[str, torch.Tensor]:
    """Return the tensors that these become in the new files, in the same order."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer = chosen.layer(name)
        if layer is None:
            found[name] = tensor
        else:
            found.update((f"{layer}.{suffix}", part) for suffix, part in target.quantized(tensor).items())
    return found


def _check_place(out: Path, force: bool) -> None:
    """Raise ConfigError where something exists that may not be replaced."""
    if not out.exists() and not out.is_symlink():
        return
    if out.is_symlink() or not _is_ours(out):
        raise ConfigError(f"{out} is not a folder that `ferrule quantize` wrote.", "--output FOLDER names another one.")
    if not force:
        raise ConfigError(f"{out} exists.", "--force replaces it; --output FOLDER names another one.")


def _is_ours(out: Path) -> bool:
    try:
        return MARK in read_json(out / CONFIG)
    except CheckpointError:  # whatever it is, it is not ours to remove
        return False

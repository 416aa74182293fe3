"""One run of `ferrule pack`: load, write beside the place, rename."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from pathlib import Path

from ferrule.assembly.model import Loaded, load_model
from ferrule.config import Resolved
from ferrule.errors import CheckpointError, ConfigError
from ferrule.interfaces.plugins import Plugins
from ferrule.locate.localise import localise
from ferrule.small_files import read_json
from ferrule_files.folder import beside, copy_others
from ferrule_files.safetensors_writer import write
from ferrule_plugins.command.pack.contents import configuration, contents
from ferrule_plugins.command.pack.options import PackConfig
from ferrule_plugins.quantization.packed import METHOD

_CONFIG, _PACKED, _SHARDED = "config.json", "packed", "sharded_state"


def pack(options: PackConfig, config: Resolved, plugins: Plugins) -> int:
    """Load the model as `ferrule serve` does, and write it. Raises StartupError."""
    _check(options, config, plugins)
    start = time.monotonic()
    named, config = config.model.model, localise(config, plugins)
    source, method = Path(config.model.model), config.model.quantization
    given = Path(named).expanduser()
    place = given.with_suffix("") if given.is_file() else source  # a file's folder is in a cache
    if options.format == _SHARDED:
        return _pack_ranks(options, config, plugins, place, start)
    if options.format != _PACKED:
        return _pack_tensors(options, config, plugins, place, start)
    if options.output is not None or method is not None:  # else it is known when the model is loaded
        _check_place(_place(options, place, method or ""), options.force)
    loaded = load_model(config, plugins)
    what = loaded.info.quantization or loaded.info.dtype
    out = _place(options, place, what)
    _check_place(out, options.force)
    with beside(out) as folder:
        files, size = _write(folder, source, loaded)
    seconds = time.monotonic() - start
    print(f"{named}, {what}: {size / 1e6:.1f} MB in {files} file{'s' * (files > 1)}, {seconds:.1f} s.")
    print(f"Serve it: ferrule serve {shlex.quote(str(out))}{_further(loaded, config)}")
    return 0


def _check(options: PackConfig, config: Resolved, plugins: Plugins) -> None:
    """Raise ConfigError for options that contradict each other, PluginError for an unknown format."""
    from ferrule_plugins.command.pack.tensors import writer_of

    own = options.format in (_PACKED, _SHARDED)
    if not own:
        writer_of(options.format, plugins)
    if own and options.encryption_keyfile is not None:
        raise ConfigError(f"--encryption-keyfile: --format {options.format} does not encrypt weights.")
    if not own and (config.model.quantization is not None or config.model.dtype != "auto"):
        raise ConfigError(
            f"--format {options.format} writes a checkpoint's tensors as they are, without --quantization and --dtype.",
            "The server can convert them when it reads them.",
        )
    if options.format != _SHARDED and options.tensor_parallel_size > 1:
        raise ConfigError(
            f"--tensor-parallel-size {options.tensor_parallel_size}: packed weights are those of one worker.",
            f"--format {_SHARDED} writes the state of several.",
        )
    if options.format == _SHARDED and config.model.quantization is not None:
        raise ConfigError(
            f"--quantization {config.model.quantization}: --format {_SHARDED} writes float weights.",
            "The server can quantize them when it reads them.",
        )


def _pack_ranks(options: PackConfig, config: Resolved, plugins: Plugins, place: Path, start: float) -> int:
    from ferrule_plugins.command.pack.sharded import state_of, write_state

    ranks, source = options.tensor_parallel_size, Path(config.model.model)
    out = place / f"sharded-{ranks}" if options.output is None else Path(options.output).expanduser()
    _check_place(out, options.force)
    state = state_of(config, plugins, ranks)
    size = state.bytes(ranks)
    with beside(out) as folder:
        _check_space(folder, size)
        copy_others(source, folder)
        files = write_state(folder, state, ranks)
    seconds, several = time.monotonic() - start, "s" * (files > 1)
    print(
        f"{config.model.model}, {ranks} rank{'s' * (ranks > 1)}: {size / 1e6:.1f} MB in {files} file{several}, "
        f"{seconds:.1f} s."
    )
    further = "" if config.model.dtype == "auto" else f" --dtype {config.model.dtype}"
    print(f"Serve it: ferrule serve {shlex.quote(str(out))}{further}")
    return 0


def _pack_tensors(options: PackConfig, config: Resolved, plugins: Plugins, place: Path, start: float) -> int:
    from ferrule_plugins.command.pack.tensors import further, write_tensors

    name, keyfile = options.format, options.encryption_keyfile
    out = place / name if options.output is None else Path(options.output).expanduser()
    _check_place(out, options.force)
    asked = {} if keyfile is None else {"encryption_keyfile": keyfile}
    with beside(out) as folder:
        size, needed = write_tensors(folder, config, plugins, name, asked)
    print(f"{config.model.model}, {name}: {size / 1e6:.1f} MB, {time.monotonic() - start:.1f} s.")
    print(f"Serve it: ferrule serve {shlex.quote(str(out))}{further(needed)}")
    return 0


def _place(options: PackConfig, source: Path, what: str) -> Path:
    """Return the folder to write: the one that was named, or one in the model's own."""
    return source / f"packed-{what}" if options.output is None else Path(options.output).expanduser()


def _further(loaded: Loaded, config: Resolved) -> str:
    """Return the options that a server of the folder needs, because they decided the weights."""
    words = "" if config.model.dtype == "auto" else f" --dtype {loaded.info.dtype}"
    words += "" if config.model.model_impl == "auto" else f" --model-impl {config.model.model_impl}"
    return words + (" --trust-remote-code" if config.model.trust_remote_code else "")


def _check_place(out: Path, force: bool) -> None:
    """Raise ConfigError where the place has something that may not be replaced."""
    if not out.exists() and not out.is_symlink():
        return
    if not _was_packed(out):
        raise ConfigError(f"{out} is not a folder that `ferrule pack` wrote.", "--output FOLDER names another one.")
    if not force:
        raise ConfigError(f"{out} exists.", "--force replaces it; --output FOLDER names another one.")


def _was_packed(out: Path) -> bool:
    from ferrule_plugins.command.pack import sharded, tensors

    if out.is_symlink() or not (out / _CONFIG).is_file():
        return False
    try:
        if sharded.was_written(out) or tensors.was_written(out):
            return True
        stated = read_json(out / _CONFIG).get("quantization_config")
    except CheckpointError:  # whatever it is, it is not ours to remove
        return False
    return isinstance(stated, dict) and stated.get("quant_method") == METHOD


def _write(folder: Path, source: Path, loaded: Loaded) -> tuple[int, int]:
    """Write the folder, and return the number of weight files and of bytes. Raises OSError, ConfigError."""
    found = contents(loaded)
    size = sum(tensor.nbytes for tensor in found.tensors.values())
    _check_space(folder, size)
    copy_others(source, folder)
    files = write(folder, found.tensors)
    text = json.dumps(configuration(loaded, found.kept), indent=2)
    (folder / _CONFIG).write_text(text + "\n", encoding="utf-8")
    return len(files), size


def _check_space(folder: Path, size: int) -> None:
    """Raise ConfigError where the disk has fewer than `size` bytes free."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ConfigError(
            f"{folder.parent} has {free / 1e9:.2f} GB of free space, and {size / 1e9:.2f} GB are to be written.",
            "--output FOLDER names another place.",
        )

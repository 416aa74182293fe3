"""Finds the folder of the model that the user named. An existing folder is used; otherwise the hub downloads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from ferrule.checkpoint import config_file
from ferrule.config import Resolved
from ferrule.errors import CheckpointError
from ferrule.interfaces.hub import Choose, ModelHub, Repository
from ferrule.interfaces.plugins import Plugins
from ferrule.launch import variants
from ferrule.launch.describe import described

_PATHS = ("/", "./", "../", "~")  # how a name begins that is not a hub id
_COMMON = (  # configuration, tokenizer, chat templates
    "*.json",
    "*.jinja",
    "*.model",
    "tokenizer*.model.v*",  # Mistral's
    "*.tiktoken",
    "*.txt",
)
_CONFIGS = ("config.json", "params.json")
_SAFETENSORS = "*.safetensors"
_PICKLES = ("*.bin", "*.pt")
_MISTRAL = "consolidated*.safetensors"
_SAFE = ("safetensors", "fastsafetensors", "runai_streamer", "sharded_state", "runai_streamer_sharded")
_OTHER_LAYOUTS = ("onnx/*", "*.onnx", "tf_*", "flax_*")  # of the same weights
_MODEL_FOLDER = "A Hugging Face model folder has that file."
_TRAINING = ("training_args.bin", "optimizer*", "scheduler.pt", "rng_state*")


def localise(config: Resolved, plugins: Plugins) -> Resolved:
    """The configuration with what the model section names replaced by folders on this machine; fetches what is missing.

    Raises CheckpointError, one readable block, when a name is neither a folder nor something that the hub has, and
    PluginError when the hub cannot be used.
    """
    model = config.model
    code = ("*.py",) if model.trust_remote_code else ()

    def weights(names: Sequence[str]) -> Sequence[str]:
        return (*_COMMON, *code, *weight_patterns(names, config.load.load_format))

    find = partial(_find, config, plugins)
    place = find("model", model.model, model.revision, weights)
    folder = _checked(_folder(config, plugins, "model", place), model.config_format)
    name, revision = model.tokenizer, model.tokenizer_revision
    if name == model.model and (revision == model.revision or Path(name).expanduser().exists()):
        tokenizer = folder
    else:
        tokenizer = find("tokenizer", name, revision, lambda names: (*_COMMON, *code))
        tokenizer = described("tokenizer", tokenizer, "auto", plugins) if tokenizer.is_file() else tokenizer
    settings = str(folder) if model.hf_config_path == model.model else model.hf_config_path
    found = replace(model, model=str(folder), tokenizer=str(tokenizer), hf_config_path=settings)
    return replace(config, model=found)


def find_settings(config: Resolved, plugins: Plugins) -> Path:
    """The folder with the model's configuration, of which nothing else is fetched. Raises as `localise` does."""
    model = config.model
    code = ("*.py",) if model.trust_remote_code else ()
    place = _find(config, plugins, "model", model.model, model.revision, lambda _: (*_CONFIGS, *code))
    return _checked(_folder(config, plugins, "model", place), model.config_format)


def _folder(config: Resolved, plugins: Plugins, what: str, place: Path) -> Path:
    return described(what, place, config.load.load_format, plugins)


def check_remote(config: Resolved, plugins: Plugins) -> list[str]:
    """Check model and tokenizer without fetching anything; return the names whose files the hub cannot list now.

    Raises what `localise` would raise for a folder that is missing, a repository that the hub does not have, or a model
    without configuration or weights.
    """
    model, unknown = config.model, []
    wanted = {("model", model.model, model.revision), ("tokenizer", model.tokenizer, model.tokenizer_revision)}
    for what, name, revision in sorted(wanted, key=lambda each: each[0]):
        folder = _local(what, name)
        if folder is not None:
            if what == "model":
                _checked(_folder(config, plugins, what, folder), model.config_format)
            continue
        hub, repository, kind = _remote(config, plugins, what, name, revision)
        with _paths_meant(name):
            files = hub.files(repository)
        if files is None:
            unknown.append(name)
        elif kind and not variants.has(kind, files):
            raise variants.missing(repository.name, kind, files)
        elif what == "model" and not kind:
            _check_listing(repository, files, config)
    return list(dict.fromkeys(unknown))


def _check_listing(repository: Repository, files: Sequence[str], config: Resolved) -> None:
    """Raises CheckpointError for a repository that is not a model that can be loaded."""
    form, load_format = config.model.config_format, config.load.load_format
    configs = {"hf": _CONFIGS[:1], "mistral": _CONFIGS[1:]}.get(form, _CONFIGS)
    wanted = weight_patterns(files, load_format)
    if not any(name in files for name in (*configs, *wanted)):  # weights with a name describe themselves
        raise CheckpointError(f"The repository {repository.name!r} has no {configs[0]}.", _MODEL_FOLDER)
    kept = [name for name in files if not any(fnmatch(name, pattern) for pattern in repository.ignore)]
    if wanted and not any(fnmatch(name, pattern) for name in kept for pattern in wanted):
        raise CheckpointError(
            f"The repository {repository.name!r} has no weights for --load-format {load_format}: no file matches "
            f"{' or '.join(wanted)}."
        )


def is_path(name: str) -> bool:
    """Whether a name is, or can only be, a folder or file on this machine: no hub would be asked for it."""
    return name.startswith(_PATHS) or Path(name).expanduser().exists()


def weight_patterns(names: Sequence[str], load_format: str) -> tuple[str, ...]:
    """Which weight files to fetch of those that a repository has. `auto` takes pickles only without safetensors.

    Without a ``config.json`` it takes what describes itself. For a format that is not built in, all files are fetched,
    because only its plugin knows which it needs. Raises CheckpointError where `auto` finds Mistral's layout alone,
    because a fetch leaves those files out, as most repositories have them beside others; and for a repository with
    several models.
    """
    if load_format == "gguf" or (load_format == "auto" and "config.json" not in names and variants.kinds(names)):
        return variants.only(names)
    if load_format not in ("auto", "hf", "bitsandbytes"):  # these read either kind
        known = {"pt": _PICKLES, "npcache": _PICKLES, "mistral": (_MISTRAL,), "dummy": ()}
        return known.get(load_format, (_SAFETENSORS,) if load_format in _SAFE else ("*",))
    weights = [name for name in names if any(fnmatch(name, form) for form in (_SAFETENSORS, *_PICKLES))]
    if load_format == "auto" and weights and all(fnmatch(name, _MISTRAL) for name in weights):
        raise CheckpointError(
            "The repository has its weights in Mistral's form only.", "Start with --load-format mistral."
        )
    has_safetensors = any(fnmatch(name, _SAFETENSORS) and not fnmatch(name, _MISTRAL) for name in weights)
    return (_SAFETENSORS,) if has_safetensors else _PICKLES


def _find(config: Resolved, plugins: Plugins, what: str, name: str, revision: str | None, choose: Choose) -> Path:
    folder = _local(what, name)
    if folder is not None:
        return folder
    hub, repository, kind = _remote(config, plugins, what, name, revision)
    seen: list[str] = []

    def of_kind(names: Sequence[str]) -> Sequence[str]:
        seen[:] = names
        return (*_COMMON, *variants.patterns(kind))

    with _paths_meant(name):
        if not kind:
            return hub.fetch(repository, choose)
        return variants.file_of(hub.fetch(repository, of_kind), repository.name, kind, seen)


def _local(what: str, name: str) -> Path | None:
    """The folder or file of that name; None where a hub must be asked. Raises CheckpointError for a missing path."""
    path = Path(name).expanduser()
    if path.is_dir() or path.is_file():
        return path.absolute() if path.is_file() else path.resolve()
    if name.startswith(_PATHS):
        raise CheckpointError(_missing(what, name), _meant(path) or _beside(path))
    return None


def _remote(
    config: Resolved, plugins: Plugins, what: str, name: str, revision: str | None
) -> tuple[ModelHub, Repository, str]:
    """The hub, what it is asked for, and of which kind the model is to be, see `variants`; "" for the only one.

    Raises CheckpointError for a name that the hub cannot have.
    """
    hub: ModelHub = plugins.make("hub", config.model.hub)
    reason, kind = hub.refuses(name), ""
    if reason is not None and hub.refuses(variants.split(name)[0]) is None:
        (name, kind), reason = variants.split(name), None
    if reason is not None:
        missing = _missing(what, name).removesuffix(".")
        raise CheckpointError(f"{missing}, and the hub {config.model.hub} {reason}.", _meant(Path(name).expanduser()))
    token = True if config.model.hf_token in {"", "true", "True", True} else config.model.hf_token  # "": the bare flag
    folder = Path(config.load.download_dir).expanduser() if config.load.download_dir else None
    others = () if config.load.load_format == "mistral" else ("consolidated*",)
    ignore = (*config.load.ignore_patterns, *others, *_OTHER_LAYOUTS, *_TRAINING, *variants.SKIPPED)
    return hub, Repository(name, revision, token, folder, ignore), kind


def _missing(what: str, name: str) -> str:
    return f"The {what} {name!r} is not a folder on this machine."


@contextmanager
def _paths_meant(name: str) -> Iterator[None]:
    """Errors of a hub also name similar folders: a hub id looks like a relative path."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(error.message, f"{error.hint} {_meant(Path(name).expanduser())}".strip()) from error


def _checked(folder: Path, form: str) -> Path:
    file = config_file(folder, form)
    if file.is_file():
        return folder
    if (folder / "model_index.json").is_file():
        raise CheckpointError(
            f"{folder} is a diffusion pipeline (model_index.json), which generates images and no text.",
            "Ferrule serves models that continue text.",
        )
    nested = sorted(entry.parent.name for entry in folder.glob("*/config.json"))
    hint = f"Its folder {nested[0]!r} has one: name that." if nested else _MODEL_FOLDER
    raise CheckpointError(f"{folder} has no {file.name}.", hint)


def _folders(parent: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in parent.iterdir() if entry.is_dir() and entry.name[0] != ".")
    except OSError:
        return []


def _meant(path: Path) -> str:
    """Folders beside a missing one whose names are close to its own."""
    close = get_close_matches(path.name, _folders(path.parent))
    return "Did you mean " + " or ".join(str(path.parent / name) for name in close) + "?" if close else ""


def _beside(path: Path) -> str:
    folders = ", ".join(_folders(path.parent)[:8]) or "no folders"
    return f"{path.parent} has {folders}." if path.parent.is_dir() else f"{path.parent} does not exist either."

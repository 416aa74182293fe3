"""Finds the folder of the model that the user named. An existing folder is used; otherwise the hub downloads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from ferrule.alike import alike
from ferrule.checkpoint import config_file, configured, other_files
from ferrule.config import Resolved
from ferrule.config.speculative import FROM_MODEL, ResolvedSpeculative, settled
from ferrule.errors import CheckpointError
from ferrule.interfaces.hub import Choose, ModelHub, Repository
from ferrule.interfaces.plugins import Plugins
from ferrule.locate import variants
from ferrule.locate.describe import described
from ferrule.locate.weights import WeightFiles, without
from ferrule.small_files import read_json

_PATHS = ("/", "./", "../", "~")  # how a name begins that is not a hub id
# Configuration, tokenizers (Mistral's too), chat templates.
_COMMON = ("*.json", "*.jinja", "*.model", "tokenizer*.model.v*", "*.tiktoken", "*.txt")
_DRAFT, _ADAPTER = "draft model", "adapter"
ADAPTER_CONFIG = "adapter_config.json"
# Of an adapter, whose tokenizer counts if it adds tokens; `_COMMON` has its configuration.
ADAPTER_FILES = (
    *("adapter_model.safetensors", "adapter_model.bin", "new_embeddings.safetensors", "new_embeddings.bin"),
    *_COMMON,
)
_MODEL_FOLDER = "A Hugging Face model folder has that file."


def localise(config: Resolved, plugins: Plugins) -> Resolved:
    """Return the configuration with folders on this machine instead of the names in the model section; download what is
    missing.

    Raises CheckpointError, one readable block, when a name is neither a folder nor something that the hub has, and
    PluginError when the hub cannot be used.
    """
    model = config.model
    code = ("*.py",) if model.trust_remote_code else ()

    def weights(names: Sequence[str]) -> Sequence[str]:
        return WeightFiles.of(config.load, plugins).beside((*_COMMON, *code), model.model, names)

    find = partial(_find, config, plugins)
    place = find("model", model.model, model.revision, weights)
    folder = _checked(_folder(config, plugins, "model", place), model.config_format, plugins)
    name, revision = model.tokenizer, model.tokenizer_revision
    if name == model.model and (revision == model.revision or Path(name).expanduser().exists()):
        tokenizer = folder
    else:
        tokenizer = find("tokenizer", name, revision, lambda names: (*_COMMON, *code))
        tokenizer = described("tokenizer", tokenizer, "auto", plugins) if tokenizer.is_file() else tokenizer
    settings = str(folder) if model.hf_config_path == model.model else model.hf_config_path
    configured(model, plugins, settings)  # what no model has is told before anything is loaded
    found = replace(model, model=str(folder), tokenizer=str(tokenizer), hf_config_path=settings)
    modules = tuple(
        replace(module, path=str(find_adapter(config, plugins, module.path))) for module in config.lora.modules
    )
    prompts = tuple(
        replace(module, path=str(find_adapter(config, plugins, module.path)))
        for module in config.prompt_adapter.modules
    )
    return replace(
        config,
        model=found,
        lora=replace(config.lora, modules=modules),
        prompt_adapter=replace(config.prompt_adapter, modules=prompts),
        speculative=_draft_model(config, find, plugins),
    )


def _draft_model(config: Resolved, find: Callable[..., Path], plugins: Plugins) -> ResolvedSpeculative:
    """Return the section of speculative decoding with the folder of its model, if it names one, and a method for it."""
    section, (name, revision) = config.speculative, draft_model(config.speculative)
    if not name:
        return section

    def weights(names: Sequence[str]) -> Sequence[str]:
        return WeightFiles.of(config.load, plugins).beside(_COMMON, name, names)

    place = find(_DRAFT, name, revision, weights)
    folder = described(_DRAFT, place, "auto", plugins) if place.is_file() else place
    stated = read_json(config_file(folder, "auto", plugins)) if section.method == FROM_MODEL else {}
    named = [stated.get("model_type"), *(stated.get("architectures") or ())]
    section = replace(section, settings={**section.settings, "model": str(folder)})
    described_as = [each for each in named if isinstance(each, str)]
    return settled(section, plugins, described_as or (["an unnamed type"] if section.method == FROM_MODEL else []))


def draft_model(section: ResolvedSpeculative) -> tuple[str, str | None]:
    """Return the name of the model that guesses tokens, "" where there is none, and its revision."""
    settings = section.settings
    return settings.get("model", ""), settings.get("revision")


def find_adapter(config: Resolved, plugins: Plugins, name: str) -> Path:
    """Return the folder of an adapter that the user has named, a folder or a hub id. Blocks. Raises CheckpointError."""
    return _find(config, plugins, _ADAPTER, name, None, lambda names: ADAPTER_FILES)


def fetch_files(config: Resolved, plugins: Plugins, name: str, choose: Choose) -> Path:
    """Return a folder with the chosen files of a repository of the hub. Blocks. Raises CheckpointError."""
    hub, repository, _ = _remote(config, plugins, _ADAPTER, name, None)
    return hub.fetch(repository, choose)


def find_settings(config: Resolved, plugins: Plugins) -> Path:
    """Return the folder with the model's configuration; download nothing else of the model. Raises as `localise`
    does.
    """
    model = config.model
    code = ("*.py",) if model.trust_remote_code else ()
    files = ("config.json", *other_files(plugins).values())
    place = _find(config, plugins, "model", model.model, model.revision, lambda _: (*files, *code))
    return _checked(_folder(config, plugins, "model", place), model.config_format, plugins)


def _folder(config: Resolved, plugins: Plugins, what: str, place: Path) -> Path:
    return described(what, place, config.load.load_format, plugins)


def check_remote(config: Resolved, plugins: Plugins) -> list[str]:
    """Check model, tokenizer, draft model and adapters without fetching anything; return the names whose files the hub
    cannot list now.

    Raises what `localise` would raise for a folder that is missing, a repository that the hub does not have, or a model
    without configuration or weights.
    """
    model, unknown = config.model, []
    wanted = {("model", model.model, model.revision), ("tokenizer", model.tokenizer, model.tokenizer_revision)}
    name, revision = draft_model(config.speculative)
    wanted |= {(_DRAFT, name, revision)} if name else set()
    adapters = [one.path for one in config.lora.modules] + [one.path for one in config.prompt_adapter.modules]
    wanted |= {(_ADAPTER, path, None) for path in adapters}
    for what, name, revision in sorted(wanted, key=lambda each: each[0]):
        folder = _local(what, name)
        if folder is not None:
            if what == "model":
                _checked(_folder(config, plugins, what, folder), model.config_format, plugins)
            continue
        hub, repository, kind = _remote(config, plugins, what, name, revision)
        with _paths_meant(name):
            files = hub.files(repository)
        if files is None:
            unknown.append(name)
        elif kind and not variants.has(kind, files):
            raise variants.missing(repository.name, kind, files)
        elif what == _ADAPTER and ADAPTER_CONFIG not in files:
            raise CheckpointError(f"The repository {repository.name!r} has no {ADAPTER_CONFIG}: it is not an adapter.")
        elif what == "model" and not kind:
            _check_listing(repository, files, config, plugins)
    return list(dict.fromkeys(unknown))


def _check_listing(repository: Repository, files: Sequence[str], config: Resolved, plugins: Plugins) -> None:
    """Check a repository's list of files. Raises CheckpointError for a repository without a model that can be
    loaded.
    """
    others, form = other_files(plugins), config.model.config_format
    configs = {"hf": ("config.json",), "auto": ("config.json", *others.values())}.get(form) or (others[form],)
    weights, kept = WeightFiles.of(config.load, plugins), without(files, repository.ignore)
    wanted = weights.patterns(kept)
    found = len(without(kept, wanted)) < len(kept)
    named = any(name in files for name in (*configs, *wanted))  # weights with a name describe themselves
    if not named and not (found and weights.describes(kept)):
        raise CheckpointError(f"The repository {repository.name!r} has no {configs[0]}.", _MODEL_FOLDER)
    if wanted and not found:
        raise CheckpointError(
            f"The repository {repository.name!r} has no weights for --load-format {config.load.load_format}: no file "
            f"matches {' or '.join(wanted)}."
        )


def is_path(name: str) -> bool:
    """Return whether a name is, or can only be, a folder or file on this machine: no hub would be asked for it."""
    return name.startswith(_PATHS) or Path(name).expanduser().exists()


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
    """Return the folder or file of that name; None where a hub must be asked. Raises CheckpointError for a missing
    path.
    """
    path = Path(name).expanduser()
    if path.is_dir() or path.is_file():
        return path.absolute() if path.is_file() else path.resolve()
    if name.startswith(_PATHS):
        raise CheckpointError(_missing(what, name), _meant(path) or _beside(path))
    return None


def _remote(
    config: Resolved, plugins: Plugins, what: str, name: str, revision: str | None
) -> tuple[ModelHub, Repository, str]:
    """Return the hub, the repository to ask it for, and the kind of the model, see `variants`; "" for the only kind.

    Raises CheckpointError for a name that the hub cannot have.
    """
    scheme, sign, _ = name.partition("://")  # of an address: the hub of that name is asked, if there is one
    hub_name = scheme if sign and scheme in plugins.names("hub") else config.model.hub
    hub: ModelHub = plugins.make("hub", hub_name)
    reason, kind = hub.refuses(name), ""
    if reason is not None and hub.refuses(variants.split(name)[0]) is None:
        (name, kind), reason = variants.split(name), None
    if reason is not None:
        missing = _missing(what, name).removesuffix(".")
        raise CheckpointError(f"{missing}, and the hub {hub_name} {reason}.", _meant(Path(name).expanduser()))
    token = True if config.model.hf_token in {"", "true", "True", True} else config.model.hf_token  # "": the bare flag
    folder = Path(config.load.download_dir).expanduser() if config.load.download_dir else None
    return hub, Repository(name, revision, token, folder, WeightFiles.of(config.load, plugins).ignored), kind


def _missing(what: str, name: str) -> str:
    return f"The {what} {name!r} is not a folder on this machine."


@contextmanager
def _paths_meant(name: str) -> Iterator[None]:
    """Add the names of similar folders to errors of a hub: a hub id looks like a relative path."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(error.message, f"{error.hint} {_meant(Path(name).expanduser())}".strip()) from error


def _checked(folder: Path, form: str, plugins: Plugins) -> Path:
    file = config_file(folder, form, plugins)
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
    """Suggest the folders beside a missing one whose names are close to its own."""
    close = alike(path.name, _folders(path.parent))
    return "Did you mean " + " or ".join(str(path.parent / name) for name in close) + "?" if close else ""


def _beside(path: Path) -> str:
    folders = ", ".join(_folders(path.parent)[:8]) or "no folders"
    return f"{path.parent} has {folders}." if path.parent.is_dir() else f"{path.parent} does not exist either."

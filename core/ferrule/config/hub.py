"""From what the user named to a folder on this machine.

A `Repository` carries everything that a fetch depends on (revision, token, folder for downloads), so that no fetch can
forget one of them. A folder that exists passes through untouched, and nothing is asked of the network for it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path

from ferrule.config.sections import Config
from ferrule.errors import CheckpointError

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
_COMMON = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")  # configuration, tokenizer, chat templates
_SAFETENSORS = "*.safetensors"
_PICKLES = ("*.bin", "*.pt")
_NEVER = (
    "consolidated*",
    "training_args.bin",
    "optimizer*",
    "scheduler.pt",
    "rng_state*",
    "onnx/*",
    "*.onnx",
    "tf_*",
    "flax_*",
)


@dataclass(frozen=True)
class Repository:
    """One hub repository as the user pinned it. `token`: True is the stored one, None the hub's default."""

    id: str
    revision: str | None = None
    token: str | bool | None = None
    download_dir: str | None = None
    ignore: tuple[str, ...] = ()

    def files(self) -> tuple[str, ...]:
        """Names of all files at the revision. Raises what huggingface_hub raises."""
        from huggingface_hub import HfApi

        # one request that is not retried: whether the hub can be reached shows at once
        listing = HfApi(token=self.token).model_info(self.id, revision=self.revision).siblings
        return tuple(file.rfilename for file in listing or ())

    def download(self, patterns: Sequence[str], *, offline: bool = False) -> Path:
        """Fetch the files that match, with a progress bar; what is in the cache already is not fetched again."""
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                self.id,
                revision=self.revision,
                token=self.token,
                cache_dir=self.download_dir,
                allow_patterns=list(patterns),
                ignore_patterns=[*self.ignore, *_NEVER],
                local_files_only=offline,
            )
        )


def localise(config: Config) -> Config:
    """The configuration with `model` and `tokenizer` replaced by folders on this machine; downloads what is missing.

    Raises CheckpointError, one readable block, when a name is neither a folder nor a repository that can be had.
    """
    folder = fetch(config)
    tokenizer = fetch_tokenizer(config, folder)
    return replace(config, model=replace(config.model, model=str(folder), tokenizer=str(tokenizer)))


def fetch(config: Config) -> Path:
    """The model's folder: the one that was named, or a snapshot of the hub repository with the weights to load."""
    model = config.model
    local = _local_folder(model.model, "model")
    if local is not None:
        return _checked(local)
    repository = _repository(config, model.model, model.revision)
    extra = ("*.py",) if model.trust_remote_code else ()
    return _checked(
        _fetch(repository, lambda names: (*_COMMON, *extra, *weight_patterns(names, config.load.load_format)))
    )


def fetch_tokenizer(config: Config, model_folder: Path) -> Path:
    """The tokenizer's folder: the model's, unless another one or another revision was asked for."""
    model = config.model
    name = model.tokenizer or model.model
    revision = model.tokenizer_revision or (model.revision if name == model.model else None)
    if name == model.model and (revision == model.revision or Path(name).expanduser().is_dir()):
        return model_folder
    local = _local_folder(name, "tokenizer")
    if local is not None:
        return local
    extra = ("*.py",) if model.trust_remote_code else ()
    return _fetch(_repository(config, name, revision), lambda names: (*_COMMON, *extra))


def weight_patterns(names: Iterable[str], load_format: str) -> tuple[str, ...]:
    """Which weight files to fetch of those that a repository has. `auto` takes pickles only without safetensors.

    A format that is not built in gets everything: what it needs is known to its plugin alone.
    """
    if load_format not in {"auto", "safetensors", "pt", "dummy"}:
        return ("*",)
    if load_format == "dummy":
        return ()
    if load_format == "pt":
        return _PICKLES
    has_safetensors = any(fnmatch(name, _SAFETENSORS) and not name.startswith("consolidated") for name in names)
    if load_format == "auto" and not has_safetensors:
        return _PICKLES
    return (_SAFETENSORS,)


def _repository(config: Config, name: str, revision: str | None) -> Repository:
    token: str | bool | None = config.model.hf_token
    if token in {"", "true", "True", True}:  # the bare flag: the stored token
        token = True
    download_dir = config.load.download_dir
    return Repository(
        name,
        revision,
        token,
        None if download_dir is None else str(Path(download_dir).expanduser()),
        # fnmatch has no "any number of folders": a/**/b is taken as a/b too
        tuple(form for pattern in config.load.ignore_patterns for form in (pattern, pattern.replace("/**/", "/"))),
    )


# ------------------------------------------------------------------------------------------------ local


def _local_folder(name: str, what: str) -> Path | None:
    """The folder that `name` is, or None when it must be a repository id."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        raise CheckpointError(f"{name} is a file; the {what} must be a folder or a hub id.", _near(path.parent, ""))
    looks_local = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or "\\" in name
    if looks_local or not _ID.fullmatch(name) or ".." in name:
        raise CheckpointError(
            f"The {what} {name!r} is not a folder on this machine and cannot be a hub id.",
            _near(path.parent, path.name),
        )
    return None


def _near(parent: Path, name: str) -> str:
    """Folders beside the missing one that were perhaps meant."""
    try:
        folders = sorted(entry.name for entry in parent.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return f"{parent} does not exist either."
    if meant := _meant(parent, name, folders):
        return meant
    return f"{parent} has the folders " + ", ".join(folders[:8]) + "." if folders else f"{parent} has no folders."


def _meant(parent: Path, name: str, folders: Sequence[str]) -> str:
    close = get_close_matches(name, folders, n=3) if name else []
    return "Did you mean " + " or ".join(str(parent / each) for each in close) + "?" if close else ""


def _checked(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    nested = sorted(entry.parent.name for entry in folder.glob("*/config.json"))
    hint = f"Its folder {nested[0]!r} has one: name that." if nested else "A Hugging Face model folder has that file."
    raise CheckpointError(f"{folder} has no config.json.", hint)


# ------------------------------------------------------------------------------------------------ the hub


def _fetch(repository: Repository, choose: Callable[[Sequence[str]], Sequence[str]]) -> Path:
    """Download what `choose(names of all files)` asks for; with the hub off or out of reach, take it from the cache."""
    from huggingface_hub import errors

    try:
        return repository.download(choose(repository.files()))
    except (errors.HTTPError, OSError, ValueError) as error:
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code < 500:  # its answer stands
            raise _explain(repository, error) from error
        cached = _cached(repository, choose)
        if cached is None:
            raise _explain(repository, error) from error
        logging.getLogger("ferrule.hub").warning(
            "The hub was not asked or not reached; %s (revision %s) comes from the cache: %s",
            repository.id,
            repository.revision or "main",
            cached,
        )
        return cached


def _cached(repository: Repository, choose: Callable[[Sequence[str]], Sequence[str]]) -> Path | None:
    """A complete snapshot in the cache. Which weights it has is unknown: try what each kind of repository asks for."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    for sample in ("model.safetensors", "pytorch_model.bin"):
        patterns = choose([sample])
        try:
            folder = repository.download(patterns, offline=True)
        except LocalEntryNotFoundError:
            continue
        weights = set(patterns) & {_SAFETENSORS, *_PICKLES}
        if not weights or any(next(folder.rglob(pattern), None) for pattern in weights):
            return folder
    return None


def _explain(repository: Repository, error: Exception) -> CheckpointError:
    """One block: what was asked for, of whom, what went wrong, and what to do."""
    from huggingface_hub import constants, errors

    folder_hint = "or name a folder that has the model."
    if isinstance(error, errors.GatedRepoError):
        reason = "it is gated, and the token (or its absence) does not open it"
        hint = f"Accept its terms on its page and pass --hf-token, {folder_hint}"
    elif isinstance(error, errors.RevisionNotFoundError):
        reason, hint = "it has no such revision", "Check --revision and --tokenizer-revision."
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason = "there is no such repository, or it is private"
        hint = f"Check the name, pass --hf-token for a private one, {folder_hint}"
    elif isinstance(error, errors.LocalTokenNotFoundError):
        reason, hint = "no token is stored on this machine", "Pass --hf-token TOKEN, or store one with `hf auth login`."
    elif isinstance(error, errors.OfflineModeIsEnabled):
        reason = "HF_HUB_OFFLINE is set and the cache has no complete copy"
        hint = f"Unset it, {folder_hint}"
    elif isinstance(error, errors.HfHubHTTPError):
        reason, hint = f"the hub answered {error.response.status_code}", f"Try again later, {folder_hint}"
    elif isinstance(error, (errors.HTTPError, ConnectionError, errors.LocalEntryNotFoundError)):
        reason = "the hub cannot be reached, and the cache has no complete copy"
        hint = f"Check the network, proxy and HF_ENDPOINT, {folder_hint}"
    else:
        reason, hint = f"{type(error).__name__}: {error}", f"Check --download-dir and free space, {folder_hint}"
    what = f"{repository.id!r} (revision {repository.revision or 'main'}) from {constants.ENDPOINT}"
    return CheckpointError(f"Cannot fetch {what}: {reason}.", f"{hint} {_misspelt(repository.id)}".rstrip())


def _misspelt(name: str) -> str:
    """Folders here whose name is close to what was taken for a hub id: a hub id looks like a relative path."""
    path = Path(name)
    if not path.parent.is_dir():
        return ""
    return _meant(path.parent, path.name, sorted(entry.name for entry in path.parent.iterdir() if entry.is_dir()))

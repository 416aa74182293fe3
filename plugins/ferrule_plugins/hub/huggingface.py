"""`huggingface`: repositories of the Hugging Face hub, or of the one that HF_ENDPOINT names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from ferrule import log
from ferrule.errors import CheckpointError
from ferrule.interfaces.hub import Choose, ModelHub, Repository

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
# One weight file of each kind: `choose` shows by them which kind of weights a complete copy needs.
_SAMPLES = ("model.safetensors", "pytorch_model.bin", "consolidated.safetensors")

_logger = log.get("hub")


class HuggingFace(ModelHub):
    """The Hugging Face hub. If the hub is off or cannot be reached, a complete copy in the cache is used."""

    conformance = "ferrule_testkit.samples.hub:HUGGINGFACE"

    def refuses(self, name: str) -> str | None:
        return (
            None
            if _ID.fullmatch(name) and ".." not in name
            else "does not accept this name: expected NAME or OWNER/NAME"
        )

    def files(self, repository: Repository) -> Sequence[str] | None:
        from huggingface_hub import errors

        try:
            return _files(repository)
        except (errors.HTTPError, OSError, ValueError) as error:
            if _refused(error):
                raise _explain(repository, error) from error
            cached = _cached_files(repository)
            if cached is not None:
                return cached
            if isinstance(error, errors.OfflineModeIsEnabled):
                raise _explain(repository, error) from error
            return None

    def fetch(self, repository: Repository, choose: Choose) -> Path:
        from huggingface_hub import errors

        try:
            return _download(repository, choose(_files(repository)))
        except (errors.HTTPError, OSError, ValueError) as error:
            if _refused(error):
                raise _explain(repository, error) from error
            cached = _cached(repository, choose)
            if cached is None:
                raise _explain(repository, error) from error
            _logger.warning(
                "The hub is off or could not be reached; using the cached copy of %s (revision %s): %s",
                repository.name,
                repository.revision or "main",
                cached,
            )
            return cached


def _refused(error: Exception) -> bool:
    """Return whether the hub answered that this cannot be had: an error that a copy in the cache must not hide."""
    from huggingface_hub import errors

    return isinstance(error, errors.HfHubHTTPError) and error.response.status_code < 500


def _files(repository: Repository) -> list[str]:
    """Return the names of all files at the revision."""
    from huggingface_hub import HfApi

    # one request that is not retried: whether the hub can be reached shows at once
    listing = HfApi(token=repository.token).model_info(repository.name, revision=repository.revision).siblings
    return [file.rfilename for file in listing or ()]


def _download(repository: Repository, patterns: Sequence[str], *, offline: bool = False) -> Path:
    """Fetch the files that match, with a progress bar; files in the cache are not fetched again."""
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repository.name,
            revision=repository.revision,
            token=repository.token,
            cache_dir=repository.folder,
            allow_patterns=list(patterns),
            # fnmatch has no "any number of folders": a/**/b is taken as a/b too
            ignore_patterns=[form for each in repository.ignore for form in (each, each.replace("/**/", "/"))],
            local_files_only=offline,
        )
    )


def _cached(repository: Repository, choose: Choose) -> Path | None:
    """Return a complete snapshot in the cache. If other weights were fetched than would be chosen now, they are
    used.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    listing = _cached_listing(repository)
    for names in (*((listing,) if listing else ()), *([sample] for sample in _SAMPLES)):
        patterns = choose(names)
        try:
            folder = _download(repository, patterns, offline=True)
        except LocalEntryNotFoundError:
            continue
        weights = [pattern for pattern in patterns if any(fnmatch(each, pattern) for each in _SAMPLES)]
        if not weights or any(next(folder.rglob(pattern), None) for pattern in weights):
            return folder
    return None


def _cached_listing(repository: Repository) -> list[str] | None:
    """Return the names of all files at the revision, where the library remembers them; it checks then that a copy is
    complete.
    """
    try:
        from huggingface_hub import errors, get_cached_repo_tree
    except ImportError:  # older versions remember none
        return None
    try:
        tree = get_cached_repo_tree(repository.name, revision=repository.revision, cache_dir=repository.folder)
    except errors.CachedRepoTreeNotFoundError:
        return None
    return [file.path for file in tree]


def _cached_files(repository: Repository) -> list[str] | None:
    """Return the names of the files of the revision that are in the cache; None where the cache has none."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = _download(repository, (), offline=True)
    except LocalEntryNotFoundError:
        return None
    return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


def _explain(repository: Repository, error: Exception) -> CheckpointError:
    """Explain an error in one block: what was asked for, of whom, what went wrong, and what to do."""
    from huggingface_hub import constants, errors

    folder_hint = "or name a folder that has the model."
    if isinstance(error, errors.GatedRepoError):
        reason = "it is gated, and access needs the token of an account that accepted its terms"
        hint = f"Accept its terms on its page and pass --hf-token, {folder_hint}"
    elif isinstance(error, errors.RevisionNotFoundError):
        reason, hint = "it does not have this revision", "Check --revision and --tokenizer-revision."
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason = "the repository does not exist, or it is private"
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
    what = f"{repository.name!r} (revision {repository.revision or 'main'}) from {constants.ENDPOINT}"
    return CheckpointError(f"Cannot fetch {what}: {reason}.", hint)

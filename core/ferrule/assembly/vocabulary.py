"""The tokenizer of the configured model, and what guided decoding knows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ferrule import checkpoint
from ferrule.config import WorkerSettings
from ferrule.env import before_libraries
from ferrule.errors import CheckpointError, ConfigError
from ferrule.interfaces.guided_decoding import GrammarBackend, Vocabulary
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.tokenizer import Tokenizer, TokenizerSource

_LOST = "\ufffd"


def open_tokenizer(config: WorkerSettings, plugins: Plugins, folder: Path) -> Tokenizer | None:
    """Open the tokenizer that the configuration names, None with --skip-tokenizer-init. Raises StartupError."""
    if config.model.skip_tokenizer_init:
        return None
    return open_folder(config, plugins, folder, trusted=config.model.trust_remote_code)


def open_folder(config: WorkerSettings, plugins: Plugins, folder: Path, *, trusted: bool) -> Tokenizer:
    """Open the tokenizer in a folder, of the kind that the configuration names. Raises StartupError."""
    before_libraries()
    source: TokenizerSource = plugins.make("tokenizer", config.model.tokenizer_mode)
    if not folder.is_dir():
        raise CheckpointError(f"The tokenizer's folder {folder} does not exist.")
    return source.open(folder, {"trust_remote_code": trusted})


def eos_ids(config: WorkerSettings, plugins: Plugins, tokenizer: Tokenizer | None, folder: Path) -> tuple[int, ...]:
    """Return the ids that end a text: the tokenizer's, those of ``config.json``, and those of
    ``generation_config.json``.
    """
    own = tokenizer.eos_token_id if tokenizer is not None else None
    settings = checkpoint.configured(config.model, plugins, folder)
    stated = checkpoint.eos_ids(settings, generation_folder(config, folder))
    return tuple(dict.fromkeys((() if own is None else (own,)) + stated))


def generation_folder(config: WorkerSettings, folder: Path) -> Path:
    """Return the folder that ``generation_config.json`` is read from. Raises CheckpointError."""
    origin = config.model.generation_config
    if origin in {"auto", "vllm"}:
        return folder
    if not (Path(origin) / "generation_config.json").is_file():
        raise CheckpointError(f"--generation-config: {origin} has no generation_config.json.")
    return Path(origin)


def format_tokens(config: WorkerSettings, plugins: Plugins) -> tuple[str, ...]:
    """Return the special tokens that the formats of the configured parsers are written with."""
    return tuple(text for kind, name in config.parsers for text in plugins.load(kind, name).special_tokens)


def special_ids(tokenizer: Tokenizer, texts: Iterable[str]) -> frozenset[int]:
    """Return the ids of the special tokens in some texts."""
    encoded = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    return tokenizer.all_special_ids & {id for ids in encoded for id in ids}


def read_vocabulary(
    tokenizer: Tokenizer, size: int, stop_ids: tuple[int, ...], written: frozenset[int] = frozenset()
) -> Vocabulary:
    """Read the bytes of each token. `size`: the width of the logits. `written`: special tokens that count as their
    text.
    """
    skipped = tokenizer.all_special_ids - written | set(stop_ids)
    ids = range(min(tokenizer.vocab_size, size))
    return Vocabulary(tuple(b"" if id in skipped else _bytes(tokenizer, id) for id in ids), size, stop_ids)


def open_backend(
    config: WorkerSettings, plugins: Plugins, open_tokenizer: Callable[[], Tokenizer | None], size: int, name: str
) -> GrammarBackend:
    """Open a backend for the configured model, whose logits have the width `size`. Raises StartupError."""
    tokenizer = open_tokenizer()
    if tokenizer is None:
        raise ConfigError("Guided decoding needs a tokenizer (--skip-tokenizer-init is set).")
    stop_ids = tuple(id for id in eos_ids(config, plugins, tokenizer, Path(config.model.model)) if id < size)
    vocabulary = read_vocabulary(tokenizer, size, stop_ids, special_ids(tokenizer, format_tokens(config, plugins)))
    backend: GrammarBackend = plugins.make("guided_decoding", name, vocabulary)
    return backend


def _bytes(tokenizer: Tokenizer, id: int) -> bytes:
    """Return the bytes that a token adds behind another one.

    Where they depend on the neighbours, they are read from a decoded text; b"" where the text is not whole characters.
    """
    piece = tokenizer.piece(id, False)
    if piece is not None:
        return piece
    before = tokenizer.decode([id], skip_special_tokens=False)
    twice = tokenizer.decode([id, id], skip_special_tokens=False)
    added = twice[len(before) :] if twice.startswith(before) else ""
    return b"" if _LOST in added else added.encode()

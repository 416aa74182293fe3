"""The tokenizer in an adapter's folder, which names the tokens that the adapter adds to the model's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ferrule.assembly.vocabulary import open_folder
from ferrule.config import Resolved
from ferrule.errors import CheckpointError, RequestError, StartupError
from ferrule.frontend.adapters.table import Served
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.tokenizer import Tokenizer

OpenAdded = Callable[[Served, Tokenizer], Tokenizer]  # of an adapter, and the model's tokenizer
_FILES = ("token*", "tekken*", "*.model", "*.tiktoken", "vocab*")


def adapter_tokenizer(config: Resolved, plugins: Plugins, size: int, served: Served, base: Tokenizer) -> Tokenizer:
    """Open the tokenizer of an adapter that adds tokens to a model with `size` of them. Blocks. Raises RequestError."""
    folder, count = Path(served.path), served.info.num_added
    try:
        if not any(next(folder.glob(pattern), None) for pattern in _FILES):
            raise CheckpointError("its folder has none.")
        tokenizer = open_folder(config, plugins, folder, trusted=False)
        _check(tokenizer, base, size, count)
    except (StartupError, OSError) as error:
        why = error.message if isinstance(error, StartupError) else f"{error.strerror or error}."
        why = why.replace(f"{folder}/", "").replace(str(folder), "its folder")  # clients may not know where
        raise RequestError(
            f"The adapter {served.name!r:.200} adds {count} tokens, and its tokenizer cannot be used: {why}", "model"
        ) from error
    return tokenizer


def _check(tokenizer: Tokenizer, base: Tokenizer, size: int, count: int) -> None:
    """Check that a tokenizer has the tokens of the model's under the same ids, and none that the adapter has not."""
    if tokenizer.vocab_size > size + count:
        raise CheckpointError(f"it has ids up to {tokenizer.vocab_size - 1}, and the last one is {size + count - 1}.")
    for id in range(min(base.vocab_size, size)):
        own, others = tokenizer.token(id), base.token(id)
        if own != others:
            raise CheckpointError(f"its token {id} is {own!r:.80}, and the model's is {others!r:.80}.")

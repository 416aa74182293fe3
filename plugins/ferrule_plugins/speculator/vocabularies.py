"""Which tokens of two vocabularies are the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ferrule.errors import ConfigError
from ferrule.interfaces.tokenizer import Tokenizer

_LEAST_SHARED = 0.5  # of the smaller vocabulary

Key = bytes | str | None  # None: of no token


@dataclass(frozen=True)
class SharedTokens:
    """The ids of a draft model for a target's, and the other way round. None: they are the same.

    An id without a partner is `filler` for the draft model, and -1 for the target.
    """

    to_draft: torch.Tensor | None = None  # [target's vocabulary] int64
    to_target: list[int] | None = None  # by the draft model's id

    def drafted(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the draft model's ids for the target's."""
        return ids if self.to_draft is None else self.to_draft.index_select(0, ids)

    def told(self, id: int) -> int:
        """Return the target's id for the draft model's, or -1."""
        return id if self.to_target is None else self.to_target[id]


def share_tokens(
    target: Tokenizer | None, draft: Tokenizer | None, sizes: tuple[int, int], device: torch.device
) -> SharedTokens:
    """Compare vocabularies whose models have logits of these sizes. Raises ConfigError where too few tokens are shared.

    A model without a tokenizer is taken to have the other's.
    """
    wide, own = sizes
    if target is None or draft is None:
        if wide != own:
            raise ConfigError(
                f"--speculative-config.model: its vocabulary has {own} tokens, the target's {wide}, and there are no "
                "two tokenizers to compare them by.",
                "Choose a draft model with the target's vocabulary.",
            )
        return SharedTokens()
    common = min(target.vocab_size, draft.vocab_size, wide, own)
    if all(target.token(id) == draft.token(id) for id in range(common)):
        if wide == own:
            return SharedTokens()
        return SharedTokens(torch.arange(wide, device=device).clamp_max(own - 1), [*range(own)])
    return _mapped(_keys(target, wide, draft), _keys(draft, own, target), draft.bos_token_id or 0, device)


def _keys(tokenizer: Tokenizer, size: int, other: Tokenizer) -> list[Key]:
    """Return what identifies each token: the bytes that it adds to a text, or its entry where one of two tokenizers has
    no such bytes. Special tokens are identified by their entries, and the one that ends a text by its part.
    """
    special, plain = tokenizer.all_special_ids, tokenizer.piece(0, False) is None or other.piece(0, False) is None

    def key(id: int) -> Key:
        if id == tokenizer.eos_token_id:
            return "eos"
        return tokenizer.token(id) if plain or id in special else tokenizer.piece(id, False) or None

    return [key(id) if id < tokenizer.vocab_size else None for id in range(size)]


def _mapped(target: list[Key], draft: list[Key], filler: int, device: torch.device) -> SharedTokens:
    of_target = {key: id for id, key in reversed([*enumerate(target)]) if key is not None}
    of_draft = {key: id for id, key in reversed([*enumerate(draft)]) if key is not None}
    shared = len(of_target.keys() & of_draft.keys())
    if shared < _LEAST_SHARED * min(len(of_target), len(of_draft)):
        raise ConfigError(
            f"--speculative-config.model: its vocabulary shares {shared} tokens with the target's, of {len(of_draft)} "
            f"and {len(of_target)}.",
            "Choose a draft model of the same family, or with the target's tokenizer.",
        )
    to_draft = [filler if key is None else of_draft.get(key, filler) for key in target]
    to_target = [-1 if key is None else of_target.get(key, -1) for key in draft]
    return SharedTokens(torch.tensor(to_draft, device=device), to_target)

"""Which way of running requests one after another gives what the class computes? Tried when its weights are there.

A short text runs once as a whole, without any cache, as the library runs it: that is what has to come out. Each
`Manner` then computes the same text in chunks, through the same code that serves requests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext
from ferrule_plugins.model.transformers.build import EAGER, set_attention, usual_attention
from ferrule_plugins.model.transformers.caches import attributes
from ferrule_plugins.model.transformers.rope import Lengths
from ferrule_plugins.model.transformers.rows import Manner, Rows, compute, manners

_TAIL = (1, 4, 1, 1)  # the last chunks of the text
_TOKENS = 12
_OTHER = 3  # tokens of another text, which runs between the chunks: nothing of it may stay anywhere
_NEAR = 64  # windows up to this are slid over
_EXACT, _ROUNDED = 1e-3, 5e-2  # of logits, relative to their size, in float32 and in narrower types
_TWO_FORMULAS = 20  # times that: classes that compute one token by another formula than many

Logits = Callable[[torch.Tensor], torch.Tensor]


def find_rows(ctx: BuildContext, inner: Any, logits: Logits, lengths: Lengths) -> tuple[Rows, bool]:
    """Return the first manner that computes what the class does, and whether its hidden states are the logits.

    `logits` maps hidden states of the class's base model to logits. Raises CheckpointError that says what went wrong.
    """
    ids, fresh = _text(ctx, inner), attributes(inner)
    wanted = _whole(inner, ids)
    _check_attention(ctx, inner, ids, wanted)
    _check_causal(inner, ids, wanted)
    _check_next(inner, ids)
    chunks = (len(ids) - sum(_TAIL), *_TAIL)
    faults: list[str] = []
    near: tuple[Rows, bool] | None = None
    for manner in manners(inner):
        if near is not None and manner.cache is None:
            return near
        for head in (False, True):
            try:
                rows = Rows(ctx, inner, manner, head=head, lengths=lengths, fresh=fresh)
                other = partial(compute, rows, ids.flip(0)[:_OTHER], (_OTHER,), ctx.dtype)
                hidden = compute(rows, ids, chunks, ctx.dtype, other)
                with torch.inference_mode():
                    given = hidden if head else logits(hidden)
                error = _error(given, wanted, ctx.dtype)
                if error <= 1:
                    return rows, head
                if near is None and ctx.dtype == torch.float32 and error <= _TWO_FORMULAS:
                    near = rows, head
                fault = f"the logits' error is {error:.3g} of what rounding may do"
            except Exception as caught:  # whatever the library raises, or a class of a checkpoint
                fault = f"{type(caught).__name__}: {str(caught)[:200]}"
            finally:
                lengths.of_tokens = None
            faults.append(f"{_told(manner)}: {fault}")
    raise CheckpointError(
        f"{type(inner).__name__} of transformers does not compute the same of a text in parts as of the whole text. "
        f"{faults[0]}. {faults[-1]}.",
        "It would answer with other tokens than transformers does, so it is not served.",
    )


def _told(manner: Manner) -> str:
    return "Without a cache" if manner.cache is None else f"With {manner.cache}"


def _text(ctx: BuildContext, inner: Any) -> torch.Tensor:
    """Return ids [tokens]: few, but more than the windows that are short."""
    text = inner.config.get_text_config(decoder=True)
    windows = [
        value
        for key, value in text.to_dict().items()
        if ("window" in key or "chunk" in key) and "layer" not in key and type(value) is int and value <= _NEAR
    ]
    tokens = min(max(_TOKENS, max(windows, default=0) + sum(_TAIL) + 2), ctx.max_model_len)
    table: torch.Tensor = inner.get_input_embeddings().weight
    return (torch.arange(tokens, device=table.device) * 7919 + 5) % table.shape[0]


def _whole(inner: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [tokens, vocab] of a whole text. Raises CheckpointError where the class does not run."""
    try:
        with torch.inference_mode():
            out = inner(input_ids=ids.unsqueeze(0), use_cache=False, return_dict=True)
        logits: torch.Tensor = out.logits[0].float()
    except Exception as error:  # whatever the library raises, or a class of a checkpoint
        raise CheckpointError(
            f"{type(inner).__name__} of transformers does not run on token ids alone: {type(error).__name__}: "
            f"{str(error)[:200]}"
        ) from error
    if logits.shape != (len(ids), inner.config.get_text_config(decoder=True).vocab_size):
        raise CheckpointError(
            f"{type(inner).__name__} of transformers gives logits of the shape {tuple(logits.shape)} for a text of "
            f"{len(ids)} tokens, which is not one row for each token."
        )
    return logits


def _check_causal(inner: Any, ids: torch.Tensor, wanted: torch.Tensor) -> None:
    """Check that a token's logits do not depend on the tokens behind it. Raises CheckpointError where they do."""
    part = len(ids) // 2
    if _error(_whole(inner, ids[:part]), wanted[:part], inner.dtype) <= 1:
        return
    raise CheckpointError(
        f"{type(inner).__name__} of transformers attends in both directions, or draws at random: the logits of a "
        "text's first tokens change with the tokens behind them. Only causal models continue text."
    )


def _check_attention(ctx: BuildContext, inner: Any, ids: torch.Tensor, wanted: torch.Tensor) -> None:
    """Check that the class gives the same result with the library's usual attention. Raises CheckpointError where it
    does not.
    """
    usual = usual_attention(inner)
    if inner.config._attn_implementation == usual or not inner._can_set_attn_implementation():
        return
    set_attention(inner, usual)
    other = _whole(inner, ids)
    set_attention(inner, EAGER)
    if _error(other, wanted, ctx.dtype) > _TWO_FORMULAS:
        raise CheckpointError(
            f"{type(inner).__name__} of transformers computes something else with its eager attention than with "
            f"{usual}: one of them is wrong.",
            "It would answer with other tokens than transformers does, so it is not served.",
        )


def _check_next(inner: Any, ids: torch.Tensor) -> None:
    """Check that the class predicts the token behind the text. Raises CheckpointError where it predicts one in place of
    a mask.
    """
    given = ids.unsqueeze(0)
    try:
        prepared = inner.prepare_inputs_for_generation(given)
    except Exception:  # a class without generation: it is called as it is
        return
    asked = prepared.get("input_ids") if isinstance(prepared, dict) else None
    if isinstance(asked, torch.Tensor) and asked.shape[-1] > given.shape[-1]:
        raise CheckpointError(
            f"{type(inner).__name__} of transformers predicts a token in the place of a mask that it puts behind the "
            "text. Ferrule serves models that continue text."
        )


def _error(given: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> float:
    """Return how far logits are off for the model's type: 1 is as far as is allowed.

    Distances are relative to the logits' size. In float32 the largest of all tokens counts; in narrower types the
    median, because there a rounding may send a token to another expert, which changes it by much and the others by
    little.
    """
    distance = (given.float() - wanted).norm(dim=-1) / (wanted.norm(dim=-1) + 1e-9)
    if not bool(torch.isfinite(distance).all()):
        return float("inf")
    return float(distance.max() / _EXACT if dtype == torch.float32 else distance.median() / _ROUNDED)

"""Turns the stream of dialogues into batches of tokens."""

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

import torch
from jinja2 import Template
from tokenizers import Tokenizer

from tools.tiny import chat, dialogues

IGNORE = -100  # label of a position without loss


class Batch(NamedTuple):
    """Rows padded on the right; ``labels[i]`` is the token that position ``i`` has to predict, or IGNORE."""

    ids: torch.Tensor  # int64 [rows, length]
    labels: torch.Tensor  # int64 [rows, length]


Row = tuple[list[int], int]  # tokens of prompt and completion, length of the prompt


def encode(dialogue: dialogues.Dialogue, tokenizer: Tokenizer, template: Template) -> Row:
    prompt = tokenizer.encode(chat.prompt_of(dialogue, template)).ids
    completion = tokenizer.encode(chat.completion_of(dialogue) + chat.END).ids
    return prompt + completion, len(prompt)


def pack(rows: list[Row]) -> Batch:
    """Make one batch of ``rows``; the length is rounded up to 8 so that few shapes occur."""
    length = -(-max(len(ids) for ids, _ in rows) // 8) * 8
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    labels = torch.full((len(rows), length), IGNORE, dtype=torch.int64)
    for i, (tokens, prompt) in enumerate(rows):
        ids[i, : len(tokens)] = torch.tensor(tokens)
        labels[i, prompt - 1 : len(tokens) - 1] = torch.tensor(tokens[prompt:])
    return Batch(ids, labels)


def batches(
    source: Iterator[dialogues.Dialogue], seed: str, tokenizer: Tokenizer, *, tokens: int, limit: int = 1024
) -> Iterator[Batch]:
    """Yield endless batches of about ``tokens`` positions from ``source``; rows of one batch have about the same
    length.

    Dialogues are sorted by length within pools of 3000 and the batches of a pool are shuffled by ``seed``.
    """
    template = chat.load_template()
    rng = Random(f"order {seed}")
    while True:
        pool = [encode(next(source), tokenizer, template) for _ in range(3000)]
        pool = sorted((row for row in pool if len(row[0]) <= limit), key=lambda row: len(row[0]))
        made: list[Batch] = []
        while pool:
            rows = [pool.pop()]
            fits = max(1, tokens // len(rows[0][0]))
            rows += [pool.pop() for _ in range(min(fits - 1, len(pool)))]
            made.append(pack(rows))
        rng.shuffle(made)
        yield from made


def padded(rows: list[Row], tokens: int) -> Iterator[tuple[list[int], Batch]]:
    """Yield all ``rows`` once, in batches of about ``tokens``, each with the indices of its rows."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    while order:
        size = max(1, tokens // len(rows[order[-1]][0]))
        chosen = order[-size:]
        del order[-size:]
        yield chosen, pack([rows[i] for i in chosen])

"""Forms of markup, parts of which may be special tokens of the model."""

from __future__ import annotations

from itertools import groupby

from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.types import Anything, Fixed, Form, OneOf, Series, SpecialToken, Until


def markup(text: str, tokenizer: Tokenizer | None) -> Form:
    """Exactly this text of a format. What is a special token of the model is that token, and no other spelling."""
    if tokenizer is None or not text:
        return Fixed(text)
    special = tokenizer.all_special_ids
    parts: list[Form] = []
    for is_special, ids in groupby(tokenizer.encode(text, add_special_tokens=False), special.__contains__):
        if is_special:
            parts += [SpecialToken(id) for id in ids]
        else:
            parts.append(Fixed(tokenizer.decode(list(ids), skip_special_tokens=False)))
    if all(isinstance(part, Fixed) for part in parts):
        return Fixed(text)
    return parts[0] if len(parts) == 1 else Series(tuple(parts))


def until(stops: tuple[str, ...], tokenizer: Tokenizer | None) -> Form:
    """Any text up to the first of these texts of a format, which is included.

    One that has a special token begins with it.
    """
    plain: list[str] = []
    options: list[Form] = []
    for stop in stops:
        form = markup(stop, tokenizer)
        if isinstance(form, Fixed):
            plain.append(stop)
        else:
            options.append(Series((Anything(), form)))
    if plain:
        options.append(Until(plain[0], tuple(plain[1:])))
    return options[0] if len(options) == 1 else OneOf(tuple(options))

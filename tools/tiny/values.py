"""Draws the values that dialogues talk about: invented words, names, numbers, mails, dates."""

import string
from collections.abc import Callable
from random import Random

from tools.tiny import words

Value = str | int


def pseudo_word(rng: Random) -> str:
    """Draw a lower-case word that is (almost always) new; mostly pronounceable, sometimes plain letters."""
    if rng.random() < 0.2:
        return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8)))
    return "".join(rng.choices(words.SYLLABLES, k=rng.choice((2, 2, 3, 3, 4))))


def noun(rng: Random) -> str:
    return rng.choice(words.NOUNS) if rng.random() < 0.5 else pseudo_word(rng)


def city(rng: Random) -> str:
    return rng.choice(words.CITIES) if rng.random() < 0.6 else pseudo_word(rng).capitalize()


def first_name(rng: Random) -> str:
    return rng.choice(words.FIRST_NAMES) if rng.random() < 0.6 else pseudo_word(rng).capitalize()


def full_name(rng: Random) -> str:
    last = rng.choice(words.LAST_NAMES) if rng.random() < 0.6 else pseudo_word(rng).capitalize()
    return f"{first_name(rng)} {last}"


def email(rng: Random) -> str:
    user = first_name(rng).lower()
    if rng.random() < 0.5:
        user += rng.choice(("", ".", "_")) + rng.choice((rng.choice(words.LAST_NAMES).lower(), str(rng.randint(1, 99))))
    host = rng.choice(("example", "mail", "post", "web", pseudo_word(rng)))
    return f"{user}@{host}.{rng.choice(('com', 'org', 'net', 'io'))}"


def identifier(rng: Random) -> str:
    """Draw an identifier as shops and trackers write it, e.g. ``AB-1234``, ``x17`` or plain digits."""
    digits = "".join(rng.choices(string.digits, k=rng.randint(2, 5)))
    letters = "".join(rng.choices(string.ascii_uppercase, k=rng.randint(1, 3)))
    return rng.choice((digits, letters + digits, f"{letters}-{digits}", letters.lower() + digits))


def date(rng: Random) -> str:
    return f"{rng.randint(1990, 2035)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def clock(rng: Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"


def integer(rng: Random) -> int:
    return rng.randint(0, 10 ** rng.choice((1, 2, 2, 3, 4)))


def phrase(rng: Random) -> str:
    """Draw two to four words, known and new ones mixed."""
    pool = (lambda: rng.choice(words.NOUNS), lambda: pseudo_word(rng), lambda: rng.choice(words.COLORS))
    return " ".join(rng.choice(pool)() for _ in range(rng.randint(2, 4)))


def phone(rng: Random) -> str:
    return f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}"


def draw(rng: Random, kind: str) -> Value:
    """Draw one value of ``kind``. Raises ``KeyError`` for a kind that does not exist."""
    makers: dict[str, Callable[[Random], Value]] = {
        "city": city, "first": first_name, "person": full_name, "email": email, "id": identifier, "date": date,
        "time": clock, "int": integer, "phrase": phrase, "word": pseudo_word, "noun": noun, "phone": phone,
        "small": lambda r: r.randint(1, 99), "code": lambda r: str(r.randint(10, 99999)),
    }  # fmt: skip
    lists = {
        "product": words.PRODUCTS, "job": words.JOBS, "color": words.COLORS, "language": words.LANGUAGES,
        "currency": words.CURRENCIES, "topic": words.TOPICS, "genre": words.GENRES,
    }  # fmt: skip
    if kind in makers:
        return makers[kind](rng)
    # A closed list would be learnt by heart; now and then a new word keeps the model copying.
    return rng.choice(lists[kind]) if rng.random() < 0.8 else pseudo_word(rng)

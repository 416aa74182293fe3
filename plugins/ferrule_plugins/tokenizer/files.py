"""What a tokenizer's folder says beside its vocabulary: special tokens and chat templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ferrule.errors import CheckpointError
from ferrule.small_files import read_json, read_small

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_TEMPLATE_BYTES = 1 << 20
_MOST_DIGITS = 9  # of a token's number


def read_settings(folder: Path) -> dict[str, Any]:
    """Read ``tokenizer_config.json``, completed by the older ``special_tokens_map.json``; empty when there is
    neither.
    """
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            settings |= {key: value for key, value in read_json(folder / name).items() if value is not None}
    return settings


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return bos_token, eos_token … as templates see them; a token is written as a string or as an object."""
    found = {}
    named = settings.get("extra_special_tokens") or settings.get("model_specific_special_tokens")
    for role, value in [*((role, settings.get(role)) for role in ROLES), *_items(named)]:
        content = token_content(value)
        if content is not None:
            found[role] = content
    return found


def extra_special_tokens(settings: Mapping[str, Any]) -> list[str]:
    """Return the special tokens without a role."""
    found = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        values = settings.get(key)
        if isinstance(values, list):
            found += [content for value in values if (content := token_content(value)) is not None]
    return found


def token_content(value: Any) -> str | None:
    """Return the text of a token that is a string or an object, or None. Raises CheckpointError for a string that is
    not Unicode text.
    """
    if isinstance(value, Mapping):
        value = value.get("content")
    if not isinstance(value, str) or not value:
        return None
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can write half of a pair of surrogates
        raise CheckpointError(f"tokenizer_config.json: the token {value!r:.80} is not Unicode text.") from None
    return value


def added_tokens(settings: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Return the tokens of ``added_tokens_decoder`` by their numbers, the least first. Raises CheckpointError for other
    data.
    """
    found = settings.get("added_tokens_decoder") or {}
    if not isinstance(found, Mapping) or not all(
        key.isdecimal() and len(key) <= _MOST_DIGITS and isinstance(value, Mapping) for key, value in found.items()
    ):
        raise CheckpointError("tokenizer_config.json: added_tokens_decoder is not tokens by their numbers.")
    return dict(sorted((int(key), value) for key, value in found.items()))


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Make a CheckpointError of a panic in a library that is written in Rust, which damaged files cause.

    Its class is not an Exception, and no module exports it: handlers of errors would let it pass.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise CheckpointError(
                f"The tokenizer's files are damaged: its library stops with {error!s:.200}."
            ) from None
        raise


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, Mapping) else []


def chat_templates(folder: Path, settings: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the folder's chat template, or its named ones.

    Files win over ``tokenizer_config.json``: ``chat_template.jinja`` and ``additional_chat_templates/NAME.jinja``, then
    ``chat_template.json``.
    """
    named: dict[str, str] = {}
    stated = settings.get("chat_template")
    if isinstance(stated, str):
        named["default"] = stated
    elif isinstance(stated, list):
        named |= {
            entry["name"]: entry["template"]
            for entry in stated
            if isinstance(entry, Mapping)
            and isinstance(entry.get("name"), str)
            and isinstance(entry.get("template"), str)
        }
    elif isinstance(stated, Mapping):
        named |= {name: text for name, text in stated.items() if isinstance(text, str)}
    if (folder / "chat_template.json").is_file():
        text = read_json(folder / "chat_template.json").get("chat_template")
        if isinstance(text, str):
            named["default"] = text
    if (folder / "chat_template.jinja").is_file():
        named["default"] = read_template(folder / "chat_template.jinja")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[file.stem] = read_template(file)
    if not named:
        return None
    return named["default"] if list(named) == ["default"] else named


def read_template(file: Path) -> str:
    """Read a chat template from a file. Raises CheckpointError naming the file."""
    try:
        return read_small(file, _MAX_TEMPLATE_BYTES, "chat template").decode()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{file} is not UTF-8 text.") from None

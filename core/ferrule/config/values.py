"""Values of options: from what was written to the type of the field, or a ValueError that says what is wrong."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from ferrule.config.schema import Match, Spec
from ferrule.errors import nearest

_SIZE = re.compile(r"([+-]?)(\d+)(?:\.(\d+))?([kKmMgGtT]?)", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d{1,19}", re.ASCII)
SCALES: dict[str, int] = {"": 1} | {
    letter: base ** (power + 1)
    for letters, base in (("kmgt", 1000), ("KMGT", 1024))
    for power, letter in enumerate(letters)
}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_SHOWN = 80  # characters of a wrong value that an error repeats

Notice = Callable[[str], None]
T = TypeVar("T")


def human_size(text: str) -> int:
    """Read 1k = 1000, 1K = 1024, 25.6k = 25600; letters k, m, g, t. Raises ValueError."""
    found = _SIZE.fullmatch(text)
    if found is None or len(found[2]) > 19:
        raise ValueError("not a size")
    sign, whole, fraction, suffix = found[1], found[2], found[3] or "", found[4]
    if fraction and suffix.isupper():
        raise ValueError(f"a decimal size takes the suffix {suffix.lower()} (powers of 1000)")
    parts: int = 10 ** len(fraction)
    value, rest = divmod(int(whole + fraction) * SCALES[suffix], parts)
    if rest:
        raise ValueError("not a whole number")
    return -value if sign == "-" else value


def is_boolean(text: str) -> bool:
    return text.lower() in _BOOLEANS


def convert(spec: Spec, raw: Any) -> Any:
    """Return the field's value for a text, a list of texts, or a Python object of the right type; JSON objects: see
    `merge`.

    Raises ValueError; its text, where there is one, says what is valid.
    """
    if opens(spec, raw):
        return spec.default
    if not spec.many:
        return _checked(spec, _one(spec, raw))
    if spec.option.json and isinstance(raw, str):
        raw = _decode(raw)
    elif isinstance(raw, (str, os.PathLike)):
        raw = [raw]
    if not isinstance(raw, (list, tuple)):
        raise ValueError
    return tuple(_checked(spec, _one(spec, item)) for item in raw)


def opens(spec: Spec, raw: Any) -> bool:
    """Return whether a value says that the option is left at its default."""
    if isinstance(raw, list) and len(raw) == 1:
        raw = raw[0]
    return str(raw) in spec.option.opens or (spec.optional and str(raw) == "None")


def problem(spec: Spec, label: str, raw: Any, why: str) -> str:
    """Return one sentence that names the option, the value and what is valid."""
    shown = "the value" if spec.option.secret else _show(raw)
    choices = nearest(str(raw), (str(c) for c in spec.option.choices))
    reason = f": {why}" if why else ""
    return f"{label}: {shown} is not valid{reason}; expected {spec.expects}.{choices}"


def merge(old: Any, match: Match, raw: Any, notice: Notice) -> dict[str, Any]:
    """Return `old` with a JSON text merged in, or with the value of one dotted key.

    A later key wins, and `notice` hears of it. Raises ValueError.
    """
    result: dict[str, Any] = _copy(old)
    if not match.path:
        _update(result, _as_json(match.spec, raw, notice), (), notice)
        return _sendable(result)
    inner: Any = result
    for depth, key in enumerate(match.path[:-1], 1):
        inner = inner.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{'.'.join(match.path[:depth])} is {_show(inner)}, not an object")
    key = match.path[-1]
    value = loose(raw) if isinstance(raw, str) else _plain(raw)
    if match.append:
        items = inner.setdefault(key, [])
        if not isinstance(items, list):
            raise ValueError(f"{'.'.join(match.path)} is {_show(items)}, not a list")
        if isinstance(value, list):
            items.extend(value)
        else:
            items.extend(loose(part) for part in str(raw).split(","))
    else:
        _update(inner, {key: value}, match.path[:-1], notice)
    return _sendable(result)


def entry(spec: Spec, text: str) -> tuple[tuple[str, ...], Any]:
    """Return (path, value) of one entry of a JSON object, KEY=JSON; the path is empty for the text of a whole object.

    Raises ValueError.
    """
    if opens(spec, text) or text.lstrip().startswith("{"):
        return (), text
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ValueError
    return (key.strip(),), _decode(value)


def loose(text: str) -> Any:
    """Return a dotted key's value: JSON if the text is that, else a size such as 80g, else the text."""
    for read in (_decode, human_size):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _one(spec: Spec, raw: Any) -> bool | int | float | str:
    if spec.base is str:
        if spec.option.objects and isinstance(raw, dict):
            raw = json.dumps(_plain(raw))
        if not isinstance(raw, (str, os.PathLike)):
            raise ValueError
        text = _sendable(str(os.fspath(raw)))
        return text.lower() if spec.option.lower else text
    if spec.base is bool:
        if isinstance(raw, str) and is_boolean(raw):
            return _BOOLEANS[raw.lower()]
        if isinstance(raw, bool):
            return raw
        raise ValueError
    if isinstance(raw, bool) or not isinstance(raw, (str, int, float)):
        raise ValueError
    return _whole(spec, raw) if spec.base is int else _number(raw)


def _whole(spec: Spec, raw: str | int | float) -> int:
    if isinstance(raw, str):
        if spec.option.human:
            value = human_size(raw)
        elif _WHOLE.fullmatch(raw):
            value = int(raw)
        else:
            raise ValueError
    elif isinstance(raw, int):
        value = raw
    else:
        raise ValueError
    if not -(2**63) <= value < 2**63:
        raise ValueError("too large")
    return value


def _number(raw: str | int | float) -> float:
    try:
        value = float(raw)
    except (ValueError, OverflowError):
        raise ValueError from None
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    return value


def _sendable(value: T) -> T:
    """Return a copy of the value, if a message between processes can carry it. Raises ValueError."""
    value = _copy(value)
    try:
        msgspec.msgpack.encode(value)
    except UnicodeEncodeError:
        raise ValueError("not Unicode text") from None
    except OverflowError:
        raise ValueError("a number is too large") from None
    return value


def _checked(spec: Spec, value: Any) -> Any:
    option = spec.option
    if option.choices and value not in option.choices:
        raise ValueError
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low = option.ge is None or value >= option.ge
        above = option.gt is None or value > option.gt
        if not (low and above and (option.le is None or value <= option.le)):
            raise ValueError
    return value


def _decode(text: str, notice: Notice | None = None) -> Any:
    """Read strict JSON, without NaN. Raises ValueError."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    def checked(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if notice is not None and len(result) < len(items):
            names = sorted({key for key, _ in items if sum(key == other for other, _ in items) > 1})
            notice(f"key {', '.join(names)} is given twice; the last one counts")
        return result

    try:
        return json.loads(text, parse_constant=refuse, parse_float=_number, object_pairs_hook=checked)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON, {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _as_json(spec: Spec, raw: Any, notice: Notice) -> dict[str, Any]:
    """Return a JSON object from its text or short form, or from an object of plain values. Raises ValueError."""
    if spec.option.key_values and isinstance(raw, str) and "=" in raw and "{" not in raw:
        return {key.strip(): loose(text.strip()) for key, _, text in (part.partition("=") for part in raw.split(","))}
    value = _decode(raw, notice) if isinstance(raw, str) else _plain(raw)
    if spec.option.scalar and type(value) is int:
        return {spec.option.scalar: _checked(spec, value)}
    if not isinstance(value, dict):
        raise ValueError
    return value


def _plain(value: Any) -> Any:
    """Return the value as JSON would carry it, with texts as keys. Raises ValueError."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ValueError("it holds a value that JSON does not have") from None
    return _decode(text)


def _copy(value: Any, levels: int = 64) -> Any:
    """Copy a value of at most so many levels of objects and lists: Python's own limit differs between releases.

    Raises ValueError.
    """
    if isinstance(value, (dict, list)) and not levels:
        raise ValueError("nested too deeply")
    if isinstance(value, dict):
        return {key: _copy(inner, levels - 1) for key, inner in value.items()}
    return [_copy(inner, levels - 1) for inner in value] if isinstance(value, list) else value


def _update(into: dict[str, Any], new: dict[str, Any], path: Iterable[str], notice: Notice) -> None:
    for key, value in new.items():
        old = into.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            _update(old, value, (*path, key), notice)
            continue
        if key in into and old != value:
            notice(f"key {'.'.join((*path, key))} is given twice; the last one counts")
        into[key] = value


def _show(raw: Any) -> str:
    text = repr(raw)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"

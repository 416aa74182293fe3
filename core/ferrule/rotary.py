"""Rotary settings of a ``config.json``: its forms made one, and overrides of them applied in the form that it has.

Files of transformers 5 have ``rope_parameters``, one object or one for each type of layer. Older ones have the base in
``rope_theta``, the scaling in ``rope_scaling`` and the share of a head that turns in ``partial_rotary_factor``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ferrule.errors import CheckpointError

_THETA, _SHARE, _ORIGINAL = "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"
_LOCAL = "rope_local_base_freq"  # the base of layers with a window, in files without an entry for them
_SCALING, _PARAMETERS = "rope_scaling", "rope_parameters"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_BESIDE = {  # numbers that files also have beside the object, under these names
    _THETA: (_THETA, "rotary_emb_base"),
    _SHARE: (_SHARE, "rotary_pct"),
    _ORIGINAL: (_ORIGINAL,),
}
_TYPES = {"su": "longrope", "mrope": "default"}  # older names of a rope type
_SCALES = ("factor", "short_factor", "long_factor")  # of which the type `default` uses none
_WITH_ORIGINAL = ("llama3", "yarn", "longrope")
_KNOWN = (
    *("rope_type", "type", _THETA, _SHARE, _ORIGINAL, *_SCALES, "attention_factor", "beta_fast", "beta_slow"),
    *("low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim", "truncate", "alpha", "llama_4_scaling_beta"),
    *("short_mscale", "long_mscale", "mrope_section", "mrope_interleaved"),  # mrope: of images; texts have one position
)
_MISSPELLED = 0.85  # how alike a key and one that has an effect are
KEYS = frozenset({*_BESIDE, _LOCAL, _SCALING, _PARAMETERS})


def override(part: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Change those settings of a part of ``config.json`` that `changes` has; the others stay.

    A scaling that names its type takes the place of the file's; one that does not is merged into it, and null removes
    it. The base and the share belong to no scaling: they stay unless they are given. Where each type of layer has an
    entry, what is meant for none is for the layers with full attention.
    """
    for form in (_SCALING, _PARAMETERS):
        if form in changes:
            _rescale(part, form, changes[form])
    for key in _BESIDE:
        if key in changes:
            _set(part, key, changes[key])
    if _LOCAL in changes:
        entry = _layers(part.get(_PARAMETERS)).get(_SLIDING)
        if entry is not None:
            entry[_THETA] = changes[_LOCAL]
        if entry is None or _LOCAL in part:
            part[_LOCAL] = changes[_LOCAL]


def _rescale(part: dict[str, Any], form: str, new: Any) -> None:
    """Put a new scaling where the file has one."""
    form = _PARAMETERS if part.get(_PARAMETERS) else form
    old: dict[str, Any] = {}
    for name in (_SCALING, _PARAMETERS):
        stated = part.pop(name, None)
        old |= stated if isinstance(stated, dict) else {}
    part[form] = new if new is not None and not isinstance(new, Mapping) else _rescaled(old, new or {})
    for key, spellings in _BESIDE.items():
        for name in spellings:
            if isinstance(new, Mapping) and key in new and part.get(name) is not None:
                part[name] = new[key]


def _rescaled(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    before = _layers(old)
    if _layers(new):
        return {**before, **{kind: _rescaled(before.get(kind, {}), each) for kind, each in _layers(new).items()}}
    if before:
        return {**before, **{kind: _rescaled(before[kind], new) for kind in _meant(before)}}
    if new and "rope_type" not in new and "type" not in new:
        return {**old, **new}
    kept = {key: old[key] for key in (_THETA, _SHARE) if key in old}
    return {**kept, **(new or {"rope_type": "default"})}


def _set(part: dict[str, Any], key: str, value: Any) -> None:
    """Put a number in every place where the file has one; beside the object, where it has none."""
    places = [(part, name) for name in _BESIDE[key] if part.get(name) is not None]
    for form in (_SCALING, _PARAMETERS):
        stated = part.get(form)
        if not isinstance(stated, dict) or not stated:
            continue
        layers = _layers(stated)
        entries = [layers[kind] for kind in _meant(layers)] if layers else [stated]
        places += [(entry, key) for entry in entries if form == _PARAMETERS or key in entry]
    for place, name in places or [(part, key)]:
        place[name] = value


def _layers(stated: Any) -> dict[str, Any]:
    """Return the entries for types of layers, of settings that have such entries."""
    items = stated.items() if isinstance(stated, Mapping) else ()
    return {kind: entry for kind, entry in items if isinstance(entry, Mapping)}


def _meant(layers: Mapping[str, Any]) -> list[str]:
    """Return the types of layers that a setting for no type in particular applies to."""
    return [_FULL] if _FULL in layers else list(layers)


# ------------------------------------------------------------------------------------------------ one form


def unify(values: dict[str, Any], file: Path) -> tuple[str, ...]:
    """Move all rotary settings of a file into ``rope_parameters``, and return what should be said of them.

    Nothing is added: what the file does not state stays unset, because defaults differ between architectures. Raises
    CheckpointError for numbers that cannot be, for two that contradict each other, and for a misspelled key.
    """
    older, newer = (_object(values.get(form), form, file) for form in (_SCALING, _PARAMETERS))
    theta = values.pop(_THETA, None)
    values.pop(_SCALING, None)
    if not older and not newer and theta is None:
        return ()
    layers, notes = _layers(newer or older), []
    if layers:
        entries = {kind: dict(entry) for kind, entry in layers.items()}
        if newer and older:
            for kind in _meant(layers):
                entries[kind] = _union(entries[kind], _layers(older).get(kind, older), file)
        for kind in _meant(layers):
            _check_same(file, _THETA, theta, entries[kind].get(_THETA))
        values[_PARAMETERS] = {kind: _rope(values, entry, theta, file) for kind, entry in entries.items()}
        notes += [note for entry in entries.values() for note in _unread(entry, file)]
    else:
        stated = _union(newer, older, file)
        for key, other in ((_THETA, theta), (_SHARE, values.get(_SHARE)), (_ORIGINAL, values.get(_ORIGINAL))):
            _check_same(file, key, other, stated.get(key))
        values[_PARAMETERS] = _rope(values, stated, theta, file)
        notes += _unread(stated, file)
    return tuple(dict.fromkeys(notes))


def _object(stated: Any, form: str, file: Path) -> dict[str, Any]:
    if stated is not None and not isinstance(stated, Mapping):
        raise CheckpointError(f"{file}: {form!r} must be an object, not {stated!r:.80}.")
    return dict(stated or {})


def _union(newer: Mapping[str, Any], older: Mapping[str, Any], file: Path) -> dict[str, Any]:
    both = [_typed(each, file) for each in (newer, older)]
    for key in both[0].keys() & both[1].keys():
        if both[0][key] != both[1][key]:
            raise _contradiction(file, f"{_SCALING!r} has {key!r} {both[1][key]!r:.80}", both[0][key], _SCALING)
    return {**both[1], **both[0]}


def _typed(stated: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the settings with the type, where there is one, under its newer key and name."""
    rope = {key: value for key, value in stated.items() if key != "type"}
    name = rope.get("rope_type", stated.get("type"))
    if name is None:
        rope.pop("rope_type", None)
        return rope
    if not isinstance(name, str):
        raise CheckpointError(f"{file}: 'rope_type' must be a name, not {name!r:.80}.")
    return {**rope, "rope_type": _TYPES.get(name, name)}


def _check_same(file: Path, key: str, beside: Any, inside: Any) -> None:
    if beside is not None and inside is not None and beside != inside:
        raise _contradiction(file, f"{key!r} is {beside!r:.80}", inside, key)


def _contradiction(file: Path, older: str, newer: Any, key: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: {older}, and {_PARAMETERS!r} has {newer!r:.80}: they contradict each other.",
        f"Say which is right with --hf-overrides.{key}.",
    )


def _rope(values: Mapping[str, Any], stated: Mapping[str, Any], theta: Any, file: Path) -> dict[str, Any]:
    rope = _typed(stated, file)
    typed = "rope_type" in rope
    kind = rope.setdefault("rope_type", "default")
    if kind == "default":
        for key in _SCALES:
            if rope.get(key) not in (None, 1):
                named = "the type 'default', which has no scaling" if typed else "no 'rope_type'"
                raise CheckpointError(
                    f"{file}: the rotary settings have {key!r} {rope[key]!r:.40} and {named}.",
                    "Name the kind of scaling with --hf-overrides.rope_parameters.rope_type.",
                )
    if theta is not None:
        rope.setdefault(_THETA, theta)
    if values.get(_SHARE) is not None:
        rope.setdefault(_SHARE, values[_SHARE])
    if kind in _WITH_ORIGINAL:
        length = values.get(_ORIGINAL) or rope.get(_ORIGINAL)
        rope[_ORIGINAL] = length or values.get("max_position_embeddings")
    for key in (_THETA, "factor", _ORIGINAL, _SHARE):
        number = rope.get(key)
        if number is not None and not is_positive(number):
            raise CheckpointError(f"{file}: {key!r} must be a positive number, not {number!r:.40}.")
    return rope


def linear_factor(config: Mapping[str, Any]) -> float | None:
    """Return the factor that a configuration has rotary positions divided by, 1.0 where it states none.

    None: they are scaled in another way, or differently by layer.
    """
    rope = config.get(_PARAMETERS) or {}
    kind, factor = rope.get("rope_type", "default"), float(rope.get("factor") or 1.0)
    return factor if kind in {"default", "linear"} and not _layers(rope) else None


def _unread(stated: Mapping[str, Any], file: Path) -> Iterator[str]:
    """Yield sentences about keys that nothing reads. Raises CheckpointError for a key that is a misspelling of one that
    is read.
    """
    for key in sorted(stated.keys() - set(_KNOWN)):
        close = get_close_matches(key, _KNOWN, n=1, cutoff=_MISSPELLED)
        if close:
            raise CheckpointError(f"{file}: the rotary settings have {key!r:.80}. Did you mean {close[0]!r}?")
        yield f"the rotary settings have {key!r:.80}, which nothing reads"


def is_positive(number: Any) -> bool:
    """Return whether a value is a finite number above zero."""
    real = isinstance(number, (int, float)) and not isinstance(number, bool)
    return real and math.isfinite(number) and number > 0

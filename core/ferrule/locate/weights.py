"""Which weight files of a repository are fetched: those of one form, as many repositories have weights in several."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from ferrule.config import LoadConfig
from ferrule.interfaces.plugins import Plugins
from ferrule.locate import variants

_KIND = "load_format"
_OTHER_LAYOUTS = ("onnx/*", "*.onnx", "tf_*", "flax_*")  # of the same weights
_ADAPTERS = ("adapter_*", "*/adapter_*")
_TRAINING = ("training_args.bin", "optimizer*", "scheduler.pt", "rng_state*")


@dataclass(frozen=True)
class Form:
    """A form of weights that a load format reads: patterns of its files, and what the format states beside."""

    patterns: tuple[str, ...]
    left_out: tuple[str, ...]  # patterns of files that other formats reserve
    describes: bool

    def found(self, names: Sequence[str]) -> bool:
        """Return whether one of the files has this form. Adapters are weights, but not a model's."""
        skipped = (each for each in (*_OTHER_LAYOUTS, *_TRAINING, *_ADAPTERS) if each not in self.patterns)
        candidates = without(names, (*skipped, *self.left_out))
        return len(without(candidates, self.patterns)) < len(candidates)


@dataclass(frozen=True)
class WeightFiles:
    """The files that are fetched for a load format: those of the first of its `forms` that a repository has.

    Files that match a pattern of `ignored` are not downloaded, whatever is chosen.
    """

    forms: tuple[Form, ...]
    ignored: tuple[str, ...]
    left_out: tuple[str, ...]  # where no form is found: what other formats reserve
    streams_from: tuple[str, ...]  # how names begin of models whose weights are not fetched

    @classmethod
    def of(cls, section: LoadConfig, plugins: Plugins) -> WeightFiles:
        """Read what the named format states, or all that `auto` may choose. Raises PluginError for a named one that
        cannot be imported."""
        known = plugins.defaults(_KIND)
        names: tuple[str, ...] = (section.load_format,)
        if section.load_format == "auto":
            names = tuple(sorted(known, key=lambda name: plugins.stated(_KIND, name, "fetch_order") or 0))
        else:
            plugins.load(_KIND, section.load_format)
        reserved = {name: _texts(plugins.stated(_KIND, name, "reserves")) for name in (*known, *names)}
        forms: list[Form] = []
        for name in names:
            describes = plugins.stated(_KIND, name, "describes") is True
            others = tuple(each for other, patterns in reserved.items() if other != name for each in patterns)
            stated = plugins.stated(_KIND, name, "forms")
            if stated is None and section.load_format != "auto":
                forms.append(Form(("*",), (), describes))
            forms += (Form(_texts(form), others, describes) for form in stated or ())
        wanted = {pattern for form in forms for pattern in form.patterns}
        skipped = (pattern for pattern in (*_OTHER_LAYOUTS, *_TRAINING, *variants.SKIPPED) if pattern not in wanted)
        streamed = _texts(plugins.stated(_KIND, section.load_format, "streams_from"))
        left = tuple(each for name, patterns in reserved.items() if (name,) != names for each in patterns)
        return cls(tuple(dict.fromkeys(forms)), (*section.ignore_patterns, *skipped), left, streamed)

    def describes(self, names: Sequence[str]) -> bool:
        """Return whether the weights that are chosen among `names` may say what a ``config.json`` says."""
        form = self._first(without(names, self.ignored))
        return form is not None and form.describes

    def patterns(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the patterns of the weight files to fetch among `names`. Raises CheckpointError for a repository with
        several models.
        """
        names = without(names, self.ignored)
        form = self._first(names)
        if form is not None:
            return variants.only(names) if form.patterns == variants.FORM else form.patterns
        return tuple(dict.fromkeys(pattern for each in self._candidates(names) for pattern in each.patterns))

    def beside(self, others: Sequence[str], model: str, names: Sequence[str]) -> tuple[str, ...]:
        """Return patterns of the weights and `others`, without files that a format reserves which is not the chosen
        one.

        A pattern cannot leave out what another one matches: where a repository has such files, names take its place.
        Weights that are read from the store where `model` is are not fetched.
        """
        wanted = () if model.startswith(self.streams_from) else self.patterns(names)
        form = self._first(without(names, self.ignored))
        kept = without(names, self.left_out if form is None else form.left_out)
        if len(kept) == len(names):
            return (*others, *wanted)
        return tuple(glob.escape(name) for name in kept if any(fnmatch(name, each) for each in (*others, *wanted)))

    def _first(self, names: Sequence[str]) -> Form | None:
        return next((form for form in self._candidates(names) if form.found(names)), None)

    def _candidates(self, names: Sequence[str]) -> Iterator[Form]:
        """Go through the forms. Files that are several models come with others of the same model beside a
        ``config.json``: they are fetched where that is missing, or where their format was named."""
        for form in self.forms:
            if form.patterns != variants.FORM or len(self.forms) == 1 or "config.json" not in names:
                yield form


def without(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that match none of the patterns."""
    return [name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)]


def _texts(stated: Any) -> tuple[str, ...]:
    """Return a pattern, or a tuple of them, as a tuple; nothing where a class states neither."""
    if isinstance(stated, str):
        return (stated,)
    return tuple(each for each in stated if isinstance(each, str)) if isinstance(stated, tuple | list) else ()

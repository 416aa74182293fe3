"""Which weight files of a repository are fetched: those of one format, as many repositories have weights in several."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from types import MappingProxyType

from ferrule.config import LoadConfig
from ferrule.errors import PluginError
from ferrule.interfaces.load_format import WeightSource
from ferrule.interfaces.plugins import Plugins
from ferrule.locate import variants

# Weight files by their form, and the forms among which each built-in load format takes the first that there is.
_FORMS = MappingProxyType(
    {
        "safetensors": ("*.safetensors",),
        "pt": ("*.bin", "*.pt"),
        "mistral": ("consolidated*.safetensors",),
        "tensorizer": ("*.tensors",),
    }
)
_READS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "auto": tuple(_FORMS),
        **dict.fromkeys(("hf", "bitsandbytes"), ("safetensors", "pt")),
        **dict.fromkeys(("safetensors", "fastsafetensors", "runai_streamer"), ("safetensors",)),
        **dict.fromkeys(("sharded_state", "runai_streamer_sharded"), ("safetensors",)),
        **dict.fromkeys(("pt", "npcache"), ("pt",)),
        "mistral": ("mistral",),
        "tensorizer": ("tensorizer",),
        "dummy": (),
    }
)
_STREAMED = {"runai_streamer": ("s3://",)}  # formats that read weights from a store, and how names of its models begin
_MISTRAL = "consolidated*"  # what other formats leave out, although it looks like theirs
_OTHER_LAYOUTS = ("onnx/*", "*.onnx", "tf_*", "flax_*")  # of the same weights
_ADAPTERS = ("adapter_*", "*/adapter_*")
_TRAINING = ("training_args.bin", "optimizer*", "scheduler.pt", "rng_state*")


@dataclass(frozen=True)
class WeightFiles:
    """The files that a load format needs. `added` are formats of other packages that it is, or that `auto` may choose.

    Files that match a pattern of `ignored` are not downloaded, whatever is chosen.

    A format takes the first form that it reads of which the repository has a file, and `auto` without a
    ``config.json`` what describes itself. The built-in forms come first, as in the order in which `auto` asks.
    """

    load_format: str
    ignored: tuple[str, ...] = ()
    added: tuple[type[WeightSource], ...] = ()

    @classmethod
    def of(cls, section: LoadConfig, plugins: Plugins) -> WeightFiles:
        """Import the formats of other packages. Raises PluginError for one that was named and cannot be imported."""
        load_format, named = section.load_format, section.load_format != "auto"
        names = (load_format,) if named else plugins.defaults("load_format")
        added: list[type[WeightSource]] = []
        for name in (name for name in names if not plugins.is_builtin("load_format", name)):
            try:
                added.append(plugins.load("load_format", name))
            except PluginError:
                if named:
                    raise
                continue  # one of several; when weights are read, it is told why `auto` does not choose it
        wanted = {pattern for each in added for pattern in each.patterns}
        skipped = (pattern for pattern in (*_OTHER_LAYOUTS, *_TRAINING, *variants.SKIPPED) if pattern not in wanted)
        return cls(load_format, (*section.ignore_patterns, *skipped), tuple(added))

    @property
    def describe(self) -> bool:
        """Whether a format of another package may say what a ``config.json`` says."""
        return any(vars(base).get("describe") for cls in self.added for base in cls.__mro__ if base is not WeightSource)

    def patterns(self, names: Sequence[str]) -> tuple[str, ...]:
        """Of the weight files to fetch among `names`. Raises CheckpointError for a repository with several models."""
        names = without(names, self.ignored)
        builtin = not self.added or self.load_format == "auto"
        describes = self.load_format == "gguf" or (self.load_format == "auto" and "config.json" not in names)
        if builtin and describes and (self.load_format == "gguf" or variants.kinds(names)):
            return variants.only(names)
        reads = _READS[self.load_format] if builtin else ()
        candidates = without(names, (*_OTHER_LAYOUTS, *_TRAINING, *_ADAPTERS))
        for form in reads:
            own = candidates if form == "mistral" else without(candidates, (_MISTRAL,))
            if len(without(own, _FORMS[form])) < len(own):
                return _FORMS[form]
        for patterns in self._added_forms:
            if len(without(names, patterns)) < len(names):
                return patterns
        return tuple(
            pattern for patterns in (*map(_FORMS.get, reads), *self._added_forms) for pattern in patterns or ()
        )

    def beside(self, others: Sequence[str], model: str, names: Sequence[str]) -> tuple[str, ...]:
        """Patterns of the weights and `others`, without files of Mistral's form where the weights are of another.

        A pattern cannot leave out what another one matches: where a repository has both forms, names take its place.
        Weights that are read from the store where `model` is are not fetched.
        """
        wanted = () if model.startswith(_STREAMED.get(self.load_format, ())) else self.patterns(names)
        kept = without(names, (_MISTRAL,))
        if wanted in (_FORMS["mistral"], *self._added_forms) or len(kept) == len(names):
            return (*others, *wanted)
        return tuple(glob.escape(name) for name in kept if any(fnmatch(name, form) for form in (*others, *wanted)))

    @property
    def _added_forms(self) -> tuple[tuple[str, ...], ...]:
        """A format that says nothing of its files gets all of them, if it was named."""
        forms = (tuple(cls.patterns) or (() if self.load_format == "auto" else ("*",)) for cls in self.added)
        return tuple(form for form in forms if form)


def without(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The names that match none of the patterns."""
    return [name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)]

"""`--speculative-config`: which of its keys mean something to every method, and what becomes of the others.

Older options (`--num-speculative-tokens`, `--ngram-prompt-lookup-max` and their like) are keys of the same object, see
`ferrule.config.unsupported`. Keys that no method shares belong to the speculator, which states them
(`Speculator.own_settings`), so that a misspelt one is found before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from ferrule.config.sections import SpeculativeConfig
from ferrule.errors import ConfigError, nearest
from ferrule.plugin import Plugins

OPTION = "--speculative-config"
MAX_TOKENS = 64
FROM_MODEL = "auto"  # a method that the draft model's config.json decides, or keys that one method has
_USUAL_TOKENS = 5  # of a speculator that states no `usual_tokens`


class AcceptanceMethods:
    """Rules by which guesses are accepted, as they are documented."""

    EXACT = "rejection_sampler"
    TYPICAL = "typical_acceptance_sampler"
    ALL = (EXACT, TYPICAL)


@dataclass(frozen=True, kw_only=True)
class ResolvedSpeculative(SpeculativeConfig):
    """The settings of speculative decoding. `settings` are the keys that the speculator reads itself."""

    method: str = ""  # a plugin; "": nothing is guessed; "auto": what the draft model is for, until it was localised
    num_tokens: int = 0  # the most guesses for a request in a step; 0: the speculator's usual number
    max_model_len: int | None = None  # nothing is guessed for requests with more tokens
    disable_by_batch_size: int | None = None  # nothing is guessed while more requests than that run and wait
    adaptive: bool = True  # fewer are made where they cost more than they bring
    acceptance_method: str = AcceptanceMethods.EXACT
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def typical(self) -> tuple[float, float] | None:
        """Threshold and alpha of typical acceptance; None where guesses change no output."""
        if self.acceptance_method != AcceptanceMethods.TYPICAL:
            return None
        return self.posterior_threshold, self.posterior_alpha


def _whole(least: int, most: int) -> tuple[Callable[[Any], bool], str]:
    return lambda value: type(value) is int and least <= value <= most, f"a whole number from {least} to {most}"


def _share() -> tuple[Callable[[Any], bool], str]:
    return lambda value: type(value) in (int, float) and 0 <= value <= 1, "a number from 0 to 1"


_BOOLEAN = (lambda value: isinstance(value, bool), "true or false")
_TEXT = (lambda value: isinstance(value, str) and bool(value.strip()), "a text")
_COMMON: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "method": _TEXT,
        "num_speculative_tokens": _whole(1, MAX_TOKENS),
        "max_model_len": _whole(1, 1 << 27),
        "disable_by_batch_size": _whole(1, 1 << 20),
        "adaptive": _BOOLEAN,
        "acceptance_method": (
            lambda value: value in AcceptanceMethods.ALL,
            "one of: " + ", ".join(AcceptanceMethods.ALL),
        ),
        "posterior_threshold": _share(),
        "posterior_alpha": _share(),
        "draft_tensor_parallel_size": (lambda value: type(value) is int and value == 1, "1: there is one worker"),
        "disable_logprobs": _BOOLEAN,
        "disable_mqa_scorer": _BOOLEAN,
    }
)
_OF_A_MODEL = ("model", "revision", "code_revision", "quantization")  # keys of speculators that load one
_AS_GIVEN = (
    *("max_model_len", "disable_by_batch_size", "adaptive"),
    *("acceptance_method", "posterior_threshold", "posterior_alpha"),
)
_NEITHER = f"{OPTION} names neither a method nor a model: give one of the keys method and model."
_WITHOUT_EFFECT = MappingProxyType(
    {
        ("disable_logprobs", True): "logprobs come with guessed tokens as with others, and cost no more",
        ("disable_mqa_scorer", True): "there is one scorer, which computes all guesses of a request at once",
    }
)


def resolve_speculative(section: SpeculativeConfig, problems: list[str]) -> ResolvedSpeculative:
    """Read the object. What is wrong with it goes to `problems`, a line each."""
    given = {key: value for key, value in section.speculative_config.items() if value is not None}
    if not given:
        return ResolvedSpeculative(speculative_config=section.speculative_config)
    faults = [
        f"{OPTION}.{key}: {given[key]!r:.80} is not valid; expected {expected}."
        for key, (valid, expected) in _COMMON.items()
        if key in given and not valid(given[key])
    ]
    settings = {key: value for key, value in given.items() if key not in _COMMON}
    faults += [
        f"{OPTION}.{key}: {settings[key]!r:.80} is not valid; expected a text."
        for key in _OF_A_MODEL
        if key in settings and not (isinstance(settings[key], str) and settings[key].strip())
    ]
    model, method = settings.get("model"), given.get("method", "")
    if isinstance(model, str) and model and model[0] == "[" and model[-1] == "]":  # "[ngram]" in the place of a model
        if method not in ("", model[1:-1]):
            faults.append(
                f"{OPTION}: method is {method!r:.80}, and model {model!r:.80} names another one: leave one out."
            )
        method = model[1:-1]
        del settings["model"]
    if not (method or settings):
        faults.append(_NEITHER)
    problems += faults
    if faults:
        return ResolvedSpeculative(speculative_config=section.speculative_config)
    named = {key: given[key] for key in _AS_GIVEN if key in given}
    return ResolvedSpeculative(
        speculative_config=section.speculative_config,
        method=str(method or FROM_MODEL),
        num_tokens=given.get("num_speculative_tokens", 0),
        settings=settings,
        **named,
    )


def remarks_on(section: ResolvedSpeculative) -> list[str]:
    """Return sentences about keys that have no effect."""
    given = section.speculative_config
    return [
        f"{OPTION}.{key} is accepted without effect: {why}."
        for (key, value), why in _WITHOUT_EFFECT.items()
        if given.get(key) is value
    ]


def settled(section: ResolvedSpeculative, plugins: Plugins, described: Sequence[str] = ()) -> ResolvedSpeculative:
    """Return the section with the name of a plugin as its method, and that plugin's usual number of guesses where none
    was given. A method that is left to the draft model stays open as long as nothing is `described`: its `model_type`
    and architectures.

    Raises ConfigError for a method that does not exist, and for keys that the method does not know.
    """
    open_method = section.method == FROM_MODEL
    if not section.method or (open_method and "model" in section.settings and not described):
        return section
    own_keys = open_method and not described
    name = _owner_of(section.settings, plugins) if own_keys else _plugin_of(section, plugins, described)
    if plugins.offers("speculator", name) and not plugins.is_builtin("speculator", name):
        plugins.find("speculator", name)  # raises where it cannot be used
    known = tuple(plugins.stated("speculator", name, "own_settings") or ())
    faults = [
        f"{OPTION}: the method {name} has no {key!r:.80}; it has {', '.join((*known, *_COMMON))}."
        f"{nearest(key, (*known, *_COMMON))}"
        for key in section.settings
        if key not in known
    ]
    if faults:
        raise ConfigError("\n".join(faults))
    usual = plugins.stated("speculator", name, "usual_tokens")
    return replace(section, method=name, num_tokens=section.num_tokens or usual or _USUAL_TOKENS)


def _owner_of(settings: Mapping[str, Any], plugins: Plugins) -> str:
    """Return the one plugin that has all these keys, where neither method nor model is named. Raises ConfigError."""
    names = plugins.names("speculator")
    owners = [name for name in names if set(settings) <= set(plugins.stated("speculator", name, "own_settings") or ())]
    if len(owners) != 1:
        meant = "".join(nearest(key, ("method", "model")) for key in settings)
        raise ConfigError(_NEITHER + meant)
    return owners[0]


def _plugin_of(section: ResolvedSpeculative, plugins: Plugins, described: Sequence[str]) -> str:
    """Return the plugin of a method: by its name, or by what it states of models. Raises ConfigError."""
    names = plugins.names("speculator")
    if not described and (section.method in names or plugins.origin("speculator", section.method)):
        return section.method
    wanted = [each.lower() for each in described or (section.method,)]
    found = [
        (len(pattern), name)
        for name in names
        for pattern in plugins.stated("speculator", name, "model_types") or ()
        if (pattern != "*" or described) and any(fnmatchcase(each, pattern.lower()) for each in wanted)
    ]
    if found:
        return max(found)[1]
    if described:
        raise ConfigError(
            f"{OPTION}.model {section.settings.get('model')}: no method takes a model of {', '.join(described)}.",
            f"Name the method: {', '.join(names)}.",
        )
    listed = ", ".join(names) or "none is installed"
    raise ConfigError(
        f"{OPTION}.method: no speculator plugin {section.method!r}; available: {listed}."
        f"{nearest(section.method, names)}"
    )

"""Importing one plugin: whatever it does meanwhile becomes a PluginError that names its distribution."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

from ferrule.errors import PluginError
from ferrule.plugin.files import load_file
from ferrule.plugin.kinds import KINDS, load_object
from ferrule.plugin.options import declared_options, describe_options
from ferrule.plugin.refs import Origin, PluginRef
from ferrule.slow_start import waiting

_TOO_LONG = "See --plugin-import-timeout; --plugins-deny leaves a plugin out."
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def load_ref(ref: PluginRef, limit: float = 0.0) -> type:
    """Import the plugin and return its class, a complete subclass of the kind's base class. Raises PluginError.

    A class that was written for an earlier contract comes as its adapter makes it. An import that takes longer than
    `limit` seconds, if that is not 0, ends this process.
    """
    with waiting(f"the import of {_title(ref)[0].lower()}{_title(ref)[1:]}", limit, _TOO_LONG):
        return _load_ref(ref)


def _load_ref(ref: PluginRef) -> type:
    kind = KINDS[ref.kind]
    base, earlier = kind.load_base(ref.contract), kind.earlier.get(ref.contract)
    try:
        found = load_file(ref, base) if ref.origin is Origin.FILE else load_object(ref.target)
        cls = _checked(ref, found, base)
        return _checked(ref, load_object(earlier.adapt)(cls), kind.load_base()) if earlier else cls
    except (KeyboardInterrupt, PluginError):
        raise
    except BaseException as error:  # a plugin may raise SystemExit, or anything
        raise PluginError(
            f"{_title(ref)} cannot be imported: {_cause(error)}{_missing(ref, error)}", _hint(ref)
        ) from error


def _checked(ref: PluginRef, found: object, base: type) -> type:
    wanted = f"{base.__module__}.{base.__qualname__}"
    if not isinstance(found, type):
        raise PluginError(f"{_title(ref)}: {ref.target} is {type(found).__name__}, not a class.", _hint(ref))
    if not issubclass(found, base):
        raise PluginError(f"{_title(ref)}: {found.__qualname__} does not derive from {wanted}.", _hint(ref))
    if inspect.isabstract(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise PluginError(f"{_title(ref)}: {found.__qualname__} lacks {missing} of {wanted}.", _hint(ref))
    if (misfit := _misfit(ref, found, base)) is not None:
        raise PluginError(f"{_title(ref)}: {found.__qualname__}{misfit}.", _hint(ref))
    return found


def _misfit(ref: PluginRef, found: type, base: type) -> str | None:
    """Return what cannot be called as the server calls it: the constructor, or a method of the base class. None: all
    fits.

    Hooks may leave out parameters; the code that calls hooks checks that.
    """
    made_with, options = KINDS[ref.kind].made_with, []
    if (declared := declared_options(found)) is not None:
        try:
            describe_options(declared)
        except Exception as error:  # the types of its fields are the plugin's
            return f".Options does not declare options: {error}"
        options = ["options"]
    if not _callable_with(found, made_with or (), options, whole=made_with is not None):
        given = [*(("**kwargs",) if made_with is None else made_with), *options]
        return f" is made with ({', '.join(given)}), and its constructor takes {_signature(found)}"
    if ref.kind == "hooks":
        return None
    for name, method in inspect.getmembers(base, inspect.isroutine):
        own = inspect.getattr_static(found, name)
        if name.startswith("_") or own is inspect.getattr_static(base, name):
            continue
        called = inspect.signature(method).parameters.values()
        given = [each.name for each in called if each.kind in _POSITIONAL and each.name not in ("self", "cls")]
        named = [each.name for each in called if each.kind is inspect.Parameter.KEYWORD_ONLY]
        bound = isinstance(own, (staticmethod, classmethod)) or not inspect.isroutine(own)
        if not callable(getattr(found, name)):
            return f".{name} is not a method"
        if not _callable_with(getattr(found, name), given if bound else ["self", *given], named):
            return f".{name}{_signature(getattr(found, name))} cannot be called with ({', '.join([*given, *named])})"
    return None


def _callable_with(
    function: Callable[..., object], given: Sequence[str], named: Sequence[str] = (), *, whole: bool = True
) -> bool:
    """Return whether a function can be called with these arguments; without `whole`, with these and some others."""
    try:
        signature = inspect.signature(function)
        (signature.bind if whole else signature.bind_partial)(*given, **dict.fromkeys(named))
    except TypeError:
        return False
    except ValueError:  # written in C: it has no signature to look at
        return True
    return True


def _signature(function: Callable[..., object]) -> str:
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return "other arguments"


def _title(ref: PluginRef) -> str:
    return f"Plugin {ref.id} of {ref.source}"


def _hint(ref: PluginRef) -> str:
    return f"`ferrule plugins why {ref.id}` shows how the name resolves."


def _cause(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r}) while it was imported"
    return f"{type(error).__name__}: {error}"


def _missing(ref: PluginRef, error: BaseException) -> str:
    """Return what to install, where the plugin needs an extra of its distribution and a module is missing; ""
    elsewhere.
    """
    if not ref.extras or not isinstance(error, ImportError):
        return ""
    return f". It needs an extra: pip install '{ref.distribution}[{ref.extras}]'"

"""Importing one plugin: whatever it does meanwhile becomes a PluginError that names its distribution."""

from __future__ import annotations

import inspect

from ferrule.errors import PluginError
from ferrule.plugin.files import load_file
from ferrule.plugin.kinds import KINDS, load_object
from ferrule.plugin.refs import Origin, PluginRef


def load_ref(ref: PluginRef) -> type:
    """Import the plugin and return its class, a complete subclass of the kind's base class. Raises PluginError.

    A class that was written for an earlier contract comes as its adapter makes it.
    """
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
    return found


def _title(ref: PluginRef) -> str:
    return f"Plugin {ref.id} of {ref.source}"


def _hint(ref: PluginRef) -> str:
    return f"`ferrule plugins why {ref.id}` shows how the name resolves."


def _cause(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r}) while it was imported"
    return f"{type(error).__name__}: {error}"


def _missing(ref: PluginRef, error: BaseException) -> str:
    """What to install, where the plugin needs an extra of its distribution and a module is not there."""
    if not ref.extras or not isinstance(error, ImportError):
        return ""
    return f". It needs an extra: pip install '{ref.distribution}[{ref.extras}]'"

"""Running a kit without pytest: one outcome per promise."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from typing import Any
from unittest import SkipTest

from msgspec import Struct

from ferrule_testkit.kits.base import Broken, Kit, promises

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
_TESTKIT = "ferrule_testkit"  # part of its files' paths


class Outcome(Struct, frozen=True, kw_only=True):
    """The outcome of one promise. `reason` is empty for one that is kept, `where` is the line that broke it."""

    name: str
    promise: str
    result: str
    reason: str = ""
    where: str = ""
    seconds: float = 0.0


def run_kit(kit: type[Kit], plugin: Any, name: str = "", only: str = "") -> Iterator[Outcome]:
    """Prove every promise of a kit for one class, in order. Nothing that the plugin raises stops the others.

    `name` is that of its entry point; `only` is the one promise that is wanted, as its method's name.
    """
    bound = type(kit.__name__, (kit,), {"plugin": plugin, "name": name, "__module__": kit.__module__})
    for method, sentence in promises(bound):
        if only not in ("", method):
            continue
        start = time.perf_counter()
        result, reason, where = _prove(bound, method)
        seconds = time.perf_counter() - start
        yield Outcome(name=method, promise=sentence, result=result, reason=reason, where=where, seconds=seconds)


def _prove(kit: type[Kit], name: str) -> tuple[str, str, str]:
    instance = kit()
    try:
        instance.setup_method()
        try:
            getattr(instance, name)()
        finally:
            instance.teardown_method()
    except SkipTest as skipped:
        return SKIPPED, str(skipped), ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may raise SystemExit, or anything
        return FAILED, _reason(error), _where(error)
    return OK, "", ""


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "without a message"
    return text if isinstance(error, Broken) else f"{type(error).__name__}: {text}"


def _where(error: BaseException) -> str:
    """Return file and line of the innermost code that is not the testkit's own; empty where only that was running."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _TESTKIT not in frame.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""

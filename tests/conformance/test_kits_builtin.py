"""Every built-in plugin keeps the promises of its kind, with the same kits as a stranger's: kinds around the model."""

from __future__ import annotations

from typing import Any

import pytest

from ferrule.engine.cache import KVCacheManager
from ferrule.plugin import KINDS
from ferrule_testkit.kits import KVCacheKit, kit_of
from ferrule_testkit.kits.base import promises
from tests.conformance import builtin


@pytest.mark.parametrize(("ref", "method"), list(builtin.cases(builtin.OTHERS)))
def test_promise(ref: Any, method: str) -> None:
    builtin.prove(ref, method)


def test_every_kind_has_a_kit() -> None:
    for kind in KINDS:
        kit = kit_of(kind)
        assert kit.kind == kind
        assert len(list(promises(kit))) >= 5


class TestKVCacheManager(KVCacheKit):
    plugin = KVCacheManager

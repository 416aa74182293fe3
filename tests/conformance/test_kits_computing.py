"""Every built-in plugin keeps the promises of its kind, with the same kits as a stranger's: kinds that compute."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance import builtin


@pytest.mark.parametrize(("ref", "method"), list(builtin.cases(builtin.COMPUTING)))
def test_promise(ref: Any, method: str) -> None:
    builtin.prove(ref, method)

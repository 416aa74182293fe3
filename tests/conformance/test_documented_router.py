"""The router of docs/plugins.md keeps what the kit asks of every router."""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from ferrule_testkit.kits import kit_of
from ferrule_testkit.kits.run import FAILED, OK, run_kit
from tools import ROOT


def test_the_router_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(r'```python title="talk.py"\n(.*?)```', (ROOT / "docs" / "plugins.md").read_text(), re.DOTALL)
    assert code is not None
    file = tmp_path / "talk.py"
    file.write_text(code[1])
    spec = spec_from_file_location("talk", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "talk", module)  # pydantic looks for the types of a module there
    spec.loader.exec_module(module)
    outcomes = list(run_kit(kit_of("router"), module.Talk))
    assert [(outcome.name, outcome.reason) for outcome in outcomes if outcome.result == FAILED] == []
    assert sum(outcome.result == OK for outcome in outcomes) >= 12
